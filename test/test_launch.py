"""``xla_fsdp.launch`` on CPU: what it runs, returns and refuses; ranks whose programs differ."""

import dataclasses
import functools
import gc
import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
from launch_scripts import HEAD, LATE
from lazy_modules import torch_xla, xm
from on_ranks import finish_step, on_each_rank, slow
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard, scan_blocks
from xla_fsdp.ranks.rank import current_rank


def sharded_step(rank, size, step):
    """Gather, compute, reduce-scatter, as FSDP does; returns a value that depends on all ranks."""
    full = xm.all_gather(torch.full((2, 8), float(rank + step)).to("xla"))
    mine = xm.reduce_scatter(xm.REDUCE_SUM, full * 2 + 1, 1.0, 0, size)
    return (mine.sum() + full.sum()) / 16


def expected(rank, size, step):
    return size * (2 * (rank + step) + 1) + sum(range(size)) + size * step


@on_each_rank(2)
def test_programs_do_not_depend_on_the_garbage_collector(rank, tmp_path):
    """Rank 1's program alone would have the reductions of the model that nothing refers to,
    and wait for rank 0's."""
    collected = tmp_path / "collected"

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
        assert grad.sum().item() == 2.0 * 6 * 3
    finally:
        gc.enable()


def test_consecutive_launches_on_4_ranks(run_ranks):
    def run(rank, step):
        loss = sharded_step(rank, 4, step)
        if step % 2:
            torch_xla.sync()
        return loss.item() if step % 3 else loss, xla_fsdp.compilation_counts().compiled

    compiled = []
    for step in range(10):
        losses, counts = zip(*run_ranks(run, 4, step), strict=True)
        assert [float(loss) for loss in losses] == [expected(r, 4, step) for r in range(4)]
        compiled.append(max(counts))
    assert compiled[6] == compiled[9], "by the sixth launch one of each program has run"


@on_each_rank(8)
def test_many_consecutive_steps_of_ranks_of_uneven_speed(rank, size):
    uneven = random.Random(rank)
    losses = []
    for step in range(20):
        time.sleep(uneven.random() * 0.02)
        loss = sharded_step(rank, size, step)
        if step % 3 == 0:
            losses.append(loss.item())
        time.sleep(uneven.random() * 0.02)
        torch_xla.sync()
        if step % 3:
            losses.append(loss.item())
        if step % 5 == 0:
            xm.rendezvous(f"step {step}")
    assert losses == [expected(rank, size, step) for step in range(20)]


READS = [
    lambda t: t.item(),
    lambda t: t.cpu().item(),
    lambda t: t.to(device=torch.device("cpu"), dtype=torch.float64).item(),
    lambda t: t.tolist(),
    lambda t: float(t),
    lambda t: float(int(t)),
    lambda t: float(f"{t:.1f}"),
    lambda t: float(repr(t).split("(")[1].split(",")[0]),
    lambda t: torch.zeros(()).copy_(t).item(),
    lambda t: t.numpy(force=True).item(),
    lambda t: 18.0 if bool(t == 18.0) else None,
    lambda t: 18.0 if torch.equal(t, torch.full((), 18.0).to(t.device)) else None,
]


@on_each_rank(3)
def test_all_ranks_read_what_is_pending(rank):
    mine = torch.full((3,), float(rank)).to("xla")
    found = [read(xm.all_gather(mine).sum() * 2) for read in READS]
    gathered = xm.all_gather(torch.full((2,), float(rank)).to("xla"))
    first = gathered.sum().item()
    second = xm.all_reduce("sum", gathered * 1.0)
    again = gathered.max().item()
    torch_xla.sync()
    assert found == [18.0] * len(READS)
    assert (first, again, second.tolist()) == (6.0, 2.0, [0.0, 0.0, 3.0, 3.0, 6.0, 6.0])


