"""Programs of XLA as data, and the reader of schedules, on programs written by hand."""

import pytest
from planned import EMPTY, hlo

from xla_fsdp.planning.program.assignment import read_assignment
from xla_fsdp.planning.program.hlo import Instruction, TupleShape, leaves, messages, parse_module
from xla_fsdp.planning.program.schedule import read_schedule
from xla_fsdp.planning.program.scopes import asked, parse_scope


@pytest.mark.parametrize(
    ("text", "expected"),  # bytes of the elements and memory space of each array
    [
        ("f32[]{:T(128)}", [(4, 0)]),
        ("s4[64,128]{1,0:T(64,128)(8,1)E(4)}", [(64 * 128 // 2, 0)]),
        ("u4[3]", [(2, 0)]),
        ("pred[3,5]{1,0}", [(15, 0)]),
        ("f8e4m3fn[32,128]{1,0:T(8,128)(4,1)}", [(32 * 128, 0)]),
        ("f32[5,8,3]{2,1,0:T(*,8,128)}", [(480, 0)]),
        ("f32[<=16]{0}", [(64, 0)]),
        ("token[]", [(0, 0)]),
        ("(f32[8,128]{1,0:T(8,128)S(1)}, (s32[2]{0:S(4)}), /*index=2*/u32[]{:S(2)})",
         [(4096, 1), (8, 4), (4, 2)]),
        ("()", []),
    ],
)  # fmt: skip
def test_bytes_and_memory_space_of_arrays(text, expected):
    program = f"HloModule m\nENTRY main {{\n  ROOT p = {text} parameter(0)\n}}"
    shape = parse_module(hlo(program)).entry.root.shape
    assert [(leaf.bytes, leaf.space) for leaf in leaves(shape)] == expected


def iota(width, dims, order):
    return {
        "num_devices_per_group": width, "iota_reshape_dims": dims, "iota_transpose_perm": order,
    }  # fmt: skip


def mesh(sizes, axes):
    found = {"mesh": {"axes": [{"size": size} for size in sizes]}}
    return {
        "mesh_axes_replica_group_list": found | {"axes": [{"mesh_axis_index": a} for a in axes]}
    }


def devices(**fields):
    return {"collective_device_list": fields}


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, ()),
        ({"replica_groups": [{"ids": [0]}, {"ids": [1, 2, 3]}]}, ((0,), (1, 2, 3))),
        ({"source_target_pairs": [{"source": 1, "target": 0}]}, ((1, 0),)),
        (devices(replica_groups=[{"ids": [0, 2]}, {"ids": [1, 3]}]), ((0, 2), (1, 3))),
        (devices(iota_replica_group_list=iota(4, [8], [0])), ((0, 1, 2, 3), (4, 5, 6, 7))),
        # As libtpu 0.0.51 writes them.
        ({"iota_collective_device_list": iota(4, [2, 2, 2], [1, 0, 2])},
         ((0, 1, 4, 5), (2, 3, 6, 7))),
        (mesh([2, 3], [0]), ((0, 3), (1, 4), (2, 5))),
        (mesh([2, 2], [1, 0]), ((0, 2, 1, 3),)),
    ],
)  # fmt: skip
def test_groups(fields, groups):
    message = messages()["Instruction"](**fields)
    assert Instruction("a", "all-gather", TupleShape(()), (), (), message).groups == groups


@pytest.mark.parametrize("fields", [{}, mesh([2, 3], [0])], ids=["none", "mesh"])
def test_groups_that_a_later_compiler_writes_elsewhere(fields):
    later = messages()["Instruction"].FromString(b"\xf2\x05\x00")  # field 94, no bytes
    later.MergeFrom(messages()["Instruction"](**fields))
    with pytest.raises(ValueError, match=r"all-gather a .* \(\[94\]\).* tested compiler"):
        _ = Instruction("a", "all-gather", TupleShape(()), (), (), later).groups


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backward[a].2/all_gather[a.b.weight].1/xla__all_gather", ("backward", "a.b.weight")),
        ("optimizer[].1/aten__addcdiv", ("optimizer", "")),
        ("recompute[blocks.1].4/aten__mm", ("backward", "blocks.1")),
        ("backward[].1/forward[blocks.2].3/aten__mm", ("backward", "blocks.2")),
        ("forward[].1/forward[a].2/forward[a.b]/aten__mm", ("forward", "a.b")),
        ("reduce_scatter[w].1/xla__reduce_scatter", ("", "w")),
        ("jit(f)/while/body/dot_general", ("", "")),
    ],
)
def test_scopes(name, expected):
    assert parse_scope(name) == expected


