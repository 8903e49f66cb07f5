"""How batches come to the device of a rank."""

import contextlib
from collections.abc import Iterable, Iterator

from absl import flags

# Ranks and epochs are added to it, and torch takes what fits into 64 bits.
flags.DEFINE_integer("seed", 1, "seed of weights and shuffling", 0, 2**32 - 1)
flags.DEFINE_integer("prefetch", 8, "batches a rank that wait on the device", lower_bound=1)


@contextlib.contextmanager
def on_device(batches: Iterable, prefetch: int) -> Iterator[Iterator]:
    """Batches on the device, with ``torch_xla.sync()`` after each; raises what reading raised.
    ``prefetch`` of them wait there."""
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    device, errors = torch_xla.device(), []

    def read() -> Iterator:
        # In a thread of torch_xla, for which an error is the end of the epoch.
        try:
            yield from batches
        except Exception as error:
            errors.append(error)

    def run() -> Iterator:
        yield from loader.per_device_loader(device)
        if errors:
            raise errors[0]

    loader = pl.ParallelLoader(read(), [device], device_prefetch_size=prefetch)
    try:
        yield run()
    finally:
        # Its threads must not be left at work when a failed run ends the process.
        loader.close()
