"""Checkpoints in the memory of hosts: whatever dies, one step that is whole is gone on from."""

import contextlib
import itertools
import os
import shutil
import socket
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest import mock

import checkpoint_files as files
import pytest
import torch
import torch_xla.core.xla_model as xm
from checkpoint_runs import Run
from faulty_disk import Interrupting, Stopped
from on_ranks import on_each_rank, raises
from rank_warnings import warnings_of_ranks

import xla_fsdp
from xla_fsdp.checkpoint.tiers.checkpointer import choose_save, describe_save
from xla_fsdp.checkpoint.tiers.host_tier import Card, HostTier, Save
from xla_fsdp.checkpoint.tiers.hosts import MultiHostStore, Peer, TierServer
from xla_fsdp.consolidate import errors
from xla_fsdp.consolidate.format.local import LocalStore
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

KEY = b"k" * 32
LATE = "0123456789abcdef"


def mortal_disk(at):
    """The process dies at the ``at``-th operation, of which some are reads: what is sent to others
    is read. After that it does nothing."""
    numbers = itertools.count(1)

    def die(name, path):
        if next(numbers) >= at:
            raise Stopped

    return Interrupting(LocalStore(), die, (*Interrupting.CHANGES, "read_into"))


class Host:
    """One host of two with one rank each, and what serves its folder."""

    def __init__(self, root, number, store=None):
        self.number = number
        self.tier = HostTier(store or LocalStore(), f"{root}/host{number}", "run")
        served = HostTier(LocalStore(), self.tier.root, "run")
        self.server = TierServer(served, KEY, "127.0.0.1")
        self.peer = Peer(self.server.address, KEY, f"host {number}")

    def write(self, save, value, partner, world=2):
        held = files.contents(self.number, world, save.step, value, save.save_id)
        card = self.tier.write(save, held, self.number)
        partner.peer.put(self.tier, card)

    def listed(self):
        found = (describe_save(self.tier.cards(save)) for save in self.tier.saves())
        return [each for each in found if each is not None]

    def close(self):
        self.server.close()


