"""A launch that can not succeed ends at once and says which rank, where and why. It never hangs."""

import os
import pickle
import time
from functools import partial

import pytest
import torch
from launch_scripts import HEAD, LATE
from lazy_modules import torch_xla, xm

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.testing import CollectiveMismatchError, RankError

# What waits for ever ends by this, with a RankTimeoutError: no slow machine comes near it.
FOR_EVER = 300.0
HERE = f"at {__file__}:"


def gather(shape=(4,), dtype=torch.float32):
    return xm.all_gather(torch.ones(shape, dtype=dtype).to("xla"))


def sync():
    torch_xla.sync()


def ready(rank):
    gather()
    sync()
    return os.getpid()


@pytest.fixture
def fails(run_ranks):
    """Runs a function that must fail, by itself, and all is well after; returns the error."""

    def run(fn, n, error=RankError, **arguments):
        assert issubclass(error, RankError)
        before = run_ranks(ready, n)
        with pytest.raises(error) as info:
            run_ranks(fn, n, timeout=FOR_EVER, **arguments)
        assert type(info.value) is error, "it was not stopped, but killed after FOR_EVER"
        assert run_ranks(ready, n) == before, "the same process must be able to launch again"
        return info.value

    return run


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no message")


class Faulty(torch.autograd.Function):
    """Raises on rank 1, on autograd's thread, while the others gather there."""

    @staticmethod
    def forward(ctx, x, rank, reads):
        ctx.rank, ctx.reads = rank, reads
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.rank == 1:
            raise ArithmeticError("in backward")
        gathered = gather()
        assert not ctx.reads or gathered.sum().item() == 12
        return grad, None, None


def raise_error(error):
    raise error


def forever(does):
    while True:
        does()


def swallow():
    try:
        gather()
        sync()
    except Exception:
        pass


def raise_while_cleaning_up(rank):
    try:
        gather()
        sync()
    finally:
        raise KeyError("while cleaning up")


def reduce_at_a_rendezvous(rank):
    xm.mesh_reduce("loss", rank, lambda values: rank == 1 and 1 / 0)
    xm.rendezvous("end")


def backward(rank, reads):
    Faulty.apply(torch.ones(4, device="xla", requires_grad=True), rank, reads).sum().backward()
    sync()


def sync_on_autograds_thread(rank):
    model = FSDP(torch.nn.Linear(4, 4), sync_on_finalization=True)
    loss = model(torch.ones(2, 4).to("xla")).sum()
    xm.rendezvous("both have a loss")
    if rank == 1:
        loss.backward()


def route(rank, name="XlaFullyShardedDataParallel"):
    from small_models import Computes

    experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    model = Computes(lambda model, x: model.experts[rank](x), experts=experts)
    getattr(xla_fsdp, name)(model)(torch.ones(2, 4).to("xla")).sum().backward()
    sync()


DOES = {
    "gather": lambda rank: gather(),
    "gather5": lambda rank: gather((5,)),
    "gather of bfloat16": lambda rank: gather(dtype=torch.bfloat16),
    "gather another shape": lambda rank: gather((2 + rank,)),
    "reduce": lambda rank: xm.all_reduce("sum", torch.ones(4).to("xla")),
    "sync": lambda rank: sync(),
    "mark step": lambda rank: xm.mark_step(),
    "read": lambda rank: gather().sum().item(),
    "read another shape": lambda rank: gather((2 + rank,)).sum().item(),
    "sleep": lambda rank: time.sleep(1.0),
    "loop": lambda rank: forever(partial(time.sleep, 0.01)),
    "compute": lambda rank: forever(lambda: None),
    "swallow": lambda rank: forever(swallow),
    "train": lambda rank: [DOES[what](rank) for _ in range(1000) for what in ("gather", "sync")],
    "raise": lambda rank: raise_error(ValueError("no data")),
    "raise what cannot be pickled": lambda rank: raise_error(Exception("odd", lambda: 0)),
    "raise what cannot be printed": lambda rank: raise_error(Unprintable()),
    "raise what is pending": lambda rank: raise_error(ValueError(gather())),
    "exit 0": lambda rank: raise_error(SystemExit(0)),
    "exit 3": lambda rank: raise_error(SystemExit(3)),
    "leave": lambda rank: raise_error(xla_fsdp.Preempted("nothing")),
    "interrupt": lambda rank: raise_error(KeyboardInterrupt()),
    "clean up": raise_while_cleaning_up,
    "mesh": reduce_at_a_rendezvous,
    "save": lambda rank: xm.rendezvous("saved"),
    "load": lambda rank: xm.rendezvous("loaded"),
    "backward": lambda rank: backward(rank, False),
    "backward that reads": lambda rank: backward(rank, True),
    "sync late": sync_on_autograds_thread,
    "route": route,
    "route in place": lambda rank: route(rank, "fully_shard"),
}


