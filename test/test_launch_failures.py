"""A launch that can not succeed ends at once and says which rank, where and why. It never hangs."""

import os
import pickle
import time

import pytest
import torch

from xla_fsdp.testing import CollectiveMismatchError, RankError, RankTimeoutError

# What waits for ever ends by this, with a RankTimeoutError: no slow machine comes near it.
FOR_EVER = 300.0


def gather(value=1.0, shape=(4,)):
    import torch_xla.core.xla_model as xm

    return xm.all_gather(torch.full(shape, value).to("xla"))


def ready(rank):
    """What any healthy process of ranks can do; its process."""
    import torch_xla

    gather()
    torch_xla.sync()
    return os.getpid()


@pytest.fixture
def fails(run_ranks):
    """Runs a function that must fail, by itself, and all is well after; returns the error."""

    def run(fn, n, error=RankError):
        before = run_ranks(ready, n)
        with pytest.raises(error) as info:
            run_ranks(fn, n, timeout=FOR_EVER)
        assert type(info.value) is error, "it was not stopped, but killed after FOR_EVER"
        assert run_ranks(ready, n) == before, "the same process must be able to launch again"
        return info.value

    return run


class TestARankRaises:
    @pytest.mark.parametrize("n", [1, 2, 4])
    def test_before_any_collective(self, fails, n):
        def step(rank):
            if rank == n - 1:
                raise ValueError("no data")
            gather().sum().item()

        error = fails(step, n)
        assert error.rank == n - 1
        assert "ValueError: no data" in str(error) and "in step" in error.traceback
        assert isinstance(error.__cause__, ValueError)

    def test_between_collectives(self, fails):
        def step(rank):
            import torch_xla

            first = gather()
            if rank == 1:
                raise KeyError("between")
            second = gather(first.sum().item())
            torch_xla.sync()
            return second

        assert fails(step, 4).rank == 1

    def test_an_interrupt_in_a_destructor_is_repeated(self, fails, capfd):
        class Loader:
            def __del__(self):
                while True:
                    time.sleep(0.05)

        def step(rank):
            if rank == 1:
                raise ValueError("no data")
            Loader()  # the first interrupt ends only its destructor
            while True:
                time.sleep(0.05)

        assert fails(step, 2).rank == 1
        assert "Exception ignored" not in capfd.readouterr().err

    def test_after_a_step_while_others_train_on(self, fails):
        def train(rank):
            import torch_xla

            for step in range(1000):
                gather().sum()
                torch_xla.sync()
                if rank == 2 and step == 3:
                    raise RuntimeError("step 3")

        assert fails(train, 3).rank == 2

    def test_in_a_rendezvous_reduction(self, fails):
        def step(rank):
            import torch_xla.core.xla_model as xm

            def reduce_fn(values):
                if rank == 1:
                    raise ZeroDivisionError("mean of nothing")
                return sum(values)

            xm.mesh_reduce("loss", rank, reduce_fn)
            xm.rendezvous("end")

        assert isinstance(fails(step, 2).__cause__, ZeroDivisionError)

    def test_in_a_backward_on_autograds_thread(self, fails):
        def step(rank):
            import torch_xla

            class Faulty(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 1

                @staticmethod
                def backward(ctx, grad):
                    gather()
                    if rank == 1:
                        raise ArithmeticError("in backward")
                    return grad

            x = torch.ones(4, device="xla", requires_grad=True)
            Faulty.apply(x).sum().backward()
            torch_xla.sync()

        error = fails(step, 3)
        assert error.rank == 1 and isinstance(error.__cause__, ArithmeticError)

    def test_while_another_waits_inside_autograds_thread(self, fails):
        def step(rank):
            class ReadsInBackward(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 1

                @staticmethod
                def backward(ctx, grad):
                    if rank == 1:
                        raise ArithmeticError("in backward")
                    assert gather().sum().item() == 12
                    return grad

            x = torch.ones(4, device="xla", requires_grad=True)
            ReadsInBackward.apply(x).sum().backward()

        assert fails(step, 3).rank == 1

    def test_others_are_named_by_the_users_lines(self, fails):
        def all_raise(rank):
            raise ValueError("no data")

        def one_has_returned(rank):
            if rank == 0:
                time.sleep(0.5)
                raise ValueError("no data")

        def one_syncs_on_autograds_thread(rank):
            from xla_fsdp import XlaFullyShardedDataParallel as FSDP

            model = FSDP(torch.nn.Linear(4, 4), sync_on_finalization=True)
            loss = model(torch.ones(2, 4).to("xla")).sum()
            if rank == 0:
                time.sleep(0.5)
                raise ValueError("no data")
            loss.backward()

        file = all_raise.__code__.co_filename
        for step, places in {
            all_raise: [f"running, at {file}:", *(f"at the {x} of its" for x in ("start", "end"))],
            one_has_returned: ["its function returned, at the end of its function"],
            one_syncs_on_autograds_thread: [f"torch_xla.sync(), at {file}:"],
        }.items():
            for _ in range(5 if step is all_raise else 1):
                text = str(fails(step, 2))
                line = text.partition("The other ranks were stopped:\n")[2].splitlines()[0]
                assert any(place in line for place in places), line

    def test_with_an_exception_that_can_not_be_pickled(self, fails):
        def step(rank):
            class Odd(Exception):
                def __init__(self, a, b):
                    super().__init__(a, b, lambda: a)

            if rank == 0:
                raise Odd(1, 2)
            gather().sum().item()

        error = fails(step, 2)
        assert error.rank == 0 and "Odd" in str(error)

    def test_system_exit(self, fails):
        def step(rank):
            if rank == 1:
                raise SystemExit(3)
            gather().sum().item()

        assert isinstance(fails(step, 2).__cause__, SystemExit)

    def test_keyboard_interrupt_of_a_rank(self, fails):
        def step(rank):
            if rank == 1:
                raise KeyboardInterrupt
            gather().sum().item()

        assert isinstance(fails(step, 2).__cause__, KeyboardInterrupt)

    def test_while_another_computes_in_a_loop(self, fails):
        def step(rank):
            if rank == 1:
                raise ValueError("stop")
            while True:
                pass

        assert fails(step, 2).rank == 1

    def test_while_others_swallow_exceptions(self, fails):
        def step(rank):
            import torch_xla

            if rank == 1:
                raise ValueError("stop")
            while True:
                try:
                    gather()
                    torch_xla.sync()
                except Exception:
                    pass

        assert fails(step, 3).rank == 1

    def test_the_first_error_wins(self, fails):
        def step(rank):
            import torch_xla

            try:
                if rank == 2:
                    raise ValueError("first")
                gather()
                torch_xla.sync()
            finally:
                if rank != 2:
                    raise KeyError("while cleaning up")

        error = fails(step, 3)
        assert error.rank == 2 and "first" in str(error)

    def test_stuck_in_c_is_left_behind(self, run_ranks):
        def step(rank):
            if rank == 0:
                raise ValueError("stop")
            time.sleep(2 * FOR_EVER)

        before = run_ranks(ready, 2)
        with pytest.raises(RankError, match="stop") as info:
            run_ranks(step, 2, timeout=FOR_EVER)
        assert type(info.value) is RankError, "it was waited for"
        assert run_ranks(ready, 2) != before, "a new process: the old one has a rank left in it"


class TestRanksDisagree:
    def test_skipped_collective(self, fails):
        def step(rank):
            import torch_xla

            gather(1.0, (2, 3))
            if rank != 1:
                gather(1.0, (5,))
            else:
                # The last to come: who comes a second after a disagreement is not waited for.
                time.sleep(1.0)
            torch_xla.sync()

        text = str(fails(step, 3, error=CollectiveMismatchError))
        for rank in range(3):
            assert f"rank {rank}: torch_xla.sync()" in text
        assert text.count("test_launch_failures.py") >= 3
        assert "differs is number 2" in text
        assert "rank 1: none" in text and "all_gather[5] float32" in text

    def test_skipped_sync(self, fails):
        def step(rank):
            import torch_xla

            gather()
            if rank:
                torch_xla.sync()
            gather()
            torch_xla.sync()

        fails(step, 3, error=CollectiveMismatchError)

    def test_different_order(self, fails):
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            x = torch.ones(4).to("xla")
            if rank:
                xm.all_gather(x), xm.all_reduce("sum", x)
            else:
                xm.all_reduce("sum", x), xm.all_gather(x)
            torch_xla.sync()

        text = str(fails(step, 2, error=CollectiveMismatchError))
        assert "differs is number 1" in text and "all_reduce(sum)" in text

    def test_experts_that_one_rank_alone_uses(self, fails):
        def step(rank):
            import torch_xla

            from xla_fsdp import XlaFullyShardedDataParallel as FSDP

            class Experts(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

                def forward(self, x):
                    return self.experts[rank](x)

            model = FSDP(Experts())
            model(torch.ones(2, 4).to("xla")).sum().backward()
            torch_xla.sync()

        text = str(fails(step, 2, CollectiveMismatchError))
        assert "rank 0: reduce_scatter" in text and "'experts.0.weight'" in text, text
        assert "rank 1: reduce_scatter" in text and "'experts.1.weight'" in text, text
        assert text.count("test_launch_failures.py") == 2, text

    def test_different_shapes(self, fails):
        def step(rank):
            gather(1.0, (2 + rank,)).sum().item()

        assert "(item)" in str(fails(step, 2, error=CollectiveMismatchError))

    def test_different_dtypes(self, fails):
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            xm.all_gather(torch.ones(2, dtype=torch.bfloat16 if rank else torch.float32).to("xla"))
            torch_xla.sync()

        assert "bfloat16" in str(fails(step, 2, error=CollectiveMismatchError))

    def test_a_rank_returns_early(self, fails):
        def train(rank):
            import torch_xla

            for _ in range(3 if rank else 2):
                gather()
                torch_xla.sync()

        text = str(fails(train, 3, error=CollectiveMismatchError))
        assert "rank 0: its function returned" in text

    def test_a_rank_ends_with_exit_zero(self, fails):
        def step(rank):
            if rank == 0:
                raise SystemExit(0)
            gather().sum().item()

        fails(step, 2, error=CollectiveMismatchError)

    def test_a_rank_never_syncs_what_it_gathered(self, fails):
        def step(rank):
            if rank == 0:
                gather()

        fails(step, 2, error=CollectiveMismatchError)

    def test_rendezvous_tags(self, fails):
        def step(rank):
            import torch_xla.core.xla_model as xm

            xm.rendezvous("saved" if rank else "loaded")

        text = str(fails(step, 2, error=CollectiveMismatchError))
        assert "xm.rendezvous('saved')" in text and "xm.rendezvous('loaded')" in text

    def test_rendezvous_on_one_rank_only(self, fails):
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            if rank == 0:
                xm.rendezvous("alone")
            gather()
            torch_xla.sync()

        fails(step, 4, error=CollectiveMismatchError)

    def test_one_reads_what_others_sync(self, fails):
        def step(rank):
            import torch_xla

            total = gather().sum()
            if rank == 0:
                total.item()
            torch_xla.sync()

        fails(step, 3, error=CollectiveMismatchError)

    def test_disagreement_is_told_while_a_rank_still_computes(self, fails):
        def step(rank):
            import torch_xla

            if rank == 2:
                while True:
                    time.sleep(0.01)
            gather(1.0, (2 + rank,))
            torch_xla.sync()

        text = str(fails(step, 3, error=CollectiveMismatchError))
        assert "rank 2: running" in text


class TestAfterAFailure:
    def test_tensors_that_were_kept_are_usable(self, run_script):
        result = run_script(
            """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch, CollectiveMismatchError
kept = {}

def fail(rank):
    ready = torch.full((3,), float(rank)).to("xla")
    torch_xla.sync()
    gathered = xm.all_gather(ready)
    kept[rank] = {"ready": ready, "gathered": gathered, "local": ready + 1,
                  "int": xm.all_reduce("sum", ready.int())}
    xm.add_step_closure(print, args=("a closure of the failed launch",))
    if rank == 0:
        xm.all_gather(gathered)
    torch_xla.sync()

def go_on(rank):
    mine = kept[rank]
    torch_xla.sync()  # all that is live becomes a program: none of the lost collectives may
    total = xm.all_reduce("sum", mine["ready"])
    values = {name: (value + 0).tolist() for name, value in mine.items()}
    return total, values

for _ in range(3):
    try:
        launch(fail, (), 2)
    except CollectiveMismatchError as error:
        kept_error = error  # keeps frames, and with them tensors
    else:
        raise AssertionError("no error")
    for rank, (total, values) in enumerate(launch(go_on, (), 2)):
        assert total.tolist() == [1.0] * 3
        assert values["ready"] == [float(rank)] * 3
        assert values["gathered"][0] != values["gathered"][0], "lost: NaN"
        assert values["int"] == [0] * 3
    assert kept[0]["ready"].tolist() == [0.0] * 3
print("usable")
"""
        )
        assert result.stdout == "usable\n", result.stderr

    def test_a_rank_left_behind_that_ends_after_all(self, run_script):
        result = run_script(
            """
import threading, torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch, RankError
kept = {}
waits, go_on = threading.Event(), threading.Event()

def fail(rank):
    kept[rank] = xm.all_gather(torch.ones(2).to("xla"))
    if rank == 0:
        waits.wait()
        raise ValueError("stop")
    waits.set()
    go_on.wait()  # in C, where nothing can stop it
    raise AssertionError("went on")

def step(rank):
    torch_xla.sync()
    return xm.all_gather(torch.ones(2).to("xla")).sum().item()

try:
    launch(fail, (), 2)
except RankError as error:
    assert error.rank == 0
try:
    launch(step, (), 2)
except RuntimeError as error:
    assert "Start a new process" in str(error) and "rank 1" in str(error), error
else:
    raise AssertionError("launched beside it")
left = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
go_on.set()
for thread in left:
    thread.join()
assert launch(step, (), 2) == [4.0, 4.0]
print("again")
raise SystemExit(3)
"""
        )
        assert result.stdout == "again\n", result.stderr
        assert result.returncode == 3, result.stderr

    def test_a_rank_that_keeps_others_waiting(self, run_script):
        result = run_script(
            """
import time, torch
from xla_fsdp import launch, RankTimeoutError

def step(rank):
    import torch_xla.core.xla_model as xm
    while rank == 1:
        time.sleep(0.1)
    xm.rendezvous("here")

try:
    launch(step, (), 2, timeout=1)
except RankTimeoutError as error:
    assert "rank 0: xm.rendezvous('here')" in str(error), error
    assert "rank 1: running, at" in str(error) and "in step" in str(error), error
    print("told")
"""
        )
        assert result.stdout == "told\n", result.stderr


def test_an_operator_on_the_cpu_that_one_rank_alone_reads_with(run_script):
    result = run_script(
        """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch

def step(rank):
    gathered = xm.all_gather(torch.ones(2).to("xla"))
    if rank == 0:
        torch.frexp(gathered)  # runs on the CPU, alone, inside XLA
    xm.rendezvous("here")

launch(step, (), 2)
"""
    )
    assert result.returncode == 1, result.stderr
    report = result.stderr.split("CollectiveMismatchError")[-1]
    assert "rank 1: torch_xla.sync()" in report, report
    assert "rank 0: an operator that reads pending collectives, at" in report, report
    assert "script.py:9 in step" in report


def test_programs_after_one_that_no_hook_has_seen(run_script):
    """All ranks read inside of XLA. Later, rank 1 starts its program late."""
    result = run_script(
        """
import time, torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch

dispatch = torch_xla._XLAC._xla_step_marker

def late(device, *args, **kwargs):
    if device == "xla:1":
        time.sleep(1.5)
    dispatch(device, *args, **kwargs)

torch_xla._XLAC._xla_step_marker = late

def step(rank):
    gathered = xm.all_gather(torch.ones(2).to("xla"))
    found = torch.frexp(gathered).mantissa.tolist()
    for number in range(2):
        gathered = xm.all_gather(torch.ones(2).to("xla"))
        torch_xla.sync()
        xm.rendezvous("here")
    return [*found, *gathered.tolist()]

print(launch(step, (), 2))
"""
    )
    assert result.stdout == f"{[[0.5] * 4 + [1.0] * 4] * 2}\n", result.stderr


def test_a_rank_that_reads_inside_xla_is_stopped_with_the_others(run_script):
    result = run_script(
        """
import threading, torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch, RankError
near = threading.Event()

def step(rank):
    gathered = xm.all_gather(torch.ones(2, 2).to("xla"))
    if rank == 0:
        near.set()
        torch.frexp(gathered)  # runs on the CPU, alone, inside XLA
    near.wait()
    raise ValueError("rank 1 fails")

try:
    launch(step, (), 2)
except RankError as error:
    assert error.rank == 1, error
def again(rank):
    return xm.all_gather(torch.ones(2).to("xla")).tolist()

print(launch(again, (), 2))
"""
    )
    assert result.stdout == f"{[[1.0] * 4] * 2}\n", result.stderr


def test_an_error_is_printed_once(run_script):
    done = run_script(
        """
from xla_fsdp import launch

def step(rank):
    raise ValueError("no data")

launch(step, num_devices=2)
"""
    )
    assert done.returncode == 1
    for line in ('raise ValueError("no data")', "\nValueError: no data\n"):
        assert done.stderr.count(line) == 1, done.stderr
    assert done.stderr.count("raised ValueError: no data") == 1
    assert "PJRT_DEVICE" not in done.stderr


def test_an_error_from_another_process_has_its_traceback():
    error = RankError("rank 1 of 2 raised ValueError: no data", 1, "Traceback ...")
    for cause in (None, ValueError("no data")):  # pickled, it has lost its traceback
        error.__cause__ = cause
        assert str(error) == "rank 1 of 2 raised ValueError: no data\n\nTraceback ..."
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.rank, again.traceback) == (str(error), 1, "Traceback ...")


def test_timeout_error_is_a_rank_error():
    assert issubclass(RankTimeoutError, RankError)
    assert issubclass(CollectiveMismatchError, RankError)
