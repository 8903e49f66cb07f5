"""Saving on ranks while things go wrong: if one rank raises, all do, and no checkpoint is lost."""

import os
import threading

import pytest
from checkpoint_files import Uniform, read_value
from faulty_disk import Interrupting
from on_ranks import on_each_rank

import xla_fsdp
from xla_fsdp.checkpoint import saving
from xla_fsdp.checkpoint.rank_exchange import RankExchange
from xla_fsdp.consolidate.errors import CheckpointNotFoundError, OtherRankError, OutputError
from xla_fsdp.consolidate.format.reader import latest_checkpoint
from xla_fsdp.consolidate.format.store import open_store

SIZE = 3


class Plan:
    def __init__(self, at):
        self.at, self.count, self.hit = at, 0, None

    def happen(self, name, path):
        if name == "sync_folder" and "step-" not in path:
            return  # of the parent: it may be somebody else's
        self.count += 1
        if self.count == self.at:
            self.hit = name
            raise OutputError(f"{path}: cannot be written: injected")


_plans = {}  # by thread: a rank opens its stores on its own


def _failing_stores(exchange):
    """``use(plan)``: stores that this rank opens from now on follow it; ``...`` ends that."""

    def opened(path, *args):
        store, folder = open_store(path, *args)
        plan = _plans.get(threading.get_ident())
        operations = Interrupting.CHANGES + Interrupting.READS
        return (store if plan is None else Interrupting(store, plan.happen, operations)), folder

    def use(plan):
        _plans[threading.get_ident()] = None if plan is ... else plan
        if plan is ...:
            saving.open_store = open_store

    saving.open_store = opened
    exchange.gather_values("patched", None)
    return use


def _fail_everywhere(rank, root, asynchronous, victims):
    """At every operation of the victims, in turn. Returns how many saves there were."""
    exchange, run = RankExchange(), Uniform()
    use = _failing_stores(exchange)
    checkpointer = xla_fsdp.AsyncCheckpointer(root, keep_last=1)
    run.save(root, 1, 1.0)
    good, at = 1.0, 0
    try:
        while True:
            at += 1
            plan = Plan(at if rank in victims else 0)
            use(plan)
            step, value, error = at + 1, at + 1.0, None
            try:
                if asynchronous:
                    run.start(checkpointer, step, value)
                    run.set(0.0)  # training goes on
                    checkpointer.wait()
                else:
                    run.save(root, step, value, keep_last=1)
            except Exception as raised:
                error = raised
            use(None)
            everybody = exchange.gather_values(
                "outcome", [plan.hit, error and type(error).__name__]
            )
            outcomes = {kind for _, kind in everybody}
            hit = [name for name, _ in everybody if name]
            assert (None not in outcomes) or outcomes == {None}, (at, everybody)
            if error is not None:
                own = isinstance(error, OutputError)
                assert own == (plan.hit is not None), (at, rank, repr(error), everybody)
                assert "injected" in str(error), (at, rank, repr(error))
            if rank == 0:
                now = read_value(latest_checkpoint(root))
                # After the rename a save may fail and be there all the same.
                allowed = {value} if error is None else {good, value}
                assert now in allowed, (at, now, allowed, everybody)
                good = now
            exchange.gather_values("looked", None)
            if not hit:
                break
            good = run.save(root, step, value + 0.5, keep_last=1) and value + 0.5
        assert run.load(root) == value
        assert exchange.rank or os.listdir(root) == [f"step-{step:08d}"]
        return at
    finally:
        use(...)


@pytest.mark.parametrize(
    "asynchronous, victims",
    [
        (False, (0,)),
        (True, (1,)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((False, (1,)), (False, (0, 1, 2)), (True, (0,)), (True, (0, 1, 2)))
        ),
    ],
)
def test_an_error_at_every_operation(run_ranks, tmp_path, asynchronous, victims):
    counts = run_ranks(_fail_everywhere, SIZE, str(tmp_path), asynchronous, victims)
    assert len(set(counts)) == 1 and counts[0] > 8


