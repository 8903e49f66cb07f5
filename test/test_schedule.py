"""The reader of schedules against the TPU compiler: small programs with known answers."""

import functools
import json
import os
import sys
from types import SimpleNamespace

import pytest
from processes import run_command

from xla_fsdp.planning.program.assignment import read_assignment
from xla_fsdp.planning.program.schedule import read_schedule

# In a process of its own: jax here must not meet the one that torch_xla brings into the tests.
SCRIPT = """
import json, os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"
BF, F = jnp.bfloat16, jnp.float32
out = {}

def compile(name, f, ins, outs, shapes, donate=()):
    shapes = [
        jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p))
        for (s, d), p in zip(shapes, ins)
    ]
    g = jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    done = jax.jit(g, donate_argnums=donate).lower(*shapes).compile().runtime_executable()
    stats = done.get_compiled_memory_stats()
    out[name] = {
        "text": done.hlo_modules()[0].to_string(),
        "program": done.hlo_modules()[0].as_serialized_hlo_module_proto().hex(),
        "assignment": max(Path(sys.argv[2]).glob(ASSIGNMENT), key=os.path.getmtime).read_text(),
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "peak": stats.peak_memory_in_bytes,
    }

def gather(x): return lax.all_gather(x, "x", tiled=True)
def beside(w, x, y):
    for _ in range(3): y = jnp.dot(y, y.T @ y) * 0.5
    with jax.named_scope("all_gather[f1.weight]"): g = gather(w)
    with jax.named_scope("forward[blocks.3]"): return jnp.dot(x, g), y
def before(w, x): return jnp.dot(x, gather(w))
def scatter(x): return lax.psum_scatter(x, "x", tiled=True)
def loop(w, x):
    return lax.scan(lambda c, wi: (jnp.tanh(c @ gather(wi)), None), x, w)[0]
def update(p, g): return p - 0.1 * jnp.tanh(g @ p)
def branch(p, x, y):
    g = x @ y
    wide = lambda g: jnp.dot(g, gather(g[:256]))
    return lax.cond(p[0] > 0, wide, lambda g: jnp.tanh(g.T), g) @ y
def fill(x, y):
    b = jnp.zeros((8, 2048, 2048), BF)
    body = lambda i, b: lax.dynamic_update_slice(b, jnp.tanh(x @ y * i)[None], (i, 0, 0))
    return jnp.einsum("aij,ajk->ik", *[lax.fori_loop(0, 8, body, b)] * 2)
def reduced(x, y): return jnp.tanh(lax.psum(x @ y, "x")) @ y

big = ((2048, 2048), BF)
topology = sys.argv[3]
devices = np.array(topologies.get_topology_desc(topology, "tpu").devices)
mesh = Mesh(devices, ("x",))
compile("loop", loop, (P(None, "x"), P()), P(), [((5, 1024, 1024), BF), ((256, 1024), BF)])
compile("flat", scatter, (P(),), P("x"), [((1 << 20,), F)])
compile("update", update, (P(), P()), P(), [((2048, 2048), F)] * 2, donate=(0,))
if topology == "v3:2x2":
    compile("branch", branch, (P(),) * 3, P(), [((1,), F), big, big])
    compile("fill", fill, (P(), P()), P(), [big, big])
    compile("reduced", reduced, (P(), P()), P(), [big, big])
else:
    compile("gather", gather, (P("x"),), P(), [((8192, 512), BF)])
    compile("beside", beside, (P("x"), P(), P()), (P(), P()), [big] * 3)
    compile("before", before, (P("x"), P()), P(), [big, big])
    compile("wide", scatter, (P(),), P("x"), [((8192, 128), F)])
json.dump(out, open(sys.argv[1], "w"))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """``compiled(topology)``: by the name of a program its schedule, its text, and what the
    compiler says of its memory."""

    @functools.cache
    def programs(topology):
        folder = tmp_path_factory.mktemp("schedules")
        (folder / "script.py").write_text(SCRIPT)
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
        quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        quiet |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": dump}
        paths = [folder / name for name in ("script.py", "out.json", "dump")]
        run_command(sys.executable, *paths, topology, env={**os.environ, **quiet})
        found = json.loads((folder / "out.json").read_text())
        for one in found.values():
            one["schedule"] = read_schedule(
                bytes.fromhex(one["program"]), read_assignment(one["assignment"])
            )
        return {name: SimpleNamespace(**one) for name, one in found.items()}

    return programs


TOPOLOGIES = ["v3:2x2", "v5e:2x4"]


@pytest.mark.parametrize(
    "topology, name, asked, kind, size, times",
    [
        ("v5e:2x4", "gather", "all-gather", "all-gather", 8192 * 512 * 2, 1),
        ("v5e:2x4", "before", "all-gather", "all-gather", 2048 * 2048 * 2, 1),
        # Of one dimension: all-reduce and slice, twice the bytes.
        *((one, "flat", "reduce-scatter", "all-reduce", 4 << 20, 2) for one in TOPOLOGIES),
        ("v5e:2x4", "wide", "reduce-scatter", "reduce-scatter", 8192 * 128 * 4, 1),
    ],
)
def test_one_collective(compiled, topology, name, asked, kind, size, times):
    (one,) = compiled(topology)[name].schedule.collectives
    assert (one.kind, one.asked, one.bytes) == (kind, asked, size)
    assert one.wire_bytes == times * size * 7 // 8
    assert one.dtype == ("bf16" if kind == "all-gather" else "f32")
    assert one.groups == (tuple(range(8)),) and one.group_size == 8
    if kind == "all-gather":
        assert not one.asynchronous and one.done == one.index and one.overlap_cycles == 0
    assert one.emitter or name != "gather"


def test_a_gather_beside_compute(compiled):
    """Cut into pieces that sit in the fusions that overlap it, and counted once."""
    program = compiled("v5e:2x4")["beside"]
    assert program.text.count(" all-gather(") > 2
    (one,) = program.schedule.collectives
    assert (one.kind, one.asynchronous, one.fused) == ("all-gather", True, False)
    assert one.bytes == 2048 * 2048 * 2 and one.wire_bytes == one.bytes * 7 // 8
    assert one.module == "f1.weight"
    ops = program.schedule.ops
    between = [op.cycles for op in ops if one.index < op.index < one.done]
    assert one.overlap_cycles == sum(between) > 0.5 * sum(op.cycles for op in ops)
    assert not {one.index, one.done} & {op.index for op in ops}
    # What needs the gather comes after it.
    last = [op for op in ops if op.phase == "forward" and op.cycles]
    assert [op.module for op in last] == ["blocks.3"] and last[0].index > one.done


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_loop(compiled, topology):
    schedule = compiled(topology)["loop"].schedule
    (one,) = schedule.collectives
    assert (one.times, one.bytes) == (5, 1024 * 1024 * 2) and not schedule.notes
    assert {op.times for op in schedule.ops if op.cycles > 5500} == {5}


# The compiler's own peak counts VMEM too where a program has no temporaries in HBM, so compare
# where everything is in HBM.
@pytest.mark.parametrize("name", ["update", "flat", "loop", "branch", "fill", "reduced"])
def test_peaks(compiled, name):
    program = compiled("v3:2x2")[name]
    schedule = program.schedule
    assert max(schedule.curve) == pytest.approx(program.peak, rel=0.002)
    assert schedule.curve[schedule.peak_index] == max(schedule.curve)
    assert sum(b.bytes for b in schedule.live_at_peak()) == max(schedule.curve)
    assert len(schedule.curve) == schedule.length
