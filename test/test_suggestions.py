"""What a plan suggests to change: for each rule a step that triggers it, and one that must not."""

from __future__ import annotations

import dataclasses

import pytest

from xla_fsdp.planning.program.hlo import parse_module
from xla_fsdp.planning.program.places import line_up
from xla_fsdp.planning.program.scopes import Labels
from xla_fsdp.planning.records import (
    Buffer,
    Collective,
    CompilerMemory,
    HostCopy,
    Op,
    Schedule,
)
from xla_fsdp.planning.reporting.advice import Situation, suggestions
from xla_fsdp.planning.timing import time_step
from xla_fsdp.planning.tracing.units import OnWire, TracedUnit
from xla_fsdp.tpu.topology import resolve

GIB, MS = 2**30, 1e-3
V5E = resolve("v5litepod-8")
RANKS = tuple(range(8))


def op(index, ms, phase="forward", **fields):
    cycles = round(ms * MS * V5E.chip.clock_hz)
    return Op(index, f"fusion.{index}", "fusion", cycles, phase=phase, **fields)


def gather(index, size, phase="forward", kind="all-gather", dtype="bf16", **fields):
    return Collective(
        index, index, f"{kind}.{index}", kind, kind, dtype, size, (RANKS,), 8, size * 7 // 8,
        False, phase=phase, **fields,
    )  # fmt: skip


def unit(name, elements=10**6, itemsize=2):
    wire = (OnWire(elements * itemsize, 8),)
    return TracedUnit(name, elements, elements, itemsize, wire, wire)


UNITS = (unit(""), unit("blocks.0"), unit("blocks.1"))


def advice(*what, required=2 * GIB, temporaries=0, capacity=16 * GIB, flops=0.0, **fields):
    """What is suggested for a schedule of ``what``."""
    parts = {"ops": Op, "collectives": Collective, "buffers": Buffer, "host_copies": HostCopy}
    sorted_ = {name: tuple(w for w in what if isinstance(w, k)) for name, k in parts.items()}
    schedule = Schedule(100, curve=(1,) * 100, peak_index=50, aliased={}, **sorted_)
    host = fields.pop("on_host", 0)
    memory = CompilerMemory(
        required - temporaries, 0, 0, temporaries, 0, required, host_temporaries=host
    )
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


def test_recomputation_stays_where_memory_does_not_suffice_or_nothing_is_recomputed():
    assert not advice(*RECOMPUTED, stored(GIB), required=16 * GIB)
    assert not advice(op(1, 10), op(12, 15, "backward"), stored(GIB))
    short = [op(1, 1000), op(11, 5, "backward", recomputed=True)]  # half a percent
    assert not advice(*short, stored(GIB))


def test_zero_2_where_the_backward_waits_for_gathers():
    step = [op(1, 10), gather(0, 10**8), gather(2, 10**8, "backward"), op(3, 20, "backward")]
    (one,) = advice(*step, units=UNITS)
    assert one.startswith("reshard_after_forward=False (ZeRO-2) (0.0 GiB more HBM): ")
    large = (unit(""), unit("blocks.0", 10**10))
    assert not advice(*step, units=large)  # 20 GB of full parameters
    assert not advice(*step[:2], step[3], units=UNITS)  # gathers once


def test_a_larger_batch_where_part_of_a_step_does_not_grow():
    step = [op(1, 10), op(2, 20, "backward"), op(3, 30, "optimizer")]
    (one,) = advice(*step, temporaries=GIB, flops=1e12)
    assert one.startswith("twice the batch of a device (at most 1.0 GiB more HBM")
    assert "15.00 ms less of a step, 25 % (model)" in one
    assert not advice(*step, temporaries=GIB, flops=1e12, required=15 * GIB)
    assert not advice(*step[:2], temporaries=GIB, flops=1e12)  # all of it grows


def test_bfloat16_where_all_is_sent_in_float32():
    wide = tuple(unit(name, itemsize=4) for name in ("", "blocks.0"))
    (one,) = advice(op(1, 1), gather(0, 10**9, dtype="f32"), units=wide)
    assert one.startswith("compute_dtype=torch.bfloat16 (counted: bytes sent")
    assert not advice(op(1, 1), gather(0, 10**9), units=UNITS)


def test_larger_units_where_small_collectives_add_up():
    small = [gather(n, 1024) for n in range(2, 60)]
    (one,) = advice(op(1, 1), *small, units=UNITS)
    assert one.startswith("larger units, such as auto_wrap_policy with more parameters (58 small")
    assert not advice(op(1, 1), *small, units=UNITS[:1])  # one unit already
    assert not advice(op(1, 100), small[0], units=UNITS)


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
    name = "xla_tpu_scoped_vmem_limit_kib"
    given = {"flops": 1e12, "temporaries": 15 * GIB, "scoped_vmem_kib": 98304}
    assert not advice(op(1, 10), options=frozenset({name}), **given)
    assert not advice(op(1, 10), **{**given, "scoped_vmem_kib": None})
    assert not advice(op(1, 1), gather(0, 10**9), **given)  # it mostly waits


def live(size, phase="forward", module="blocks.0.mlp"):
    return Buffer("b", size, 40, 60, "temporary", "bf16[1]", module=module, phase=phase)


def test_what_does_not_fit_is_told_what_frees_most():
    over = {"required": 20 * GIB, "units": UNITS}
    first, second = advice(op(1, 1), gather(0, 10**8), live(6 * GIB), **over)
    assert first == (
        "checkpoint_module on each block: recompute activations: frees at most 6.0 GiB of HBM"
    )
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
    saved = [float(one.rsplit(": ", 1)[1].split(" ms")[0].replace(",", "")) for one in every]
    assert saved == sorted(saved, reverse=True)


def test_nothing_is_suggested_where_no_time_is_known():
    assert not advice(scoped_vmem_kib=98304, units=UNITS)


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
    line = line_up(parse_module(text))
    last = line.places[-1].instruction
    assert last.opcode == "fusion" and Labels(line, {}).is_recomputed(last) == again
