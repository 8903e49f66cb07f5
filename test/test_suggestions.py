"""What a plan suggests to change: for each rule a step that triggers it, and one that must not."""

import dataclasses

import pytest
from planned import hlo
from reports import GIB, MS, schedule_of

from xla_fsdp.compiler_options import limit_scoped_vmem
from xla_fsdp.planning import records
from xla_fsdp.planning.program.assignment import Assignment
from xla_fsdp.planning.program.flops import why_no_kernel
from xla_fsdp.planning.program.hlo import parse_module
from xla_fsdp.planning.program.places import inline_schedule
from xla_fsdp.planning.program.schedule import read_schedule
from xla_fsdp.planning.program.scopes import Labels
from xla_fsdp.planning.records import Buffer, HostCopy, Op, Schedule
from xla_fsdp.planning.reporting.advice import Situation, suggestions, warnings
from xla_fsdp.planning.timing import time_step
from xla_fsdp.planning.tracing.step import TracedStep
from xla_fsdp.planning.tracing.traced import TracedProgram
from xla_fsdp.planning.tracing.units import OnWire, TracedUnit
from xla_fsdp.tpu.topology import resolve

V5E = resolve("v5litepod-8")
RANKS = tuple(range(8))


def op(index, ms, phase="forward", **fields):
    cycles = round(ms * MS * V5E.chip.clock_hz)
    return Op(index, f"fusion.{index}", "fusion", cycles, phase=phase, **fields)


def gather(index, size, phase="forward", kind="all-gather", dtype="bf16", **fields):
    return records.CompiledCollective(
        kind, size, (RANKS,), index=index, done=index, name=f"{kind}.{index}", asked=kind,
        dtype=dtype, group_size=8, wire_bytes=size * 7 // 8, asynchronous=False, phase=phase,
        **fields,
    )  # fmt: skip


def unit(name, elements=10**6, itemsize=2):
    wire = (OnWire(elements * itemsize, 8),)
    return TracedUnit(name, elements, elements, itemsize, wire, wire)


UNITS = (unit(""), unit("blocks.0"), unit("blocks.1"))


def advice(*what, required=2 * GIB, temporaries=0, capacity=16 * GIB, flops=0.0, **fields):
    schedule = schedule_of(*what)
    figures = required - temporaries, 0, 0, temporaries, 0, required
    memory = records.CompilerMemory(*figures, host_temporaries=fields.pop("on_host", 0))
    found = Situation(
        schedule, time_step(schedule, V5E, flops), memory, capacity, False, fields.pop("units", ()),
        lambda other: time_step(other, V5E, flops).step, **fields,
    )  # fmt: skip
    return suggestions(found)


RECOMPUTED = [op(1, 10), op(11, 5, "backward", recomputed=True), op(12, 15, "backward")]


def stored(size):
    return Buffer("b", size, 11, 12, "temporary", "bf16[1]", phase="backward")


def test_recomputation_is_left_out_where_memory_suffices():
    (one,) = advice(*RECOMPUTED, stored(GIB))
    assert one.startswith("no checkpoint_module (at most 1.0 GiB more HBM): 5.00 ms less of a step")
    assert "17 % (model)" in one
    # 12.6 GiB are free, with a tenth left: half of the modules.
    (some,) = advice(*RECOMPUTED, stored(int(25.2 * GIB)))
    assert some.startswith("checkpoint_module on 50 % of the modules that have it now")
    assert "2.50 ms less" in some
    looped = [dataclasses.replace(one, times=4) for one in RECOMPUTED]
    (all_of_them,) = advice(*looped, stored(GIB))
    assert all_of_them.startswith("no checkpoint_module, and no scan_blocks (at most 4.0 GiB")
    (some,) = advice(*looped, stored(10 * GIB))
    assert some.startswith("scan_blocks(keep=...) with more values")
    assert not advice(*RECOMPUTED, stored(GIB), required=16 * GIB)
    assert not advice(op(1, 10), op(12, 15, "backward"), stored(GIB))
    short = [op(1, 1000), op(11, 5, "backward", recomputed=True)]  # half a percent
    assert not advice(*short, stored(GIB))