def test_what_was_asked_for():
    assert asked("backward[a].1/reduce_scatter[w].2/xla__reduce_scatter") == "reduce-scatter"
    assert asked("jit(f)/psum_scatter") == asked("jit(f)/reduce_scatter") == "reduce-scatter"
    assert asked("jit(f)/psum") == asked("all-reduce.32") == "all-reduce"
    assert asked("jit(f)/ppermute") == "collective-permute"
    assert asked("aten__mm") == ""


def test_instructions():
    text = "HloModule m, is_scheduled=true\n\nENTRY %main {\n" + (
        """  %p = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="a \\"b\\" {c}, d=("}
  %c = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  %k.1 = (f32[8]{0}, (u32[]{:S(2)})) custom-call(%p, %c), custom_call_target="x{y(", """
        """frontend_attributes={a="1"}, backend_config={"a":{"b":["}",1]},"estimated_cycles":"12"}
  ROOT %e = f32[8,128]{1,0:T(8,128)} exponential(f32[8,128]{1,0:T(8,128)} %p)
}
"""
    )
    module = parse_module(hlo(text, devices=8))
    entry = module.entry
    p, c, k, e = entry.instructions
    assert (p.opcode, p.operands, p.op_name) == ("parameter", (), 'a "b" {c}, d=(')
    assert (k.name, k.operands, k.called) == ("k.1", (p, c), ()) and k.attributes == {"a": "1"}
    assert k.backend_config == {"a": {"b": ["}", 1]}, "estimated_cycles": "12"}
    assert e.operands == (p,) and entry.root is e and entry.parameters == (p,)
    assert module.devices == 8 and module.scheduled and module.name == "m"


ADD = """%add (left: f32[], right: f32[]) -> f32[] {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %sum = f32[] add(%left, %right)
}
"""


NOTHING = "BufferAssignment:\n\nHloLiveRange (max 0):\n  InstructionSequence:\n"


def module(body, *computations):
    return "\n\n".join(
        ["HloModule m, is_scheduled=true", ADD, *computations]
        + ["ENTRY %main {\n" + body + "\n}\n"]
    )


def schedule_of(*parts):
    """Of a program, without memory, which the text does not tell."""
    return read_schedule(hlo(module(*parts), devices=8), read_assignment(NOTHING))


@pytest.mark.parametrize(
    "program, words",
    [
        (b"", "not an HLO module, or damaged"),
        (b"HloModule m", "not an HLO module, or damaged"),
        (b"\x30\x05", "not an HLO module, or damaged"),
        (EMPTY, "'m' is not scheduled"),
    ],
)
def test_not_a_schedule(program, words):
    program = program if isinstance(program, bytes) else hlo(program)
    with pytest.raises(ValueError, match=words):
        read_schedule(program, read_assignment(NOTHING))


FUSED = """%{name} (a: f32[8,128]) -> f32[8,128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  ROOT %made.{name} = f32[8,128]{{1,0}} {call}
}}
"""


@pytest.mark.parametrize(
    ("call", "work"),
    [
        ("fusion(%a), kind=kLoop, calls=%inner", "matmul"),  # in a fusion inside
        ("exponential(%a)", "elementwise"),
        ("transpose(%a), dimensions={0,1}", "copy"),
    ],
)
def test_what_operations_do(call, work):
    dot = "dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    schedule = schedule_of(
        "  %p = f32[8,128]{1,0} parameter(0)\n"
        "  ROOT %f = f32[8,128]{1,0} fusion(%p), kind=kLoop, calls=%outer",
        FUSED.format(name="inner", call=dot),
        FUSED.format(name="outer", call=call),
    )
    assert [op.work for op in schedule.ops] == [work]