@on_each_rank(SIZE)
def test_async_saves_are_ordered_and_raise_at_the_next_call(rank, size, folder):
    exchange, run = RankExchange(), Uniform()
    checkpointer = xla_fsdp.AsyncCheckpointer(folder)
    for step in range(1, 6):  # each begins while the one before may still be written
        run.start(checkpointer, step, float(step))
        run.set(-1.0)  # what happens now is not in the checkpoint
    names = [f"xla_fsdp checkpoint, rank {rank}" for rank in range(SIZE)]
    mine = [each for each in threading.enumerate() if each.name in names]
    assert not any(each.daemon for each in mine)  # a program that ends completes the checkpoint
    assert checkpointer.wait() == f"{folder}/step-00000005"
    assert checkpointer.wait() is None  # nothing is left to wait for
    assert [read_value(f"{folder}/step-0000000{step}") for step in range(1, 6)] == [1, 2, 3, 4, 5]

    use = _failing_stores(exchange)
    try:
        # The error of a save comes with the next call, which does not begin another one.
        for call in ("save", "wait", "close"):
            use(Plan(4) if rank == 2 else None)
            run.start(checkpointer, 6, 6.0)
            use(None)
            kind = OutputError if rank == 2 else OtherRankError
            with pytest.raises(kind, match="injected"):
                if call == "save":
                    run.start(checkpointer, 7, 7.0)
                else:
                    getattr(checkpointer, call)()
            exchange.gather_values("all raised", None)
            assert read_value(latest_checkpoint(folder)) == 5.0
            assert not [name for name in os.listdir(folder) if "partial" in name]
        # So does leaving a `with` block, but not in place of another error.
        with pytest.raises(kind, match="injected"):
            with xla_fsdp.AsyncCheckpointer(folder) as inner:
                use(Plan(4) if rank == 2 else None)
                run.start(inner, 6, 6.0)
                use(None)
        run.start(checkpointer, 8, 8.0)
        checkpointer.close()
        assert read_value(latest_checkpoint(folder)) == 8.0
    finally:
        use(...)


PATHS = ["a b/[ab]*?{1}", "ünï/ço", "new\nline%41", "-x:y", "~", "\udcff"]


@on_each_rank(2)
def test_any_path(rank, size, folder):
    paths = [f"{folder}/{path}" for path in PATHS] + [f"file://{folder}/file url"]
    paths += [f"memory://paths/{path}" for path in PATHS if path != "\udcff"]
    run = Uniform()
    not_found = OtherRankError if rank else CheckpointNotFoundError
    for number, path in enumerate(paths, 1):
        base = number * 10.0
        with pytest.raises(not_found):
            run.load(path)
        first = run.save(path, 1, base + 1)
        assert first == f"{path}/step-00000001" and run.load(first) == base + 1
        with xla_fsdp.AsyncCheckpointer(path, keep_last=1) as checkpointer:
            run.start(checkpointer, 2, base + 2)
        assert latest_checkpoint(path) == f"{path}/step-00000002" and read_value(path) == base + 2
        run.set(0.0)
        assert run.load(path) == base + 2
        found = xla_fsdp.load_checkpoint(path, run.model).path
        assert found == latest_checkpoint(path) and run.load(found) == base + 2
        with pytest.raises(not_found):
            run.load(first)


@on_each_rank(2)
def test_paths_that_cannot_be_saved_to(rank, size, folder):
    with open(f"{folder}/file", "w") as file:
        file.write("precious")
    run = Uniform()
    for path, kind in (
        (f"{folder}/file", OutputError),
        (f"{folder}/file/below", OutputError),
        ("nosuchprotocol://bucket", ValueError),
        ("", ValueError),
        (5, TypeError),
        ("a\0b", ValueError),
    ):
        with pytest.raises((kind, OtherRankError)) as caught:
            run.save(path, 1, 1.0)
        assert kind is not OutputError or "cannot be written" in str(caught.value)
        with pytest.raises((kind, OtherRankError)):
            run.start(xla_fsdp.AsyncCheckpointer(path), 1, 1.0)
    with pytest.raises((ValueError, OtherRankError)):
        run.save("nosuchprotocol://bucket" if rank else f"{folder}/fine", 1, 1.0)
    run.save(f"{folder}/fine", 1, 1.0)
    with open(f"{folder}/file") as file:
        assert file.read() == "precious"
