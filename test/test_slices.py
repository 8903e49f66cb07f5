"""Several slices: who is where, what is sharded over what, and what is left when one is lost."""

import os
import pickle
import re
import shutil
import time

import pytest
import torch
from checkpoint_runs import Run
from lazy_modules import torch_xla
from on_ranks import on_each_rank, raises
from small_models import mlp
from test_strategy import assert_trains_alike
from torch import nn

import xla_fsdp
from xla_fsdp import ShardingStrategy as S
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard, scan_blocks, xlac
from xla_fsdp.checkpoint.tiers.hosts import hosts_apart
from xla_fsdp.collectives.routes import attributes_of
from xla_fsdp.integrations.sharding import meant_by_name
from xla_fsdp.planning.tuning.settings import _mesh
from xla_fsdp.ranks import channel, launch
from xla_fsdp.ranks import slices as ours
from xla_fsdp.ranks.errors import RankError
from xla_fsdp.ranks.rank import current_rank
from xla_fsdp.tpu import slices as several
from xla_fsdp.tpu.slices import VARIABLES, MultisliceConfig, equal_parts
from xla_fsdp.tpu.topology import resolve

GROUPS = ((0, 1), (2, 3))
COUNT, NUMBER, COORDINATOR, PORT = VARIABLES


def said(count="2", number="1", coordinator="10.0.0.2:8080", port="8080"):
    values = (count, number, coordinator, port)
    return {name: value for name, value in zip(VARIABLES, values, strict=True) if value is not None}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"MEGASCALE_PORT": "8081"}, None),
        (said("", "", "", ""), None),  # emptied is not there
        (said("1"), None),  # one of several, alone
        (said(None, "0", None), None),  # so is that
        (said(), MultisliceConfig(2, 1, "10.0.0.2")),
        (said("16", " 0 ", "vit-0-0.vit", None), MultisliceConfig(16, 0, "vit-0-0.vit")),
        (said(port="8082"), MultisliceConfig(2, 1, "10.0.0.2", 8082)),
        (said(coordinator="dns:///head:1234"), MultisliceConfig(2, 1, "head")),
        (said(coordinator="[fd00::2]:8080"), MultisliceConfig(2, 1, "[fd00::2]")),
    ],
)
def test_what_the_variables_say(variables, place):
    assert several.read_multislice_config(variables) == place


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (said(None), "MEGASCALE_SLICE_ID='1' says that there are several slices, but MEGASCALE_"),
        (said(None, None), "MEGASCALE_COORDINATOR_ADDRESS='10.0.0.2:8080' says that there are sev"),
        (said(number=None), "MEGASCALE_NUM_SLICES=2, but MEGASCALE_SLICE_ID is not set"),
        (said(coordinator=""), "MEGASCALE_NUM_SLICES=2, but MEGASCALE_COORDINATOR_ADDRESS is not"),
        (said("two"), "MEGASCALE_NUM_SLICES='two' must be a number from 1 on"),
        (said("0"), "MEGASCALE_NUM_SLICES='0' must be a number from 1 on"),
        (said(number="2"), "MEGASCALE_SLICE_ID='2' must be a number from 0 to 1, as MEGASCALE_"),
        (said(number="-1"), "MEGASCALE_SLICE_ID='-1' must be a number from 0 to 1"),
        (said(coordinator="a b"), "MEGASCALE_COORDINATOR_ADDRESS='a b' must be HOST or HOST:PORT"),
        (said(coordinator="h:99999"), "ADDRESS='h:99999' must be HOST or HOST:PORT"),
        (said(coordinator=":80"), "MEGASCALE_COORDINATOR_ADDRESS=':80' must be HOST or HOST:PORT"),
        (said(port="http"), "MEGASCALE_PORT='http' must be a port, a number from 1 to 65535"),
    ],
)
def test_variables_that_do_not_fit_together_are_refused(variables, words):
    raises(ValueError, re.escape(words), several.read_multislice_config, variables)