def test_collectives_of_a_sparsecore():
    """One is prepared at its start, and begins where it gets its operand."""
    called = """%called (q: f32[8,128]) -> f32[64,128] {
  %q = f32[8,128]{1,0} parameter(0)
  %one = (f32[8,128]{1,0}) tuple(%q)
  %part = f32[8,128]{1,0} get-tuple-element(%one), index=0
  ROOT %all = f32[64,128]{1,0} all-gather(%part), replica_groups=[1,8]<=[8], """
    called += """dimensions={0}, backend_config={"collective_offload_config":{}}
}, execution_thread="sparsecore"

%prepared (u: f32[8,128]) -> f32[8,128] {
  %u = f32[8,128]{1,0} parameter(0)
  ROOT %v = f32[8,128]{1,0} negate(%u)
}
"""
    text = module(
        """  %p = f32[8,128]{1,0} parameter(0)
  %s = ((f32[8,128]), f32[64,128], s32[8]{0}) custom-call-start(%p), custom_call_target="x",
    async_execution_thread="sparsecore", called_computations={%called}
  %o = ((f32[8,128]), f32[8,128], s32[8]{0}) custom-call-start(%p), custom_call_target="x",
    called_computations={%prepared}
  %e = f32[8,128]{1,0} exponential(%p), backend_config={"estimated_cycles":"100"}
  %b = ((f32[8,128]), f32[64,128], s32[8]{0}) custom-call-update(%s)
  %r = f32[8,128]{1,0} all-reduce(%e), to_apply=%add
  %f = f32[8,128]{1,0} negate(%r), backend_config={"estimated_cycles":"23"}
  %d = f32[64,128]{1,0} custom-call-done(%b)
  ROOT %t = f32[64,128]{1,0} negate(%d), backend_config={"estimated_cycles":"9"}""",
        called,
    )
    program = messages()["HloModule"].FromString(hlo(text, devices=8))
    (entry,) = (one for one in program.computations if one.id == program.entry_computation_id)
    entry = {one.name.decode(): one for one in entry.instructions}
    for name in "so":  # the text of HLO cannot express that the update gets the operand
        entry[name].ClearField("operand_ids")
    entry["b"].operand_ids.append(entry["e"].id)
    schedule = read_schedule(program.SerializeToString(), read_assignment(NOTHING))
    gather, reduce = schedule.collectives
    assert (gather.kind, gather.asynchronous, gather.emitter) == ("all-gather", True, "SparseCore")
    assert (gather.index, gather.done, gather.overlap_cycles) == (4, 7, 23)
    assert (gather.bytes, gather.wire_bytes, gather.group_size) == (32768, 28672, 8)
    assert (reduce.kind, reduce.index) == ("all-reduce", 5)
    assert sum(op.cycles for op in schedule.ops) == 132


def test_variadic_and_fused():
    """Bytes add up over operands. A fused all-reduce that only leaves a part is a scatter."""
    fused = """%fused (q: f32[64,128], i: s32[]) -> f32[8,128] {
  %q = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %inner = f32[64,128]{1,0} all-reduce(%q), replica_groups={}, to_apply=%add
  ROOT %ds = f32[8,128]{1,0} dynamic-slice(%inner, %i, %z), dynamic_slice_sizes={8,128}
}
"""
    schedule = schedule_of(
        """  %p = f32[8,128]{1,0} parameter(0)
  %i = s32[] constant(0)
  %b = bf16[3]{0:T(128)} constant({1, 2, 3})
  %v = (f32[8,128]{1,0:T(8,128)}, bf16[3]{0:T(128)}) all-reduce(%p, %b), to_apply=%add
  %x = f32[64,128]{1,0} broadcast(%p), dimensions={0,1}
  %w = f32[8,128]{1,0} fusion(%x, %i), kind=kCustom, calls=%fused, """
        """backend_config={"estimated_cycles":"9"}
  %cp = f32[8,128]{1,0} collective-permute(%w), source_target_pairs={{0,1},{1,0}}
  ROOT %o = f32[8,128]{1,0} all-to-all(%cp), replica_groups={{0,1},{2,3},{4,5},{6,7}}""",
        fused,
    )
    reduce, scatter, permute, exchange = schedule.collectives
    assert (reduce.kind, reduce.dtype, reduce.bytes) == ("all-reduce", "f32", 4096 + 6)
    assert reduce.groups == () and reduce.group_size == 8
    assert reduce.wire_bytes == 2 * 4102 * 7 // 8
    assert (scatter.kind, scatter.fused, scatter.wire_bytes) == ("reduce-scatter", True, 28672)
    assert [op.cycles for op in schedule.ops if op.name == "w"] == [9]
    assert (permute.wire_bytes, permute.groups) == (4096, ((0, 1), (1, 0)))
    assert (exchange.wire_bytes, exchange.group_size) == (2048, 2)


LOOP = """%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%n, %step)
  %y = f32[8,128]{1,0} all-reduce(%x), to_apply=%add
  ROOT %out = (s32[], f32[8,128]{1,0}) tuple(%next, %y)
}

%cond (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant(10)
  ROOT %go = pred[] compare(ORDER), direction=LT
}
"""