def test_zero_2_where_the_backward_waits_for_gathers():
    step = [op(1, 10), gather(0, 10**8), gather(2, 10**8, "backward"), op(3, 20, "backward")]
    (one,) = advice(*step, units=UNITS)
    assert one.startswith("reshard_after_forward=False (ZeRO-2) (0.0 GiB more HBM): ")
    large = (unit(""), *(unit(f"blocks.{n}", 10**9) for n in range(10)))
    assert not advice(*step, units=large)  # 20 GB of full parameters
    assert not advice(*step[:2], step[3], units=UNITS)  # gathers once


def test_a_larger_batch_where_part_of_a_step_does_not_grow():
    step = [op(1, 10), op(2, 20, "backward"), op(3, 30, "optimizer")]
    (one,) = advice(*step, temporaries=GIB, flops=1e12)
    # 0.9 * 14 GiB are free, twelve times the temporaries. Per sample: 30 + 30 / 13 of 60 ms.
    more = "less time a sample (model), at most 12.0 GiB more HBM"
    assert one == f"13 times the batch of a device: 46 % {more}"
    (one,) = advice(*step, temporaries=GIB, flops=1e12, required=14 * GIB)
    more = "less time a sample (model), at most 1.0 GiB more HBM"
    assert one == f"2 times the batch of a device: 25 % {more}"
    assert not advice(*step, temporaries=GIB, flops=1e12, required=15 * GIB)
    assert not advice(*step, flops=1e12)  # it is not known what grows
    assert not advice(*step[:2], temporaries=GIB, flops=1e12)  # all of it grows


def test_bfloat16_for_units_that_send_in_float32():
    wide = tuple(unit(name, itemsize=4) for name in ("", "blocks.0"))
    sent = gather(0, 10**9, dtype="f32"), gather(2, 10**9, dtype="f32", module="blocks.0.weight")
    (one,) = advice(op(1, 1), *sent, units=wide)
    assert one.startswith("compute_dtype=torch.bfloat16 (counted: bytes sent")
    assert one.endswith(" 48 % (model)")  # half of what is not compute
    assert not advice(op(1, 1), gather(0, 10**9), units=UNITS)
    (one,) = advice(op(1, 1), *sent, units=(unit(""), unit("blocks.0", itemsize=4)))
    assert one.startswith("compute_dtype=torch.bfloat16 for blocks.0 (counted: bytes sent")
    assert one.endswith(" 24 % (model)")


def test_units_of_another_size():
    small = [gather(n, 1024) for n in range(2, 60)]
    (one,) = advice(op(1, 1), *small, units=UNITS)
    assert one.startswith("larger units, such as auto_wrap_policy with more parameters (58 small")
    assert not advice(op(1, 1), *small, units=UNITS[:1])  # one unit already
    assert not advice(op(1, 100), small[0], units=UNITS)

    large = (unit("", 10**8), unit("blocks.0"))
    step = [op(1, 10), gather(0, 10**8)]
    (one,) = advice(*step, units=large, overlaps_gathers=True)
    assert one.startswith("smaller units: the model has 99 % of the parameters, wrap its blocks")
    assert "ms less of a step" in one
    (one,) = advice(*step, units=large)  # where gathers do not overlap it saves memory only
    assert one.endswith("the gain is not modelled, plan it")
    assert not advice(*step, units=UNITS, overlaps_gathers=True)
    early = dataclasses.replace(gather(0, 10**8), asynchronous=True, done=1)
    assert not advice(step[0], early, units=large, overlaps_gathers=True)