@on_each_rank(4)
def test_one_rank_may_do_local_things_alone(rank):
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
    wanted = [x for step in range(4) for x in (3.0 * step, expected(0, 4, step))]
    assert seen == ([] if rank else wanted)


@on_each_rank(4)
def test_steps_compile_once_for_all_ranks(rank):
    counts = []
    for number in range(6):
        xm.rendezvous("count")
        counts.append(sum(xla_fsdp.compilation_counts()))  # also what another has compiled
        xm.rendezvous("counted")
        x = torch.full((5,), float(rank)).to("xla")
        y = xm.all_gather(x) + xm.all_reduce("sum", x).sum()
        xm.all_to_all(y.reshape(4, 5), 0, 1, 4)
        xm.collective_permute(x, [[0, 1], [1, 2]])
        if number % 2 == 0:
            y.sum().item()
        torch_xla.sync()
    assert counts[2] == counts[-1], "two kinds of steps, and no more"
    assert counts[2] - counts[0] <= 4, "each for all ranks"


@on_each_rank(2)
def test_reads_without_a_sync_do_not_add_up(rank):
    """Evaluation with .item() a batch. A sync, as in a rendezvous, would hide it."""
    weight = torch.full((3,), 2.0).to("xla")
    found, programs, pending = [], [], []
    for batch in range(5):
        full = xm.all_gather(weight)
        found.append((full * torch.tensor([float(batch)]).to("xla")).sum().item())
        programs.append(sum(xla_fsdp.compilation_counts()))
        pending.append(len(current_rank().pending))
    assert found == [12.0 * batch for batch in range(5)]
    assert len(set(programs[1:])) == 1 and pending == [0] * 5, programs