# A counter of 64 bits in two of 32, as the compiler leaves one of torch_xla's scan; the bound is in
# the state, and the comparison fused.
SPLIT = """%less (s: (u32[], u32[], u32[])) -> pred[] {
  %s = (u32[], u32[], u32[]) parameter(0)
  %low = u32[] get-tuple-element(%s), index=0
  %end = u32[] get-tuple-element(%s), index=2
  ROOT %go = pred[] compare(%low, %end), direction=LT
}

%cond (s: (u32[], u32[], u32[], f32[8])) -> pred[] {
  %s = (u32[], u32[], u32[], f32[8]) parameter(0)
  %high = u32[] get-tuple-element(%s), index=1
  %zero = u32[] constant(0)
  %signed = s32[] bitcast-convert(%high)
  %nothing = s32[] constant(0)
  %same = pred[] compare(%high, %zero), direction=EQ
  %fused = pred[] fusion(%s), kind=kLoop, calls=%less
  %both = pred[] and(%same, %fused)
  %below = pred[] compare(%signed, %nothing), direction=LT
  ROOT %go = pred[] or(%below, %both)
}

%body (s: (u32[], u32[], u32[], f32[8])) -> (u32[], u32[], u32[], f32[8]) {
  %s = (u32[], u32[], u32[], f32[8]) parameter(0)
  %low = u32[] get-tuple-element(%s), index=0
  %high = u32[] get-tuple-element(%s), index=1
  %end = u32[] get-tuple-element(%s), index=2
  %x = f32[8]{0} get-tuple-element(%s), index=3
  %one = u32[] constant(1)
  %next = u32[] add(%low, %one)
  %over = pred[] compare(%next, %low), direction=LT
  %carry = u32[] convert(%over)
  %up = u32[] add(%high, %carry)
  %y = f32[8]{0} all-reduce(%x), to_apply=%add
  ROOT %t = (u32[], u32[], u32[], f32[8]{0}) tuple(%next, %up, %end, %y)
}
"""


def test_a_counter_in_two_parts():
    schedule = schedule_of(
        """  %p = f32[8]{0} parameter(0)
  %low = u32[] constant(4294967290)
  %high = u32[] constant(4294967295)
  %end = u32[] constant(3)
  %copy = u32[] copy(%low)
  %t = (u32[], u32[], u32[], f32[8]{0}) tuple(%copy, %high, %end, %p)
  %w = (u32[], u32[], u32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=3""",
        SPLIT,
    )
    assert [one.times for one in schedule.collectives] == [9] and schedule.notes == ()


@pytest.mark.parametrize(
    ("start", "step", "order", "config", "times"),
    [
        ("constant(0)", 1, "%n, %end", "", 10),
        ("constant(1)", 2, "%n, %end", "", 5),
        ("constant(30)", -3, "%end, %n", "", 7),
        ("constant(0)", 1, "%n, %n", ', backend_config={"known_trip_count":{"n":"6"}}', 6),
        ("constant(5)", 1, "%end, %n", "", 0),
        ('custom-call(), custom_call_target="x"', 1, "%n, %end", "", None),
    ],
)
def test_trip_counts(start, step, order, config, times):
    schedule = schedule_of(
        f"""  %p = f32[8,128]{{1,0}} parameter(0)
  %c = s32[] {start}
  %t = (s32[], f32[8,128]{{1,0}}) tuple(%c, %p)
  %w = (s32[], f32[8,128]{{1,0}}) while(%t), condition=%cond, body=%body{config}
  ROOT %r = f32[8,128]{{1,0}} get-tuple-element(%w), index=1""",
        LOOP.replace("STEP", str(step)).replace("ORDER", order),
    )
    assert [one.times for one in schedule.collectives] == [1 if times is None else times]
    unknown = ("trip count of w is unknown, assumed 1",)
    assert schedule.notes == (unknown if times is None else ())


ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=4096,offset=0): f32[8,128]{1,0}
 value: <9 o @0> (size=4096,offset=0): f32[8,128]{1,0}
allocation 1: size 4096, parameter 1, shape |f32[8,128]| at ShapeIndex {}:
 value: <2 q @0> (size=4096,offset=0): f32[8,128]{1,0}
allocation 2: size 512, maybe-live-out:
 value: <11 i @0> (size=4,offset=0): s32[]
 value: <8 s @0> (size=512,offset=0): f32[128]{0}
allocation 3: size 64, constant:
 value: <3 c @0> (size=64,offset=0): s32[]
