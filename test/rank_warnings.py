"""Warnings that ranks give: what catches them is the process's, and ranks are its threads."""

import contextlib
import re
import warnings

import torch_xla
import torch_xla.core.xla_model as xm


@contextlib.contextmanager
def warnings_of_ranks(rank: int):
    """All ranks enter; rank 0 has a list of what any has warned of meanwhile, after that."""
    said: list[str] = []
    with contextlib.ExitStack() as only_rank_0:
        if rank == 0:
            caught = only_rank_0.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
        xm.rendezvous("warnings are caught")
        yield said
        xm.rendezvous("all have warned")
        if rank == 0:
            said += [str(one.message) for one in caught]
    xm.rendezvous("warnings go where they went")


@contextlib.contextmanager
def every_rank_warns(rank: int, match: str | None):
    """All ranks enter; each must warn once as ``match`` says, or none of anything if it is None."""
    with warnings_of_ranks(rank) as found:
        yield
    if rank == 0:
        wanted = 0 if match is None else torch_xla.runtime.world_size()
        right = [one for one in found if match is not None and re.search(match, one)]
        assert len(right) == len(found) == wanted, found