@contextlib.contextmanager
def two_hosts(root, store=None):
    hosts = [Host(root, 0, store), Host(root, 1)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.close()
        for thread in threading.enumerate():  # what was sent is there, or is not
            if "process_request" in thread.name:
                thread.join(600)


def opened(hosts, reader=0):
    choice = choose_save([host.listed() for host in hosts])
    assert choice.save is not None, choice.skipped
    cards = {card.rank: card for host in hosts for card in host.tier.cards(choice.save)}

    def copies_of(rank):
        hosts_by_rank = sorted(choice.hosts_by_rank[rank], key=lambda host: host != reader)
        return [None if holder == reader else hosts[holder].peer for holder in hosts_by_rank]

    store = MultiHostStore(hosts[reader].tier, cards, copies_of)
    return ShardedCheckpoint(store.folder, store, store.manifest())


def value_of(hosts, reader=0):
    return files.value_in(opened(hosts, reader))


def save_step(hosts, step, value, save_id=LATE):
    save = Save(step, save_id)
    for host in hosts:
        host.write(save, value, hosts[1 - host.number])
    for host in hosts:
        host.tier.discard([old for old in host.tier.saves() if old < save])


@pytest.fixture
def started(tmp_path):
    with two_hosts(tmp_path / "start") as hosts:
        save_step(hosts, 1, 1.0)
        assert value_of(hosts, 0) == value_of(hosts, 1) == 1.0
    return tmp_path


@pytest.mark.slow
def test_a_process_that_is_killed_at_every_operation_and_then_its_host_is_lost(started):
    seen, at = {1.0: 0, 2.0: 0}, 0
    while True:
        at += 1
        root = started / "run"
        shutil.copytree(started / "start", root)
        over = False
        with two_hosts(root, mortal_disk(at)) as hosts:
            with contextlib.suppress(Stopped, errors.CheckpointError):
                save_step(hosts, 2, 2.0)
                over = True
        with two_hosts(root) as hosts:
            for host in hosts:
                host.tier.clean()
            value = value_of(hosts, at % 2)
            seen[value] += 1
            # A host that is lost, and a new one in its place: what is whole is on the other.
            shutil.rmtree(hosts[at % 2].tier.root)
            survived = value_of(hosts, at % 2)
            assert survived in (1.0, 2.0) and survived <= value
            # The next save is as if nothing had been, and leaves nothing but itself.
            save_step(hosts, 3, 3.0)
            assert value_of(hosts) == 3.0
            for host in hosts:
                (left,) = os.listdir(host.tier.root)
                names = sorted(os.listdir(f"{host.tier.root}/{left}"))
                assert [name[:10] for name in names] == ["rank-00000"] * 2 + ["rank-00001"] * 2
        shutil.rmtree(root)
        if over:
            break
    assert at > 15 and seen[1.0] > 8 and seen[2.0] > 3, (at, seen)


def test_any_mix_of_ages_resolves_to_what_all_have():
    one, two = "1" * 16, "2" * 16
    both = [(10, one, 2, [0, 1])]
    assert choose_save([both, both]).hosts_by_rank == {0: [0, 1], 1: [0, 1]}
    # The later of two saves of one step; the whole of two steps; the parts of three hosts.
    assert choose_save([[*both, (10, two, 2, [0])], [(10, two, 2, [1])]]).save == Save(10, two)
    found = choose_save([[*both, (20, one, 2, [1])], [(30, one, 4, [0, 1, 3])]])
    assert found.save == Save(10, one)
    assert found.skipped == {
        20: "step 20: no host has the files of ranks 0 (of 2)",
        30: "step 30: no host has the files of ranks 2 (of 4)",
    }
    apart = choose_save([[(5, one, 3, [2])], [(5, one, 3, [0])], [(5, one, 3, [1])]])
    assert apart.hosts_by_rank == {0: [1], 1: [2], 2: [0]}
    mixed = choose_save([[(5, one, 2, [0])], [(5, two, 2, [1])]])
    assert mixed.save is None and list(mixed.skipped) == [5]
    assert choose_save([both], step=11).save is None and choose_save([]).save is None
    many = choose_save([[(7, one, 4096, [1])]]).skipped[7]
    assert many.endswith("ranks 0, 2, 3, 4, 5, 6, 7, 8, ... (of 4096)")


def told():
    return pytest.warns(UserWarning, match="it is read from another host. Check the memory")


def file_of(host, rank):
    return Path(host.tier.root, Save(1, LATE).folder, f"rank-{rank:05d}-of-00002.safetensors")


def test_what_is_damaged_on_one_host_is_read_from_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr("xla_fsdp.consolidate.format.digests._LEAST_CHUNK", 64)
    with two_hosts(tmp_path) as hosts:
        save_step(hosts, 1, 1.0)
        expected = [file_of(hosts[1], rank).read_bytes() for rank in (0, 1)]
        size = len(expected[0])
        assert size > 8 * 64
        for places in ([0], [9], [size // 2], [size - 1], range(0, size, 64)):
            for at in places:
                files.flip(file_of(hosts[0], 0), at, bit=at % 8)
            for reader in (0, 1):  # the damaged one is its own; or the other's, and not asked
                with told() if reader == 0 else contextlib.nullcontext():
                    checkpoint = opened(hosts, reader)
                    assert files.value_in(checkpoint) == 1.0
                    for rank in (0, 1):
                        out = bytearray(len(expected[rank]))
                        checkpoint.file(rank).read_into(0, memoryview(out))
                        assert out == expected[rank]
            file_of(hosts[0], 0).write_bytes(expected[0])

        # Both are damaged, at different places: every chunk is whole on one of them.
        files.flip(file_of(hosts[0], 0), 3)
        files.flip(file_of(hosts[1], 0), size - 1)
        for reader in (0, 1):
            with told():
                assert value_of(hosts, reader) == 1.0
        # At the same place: no file is made up.
        files.flip(file_of(hosts[1], 0), 3)
        words = "rank-00000-of-00002.*: bytes 0 to 64 are not those that"
        for reader in (0, 1):
            with told(), pytest.raises(errors.CorruptFileError, match=words):
                opened(hosts, reader).verify()


def test_what_goes_after_it_was_chosen_is_read_from_the_other_host(started):
    with two_hosts(started / "start") as hosts:
        for change in (Path.unlink, lambda path: os.truncate(path, 100)):
            whole = file_of(hosts[0], 1).read_bytes()
            store = opened(hosts).store
            change(file_of(hosts[0], 1))
            with told():
                assert (
                    files.value_in(ShardedCheckpoint(store.folder, store, store.manifest())) == 1.0
                )
            file_of(hosts[0], 1).write_bytes(whole)
        # A host that does not answer any more has a copy on this one; one without is missed.
        hosts[1].server.close()
        assert value_of(hosts) == 1.0
        store = opened(hosts).store
        file_of(hosts[0], 1).unlink()
        with told(), pytest.raises(errors.UnreadableFileError, match="host 1 .*check that hosts"):
            files.value_in(ShardedCheckpoint(store.folder, store, store.manifest()))


def test_files_and_cards_that_are_damaged_do_not_count(started):
    with two_hosts(started / "start") as hosts:
        card = file_of(hosts[0], 1).with_suffix(".json")
        data = card.read_bytes()
        for wrong in (b"", b"{}", data[:-9], data.replace(b"rank", b"rink", 1), b'["a","b"]'):
            card.write_bytes(wrong)
            with pytest.raises(errors.InvalidMetadataError):
                Card.load(wrong, "card")
            assert [c.rank for c in hosts[0].tier.cards(Save(1, LATE))] == [0]
            assert value_of(hosts) == 1.0  # the other host has it
        card.write_bytes(data)
        with file_of(hosts[0], 0).open("ab") as file:
            file.write(b"x")
        assert [c.rank for c in hosts[0].tier.cards(Save(1, LATE))] == [1]
        other = HostTier(LocalStore(), hosts[0].tier.root, "another run")
        assert other.cards(Save(1, LATE)) == []


def test_only_the_job_is_served(started):
    with two_hosts(started / "start") as hosts:
        (card, _) = hosts[0].tier.cards(Save(1, LATE))
        out = memoryview(bytearray(8))
        hosts[0].peer.read_into(card, 0, out)
        assert bytes(out) != bytes(8)
        assert hosts[0].peer.card(card.without_manifest()) == card and card.manifest
        with pytest.raises(errors.UnreadableFileError, match="is not on this host"):
            other = replace(card.record, digests="0" * 16)
            hosts[0].peer.card(replace(card.without_manifest(), record=other))
        stranger = Peer(hosts[0].server.address, b"x" * 32, "me")
        raises(errors.UnreadableFileError, "me .127.0.0.1", stranger.read_into, card, 0, out)
        beyond = memoryview(bytearray(card.record.size + 1))
        raises(errors.UnreadableFileError, "bytes 0 to", hosts[0].peer.read_into, card, 0, beyond)
        foreign = HostTier(LocalStore(), hosts[0].tier.root, "another run")
        with pytest.raises(errors.OutputError, match="belongs to another run"):
            hosts[1].peer.put(foreign, replace(card, run=foreign.run))
        outside = replace(card, record=replace(card.record, name="../../secret"))
        raises(errors.UnreadableFileError, "is called", hosts[0].peer.read_into, outside, 0, out)
        lie = replace(card, record=replace(card.record, digests="0" * 16))
        with pytest.raises(errors.OutputError, match="are not the bytes that were sent"):
            hosts[1].peer.put(hosts[0].tier, lie)
        assert value_of(hosts) == 1.0
    with pytest.raises(errors.UnreadableFileError, match="check that hosts reach each other"):
        hosts[0].peer.read_into(card, 0, out)


def test_a_host_that_says_nothing_is_given_up(started, monkeypatch):
    monkeypatch.setattr("xla_fsdp.checkpoint.tiers.hosts.TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        peer = Peer(mute.getsockname(), KEY, "the mute host")
        tier = HostTier(LocalStore(), str(started / "start/host0"), "run")
        with pytest.raises(errors.UnreadableFileError, match="the mute host .*timed out"):
            peer.read_into(tier.cards(Save(1, LATE))[0], 0, memoryview(bytearray(8)))


@pytest.mark.slow
@on_each_rank(4)
def test_training_goes_on_from_the_other_host_bit_for_bit(rank, size, folder):
    def tiers():
        return xla_fsdp.TieredCheckpointer(
            f"{folder}/durable", fast=f"{folder}/host{rank // 2}", host=f"host{rank // 2}",
            address="127.0.0.1", drain_every=3,
        )  # fmt: skip

    run = Run("nested", rank, size)
    with tiers() as checkpointer:
        assert checkpointer.load(run.model, run.optimizer, run.scheduler, missing_ok=True) is None
        for step in (1, 2):
            run.train(step - 1, step)
            checkpointer.save(
                run.model, run.optimizer, run.scheduler, step=step, extra={"at": step}
            )
        expected = run.train(2, 4)
    # The first goes to the durable store as well; memory keeps two after the last.
    assert sorted(os.listdir(f"{folder}/durable")) == ["step-00000001"]
    xm.rendezvous("saved")
    if rank == 0:
        (damaged,) = Path(folder, "host0").glob("run-*/save-00000002-*/rank-00001-of-*.safetensors")
        files.flip(damaged, damaged.stat().st_size - 5)

    def resume(seed):
        """What is loaded, the losses of steps 2 and 3, and the warnings."""
        run = Run("nested", rank, size, seed=seed)
        with tiers() as checkpointer, warnings_of_ranks(rank) as said:
            loaded = checkpointer.load(run.model, run.optimizer, run.scheduler)
        return loaded, run.train(loaded.step, 4)[-2:], said

    _, found, said = resume(4)
    assert found == expected
    if rank == 0:
        (warning,) = said
        assert warning.startswith("rank-00001-of-00004.safetensors of save-00000002-")
        files.flip(damaged, damaged.stat().st_size - 5)
        shutil.rmtree(f"{folder}/host1")
    xm.rendezvous("lost")
    loaded, found, _ = resume(5)
    assert (loaded.step, loaded.extra, loaded.world_size) == (2, {"at": 2}, size)
    assert found == expected
    xm.rendezvous("gone on")
    if rank == 0:
        shutil.rmtree(f"{folder}/host0")
    xm.rendezvous("lost, too")
    loaded, found, _ = resume(6)
    assert loaded.step == 1 and "durable" in loaded.path and found == expected
    words = "has no checkpoint, and there is no save of this run"
    with tiers() as checkpointer, pytest.raises(errors.CheckpointNotFoundError, match=words):
        checkpointer.load(run.model, step=9)


def _damaged_wherever_it_is(rank, size, folder):
    run = files.Uniform()

    def damage(step):
        xm.rendezvous(f"before the damage of {step}")
        if rank == 0:
            pattern = f"host*/run-*/save-{step:08d}-*/rank-00001-of-*.safetensors"
            copies = list(Path(folder).glob(pattern))
            assert len(copies) == 2
            for copy in copies:
                files.flip(copy, copy.stat().st_size - 5)
        xm.rendezvous(f"after the damage of {step}")

    with xla_fsdp.TieredCheckpointer(
        f"{folder}/durable", fast=f"{folder}/host{rank}", host=f"host{rank}", address="127.0.0.1",
        drain_every=9, keep_fast=3,
    ) as tiers:  # fmt: skip
        for step in (1, 2, 3):
            run.start(tiers, step, float(step))
        tiers.wait()
        told = []

        def load(**options):
            run.set(9.0)
            with warnings_of_ranks(rank) as said:
                step = tiers.load(run.model, run.optimizer, **options).step
            told.append(said)
            return step, run.get()

        assert load() == (3, 3.0)
        damage(3)
        assert load() == (2, 2.0)
        damage(2)
        assert load() == (1, 1.0)
        assert load(step=1) == (1, 1.0)
        damage(1)
        assert load() == (1, 1.0)  # the durable one
        xm.rendezvous("before the durable one goes")
        if rank == 0:
            shutil.rmtree(f"{folder}/durable")
        xm.rendezvous("after")
        run.set(9.0)
        for options in ({}, {"missing_ok": True}, {"step": 2}):
            with pytest.raises(errors.CorruptFileError) as caught:
                tiers.load(run.model, run.optimizer, **options)
            told.append(str(caught.value))
        assert run.get() == 9.0  # nothing was changed
        with pytest.raises(errors.CheckpointNotFoundError):
            tiers.load(run.model, run.optimizer, step=7)
    return told


def test_damage_on_all_hosts_falls_back_to_what_is_older(run_ranks, tmp_path):
    told, others = run_ranks(_damaged_wherever_it_is, 2, 2, str(tmp_path))
    # Of each load: the saves that it passed over, and the one that it took.
    for said, steps, goes in zip(told, ((), (3,), (3, 2), (), (3, 2, 1)), "32111", strict=False):
        for step in steps:
            head = f"step {step}: damaged on every host that has it: Corr"
            end = f"; step {goes} is the newest"
            assert sum(text.startswith(head) and end in text for text in said) == 1, (step, said)
    everything, also, second = told[5:]
    for mine, other in zip(told[5:], others[5:], strict=True):  # only a folder is another
        assert mine.partition(" Check the")[0] == other.partition(" Check the")[0]
    assert everything == also and "has no checkpoint, and step 3: damaged" in everything
    assert "rank-00001-of-00002.safetensors: bytes" in everything and "step 1: dam" in everything
    assert "has no checkpoint, and step 2: damaged" in second and "step 3" not in second


@on_each_rank(1)
def test_the_newest_save_of_a_run_is_loaded(rank, folder):
    """Of several runs in one folder, and of one whose clock went back."""
    model = torch.nn.Linear(1, 1)

    def tiers(name):
        return xla_fsdp.TieredCheckpointer(f"{folder}/{name}", fast=folder, drain_every=0)

    # Step, value and time of each save.
    for name, saves in (
        ("first", [(1, 1.0, 1), (9, 9.0, 2)]),
        ("second", [(1, 1.0, 3), (2, 2.0, 4)]),
        ("back", [(5, 1.0, 2 * 10**18), (5, 2.0, 10**18)]),
    ):
        with tiers(name) as checkpointer:
            for step, value, clock in saves:
                torch.nn.init.constant_(model.weight, value)
                with mock.patch("time.time_ns", return_value=clock):
                    checkpointer.save(model, step=step)
                checkpointer.wait()
    for name, step, value in (("first", 9, 9.0), ("second", 2, 2.0), ("back", 5, 2.0)):
        with tiers(name) as checkpointer:
            assert checkpointer.load(model).step == step and model.weight.item() == value


@on_each_rank(2)
def test_an_error_of_one_rank_is_raised_on_all(rank, size, folder):
    run = Run("root", rank, size)
    checkpointer = xla_fsdp.TieredCheckpointer(
        f"{folder}/durable", fast=f"{folder}/fast", drain_every=0
    )
    checkpointer.save(run.model, step=1)
    if rank == 1:
        save, written = checkpointer._writing
        written.result()
        failed = Future()
        failed.set_exception(errors.OutputError("no space"))
        checkpointer._writing = save, failed
    with pytest.raises(errors.CheckpointError) as caught:
        checkpointer.save(run.model, step=2)
    checkpointer.close()
    assert type(caught.value) is (errors.OutputError if rank else errors.OtherRankError)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"keep_fast": 0}, "keep_fast must be an int of at least 1, got 0"),
        ({"drain_every": -1}, "drain_every must be an int of at least 0, got -1"),
        ({"keep_last": 0}, "keep_last must be an int of at least 1, or None, got 0"),
        ({"fast": "memory://x"}, "fast must be a folder of this host"),
    ],
)
def test_wrong_arguments(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        xla_fsdp.TieredCheckpointer(tmp_path, **{"fast": str(tmp_path / "f"), **options})