def test_ranks_by_what_the_runtime_says_of_devices():
    two = attributes_of(resolve("2xv5litepod-4"))
    assert several.ranks_by_slice(two[::-1]) == ((0, 1, 2, 3), (4, 5, 6, 7)) == equal_parts(8, 2)
    assert several.ranks_by_slice(attributes_of(resolve("v5litepod-4"))) == ()
    # In the order of the slices, whatever ordinals they have; and devices that say nothing.
    devices = [{"name": f"TPU:{n}", "slice_index": 1 - n % 2} for n in range(4)]
    assert several.ranks_by_slice(devices) == ((1, 3), (0, 2))
    assert several.ranks_by_slice([{"name": "CPU:0"}]) == several.ranks_by_slice([]) == ()


@pytest.fixture
def tpu_host(monkeypatch):
    """``tpu_host(metadata, **environment)``: a TPU host, as far as it can be asked."""

    def host(metadata, **environment):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"PJRT_DEVICE": "TPU", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(xlac, "host_metadata", lambda: metadata)

    return host


def test_the_environment_goes_before_the_metadata_of_a_tpu_vm(tpu_host):
    metadata = {"WORKER_ID": 0, COUNT: 2, NUMBER: 1, COORDINATOR: "10.0.0.2:8080"}
    for given, environment, place in (
        (metadata, {}, MultisliceConfig(2, 1, "10.0.0.2")),
        ({"WORKER_ID": 0, COUNT: None, NUMBER: None, COORDINATOR: None}, {}, None),
        (metadata, {COUNT: "1"}, None),
        (metadata, {COUNT: "3", NUMBER: "2"}, MultisliceConfig(3, 2, "10.0.0.2")),
        ({}, {"PJRT_DEVICE": "CPU", **said()}, None),  # CPU ranks are all in one process
    ):
        tpu_host(given, **environment)
        assert ours.multislice_config() == place


def test_launch_and_what_it_starts_agree_on_the_slices(tpu_host, monkeypatch):
    import torch_xla.runtime as xr

    # The store of all ranks is on the first host of the first slice.
    for place, worker, served in (("0", 0, 0), ("0", 1, 1), ("1", 0, 1), ("1", 1, 1)):
        tpu_host({}, **said(number=place))
        addresses = [f"10.0.{place}.2", f"10.0.{place}.3"]
        monkeypatch.setattr(xlac, "addresses_of_hosts", lambda found=addresses: found)
        monkeypatch.setattr(xlac, "number_of_host", lambda found=worker: found)
        hosts, number = channel._hosts()
        assert (hosts[0], number) == ("10.0.0.2", served)
    for port in ("twelve", "0", "65536"):
        monkeypatch.setenv(channel._PORT_VARIABLE, port)
        with pytest.raises(ValueError, match=f"XLA_FSDP_STORE_PORT='{port}' must be a port"):
            channel.served().__enter__()
    monkeypatch.delenv(channel._PORT_VARIABLE)
    for variable, slices, place, message in (
        ("", 3, ours.multislice_config(), "slices=3, but MEGASCALE_NUM_SLICES=2. On a TPU"),
        ("", 2, None, "slices=2, but MEGASCALE_NUM_SLICES is not set, or 1. On"),
        ("2", None, None, "XLA_FSDP_SLICES=2, but MEGASCALE_NUM_SLICES is not set"),
        ("two", None, ours.multislice_config(), "XLA_FSDP_SLICES='two' must be a number of slices"),
    ):
        monkeypatch.setenv("XLA_FSDP_SLICES", variable)
        raises(ValueError, message, ours.require_slices, slices, place)
    monkeypatch.setenv("XLA_FSDP_SLICES", "2")  # as the recipes say it
    ours.require_slices(None, ours.multislice_config())
    monkeypatch.delenv("XLA_FSDP_SLICES")
    monkeypatch.setattr(xlac, "slice_device_count", lambda: 8)
    launch._check_device_count(16, 2)
    raises(ValueError, "num_devices=8, but there are 16 devices", launch._check_device_count, 8, 2)
    # Each process of a host has a port of its own, the first that of the host.
    for given, ports in (({PORT: "9000"}, ("9000", "9003")), ({}, (None, "8083"))):
        for local, expected in zip((0, 3), ports, strict=True):
            tpu_host({**said(port=None)}, **given)
            ours.prepare_process(local)
            assert os.environ.get(PORT) == expected
    # Where torch_xla starts the processes they learn their number after their function.
    tpu_host({**said(port=None), PORT: 8081})
    configured = []
    monkeypatch.setattr(xlac.configure_process, "value", lambda *given: configured.append(given))
    for _ in range(2):
        fn = pickle.loads(pickle.dumps(ours.OnAllSlices(said)))
    xlac.configure_process(2, 4)
    assert (configured, os.environ[PORT], fn.fn) == ([(2, 4)], "8083", said)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ours.prepare_host(ours.multislice_config())
    assert os.environ.pop("MASTER_ADDR") == "10.0.0.2"
    # A runtime that knows of one slice only would train, and save, beside the others.
    monkeypatch.setattr(xr, "world_size", lambda: 8)
    devices = attributes_of(resolve("2xv5litepod-4"))
    monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: devices)
    ours.require_all_slices()
    monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: devices[:4])
    monkeypatch.setattr(xr, "world_size", lambda: 4)
    message = "MEGASCALE_NUM_SLICES=2, but the XLA runtime .* 1 slice,"
    raises(RuntimeError, message, ours.require_all_slices)


