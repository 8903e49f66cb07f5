"""The peers of the planned benchmark: the same network, and programs whose bytes are known."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch_xla
from on_ranks import without_ranks
from reports import make

from benchmarks.peers import JAX, SPMD, plan_peer
from benchmarks.peers.child import Request, lower
from benchmarks.peers.sizes import AGAIN, REMATERIALISED, SCANNED, WAYS, Sizes
from benchmarks.planned import FIGURES, OURS, TABLES, differences, page
from benchmarks.tables import by_compiler
from benchmarks.workload_s import Network, step_of
from xla_fsdp.planning.foreign import plan_partitioned
from xla_fsdp.planning.program.flops import model_flops
from xla_fsdp.planning.tracing.step import trace_step

# More activations than parameters, so that gathering parameters is what costs least.
TINY = Sizes(blocks=1, width=256, batch=16, sequence=64)
V3 = "v3-8"


def _stacked(values):
    """With the two blocks' as rows of one."""
    import jax.numpy as jnp

    found = {}
    for name, value in values.items():
        rows = [value, values[name.replace(".0.", ".1.")]]
        found[name.replace(".0.", ".")] = jnp.stack(rows) if ".0." in name else value
    return {name: value for name, value in found.items() if ".1." not in name}


def _row(values, name):
    """A block's in what is stacked."""
    if name in values:
        return values[name]
    _, number, rest = name.split(".", 2)
    return values[f"blocks.{rest}"][int(number)]


@pytest.mark.full
@without_ranks
def test_peers_send_what_they_should(cache):
    plain = plan_peer(JAX, V3, TINY, cache=cache, progress=False)
    again = plan_peer(JAX, V3, TINY, cache=cache, progress=False)
    assert again.from_cache and again.schedule == plain.schedule
    parts = 2 * TINY.elements * 7 // 8  # what a gather or a reduce-scatter of everything sends
    assert plain.bound_wire_bytes == pytest.approx(3 * parts, abs=2)
    assert all(c.group_size == 8 for c in plain.schedule.collectives)
    spmd = plan_peer(SPMD, V3, TINY, cache=cache, progress=False)
    for report, least, most, rel in ((plain, 0.98, 1.02, 0.02), (spmd, 1, 2, 0.1)):
        sent = _sent(report)
        assert least * parts <= sent["all-gather"] <= most * parts
        # On a torus a reduce-scatter over all devices is an all-reduce: twice the bytes.
        reduced = sent["all-reduce"] + 2 * sent["reduce-scatter"]
        assert reduced == pytest.approx(2 * parts, rel=rel)
        _holds_its_share(report)

    rematerialised = plan_peer(JAX, V3, TINY, REMATERIALISED, cache=cache, progress=False)
    blocks = TINY.elements - 2 * (TINY.width**2 + TINY.width)
    twice = parts + 2 * blocks * 7 // 8  # the blocks' parameters are gathered again
    assert _sent(rematerialised)["all-gather"] == pytest.approx(twice, rel=0.1)
    again = plan_peer(JAX, V3, TINY, AGAIN, cache=cache, progress=False)
    # Not those of the first layer, of whose input no gradient is needed, and no biases.
    assert 1.5 * parts <= _sent(again)["all-gather"] <= 2.02 * parts


def _sent(report):
    found = Counter()
    for one in report.schedule.collectives:
        found[one.kind] += one.wire_bytes * one.times
    return found


def _holds_its_share(report):
    """Parameters and both moments, float32, an eighth each, all donated; and the batch."""
    state = 3 * 4 * TINY.elements // 8
    batch = 4 * TINY.batch * TINY.sequence * TINY.width
    assert state <= report.memory.aliased <= 1.1 * state  # small vectors are padded
    assert report.memory.outputs - report.memory.aliased < 4096
    assert state + batch <= report.memory.arguments <= 1.1 * (state + batch)
    names = {b.name for b in report.schedule.buffers if b.category == "argument"}
    assert {"first.weight", "exp_avg of blocks.0.up.weight"} <= names
    assert report.timing.model_flops == TINY.model_flops