allocation 4: size 12288, preallocated-temp:
 value: <4 a @0> (size=8192,offset=0): f32[16,128]{1,0:T(8,128)}
 value: <5 u @0> (size=8192,offset=0): f32[16,128]{1,0:T(8,128)}
 value: <6 b{0} @0> (size=4096,offset=8192): f32[8,128]{1,0}
 value: <7 d @0> (size=4096,offset=8192): f32[8,128]{1,0}
allocation 5: size 1024, color 1, preallocated-temp:
 value: <10 v @0> (size=1024,offset=0): f32[256]{0:S(1)}

Total bytes used: 20000 (19.5KiB)

Used values:
<1 p @0>
 positions:
  p

HloLiveRange (max 9):
  InstructionSequence:
    0:p
    1:q
    2:c
    3:a
    4:inside.1
    5:u
    6:b
    7:d
    8:s
    9:o
  BufferLiveRange:
    p{}:0-9
    q{}:0-9
    a{}:3-5
    u{}:5-7
    b{0}:6-6
    d{}:7-8
    s{}:8-9
    o{}:9-9
    i{}:8-8
  Live ranges at 6 (peak):
    u{}: 8192 bytes (cumulative: 8192 bytes)
"""


def test_buffers():
    """Donated arguments, updates in place, what is inside of a fusion, other memories."""
    text = module(
        """  %p = f32[8,128]{1,0} parameter(0)
  %q = f32[8,128]{1,0} parameter(1)
  %c = s32[] constant(0)
  %a = f32[16,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %u = f32[16,128]{1,0} negate(%a), metadata={op_name="forward[x.y].3/negate"}
  %b = f32[8,128]{1,0} slice(%u), slice={[0:8], [0:128]}
  %d = f32[8,128]{1,0} slice(%u), slice={[0:8], [0:128]}
  %s = f32[128]{0} bitcast(%d), metadata={op_name="optimizer[].3/slice"}
  ROOT %o = f32[8,128]{1,0} negate(%d)""",
    )
    schedule = read_schedule(hlo(text), read_assignment(ASSIGNMENT), ["w", ""])
    rows = {(b.name, b.bytes, b.born, b.dies, b.category) for b in schedule.buffers}
    assert rows == {
        ("w", 4096, 0, 8, "argument"),
        ("q", 4096, 0, 8, "argument"),
        ("a", 8192, 3, 3, "temporary"),  # u is written over it
        ("u", 8192, 4, 6, "temporary"),
        ("b", 4096, 5, 5, "temporary"),
        ("d", 4096, 6, 7, "temporary"),
        ("s", 512, 7, 8, "output"),
    }
    shared = 8192
    assert schedule.curve == (
        shared, shared, shared, shared + 8192, shared + 8192, shared + 12288, shared + 12288,
        shared + 4096 + 512, shared + 512,
    )  # fmt: skip
    assert schedule.peak_index == 5
    assert {b.name for b in schedule.live_at_peak()} == {"w", "q", "u", "b"}
    assert "f32[128]" in {b.shape for b in schedule.buffers}  # of the output, not what was before
    named = {b.name: (b.phase, b.module) for b in schedule.buffers}
    assert named["u"] == ("forward", "x.y") and named["w"][1] == "w"
    for damaged in ("", "BufferAssignment:\n", "HloModule m"):
        with pytest.raises(ValueError, match="buffer assignment"):
            read_assignment(damaged)


def test_no_estimate():
    """The largest number there is means none; what takes no time for want of one is noted."""
    largest = 2**64 - 1  # of libtpu 0.0.51; of 0.0.21 2**63 - 1
    schedule = schedule_of(
        f"""  %p = f32[8,128]{{1,0}} parameter(0)
  %a = f32[8,128]{{1,0}} negate(%p), backend_config={{"x":{{"estimated_cycles":"100"}}}}
  %b = f32[8,128]{{1,0}} negate(%a), backend_config={{"x":{{"estimated_cycles":"{2**63 - 1}"}}}}
  %d = f32[8,128]{{1,0}} negate(%b), backend_config={{"x":{{"estimated_cycles":"{largest}"}}}}
  %r = u32[8,128]{{1,0}} rng-bit-generator(%d), algorithm=rng_default
  ROOT %c = f32[8,128]{{1,0}} add(%b, %b), backend_config={{"x":{{"estimated_cycles":"7"}}}}"""
    )
    assert [op.cycles for op in schedule.ops] == [100, 0, 0, 0, 7]
    unable, random = schedule.notes
    assert "for 2 fusion" in unable and "for 1 generator" in random