SCRIPT = """
import sys
import torch
import torch_xla
from torch import nn
import xla_fsdp
from xla_fsdp import xlac
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

def train(rank, seeds):
    torch.manual_seed(seeds[rank])
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), FSDP(nn.Linear(4, 4))))
    for _ in range(2):
        model(torch.ones(2, 4).to("xla")).sum().backward()
        torch_xla.sync()
    world = model._unit.world
    return world.rank, world.size, world.replicas

if __name__ == "__main__":
    for slices, seeds in ((None, (0, 0, 0, 0)), (2, (0, 0, 1, 1))):
        print("warned" if slices else "silent", file=sys.stderr, flush=True)
        print(xla_fsdp.launch(train, (seeds,), num_devices=4, slices=slices))
    for wrong in (3, 0, True, "2"):
        try:
            xla_fsdp.launch(train, (), num_devices=4, slices=wrong)
        except (TypeError, ValueError) as error:
            print(type(error).__name__, error)
"""


def test_slices_are_simulated_on_cpu_ranks(run_script):
    done = run_script(SCRIPT, env={"XLA_FSDP_SLICES": "4"}, code=0)
    four, two, *refused = done.stdout.splitlines()
    assert two == "[(0, 2, 2), (1, 2, 2), (0, 2, 2), (1, 2, 2)]"
    assert four == "[(0, 1, 4), (0, 1, 4), (0, 1, 4), (0, 1, 4)]"
    wrong = "does not divide 4 ranks into slices of equal size; allowed are 1, 2, 4"
    assert refused[:2] == [f"ValueError slices=3 {wrong}", f"ValueError slices=0 {wrong}"]
    assert all(one.startswith("TypeError slices must be a number") for one in refused[2:])
    told = [line for line in done.stderr.splitlines() if line.startswith("xla_fsdp: ")]
    words = "the model is sharded within each slice and replicated over the slices. Pass"
    sizes = [line.partition(words)[0] for line in told]
    assert sizes == ["xla_fsdp: 4 slices of 1 ranks: ", "xla_fsdp: 2 slices of 2 ranks: "]
    # Replicas that began with other weights would stay others for ever.
    alike, _, different = done.stderr.partition("warned")
    assert "ranks built" not in alike
    assert "ranks built '0', '1' with different weights" in different


def on_two_slices() -> None:
    current_rank().slices = equal_parts(4, 2)