def test_no_offload_where_inputs_fit():
    step = [op(1, 1), HostCopy(0, 2, 15 * 10**7, to_host=True)]
    (one,) = advice(*step, on_host=GIB)
    assert one.startswith("offload=False (1.0 GiB more HBM): 9.00 ms less of a step, 90 %")
    assert not advice(*step, on_host=15 * GIB)
    hidden = [op(1, 100), HostCopy(0, 2, 15 * 10**7, to_host=True)]
    assert not advice(*hidden, on_host=GIB)


def test_vmem_where_compute_is_most_of_a_step_and_nobody_has_set_it():
    (one,) = advice(op(1, 10), flops=1e12, temporaries=15 * GIB, scoped_vmem_kib=98304)
    assert one.startswith("compiler_options=limit_scoped_vmem(98304)")
    assert one.endswith("the gain is not modelled, plan it")
    given = {"flops": 1e12, "temporaries": 15 * GIB, "scoped_vmem_kib": 98304}
    assert not advice(op(1, 10), options=frozenset(limit_scoped_vmem(98304)), **given)
    assert not advice(op(1, 10), **{**given, "scoped_vmem_kib": None})
    assert not advice(op(1, 1), gather(0, 10**9), **given)  # it mostly waits


def test_one_loop_for_many_equal_blocks_that_compile_slowly():
    many = (unit(""), *(unit(f"blocks.{n}") for n in range(8)))
    step = [op(1, 10, module="blocks.1.mlp"), op(2, 3, module="head"), op(3, 20, "backward")]
    (one,) = advice(*step, units=many, compile_seconds=300)
    assert one == (
        "scan_blocks: 8 equal blocks in one loop; compiles faster (this program took 300 s, and "
        "its code has 0 MiB), but a step takes about 10.00 ms more (model), since the backward "
        "recomputes the blocks"
    )
    again = op(4, 10, "backward", module="blocks.1.mlp", recomputed=True)
    *_, last = advice(*step, again, units=many, compile_seconds=300)
    assert "a step takes about 0.00 ms more" in last  # recomputed already
    first, last = advice(*step, op(4, 5, work="attention"), units=many, compile_seconds=300)
    assert "attention takes" in first and last.startswith("scan_blocks")  # no gain: it is last
    assert not advice(op(1, 10), units=many, compile_seconds=30)
    assert not advice(op(1, 10), units=many[:-1], compile_seconds=300)
    unequal = (*many[:-1], unit("blocks.7", 10**5))
    assert not advice(op(1, 10), units=unequal, compile_seconds=300)
    assert not advice(op(1, 10, times=8), units=many, compile_seconds=300)  # a loop already


def test_gathers_of_loops_overlap_with_prefetch():
    step = [op(1, 10, times=8), gather(0, 10**8, times=8)]
    (one,) = advice(*step, units=UNITS, overlaps_gathers=True)
    assert one.startswith("scan_blocks(prefetch=True), or no scan_blocks (at most, if all gathers")
    assert not advice(*step, units=UNITS)  # a chip on which nothing overlaps
    ahead = dataclasses.replace(gather(0, 10**8, times=8), asynchronous=True, done=1)
    assert not advice(step[0], ahead, units=UNITS, overlaps_gathers=True)
    assert not advice(*step, units=UNITS, overlaps_gathers=True, required=16 * GIB)


def test_a_kernel_where_attention_has_none_and_why_not():
    step = [op(1, 10), op(2, 5, work="attention")]
    (one,) = advice(*step)
    assert one == (
        "xla_fsdp.layers.scaled_dot_product_attention without attn_mask: attention takes 5.00 ms "
        "of a step without a kernel; the gain is not modelled, plan it"
    )
    (one,) = advice(*step, no_kernel="197 tokens are no multiple of 128; 256 would be")
    assert "which cannot be used here: 197 tokens are no multiple of 128; 256 would be" in one
    assert not advice(op(1, 10), op(2, 5, work="kernel"))
    assert not advice(op(1, 10), op(2, 0.05, work="attention"))  # half a percent