@pytest.mark.full
@without_ranks
def test_wrong_requests(cache):
    for peer, how, message in (
        ("DDP", {}, "allowed are SPMD, JAX"),
        (SPMD, {"way": REMATERIALISED}, "not set up for rematerialisation"),
        (JAX, {"way": "remat"}, "way must be one of kept, again"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_peer(peer, V3, **how)
    with pytest.raises(RuntimeError, match="lowering jax_fsdp ended with status 1"):
        lower("jax_fsdp", Request(8, replace(TINY, width=24)))
    program = lower("jax_fsdp", Request(8, TINY))
    with pytest.raises(ValueError, match="over 8 devices and v3-32 has 32"):
        plan_partitioned(program, "v3-32", cache=cache)


@pytest.mark.full
@without_ranks
def test_flops_are_those_of_the_traced_step(cache):
    """What the peers are told, and what a plan counts in the program of this package's class."""
    assert model_flops(trace_step(step_of("ours"), 0, 8).program.hlo) == Sizes().model_flops


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("plans"))


@pytest.mark.full
@without_ranks
def test_jax_trains_the_same_network():
    import jax
    import jax.numpy as jnp
    import numpy
    import torch

    from benchmarks.peers import jax_fsdp

    torch_xla.device()  # this process also plans, which a backward before this would prevent
    jax.config.update("jax_platforms", "cpu")
    torch.manual_seed(0)
    model = Network(lambda block: block, blocks=2, width=32)
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    known = jax_fsdp.shapes(blocks=2, width=32)
    assert {name: value.T.shape for name, value in weights.items()} == known
    assert sum(value.size for value in weights.values()) == Sizes(2, 32).elements

    x = torch.randn(3, 8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=jax_fsdp.RATE)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()

    parameters = {name: jnp.asarray(value.T) for name, value in weights.items()}
    zeros = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    state = {"step": jnp.int32(0), "exp_avg": zeros, "exp_avg_sq": zeros}
    stacked = _stacked(zeros)
    stacked = _stacked(parameters), {**state, "exp_avg": stacked, "exp_avg_sq": stacked}
    for way in WAYS:
        given = stacked if way == SCANNED else (parameters, state)
        new, after, jax_loss = jax_fsdp.train_step(*given, jnp.asarray(x.numpy()), jnp.float32, way)
        assert float(jax_loss) == pytest.approx(loss.item(), rel=1e-6)
        assert int(after["step"]) == 1
        for name, parameter in model.named_parameters():
            # A first step of Adam is the sign of the gradient, times the rate, almost.
            moment = optimizer.state[parameter]["exp_avg"].numpy()
            found = _row(after["exp_avg"], name)
            numpy.testing.assert_allclose(found.T, moment, rtol=1e-4, atol=1e-8)
            clear = abs(moment) > 1e-6
            expected, found = parameter.detach().numpy(), numpy.asarray(_row(new, name).T)
            numpy.testing.assert_allclose(found[clear], expected[clear], rtol=1e-5, atol=1e-7)
            assert clear.mean() > 0.9 or name.endswith("qkv.bias")
    half = jax_fsdp.train_step(parameters, state, jnp.asarray(x.numpy()))[2]
    assert float(half) == pytest.approx(loss.item(), rel=0.02)


SAME = """
import json, os, sys
from pathlib import Path
from benchmarks.peers import spmd
spmd.STAND_IN = int(sys.argv[2])
spmd.main(Path(sys.argv[1]))
os._exit(0)
"""


@pytest.mark.full
def test_a_mesh_that_stands_in_gives_the_program_of_the_true_one(run_script, tmp_path):
    """Two devices whose shardings are then said to be of eight, and eight devices."""
    answers = []
    for devices in (2, 8):
        folder = tmp_path / str(devices)
        folder.mkdir()
        sizes = {"blocks": 1, "width": 256, "batch": 2, "sequence": 16}
        request = {"devices": 8, "sizes": sizes}
        (folder / "request.json").write_text(json.dumps(request))
        done = run_script(SAME, folder, devices)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads((folder / "step.json").read_text()))
    assert answers[0] == answers[1]


def test_only_shardings_of_one_dimension_are_resized():
    from benchmarks.peers.spmd import resized

    text = 'mhlo.sharding = "{devices=[1,2]0,1}", mhlo.sharding = "{devices=[2,1,1]<=[2]}"'
    assert resized(text, 2, 16) == (
        'mhlo.sharding = "{devices=[1,16]<=[16]}", mhlo.sharding = "{devices=[16,1,1]<=[16]}"'
    )
    assert resized('mhlo.sharding = "{replicated}"', 2, 16) == 'mhlo.sharding = "{replicated}"'
    with pytest.raises(ValueError, match="not one dimension over 2 devices"):
        resized('mhlo.sharding = "{devices=[2,2]0,1,2,3}"', 2, 16)


def test_the_benchmark_has_a_row_for_every_slice_and_name():
    report = make()
    tables = {
        kind: {where: dict.fromkeys(table.plans, report) for where in (V3, "v6e-8")}
        for kind, table in TABLES.items()
    }
    lines = page(tables).splitlines()
    for where in (V3, "v6e-8"):
        assert sum(line.startswith(f"| {where} | ours |") for line in lines) == len(TABLES)
        assert sum(line.startswith(f"| {where} | SPMD |") for line in lines) == 1
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(FIGURES) + 3}
    (row,) = [line for line in lines if line.startswith(f"| {V3} | SPMD |")]
    assert row.split(" | ")[2] == f"{report.wire_bytes / 1e6:,.1f}", "sent, MB"


def test_the_benchmark_lists_what_two_compilers_make_of_a_row():
    old = make()
    new = replace(old, memory=replace(old.memory, temporaries=2 * old.memory.temporaries))
    both = {by_compiler(OURS, "0.0.21"): old, by_compiler(OURS, "0.0.51"): new}
    lines = differences({"v6e-8": both}, [OURS], ["0.0.21", "0.0.51"]).splitlines()
    assert lines[0] == "| slice | | figure | 0.0.21 | 0.0.51 | ratio |"
    assert lines[2].startswith("| v6e-8 | ours | temporaries, MiB |")
    assert lines[2].endswith("| 2.00 |")
    same = {by_compiler(OURS, "0.0.21"): old, by_compiler(OURS, "0.0.51"): old}
    assert len(differences({"v6e-8": same}, [OURS], ["0.0.21", "0.0.51"]).splitlines()) == 2