SCRIPTS = {
    "tensors that outlive the launch": """
kept = {}

def step(rank):
    kept[rank] = xm.all_gather(torch.full((2,), float(rank)).to("xla"))  # never synced
    return {"a": [kept[rank] + 1, (kept[rank], rank)]}

results = launch(step, (), 2)
for rank, result in enumerate(results):
    assert result["a"][0].device.type == "cpu" and result["a"][1][1] == rank
    assert result["a"][0].tolist() == [1.0, 1.0, 2.0, 2.0]
assert kept[1].tolist() == [0.0, 0.0, 1.0, 1.0]
""",
    "without gradients": """
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        assert launch(lambda rank: torch.ones(2, device="xla").sum().item(), (), 2) == [2.0, 2.0]
""",
    "wrong arguments": """
for count in (0, 9, -1):
    raises(ValueError, [repr(count), "1 to 8", "num_devices"], print, (), count)
for count in ("4", True, 2.0):
    raises(TypeError, [repr(count), "1 to 8", "num_devices"], print, (), count)
for value in ("0", "many", "12"):
    os.environ["CPU_NUM_DEVICES"] = value
    raises(ValueError, ["CPU_NUM_DEVICES"], print)
for bad in (0, -1, "5", None, True):
    raises(ValueError, [repr(bad)], print, (), 2, timeout=bad)
raises(TypeError, ["fn"], 3)
for bad in (2, None, "ab"):
    raises(TypeError, ["args must be a tuple", repr(bad)], print, bad)
assert not torch_xla._XLAC._xla_runtime_is_initialized()
os.environ["CPU_NUM_DEVICES"] = "3"
assert launch(lambda rank, a: (rank, a), ("x",)) == [(0, "x"), (1, "x"), (2, "x")]
assert xla_fsdp.launch(lambda rank: rank) == [0, 1, 2]
raises(RuntimeError, ["already", "num_devices=3", "new process"], print, (), 4)
""",
    "a launch within a rank, and two at once": """
runs, go_on = threading.Event(), threading.Event()

def first(rank):
    raises(RuntimeError, ["inside rank"], print, (), 2)
    runs.set()
    go_on.wait()

thread = threading.Thread(target=launch, args=(first, (), 2))
thread.start()
runs.wait()
try:
    raises(RuntimeError, ["already launching ranks or planning"], print, (), 2)
finally:
    go_on.set()
thread.join()
""",
    "functions imported before the launch": """
from torch_xla.core.xla_model import all_gather, all_reduce, rendezvous

def step(rank):
    x = torch.ones(2).to("xla") + rank
    rendezvous("a")
    return all_reduce("sum", x).tolist(), all_gather(x).tolist()

assert launch(step, (), 2) == [([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])] * 2
assert all_reduce is xm.all_reduce and all_reduce.__module__ == "torch_xla.core.xla_model"
""",
    "the caller's random state is given to ranks and kept": """
def draw(rank):
    return torch.rand(2), [torch.manual_seed(rank), torch.rand(5)][1]

torch.manual_seed(11)
first = torch.rand(1)
results = launch(draw, (), 3)
after = torch.rand(2)
torch.manual_seed(11)
assert torch.equal(first, torch.rand(1))
want = torch.rand(2)
assert all(torch.equal(value, want) for value in (after, *(value for value, _ in results)))
assert torch.random.default_generator is torch.default_generator
""",
    "on a TPU": """
os.environ["PJRT_DEVICE"] = "TPU"
from torch_xla._internal import tpu
calls = []
torch_xla.launch = lambda fn, args: calls.append((fn, args))
tpu.num_expected_global_devices = lambda: 8
assert launch(print, ["a"]) is None and launch(print, (), 8) is None
raises(ValueError, ["num_devices=4", "8 devices"], print, (), 4)
os.environ["XLA_FSDP_WATCHDOG"] = "off"
launch(print)
whole, off = calls[:-1], calls[-1]
assert [(fn.args[1].args[0], args) for fn, args in whole] == [(print, ("a",)), (print, ())], calls
assert whole[0][0].args[1].args[1].timeout == 600.0 and (off[0].args[1], off[1]) == (print, ())
""",
    "Ctrl-C": """
def step(rank):
    for number in range(1_000_000):  # for ever
        xm.all_gather(torch.ones(2).to("xla"))
        torch_xla.sync()
        if rank == number == 0:
            os.kill(os.getpid(), signal.SIGINT)

raises(KeyboardInterrupt, [], step, (), 2)
assert launch(lambda rank: rank, (), 2) == [0, 1]
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_a_process_of_its_own(run_script, name):
    result = run_script(f"{HEAD}{SCRIPTS[name]}\nprint('done')")
    assert result.stdout == "done\n" and result.returncode == 0, result.stderr


STARTED = 'import torch, torch_xla; torch.ones(1).to("xla")'


@pytest.mark.parametrize(
    "before, env, words",
    [
        (STARTED, {"CPU_NUM_DEVICES": "4"},
         ["RuntimeError: this process's XLA runtime was already started", "_ALIASING=0"]),
        slow(STARTED, {"CPU_NUM_DEVICES": "1"}, ["already started with 1", "CPU_NUM_DEVICES=4"]),
        ("",
         {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
          "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
         ["torchrun started 2 processes, but XLA has a world size of 1; on a CPU, XLA has no "]),
    ],
)  # fmt: skip
def test_a_process_in_which_ranks_cannot_run(run_script, before, env, words):
    num = "" if "RANK" in env else ", (), 4"
    script = f"{before}\nimport xla_fsdp\nxla_fsdp.launch(print{num})"
    result = run_script(script, env={"PJRT_DEVICE": "CPU", **env})
    assert result.returncode == 1 and all(word in result.stderr for word in words), result.stderr


STUCK = """
near = threading.Event()

def step(rank):
    gathered = xm.all_gather(torch.ones(2, 2).to("xla"))
    if rank == 0:
        near.set()
        time.sleep(600)  # in C, where nothing can stop it
    near.wait()
    time.sleep(1.0)
    raise ValueError("rank 1 fails")

raises(RankError, ["rank 1 fails"], step, (), 2)
assert "rank 0" in [thread.name for thread in threading.enumerate()], "it was waited for"
"""
CLEAN = """
import sys
from xla_fsdp import launch
assert launch(lambda rank: rank) == [0, 1, 2, 3]  # the default
"""


@pytest.mark.parametrize(
    "script, end, status",
    [
        (HEAD + STUCK, "sys.exit(3)", 3),
        slow(HEAD + STUCK, "", 0),
        slow(HEAD + STUCK, "raise KeyError('x')", 1),
        (CLEAN, "1 / 0", 1),
        (CLEAN, "sys.exit(3)", 3),
        slow(CLEAN, "", 0),
    ],
    ids=["stuck-exit", "stuck", "stuck-raise", "clean-raise", "clean-exit", "clean"],
)
def test_exit_status(run_script, script, end, status):
    result = run_script(f"{script}\nprint('launched', flush=True)\n{end}")
    assert result.stdout == "launched\n", result.stderr
    assert result.returncode == status, result.stderr
    assert "Fatal" not in result.stderr


def gather(value):
    return xm.all_gather(value.to("xla"))


STEP = """
def step(rank):
    gathered = xm.all_gather(torch.full((2,), rank + 1.5).to("xla"))
    torch_xla.sync()
    return gathered.tolist()
"""


@pytest.mark.slow
def test_a_rank_that_keeps_others_waiting_for_longer_than_xla_does(run_script):
    """Rank 1 reaches its program 12 s after rank 0's has started, as if it had compiled meanwhile.
    XLA ends the process after 10 s."""
    late = "before = lambda: time.sleep(12)"
    result = run_script(f"{HEAD}{LATE}{STEP}{late}\nprint(launch(step, (), 2))")
    assert result.stdout == f"{[[1.5, 1.5, 2.5, 2.5]] * 2}\n", result.stderr


def test_a_rank_whose_program_cannot_be_compiled(run_script):
    """Rank 0's program has started by then and waits for one that will not come."""
    result = run_script(
        f"""{HEAD}{LATE}{STEP}
def before():
    raise RuntimeError("does not compile")

try:
    launch(step, (), 2)
except RankError as error:
    assert error.rank == 1 and "does not compile" in str(error), error
    before = lambda: None
    print(launch(step, (), 2))
"""
    )
    assert result.stdout == f"{[[1.5, 1.5, 2.5, 2.5]] * 2}\n", result.stderr


WIDTH = 16  # of each weight both ranks have a half


class Experts(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        first, second = (expert(x) for expert in self.experts)
        if self.rank:
            return first * 0.25 + second
        return torch.sort(torch.tanh(first), -1).values + second * 0.5


class NovoGrad(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, norm = self.state[parameter], parameter.grad.square().sum()
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros([]).to(state["exp_avg"].device)
            if state["exp_avg_sq"] == 0:
                state["exp_avg_sq"].copy_(norm)
            else:
                state["exp_avg_sq"].mul_(0.98).add_(norm, alpha=0.02)
            update = parameter.grad / state["exp_avg_sq"].sqrt().add_(1e-8)
            state["exp_avg"].mul_(0.95).add_(update)
            parameter.add_(state["exp_avg"], alpha=-0.05)


def batch(rank, step, rows=8):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable = lambda rank: [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    data: Callable = batch
    held: Callable = lambda parameters, rank: parameters
    optimizer: Callable = sgd


CASES = {
    "optimizers in another order": Case(held=lambda some, rank: some[::-1] if rank else some),
    "optimizers of fewer parameters": Case(
        held=lambda some, rank: [p for p in some if p.dim() == 1] if rank else some
    ),
    "batches of another length": Case(data=lambda rank, step: batch(rank, step, 4 + 3 * rank)),
    "NovoGrad": Case(optimizer=NovoGrad),
    "routing": Case(build=lambda rank: [Experts(rank), nn.Linear(WIDTH, WIDTH)]),
}
SCANNED = ("optimizers in another order", "batches of another length")


def plain_losses(case, size, steps):
    torch.manual_seed(0)
    model = nn.Sequential(*case.build(0))
    if case is CASES["optimizers of fewer parameters"]:
        first_half = (torch.arange(WIDTH) < WIDTH // 2).float()[:, None]
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.register_hook(lambda grad: grad * first_half)
    optimizer = case.optimizer(model.parameters())
    losses = [[] for _ in range(size)]
    for step in range(steps):
        for rank in range(size):
            for module in model.modules():
                if isinstance(module, Experts):
                    module.rank = rank
            loss = model(case.data(rank, step)).square().mean()
            (loss / size).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses


@pytest.mark.parametrize(
    "name, sharding",
    [*itertools.product(CASES, ["class", "in place"]), *((name, "scanned") for name in SCANNED)],
)
@on_each_rank(2)
def test_losses_are_those_of_one_process(rank, size, name, sharding):
    case, losses = CASES[name], []
    want = plain_losses(case, size, 3)[rank]
    torch.manual_seed(0)
    units = case.build(rank)
    if sharding == "scanned":
        model = scan_blocks(units)
    elif sharding == "in place":
        model = fully_shard(nn.Sequential(*map(fully_shard, units)))
    else:
        model = FSDP(nn.Sequential(*map(FSDP, units)))
    optimizer = case.optimizer(case.held(list(model.parameters()), rank))
    for step in range(3):
        loss = model(case.data(rank, step).to("xla")).square().mean()
        loss.backward()
        finish_step(optimizer)
        losses.append(loss.item())
    assert losses == pytest.approx(want, rel=1e-5)


@on_each_rank(2)
def test_a_result_that_one_rank_alone_refers_to(rank):
    for _ in range(3):
        first = gather(torch.full((2,), rank + 1.5))
        second = gather(first * 2)
        kept = [second] if rank else []
        del second
        torch_xla.sync()
        assert first.tolist() == [1.5, 1.5, 2.5, 2.5]
        assert [one.sum().item() for one in kept] == [32.0] * rank


@on_each_rank(2)
def test_channels_of_the_caller(rank):
    own = {"groups": [[0, 1]], "pin_layout": False}
    first = xm.all_gather(torch.full((2,), rank + 1.5).to("xla"), channel_id=71, **own)
    second = gather(torch.full((2,), rank + 2.5))
    values = torch.arange(4.0).to("xla") + rank
    third = xm.reduce_scatter("sum", values, 1.0, 0, 2, channel_id=72, **own)
    kept = [first, second, third][:: -1 if rank else 1]
    del first, second, third
    torch_xla.sync()
    first, second, third = (one.tolist() for one in kept[:: -1 if rank else 1])
    assert (first, second) == ([1.5, 1.5, 2.5, 2.5], [2.5, 2.5, 3.5, 3.5])
    assert third == ([5.0, 7.0] if rank else [1.0, 3.0])


@on_each_rank(2)
def test_values_go_through_as_they_are(rank):
    special = [float("nan"), float("inf"), -float("inf"), 0.5, 2e-38]
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.int32]
    sent = [torch.tensor(special)[start:] for start in range(len(special))]
    sent += [torch.tensor([1, 0, 1], dtype=kind) for kind in kinds]
    sent.append(torch.tensor([1.5 + 2j]))
    gathered = [gather(value) for value in sent]
    scattered = xm.reduce_scatter("sum", torch.tensor(special[:2]).to("xla"), 1.0, 0, 2)
    gathered.append(gather(torch.ones(2) + 0 * scattered.detach()[:0].sum()))
    torch_xla.sync()
    for value, found in zip([*sent, torch.ones(2)], gathered, strict=True):
        assert found.dtype == value.dtype
        want = torch.cat([value, value])
        torch.testing.assert_close(found.cpu(), want, rtol=0, atol=0, equal_nan=True)
