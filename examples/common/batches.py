"""Loads batches to the device of a rank."""

import contextlib
from collections.abc import Iterable, Iterator

from absl import flags

# Ranks and epochs are added to the seed, and torch allows seeds of 64 bits.
flags.DEFINE_integer("seed", 1, "random seed of weights and shuffling", 0, 2**32 - 1)
flags.DEFINE_integer("prefetch", 8, "batches to load to the device in advance", lower_bound=1)


@contextlib.contextmanager
def on_device(batches: Iterable, prefetch: int) -> Iterator[Iterator]:
    """Yields batches on the device, with ``torch_xla.sync()`` after each; loads ``prefetch`` ahead.

    It raises errors of the reading thread.
    """
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    device, errors = torch_xla.device(), []

    def read() -> Iterator:
        # This runs in a thread of torch_xla, which would treat an error as the end of the epoch.
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
        # Stop its threads, which would otherwise still run when a failed run ends the process.
        loader.close()
