"""Runs a function as N ranks from a test suite, with pytest or by :func:`run_in_ranks`.

In ``conftest.py``::

    pytest_plugins = ["xla_fsdp.testing"]

In a test::

    def test_sum(run_ranks):
        def step(rank, start):
            value = torch.full((), float(start + rank)).to("xla")
            return xm.all_reduce(xm.REDUCE_SUM, value)

        assert run_ranks(step, 3, 10) == [33.0] * 3
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from typing import Any

from .ranks.errors import CollectiveMismatchError, RankError, RankTimeoutError
from .ranks.worker_pool import WorkerDiedError, WorkerPool

__all__ = [
    "CollectiveMismatchError",
    "RankError",
    "RankTimeoutError",
    "WorkerDiedError",
    "keep_programs",
    "run_in_ranks",
]

_workers = WorkerPool()
atexit.register(_workers.close)


def run_in_ranks(
    fn: Callable, num_ranks: int, /, *args: Any, timeout: float = 600.0, **kwargs: Any
) -> list[Any]:
    """Runs ``fn(rank, *args, **kwargs)`` as ``num_ranks`` CPU ranks in a worker process.

    A worker serves all calls with its number of ranks; each call starts with the same random
    states. Output goes to this process's standard error.

    Args:
        fn: may be a closure or a lambda; it is pickled, as are its arguments and results. Returned
            tensors are CPU tensors.
        num_ranks: 1 to 8.
        timeout: seconds after which the worker is killed; a new worker has 60 more to start.

    Returns:
        The results of ``fn``, by rank.

    Raises:
        RankError: a rank raised; ``__cause__`` is its exception, if that can be pickled.
        CollectiveMismatchError: ranks wait for different collectives.
        RankTimeoutError: ``timeout`` has passed; the message has all stacks.
        WorkerDiedError: the worker process ended, for example by an abort inside XLA.
        TypeError, ValueError: ``num_ranks`` is wrong, or a value cannot be pickled.
    """
    return _workers.run(fn, num_ranks, args, kwargs, timeout)


def keep_programs(folder: str | os.PathLike[str]) -> None:
    """Makes workers that start from now on share compiled programs in ``folder``, if possible."""
    _workers.programs = os.fspath(folder)


try:
    import pytest
except ImportError:  # run_in_ranks does not need pytest
    pass
else:

    @pytest.fixture(scope="session")
    def _rank_workers() -> Iterator[WorkerPool]:
        yield _workers
        _workers.close()

    @pytest.fixture
    def run_ranks(_rank_workers: WorkerPool) -> Callable[..., list[Any]]:
        """``run_ranks(fn, n, *args, timeout=600, **kwargs)``: see :func:`run_in_ranks`."""
        return run_in_ranks