def test_dimensions_that_fill_tiles():
    (one,) = advice(op(1, 10), op(2, 10, work="matmul", padding=0.25, module="blocks.3.qkv"))
    assert one.startswith("dimensions that are multiples of 128, the tiles of matmuls")
    assert "mostly in blocks.N.qkv): 2.50 ms less of a step, 12 % (model)" in one
    for padding in (0.0, 0.01):
        assert not advice(op(1, 10), op(2, 10, work="matmul", padding=padding))


TRACED = """HloModule m

ENTRY %main {{
  %q = bf16[8,{s},{d}] parameter(0)
  %dot.1 = bf16[8,{s},{s}] dot(%q, %q), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, {name}
  %s = f32[2,4,{s},{s}] bitcast(%dot.1)
  %e.2 = f32[2,4,{s},{s}] {between}(%s), {name}
  %p = bf16[8,{s},{s}] bitcast(%e.2)
  ROOT %dot.3 = bf16[8,{s},{d}] dot(%p, %q), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, {name}
}}
"""


@pytest.mark.parametrize(
    "s, d, between, why",
    [
        (197, 64, "exponential", "197 tokens are no multiple of 128; 256 would be"),
        (256, 80, "exponential", "the head dimension 80 is no multiple of 64 up to"),
        (256, 64, "exponential", ""),
        (197, 64, "tanh", ""),  # no attention, such as the matmuls of experts
    ],
)
def test_why_attention_has_no_kernel(s, d, between, why):
    name = 'metadata={op_name="forward[a].1/matmul"}'
    program = hlo(TRACED.format(s=s, d=d, between=between, name=name))
    found = why_no_kernel(program, V5E.chip)
    assert found.startswith(why) and bool(found) == bool(why)
    old = dataclasses.replace(V5E.chip, attention_kernel=False)
    assert bool(why_no_kernel(program, old)) == (between == "exponential")


@pytest.mark.parametrize(
    "window, work",
    [
        ("size=8 stride=7 lhs_dilate=8", "attention"),
        ("size=2 lhs_dilate=2", "attention"),
        ("size=8", "matmul"),
    ],
)
def test_batched_matmuls_and_their_softmax_are_attention(window, work):
    """The TPU compiler writes the batch of a dot as a spatial dimension of a convolution."""
    dims = "dim_labels=0bf_0io->0bf"
    text = f"""HloModule m, is_scheduled=true

%softmax (p: f32[8,200,197]) -> f32[8,200,197] {{
  %p = f32[8,200,197]{{2,1,0}} parameter(0)
  ROOT %e = f32[8,200,197]{{2,1,0}} exponential(%p)
}}

%other (p: f32[8,200,64]) -> f32[8,200,64] {{
  %p = f32[8,200,64]{{2,1,0}} parameter(0)
  ROOT %e = f32[8,200,64]{{2,1,0}} exponential(%p)
}}

ENTRY %main (a: f32[8,200,64], b: f32[8,64,197]) -> f32[8,200,64] {{
  %a = f32[8,200,64]{{2,1,0:T(8,128)}} parameter(0)
  %b = f32[8,64,197]{{2,1,0:T(8,128)}} parameter(1)
  %s = f32[8,200,197]{{2,1,0:T(8,128)}} convolution(%a, %b), window={{{window}}}, {dims}
  %t = f32[8,200,197]{{2,1,0:T(8,128)}} fusion(%s), kind=kLoop, calls=%softmax
  %m = f32[8,200,64]{{2,1,0:T(8,128)}} convolution(%t, %a), window={{{window}}}, {dims}
  ROOT %o = f32[8,200,64]{{2,1,0:T(8,128)}} fusion(%m), kind=kLoop, calls=%other
}}
"""
    ops = {op.name: op for op in read_schedule(hlo(text), Assignment((), ())).ops}
    softmax = "attention" if work == "attention" else "elementwise"
    assert [ops[name].work for name in "stmo"] == [work, softmax, work, "elementwise"]
    assert ops["s"].padding == pytest.approx(1 - 197 / 256) and ops["m"].padding == 0.5
    assert ops["t"].padding == 0.0


