"""``xla_fsdp.testing``: ranks for other people's test suites."""

import ctypes
import gc
import os
import sys
import textwrap
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch
from lazy_modules import xm
from on_ranks import only_full, raises
from processes import ended, run_command

from xla_fsdp.testing import RankError, RankTimeoutError, WorkerDiedError, run_in_ranks

Pair = namedtuple("Pair", "rank value")


class DomainError(Exception):
    pass


def pair(rank, value):
    return Pair(rank, value)


def fail(rank):
    if rank == 1:
        raise DomainError("rank one")


def pid(rank):
    return os.getpid()


def all_reduced(rank, start, factor=1.0):
    return xm.all_reduce(xm.REDUCE_SUM, torch.full((2,), start + rank).to("xla")) * factor


def test_results_by_rank_and_at_most_two_idle_workers(run_ranks):
    for n in (1, 3, 8):
        total = n * 10.0 + sum(range(n))
        for result in run_ranks(all_reduced, n, 10.0, factor=2.0):
            assert result.device.type == "cpu"
            assert result.tolist() == [2 * total] * 2
    below = psutil.Process().children(recursive=True)
    below = [one for one in below if one.status() != psutil.STATUS_ZOMBIE]
    servers = [one for one in below if "worker.main()" in " ".join(one.cmdline())]
    workers = [one for one in servers if one.parent() in servers]
    assert len(servers) - len(workers) == 1 and 0 < len(workers) <= 2


def test_classes_keep_their_identity_and_the_worker_is_reused(run_ranks):
    first = run_ranks(pid, 2)
    assert first[0] == first[1] != os.getpid()
    results = run_ranks(pair, 2, "v")
    assert results == [Pair(0, "v"), Pair(1, "v")] and type(results[0]) is Pair
    with pytest.raises(RankError) as info:
        run_ranks(fail, 2)
    assert type(info.value.__cause__) is DomainError and info.value.rank == 1
    assert run_ranks(pid, 2) == first == run_in_ranks(pid, 2)


def test_xla_tensors_inside_any_result_of_a_closure_come_back_on_the_cpu(run_ranks):
    offset = torch.zeros(1)

    def build(rank):
        model = torch.nn.Linear(2, 2).to("xla")
        with torch.no_grad():
            model.weight.fill_(rank)
        return {"model": model, "grads": (None, [offset.to("xla") + 1])}

    for rank, result in enumerate(run_ranks(build, 2)):
        weight = result["model"].weight
        assert weight.device.type == "cpu" and isinstance(weight, torch.nn.Parameter)
        assert weight.tolist() == [[rank] * 2] * 2
        assert result["grads"][1][0].tolist() == [1.0]


def test_an_abort_in_a_rank_ends_the_worker_only(run_ranks):
    def die(rank):
        print("last words", flush=True)
        if rank == 1:
            os.abort()
        time.sleep(60)

    with pytest.raises(WorkerDiedError, match="SIGABRT") as info:
        run_ranks(die, 2)
    assert "last words" in str(info.value)
    assert len(run_ranks(pid, 2)) == 2


def test_a_crash_in_a_used_process_is_tried_again_in_a_new_one(run_ranks, tmp_path, capfd):
    def crash(rank, until):
        if len(os.listdir(tmp_path)) < until:
            (tmp_path / str(time.monotonic_ns())).touch()
            ctypes.string_at(0)
        return os.getpid()

    before = run_ranks(pid, 1)
    (after,) = run_ranks(crash, 1, 1)
    assert after not in before
    assert "SIGSEGV" in (said := capfd.readouterr().err) and "again, in a new process" in said
    raises(WorkerDiedError, "SIGSEGV", run_ranks, crash, 1, 3)
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.slow
def test_timeout_kills_the_worker_and_shows_stacks(run_ranks):
    def dawdle(rank):
        print("before")
        while rank == 1:
            time.sleep(1)

    before = run_ranks(pid, 2)
    # Time enough to get into the loop on a machine that has other things to do.
    with pytest.raises(RankTimeoutError) as info:
        run_ranks(dawdle, 2, timeout=5)
    assert "in dawdle" in str(info.value) and "before" in str(info.value)
    assert ended(before[0])
    assert run_ranks(pid, 2) != before


def test_output_of_ranks(run_ranks, capfd):
    def talk(rank, then):
        print(f"rank {rank} says")
        if then:
            raise ValueError("then")

    run_ranks(talk, 2, False)
    printed = capfd.readouterr().err
    assert "rank 0 says" in printed and "rank 1 says" in printed
    with pytest.raises(RankError) as info:
        run_ranks(talk, 2, True)
    assert any("says" in note for note in info.value.__notes__)


def test_what_can_not_be_pickled_is_named(run_ranks):
    with pytest.raises(TypeError, match="result of rank 0"):
        run_ranks(lambda rank: gc.get_objects if rank else sys._getframe(), 2)
    frame = sys._getframe()
    raises(TypeError, "arguments", run_ranks, lambda rank, f: None, 2, frame)
    assert len(run_ranks(pid, 2)) == 2


@pytest.mark.parametrize("count, error", [(0, ValueError), (9, ValueError), ("2", TypeError)])
def test_wrong_counts(run_ranks, count, error):
    raises(error, "1 to 8", run_ranks, pid, count)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prepend", only_full("importlib")])
def test_in_a_suite_of_its_own(tmp_path, mode):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["xla_fsdp.testing"]\n')
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent(
            """
            import torch, pytest
            from xla_fsdp.testing import RankError

            def loss(rank):
                import torch_xla.core.xla_model as xm
                return xm.mesh_reduce("loss", rank, sum)

            def test_loss(run_ranks):
                assert run_ranks(loss, 2) == [1, 1]

            def test_failure(run_ranks):
                def step(rank):
                    assert rank == 0, "wrong rank"
                run_ranks(step, 2)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    words = ("-q", "-p", "no:cacheprovider", f"--import-mode={mode}", tmp_path)
    how = {"env": environment, "cwd": tmp_path, "code": 1}
    result = run_command(sys.executable, "-m", "pytest", *words, **how)
    assert "1 failed, 1 passed" in result.stdout, result.stdout
    assert "rank 1 of 2 raised AssertionError: wrong rank" in result.stdout
