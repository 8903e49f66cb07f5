"""``xla_fsdp.launch`` on CPU: what it runs, returns, compiles and refuses."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch


def sharded_step(rank, size, step):
    """Gather, compute, reduce-scatter, as FSDP does; returns a value that depends on all ranks."""
    import torch_xla.core.xla_model as xm

    shard = torch.full((2, 8), float(rank + step)).to("xla")
    full = xm.all_gather(shard)
    grad = full * 2 + 1
    mine = xm.reduce_scatter(xm.REDUCE_SUM, grad, 1.0, 0, size)
    return (mine.sum() + full.sum()) / 16


def expected(rank, size, step):
    return size * (2 * (rank + step) + 1) + sum(range(size)) + size * step


class TestHealthyRanks:
    def test_200_consecutive_steps_on_4_ranks(self, run_ranks):
        def train(rank):
            import torch_xla

            losses = []
            for step in range(200):
                loss = sharded_step(rank, 4, step)
                torch_xla.sync()
                losses.append(loss.item())
            return losses

        for rank, losses in enumerate(run_ranks(train, 4)):
            assert losses == [expected(rank, 4, step) for step in range(200)]

    def test_programs_do_not_depend_on_the_garbage_collector(self, run_ranks, tmp_path):
        """Rank 1's program alone would have the reductions of the model that nothing refers to,
        and wait for rank 0's."""
        collected = tmp_path / "collected"

        def train(rank):
            import gc

            import torch_xla

            from xla_fsdp import XlaFullyShardedDataParallel as FSDP

            def backward(model):
                model(torch.ones(2, 6).to("xla")).sum().backward()
                return model.weight.grad

            def abandon():
                cycle = [FSDP(torch.nn.Linear(6, 3))]
                cycle.append(cycle)
                backward(cycle[0])

            gc.disable()
            try:
                if rank == 0:
                    abandon()
                    gc.collect()
                    collected.touch()
                while not collected.exists():
                    time.sleep(0.01)
                if rank == 1:
                    abandon()
                model = FSDP(torch.nn.Linear(6, 3))
                grad = backward(model)
                torch_xla.sync()
                return grad
            finally:
                gc.enable()

        assert sum(grad.sum().item() for grad in run_ranks(train, 2)) == 2.0 * 6 * 3

    def test_60_consecutive_launches_on_4_ranks(self, run_script):
        result = run_script(
            """
import sys
sys.path.insert(0, sys.argv[1])
from test_launch import expected, sharded_step
from xla_fsdp import launch
import torch_xla, torch_xla.debug.metrics as met

def run(rank, step):
    loss = sharded_step(rank, 4, step)
    if step % 2:
        torch_xla.sync()
    return loss.item() if step % 3 else loss

for step in range(60):
    results = launch(run, (step,), 4)
    assert [float(r) for r in results] == [expected(r, 4, step) for r in range(4)], (step, results)
    if step == 11:
        compiled = met.metric_data("CompileTime")[0]
assert met.metric_data("CompileTime")[0] == compiled
print("60 launches")
""",
            os.path.dirname(__file__),
            timeout=1500,
        )
        assert result.stdout == "60 launches\n", result.stderr

    def test_ranks_of_uneven_speed(self, run_ranks):
        def train(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            uneven = random.Random(rank)
            losses = []
            for step in range(30):
                time.sleep(uneven.random() * 0.02)
                loss = sharded_step(rank, 4, step)
                if step % 3 == 0:
                    losses.append(loss.item())
                time.sleep(uneven.random() * 0.02)
                torch_xla.sync()
                if step % 3:
                    losses.append(loss.item())
                if step % 5 == 0:
                    xm.rendezvous(f"step {step}")
            return losses

        for rank, losses in enumerate(run_ranks(train, 4)):
            assert losses == [expected(rank, 4, step) for step in range(30)]

    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t.item(),
            lambda t: t.cpu().item(),
            lambda t: t.to("cpu").item(),
            lambda t: t.to(device=torch.device("cpu"), dtype=torch.float64).item(),
            lambda t: t.tolist(),
            lambda t: float(t),
            lambda t: float(int(t)),
            lambda t: float(f"{t:.1f}"),
            lambda t: float(repr(t).split("(")[1].split(",")[0]),
            lambda t: torch.zeros(()).copy_(t).item(),
            lambda t: t.numpy(force=True).item(),
            lambda t: 18.0 if bool(t == 18.0) else None,
            lambda t: 18.0 if t == 18.0 else None,
            lambda t: 18.0 if torch.equal(t, torch.full((), 18.0).to(t.device)) else None,
        ],
    )
    def test_all_ranks_read_what_is_pending(self, run_ranks, read):
        def step(rank):
            import torch_xla.core.xla_model as xm

            return read(xm.all_gather(torch.full((3,), float(rank)).to("xla")).sum() * 2)

        assert run_ranks(step, 3) == [18.0] * 3

    def test_one_rank_may_do_local_things_alone(self, run_ranks):
        def train(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            seen = []
            for step in range(4):
                loss = sharded_step(rank, 4, step)
                local = torch.ones(3).to("xla") * step
                if rank == 0:
                    seen.append(local.sum().item())  # pending, but no collective in it
                torch_xla.sync()
                if xm.is_master_ordinal():
                    print(f"loss {loss}")
                    seen.append(loss.item())
                    (local + 1).sum()
                    torch_xla.sync()
                    torch_xla.sync(wait=True)
                    time.sleep(0.05)
            return seen

        results = run_ranks(train, 4)
        want = [x for step in range(4) for x in (3.0 * step, expected(0, 4, step))]
        assert results == [want, [], [], []]

    def test_a_value_read_twice_and_more_collectives_after_it(self, run_ranks):
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            x = torch.full((2,), float(rank)).to("xla")
            gathered = xm.all_gather(x)
            first = gathered.sum().item()
            second = xm.all_reduce("sum", gathered * 1.0)
            again = gathered.max().item()
            torch_xla.sync()
            return first, again, second.tolist()

        assert run_ranks(step, 3) == [(6.0, 2.0, [0.0, 0.0, 3.0, 3.0, 6.0, 6.0])] * 3

    def test_consecutive_programs_do_not_mix(self, run_ranks):
        # All have the same channel ids and do not depend on each other.
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            big = torch.full((300, 300), 1e-3).to("xla")
            torch_xla.sync()
            kept = []
            for index in range(20):
                x = torch.full((300,), float(index)).to("xla")
                if index % 4 == 0:
                    for _ in range(8):
                        x = (big @ x) * 0 + index
                kept.append(xm.all_gather(x).mean())
                torch_xla.sync()
            return [value.item() for value in kept]

        assert run_ranks(step, 4) == [[float(index) for index in range(20)]] * 4

    def test_ranks_share_compilations(self, run_ranks):
        def step(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            import xla_fsdp

            xm.rendezvous("start")
            before = sum(xla_fsdp.compilation_counts())  # also what another process has compiled
            for _ in range(3):
                x = torch.full((5,), float(rank)).to("xla")
                y = xm.all_gather(x) + xm.all_reduce("sum", x).sum()
                xm.all_to_all(y.reshape(4, 5), 0, 1, 4)
                xm.collective_permute(x, [[0, 1], [1, 2]])
                torch_xla.sync()
            xm.rendezvous("end")
            return sum(xla_fsdp.compilation_counts()) - before

        assert max(run_ranks(step, 4)) <= 2, "the step, once, and perhaps one more for its outputs"

    def test_steps_compile_once(self, run_ranks):
        def train(rank):
            import torch_xla
            import torch_xla.core.xla_model as xm

            import xla_fsdp

            counts = []
            for step in range(6):
                loss = sharded_step(rank, 2, step)
                if step % 2 == 0:
                    loss.item()
                torch_xla.sync()
                xm.rendezvous("count")
                counts.append(sum(xla_fsdp.compilation_counts()))
            return counts

        for counts in run_ranks(train, 2):
            assert counts[1] == counts[-1] or counts[2] == counts[-1]

    def test_reads_without_a_sync_do_not_add_up(self, run_ranks):
        # Evaluation with .item() a batch. A sync, as in a rendezvous, would hide it.
        def evaluate(rank):
            import torch_xla.core.xla_model as xm

            import xla_fsdp
            from xla_fsdp.ranks.rank import current_rank

            weight = torch.full((3,), 2.0).to("xla")
            found, programs, pending = [], [], []
            for batch in range(5):
                full = xm.all_gather(weight)
                found.append((full * torch.tensor([float(batch)]).to("xla")).sum().item())
                programs.append(sum(xla_fsdp.compilation_counts()))
                pending.append(len(current_rank().pending))
            return found, programs, pending

        for found, programs, pending in run_ranks(evaluate, 2):
            assert found == [12.0 * batch for batch in range(5)]
            assert len(set(programs[1:])) == 1, programs
            assert pending == [0] * 5

    def test_tensors_that_outlive_the_launch_hold_values(self, run_script):
        result = run_script(
            """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch
kept = {}

def step(rank):
    kept[rank] = xm.all_gather(torch.full((2,), float(rank)).to("xla"))  # never synced
    return {"a": [kept[rank] + 1, (kept[rank], rank)]}

results = launch(step, (), 2)
for rank, result in enumerate(results):
    assert result["a"][0].device.type == "cpu" and result["a"][1][1] == rank
    assert result["a"][0].tolist() == [1.0, 1.0, 2.0, 2.0]
assert kept[1].tolist() == [0.0, 0.0, 1.0, 1.0]
print("values")
"""
        )
        assert result.stdout == "values\n", result.stderr

    def test_eight_ranks(self, run_ranks):
        def train(rank):
            import torch_xla

            for step in range(20):
                loss = sharded_step(rank, 8, step)
                torch_xla.sync()
            return loss.item()

        assert run_ranks(train, 8) == [expected(r, 8, 19) for r in range(8)]


class TestArguments:
    def test_wrong_counts_are_refused_before_anything_starts(self, run_script):
        result = run_script(
            """
import os
import xla_fsdp
from xla_fsdp import launch
import torch_xla

for count, error in ((0, ValueError), (9, ValueError), (-1, ValueError), ("4", TypeError),
                     (True, TypeError), (2.0, TypeError)):
    try:
        launch(print, (), count)
    except error as e:
        assert repr(count) in str(e) and "1 to 8" in str(e) and "num_devices" in str(e), e
    else:
        raise AssertionError(count)
for value in ("0", "many", "12"):
    os.environ["CPU_NUM_DEVICES"] = value
    try:
        launch(print)
    except ValueError as e:
        assert "CPU_NUM_DEVICES" in str(e), e
    else:
        raise AssertionError(value)
for bad in (0, -1, "5", None, True):
    try:
        launch(print, (), 2, timeout=bad)
    except ValueError as e:
        assert repr(bad) in str(e)
    else:
        raise AssertionError(bad)
try:
    launch(3)
except TypeError as e:
    assert "fn" in str(e)
assert not torch_xla._XLAC._xla_runtime_is_initialized()
os.environ["CPU_NUM_DEVICES"] = "3"
assert launch(lambda rank, a: (rank, a), ("x",)) == [(0, "x"), (1, "x"), (2, "x")]
assert xla_fsdp.launch(lambda rank: rank) == [0, 1, 2]
try:
    launch(print, (), 4)
except RuntimeError as e:
    assert "already" in str(e) and "num_devices=3" in str(e) and "new process" in str(e), e
else:
    raise AssertionError
print("refused")
"""
        )
        assert result.stdout.endswith("refused\n"), result.stderr

    def test_default_is_four(self, run_script):
        result = run_script("from xla_fsdp import launch\nprint(len(launch(lambda rank: rank)))")
        assert result.stdout == "4\n", result.stderr

    @pytest.mark.parametrize("count", ["1", "4"])
    def test_runtime_started_before_without_settings(self, run_script, count):
        result = run_script(
            """
import torch, torch_xla
torch.ones(1).to("xla")
from xla_fsdp import launch
try:
    launch(print, (), 4)
except RuntimeError as error:
    print(error)
""",
            env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": count},
        )
        assert "already started" in result.stdout, result.stderr
        if count == "4":
            assert "XLA_ENABLE_PARAM_ALIASING=0" in result.stdout
        else:
            assert "started with 1" in result.stdout and "CPU_NUM_DEVICES=4" in result.stdout

    def test_launch_inside_a_rank(self, run_ranks):
        def step(rank):
            from xla_fsdp import launch

            with pytest.raises(RuntimeError, match="inside rank"):
                launch(print, (), 2)

        run_ranks(step, 2)

    def test_two_launches_at_once(self, run_script):
        result = run_script(
            """
import threading
from xla_fsdp import launch

runs, go_on = threading.Event(), threading.Event()

def first(rank):
    runs.set()
    go_on.wait()

thread = threading.Thread(target=launch, args=(first, (), 2))
thread.start()
runs.wait()
try:
    launch(print, (), 2)
except RuntimeError as error:
    print(error)
finally:
    go_on.set()
thread.join()
"""
        )
        assert "one launch can run at a time" in result.stdout, result.stderr

    def test_tpu_hands_over(self, run_script):
        result = run_script(
            """
import os, torch_xla
os.environ["PJRT_DEVICE"] = "TPU"
from xla_fsdp import launch
from torch_xla._internal import tpu
calls = []
torch_xla.launch = lambda fn, args: calls.append((fn, args))
tpu.num_expected_global_devices = lambda: 8
assert launch(print, ["a"]) is None and launch(print, (), 8) is None
try:
    launch(print, (), 4)
except ValueError as error:
    assert "num_devices=4" in str(error) and "8 devices" in str(error)
else:
    raise AssertionError
os.environ["XLA_FSDP_WATCHDOG"] = "off"
launch(print)
whole, off = calls[:-1], calls[-1]
assert [(fn.fn.fn, args) for fn, args in whole] == [(print, ("a",)), (print, ())], calls
assert whole[0][0].fn.chosen.timeout == 600.0 and (off[0].fn, off[1]) == (print, ())
print("handed over")
"""
        )
        assert result.stdout == "handed over\n", result.stderr

    def test_torchrun_on_a_cpu_is_refused(self, run_script):
        env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        env |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
        result = run_script(
            """
import xla_fsdp
try:
    xla_fsdp.launch(print)
except RuntimeError as error:
    print(error)
""",
            env={name: str(value) for name, value in env.items()} | {"PJRT_DEVICE": "CPU"},
        )
        assert result.stdout.startswith(
            "torchrun started 2 processes, but XLA has a world size of 1; on a CPU, XLA has no "
        ), result.stderr


STUCK = """
import os, sys, threading, time, torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch, RankError
near = threading.Event()

def step(rank):
    gathered = xm.all_gather(torch.ones(2, 2).to("xla"))
    if rank == 0:
        near.set()
        time.sleep(600)  # in C, where nothing can stop it
    near.wait()
    time.sleep(1.0)
    raise ValueError("rank 1 fails")

try:
    launch(step, (), 2)
except RankError as error:
    assert error.rank == 1, error
    assert "rank 0" in [thread.name for thread in threading.enumerate()], "it was waited for"
else:
    raise AssertionError("no error")
try:
    launch(print, (), 2)
except RuntimeError as error:
    assert "Start a new process" in str(error), error
else:
    raise AssertionError("launched again")
print("stopped", flush=True)
"""


class TestLeavingAProcess:
    @pytest.mark.parametrize(
        "end, status",
        [("", 0), ("sys.exit(3)", 3), ("raise KeyError('x')", 1)],
    )
    def test_exit_status_with_a_rank_that_is_stuck(self, run_script, end, status):
        result = run_script(STUCK + end)
        assert result.stdout == "stopped\n", result.stderr
        assert result.returncode == status, result.stderr
        assert "Fatal" not in result.stderr

    @pytest.mark.parametrize("end, status", [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
    def test_exit_status_after_a_clean_launch(self, run_script, end, status):
        result = run_script(
            "import sys\nfrom xla_fsdp import launch\n"
            "assert launch(lambda rank: rank, (), 2) == [0, 1]\n" + end
        )
        assert result.returncode == status, result.stderr

    def test_keyboard_interrupt_stops_the_ranks(self, tmp_path):
        path = tmp_path / "script.py"
        path.write_text(
            """
import sys, time, torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_fsdp import launch

def step(rank):
    while True:
        xm.all_gather(torch.ones(2).to("xla"))
        torch_xla.sync()
        if rank == 0:
            print("step", flush=True)

try:
    launch(step, (), 2)
except KeyboardInterrupt:
    assert launch(lambda rank: rank, (), 2) == [0, 1]
    print("interrupted", flush=True)
"""
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        }
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        with process:
            try:
                assert process.stdout.readline() == "step\n"
                process.send_signal(signal.SIGINT)
                # The ranks would go on for ever.
                output, errors = process.communicate(timeout=1500)
            finally:
                process.kill()
        assert output.endswith("interrupted\n"), errors
        assert process.returncode == 0, errors