def live(size, phase="forward", module="blocks.0.mlp"):
    return Buffer("b", size, 40, 60, "temporary", "bf16[1]", module=module, phase=phase)


def test_what_does_not_fit_is_told_what_frees_most():
    over = {"required": 20 * GIB, "units": UNITS}
    first, second = advice(op(1, 1), gather(0, 10**8), live(6 * GIB), **over)
    assert first.startswith("checkpoint_module on each block: recompute activations: frees at most")
    assert first.endswith(" 6.0 GiB of HBM")
    assert second.startswith("reshard_after_forward=True (ZeRO-3): frees at most 0.0 GiB")
    again = [*RECOMPUTED, gather(2, 10**8, "backward")]
    (one,) = advice(*again, live(2 * GIB), **over)
    assert one.startswith("offload=True: inputs of recomputed modules in host memory; the size is")
    copied = HostCopy(3, 4, 10**6, to_host=True)
    assert not advice(*again, copied, live(2 * GIB), **over)
    gathered = [op(1, 1), gather(2, 10**8, "backward")]
    assert not advice(*gathered, live(2 * GIB, "backward"), **over)
    assert not advice(*gathered, live(2 * GIB, module="head"), **over)  # in no block


def test_at_most_five_the_one_that_saves_most_first():
    wide = tuple(unit(name, itemsize=4) for name in ("", "blocks.0", "blocks.1"))
    step = [
        *RECOMPUTED, stored(GIB), op(90, 30, "optimizer"), gather(0, 10**9, dtype="f32"),
        gather(20, 10**8, "backward"), HostCopy(30, 30, 15 * 10**7, to_host=True),
        *(gather(n, 1024) for n in range(100, 400)),
    ]  # fmt: skip
    every = advice(*step, units=wide, flops=1e12, on_host=GIB, scoped_vmem_kib=98304)
    assert len(every) == 5
    # The one without a modelled gain is among the five, at the end.
    assert every[-1].startswith("compiler_options=limit_scoped_vmem(98304)")
    saved = [float(one.rsplit(": ", 1)[1].split(" ms")[0].replace(",", "")) for one in every[:-1]]
    assert saved == sorted(saved, reverse=True)
    # Without modelled gains the one that concerns most is first.
    for matmul, attention in ((1, 30), (30, 1)):
        ops = op(1, matmul, work="matmul"), op(2, attention, work="attention")
        first, second = advice(*ops, flops=1e12, scoped_vmem_kib=98304)
        assert ("attention takes" in first) == (attention > matmul)
        assert ("limit_scoped_vmem" in second) == (attention > matmul)
    assert not advice(scoped_vmem_kib=98304, units=UNITS)  # no time is known


def test_a_backward_without_an_update_gives_a_warning():
    for phase, updated, warned in (("backward", False, 1), ("backward", True, 0), ("", False, 0)):
        step = TracedStep(TracedProgram(b"", {}, ()), None, (), 0, has_optimizer=updated)
        schedule = Schedule(1, (), (gather(0, 10**6, phase),), (), (1,), 0)
        found = [w for w in warnings(schedule, step, 1, (0,), 0.5) if "nothing updates" in w]
        assert len(found) == warned, (phase, updated)


@pytest.mark.parametrize("again", [True, False])
def test_what_is_recomputed_is_read_off_the_program(again):
    """A forward within a backward, of a fusion by what it computes last."""
    name = "recompute[b].1/mul" if again else "backward[b].1/mul"
    text = f"""HloModule m, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %m = f32[8]{{0}} multiply(%p, %p), metadata={{op_name="{name}"}}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  ROOT %f = f32[8]{{0}} fusion(%a), kind=kLoop, calls=%fused
}}
"""
    line = inline_schedule(parse_module(hlo(text)))
    last = line.places[-1].instruction
    assert last.opcode == "fusion" and Labels(line, {}).is_recomputed(last) == again