def follow(rank, scripts):
    """The last script is that of all further ranks."""
    for what in filter(None, scripts[min(rank, len(scripts) - 1)].split(", ")):
        DOES[what](rank)


@pytest.mark.parametrize(
    "n, scripts, rank, cause, words",
    [
        (1, ["raise"], 0, ValueError, ["ValueError: no data", "in raise_error"]),
        (4, ["read", "raise", "read"], 1, ValueError, []),
        (4, ["gather, gather, sync", "gather, raise", "gather, gather, sync"], 1, ValueError, []),
        (3, ["gather, sync, gather, sync, raise", "train"], 0, ValueError, []),
        (2, ["mesh"], 1, ZeroDivisionError, []),
        (3, ["backward"], 1, ArithmeticError, []),
        (3, ["backward that reads"], 1, ArithmeticError, []),
        (2, ["raise what cannot be pickled", "read"], 0, None, ["Exception: ('odd', <function"]),
        (2, ["sync", "raise what cannot be printed"], 1, Unprintable, ["Unprintable (its message"]),
        (2, ["read", "raise what is pending"], 1, ValueError, ["ValueError (its message raises"]),
        (2, ["read", "exit 3"], 1, SystemExit, []),
        (2, ["read", "interrupt"], 1, KeyboardInterrupt, []),
        (2, ["compute", "raise"], 1, ValueError, []),
        (3, ["swallow", "raise", "swallow"], 1, ValueError, []),
        (3, ["raise", "clean up"], 0, ValueError, ["no data"]),
        (2, ["sleep, raise", ""], 0, ValueError, ["function returned, at the end of its function"]),
        (2, ["sync late, sleep, raise", "sync late"], 0, ValueError, [f"torch_xla.sync(), {HERE}"]),
    ],
)
def test_a_rank_that_raises_ends_all(fails, n, scripts, rank, cause, words):
    error = fails(follow, n, scripts=scripts)
    assert error.rank == rank and all(word in f"{error}{error.traceback}" for word in words), error
    assert cause is None or isinstance(error.__cause__, cause)