@on_each_rank(4, timeout=1500)
def test_sharded_within_a_slice_and_replicated_over_them(rank):
    on_two_slices()
    model = assert_trains_alike(rank, 4)
    for wrapper in FSDP.fsdp_modules(model):
        world = wrapper._unit.world
        assert (world.rank, world.groups) == (rank % 2, GROUPS)
        assert world.replica_groups == ((0, 2), (1, 3))
    for strategy in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2):
        options = FSDP(mlp(), sharding_strategy=strategy).fsdp_options
        assert options.sharding_groups == [[0, 1], [2, 3]]
        assert options.reshard_after_forward is (strategy is S.HYBRID_SHARD)
    model = assert_trains_alike(rank, 4, sharding_strategy=S.FULL_SHARD)
    assert all(wrapper.world_size == 4 for wrapper in FSDP.fsdp_modules(model))
    assert FSDP(mlp(), device_mesh=range(4)).world_size == 4
    assert FSDP(mlp(), reshard_after_forward=2).world_size == 2
    with pytest.raises(ValueError, match="must divide the 2 ranks that share the param"):
        FSDP(mlp(), reshard_after_forward=4)
    assert fully_shard(mlp())._unit.world.replicas == 2
    assert fully_shard(mlp(), mesh=range(4))._unit.world.replicas == 1
    blocks = scan_blocks([nn.Linear(4, 4) for _ in range(2)])
    assert (blocks.world_size, blocks._unit.world.replicas) == (2, 2)
    assert _mesh(None) == [0, 1, 2, 3] and _mesh(2) == [[0, 1], [2, 3]]
    # As configurations of Accelerate and the Trainer have it.
    assert meant_by_name("hybrid_shard") == {"sharding_strategy": S.HYBRID_SHARD}
    current_rank().slices = ((0,), (1, 2, 3))
    with pytest.raises(ValueError, match="on slices of 1, 3, which .* slices of equal size"):
        FSDP(mlp())
    assert FSDP(mlp(), sharding_strategy=S.FULL_SHARD).world_size == 4
    torch_xla.sync()


DIE_AT, STEPS = 3, 5


def tiers(folder, host):
    return xla_fsdp.TieredCheckpointer(
        folder / "store", fast=folder / f"host{host}", host=f"host{host}",
        address="127.0.0.1", drain_every=0,
    )  # fmt: skip


def until_a_slice_is_lost(rank, folder):
    on_two_slices()
    run = Run("nested", rank, 4)
    losses = run.train(0, DIE_AT)
    run.save(folder / "runs", DIE_AT)
    with tiers(folder, rank) as checkpointer:
        checkpointer.save(run.model, run.optimizer, run.scheduler, step=DIE_AT)
    if rank >= 2:  # slice 1
        (folder / f"died {rank}").touch()
        raise SystemError("its machines were taken away")
    return losses, run.train(DIE_AT, STEPS)


def go_on(rank, folder, size, from_memory=False):
    run = Run("nested", rank, size, seed=5)
    assert run.model.world_size == size  # one slice
    if from_memory:
        with tiers(folder, 2 + rank) as checkpointer:
            loaded = checkpointer.load(run.model, run.optimizer, run.scheduler)
        assert loaded.step == DIE_AT and "store" not in loaded.path
    else:
        assert run.load(folder / "runs").step == DIE_AT
    return run.train(DIE_AT, STEPS)


def alone(rank):
    return Run("none", rank, 1).train(0, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])  # as many ranks as are left, or as many as before
def test_a_slice_is_lost_and_training_goes_on_without_it(run_ranks, tmp_path, size):
    (expected,) = run_ranks(alone, 1)
    with pytest.raises(RankError, match="rank [23] of 4 raised SystemError: its machines") as lost:
        run_ranks(until_a_slice_is_lost, 4, tmp_path)
    died = min(path.stat().st_mtime for path in tmp_path.glob("died *"))
    assert lost.value.rank in (2, 3) and time.time() - died < 60  # 5 s, and to be told of it
    losses = run_ranks(go_on, size, tmp_path, size)
    assert losses == [losses[0]] * size
    torch.testing.assert_close(losses[0], expected[DIE_AT:], rtol=1e-5, atol=1e-6)
    # What was in the memory of the first slice, which has all that is trained, the other one has.
    for host in ("host0", "host1"):
        shutil.rmtree(tmp_path / host)
    losses = run_ranks(go_on, 2, tmp_path, 2, True)
    torch.testing.assert_close(losses[0], expected[DIE_AT:], rtol=1e-5, atol=1e-6)


def test_copies_of_a_host_are_on_another_slice():
    assert hosts_apart([0, 4, 8, 12], equal_parts(16, 2)) == 2
    assert hosts_apart([0, 4, 8, 12], equal_parts(16, 4)) == hosts_apart([0, 4, 8, 12], ()) == 1
    assert hosts_apart([0], equal_parts(4, 2)) == 1  # simulated on one host
    assert hosts_apart([0, 1, 2, 3], ((0, 2), (1, 3))) == 1  # no whole hosts follow one another
    assert hosts_apart([0, 4, 8], equal_parts(12, 2)) == 1