@pytest.mark.parametrize(
    "n, scripts, words",
    [
        # The last to come: who comes a second after a disagreement is not waited for.
        (3, ["gather, gather5, sync", "gather, sleep, sync", "gather, gather5, sync"],
         [*(f"rank {rank}: torch_xla.sync(), {HERE}" for rank in range(3)),
          "differs is number 2", "rank 1: none", "all_gather[5] float32"]),
        (3, ["gather, gather, sync", "gather, sync, gather, sync"], []),
        (2, ["reduce, gather, sync", "gather, reduce, sync"],
         ["differs is number 1", "all_reduce(sum)"]),
        *((2, [route], ["rank 0: reduce_scatter", "'experts.0.weight'", HERE,
                        "rank 1: reduce_scatter", "'experts.1.weight'"])
          for route in ("route", "route in place")),
        (2, ["read another shape"], ["(item)"]),
        (2, ["gather, sync", "gather of bfloat16, sync"], ["bfloat16"]),
        (3, ["gather, sync", "gather, sync, gather, sync"], ["rank 0: its function returned"]),
        (2, ["exit 0", "read"], []),
        (2, ["gather, mark step", ""], [f"rank 0: torch_xla.sync(), {HERE}"]),
        (2, ["save", "leave"], ["rank 1: its function returned"]),
        (2, ["load", "save"], ["xm.rendezvous('saved')", "xm.rendezvous('loaded')"]),
        (4, ["save, gather, sync", "gather, sync"], []),
        (3, ["read, sync", "gather, sync"], []),
        (3, ["gather another shape, sync", "gather another shape, sync", "loop"],
         ["rank 2: running"]),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_named(fails, n, scripts, words):
    text = str(fails(follow, n, CollectiveMismatchError, scripts=scripts))
    assert all(word in text for word in words), text


def test_an_interrupt_in_a_destructor_is_repeated(fails, capfd):
    class Loader:
        def __del__(self):
            forever(partial(time.sleep, 0.05))

    def step(rank):
        if rank == 1:
            raise ValueError("no data")
        Loader()  # the first interrupt ends only its destructor
        forever(partial(time.sleep, 0.05))

    assert fails(step, 2).rank == 1
    assert "Exception ignored" not in capfd.readouterr().err


def test_others_are_named_by_the_users_lines(fails):
    places = [f"running, {HERE}", *(f"at the {end} of its function" for end in ("start", "end"))]
    for _ in range(5):
        text = str(fails(follow, 2, scripts=["raise"]))
        line = text.partition("The other ranks were stopped:\n")[2].splitlines()[0]
        assert any(place in line for place in places), line


class Slow(Exception):
    def __str__(self):
        time.sleep(2 * FOR_EVER)
        return "after all"


@pytest.mark.parametrize("error, waits", [(ValueError("stop"), True), (Slow(), False)])
def test_stuck_in_c_is_left_behind(run_ranks, error, waits):
    """In a function, and in the message of the exception."""

    def step(rank):
        if rank == 0:
            raise error
        if waits:
            time.sleep(2 * FOR_EVER)

    before = run_ranks(ready, 2)
    with pytest.raises(RankError, match=rf"rank 0 of 2 raised {type(error).__name__}") as info:
        run_ranks(step, 2, timeout=FOR_EVER)
    assert type(info.value) is RankError, "it was waited for"
    assert run_ranks(ready, 2) != before, "a new process: the old one has a rank left in it"


SCRIPTS = {
    "places in a script without a file": """
source = '''
def step(rank):
    xm.all_gather(torch.ones(3 + rank).to("xla"))
    torch_xla.sync()
'''
exec(compile(source, "<stdin>", "exec"))
text = str(raises(CollectiveMismatchError, [], step, (), 2))
assert text.count("<stdin>:3 in step") == text.count("<stdin>:4 in step") == 2, text
""",
    "tensors that were kept are usable": """
import gc

kept = {}

def fail(rank):
    ready = torch.full((3,), float(rank)).to("xla")
    torch_xla.sync()
    gathered = xm.all_gather(ready)
    kept[rank] = {"ready": ready, "gathered": gathered, "local": ready + 1,
                  "int": xm.all_reduce("sum", ready.int())}
    xm.add_step_closure(print, args=("a closure of the failed launch",))
    gc.freeze()  # Python no longer lists them
    if rank == 0:
        xm.all_gather(gathered)
    torch_xla.sync()

def go_on(rank):
    mine = kept[rank]
    torch_xla.sync()  # all that is live becomes a program: none of the lost collectives may
    total = xm.all_reduce("sum", mine["ready"])
    values = {name: (value + 0).tolist() for name, value in mine.items()}
    return total, values

for _ in range(2):
    kept_error = raises(CollectiveMismatchError, [], fail, (), 2)  # keeps frames: tensors
    for rank, (total, values) in enumerate(launch(go_on, (), 2)):
        assert total.tolist() == [1.0] * 3
        assert values["ready"] == [float(rank)] * 3
        assert values["gathered"][0] != values["gathered"][0], "lost: NaN"
        assert values["int"] == [0] * 3
    assert kept[0]["ready"].tolist() == [0.0] * 3
""",
    "a rank left behind that ends after all": """
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

assert raises(RankError, [], fail, (), 2).rank == 0
raises(RuntimeError, ["Start a new process", "rank 1"], step, (), 2)
left = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
go_on.set()
for thread in left:
    thread.join()
assert launch(step, (), 2) == [4.0, 4.0]
""",
    "an operator on the CPU that one rank alone reads with": """
def step(rank):
    gathered = xm.all_gather(torch.ones(2).to("xla"))
    if rank == 0:
        torch.frexp(gathered)
    xm.rendezvous("here")

words = ["rank 0: an operator that reads pending collectives, at", "script.py:18 in step"]
raises(CollectiveMismatchError, ["rank 1: torch_xla.sync()", *words], step, (), 2)
""",
    "a rank that keeps others waiting": """
def step(rank):
    while rank == 1:
        time.sleep(0.1)
    xm.rendezvous("here")

words = ["rank 0: xm.rendezvous('here')", "rank 1: running, at", "in step"]
raises(RankTimeoutError, words, step, (), 2, timeout=5)
""",
    # All ranks read inside of XLA. Later, rank 1 starts its program late.
    "programs after one that no hook has seen": f"""{LATE}
before = lambda: time.sleep(1.5)

def step(rank):
    gathered = xm.all_gather(torch.ones(2).to("xla"))
    found = torch.frexp(gathered).mantissa.tolist()
    for number in range(2):
        gathered = xm.all_gather(torch.ones(2).to("xla"))
        torch_xla.sync()
        xm.rendezvous("here")
    return [*found, *gathered.tolist()]

assert launch(step, (), 2) == [[0.5] * 4 + [1.0] * 4] * 2
""",
    "a rank that reads inside of XLA is stopped with the others": """
near = threading.Event()

def step(rank):
    gathered = xm.all_gather(torch.ones(2, 2).to("xla"))
    if rank == 0:
        near.set()
        torch.frexp(gathered)  # runs on the CPU, alone, inside XLA
    near.wait()
    raise ValueError("rank 1 fails")

assert raises(RankError, [], step, (), 2).rank == 1
again = launch(lambda rank: xm.all_gather(torch.ones(2).to("xla")).tolist(), (), 2)
assert again == [[1.0] * 4] * 2
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_a_process_of_its_own(run_script, name):
    result = run_script(f"{HEAD}{SCRIPTS[name]}\nprint('done')\nraise SystemExit(3)")
    assert (result.stdout, result.returncode) == ("done\n", 3), result.stderr


def test_an_error_is_printed_once(run_script):
    step = 'def step(rank):\n    raise ValueError("no data")\n'
    done = run_script(f"{HEAD}{step}launch(step, num_devices=2)")
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
