"""The text of HLO as data: shapes, groups, names and instructions."""

from __future__ import annotations

import pytest

from xla_fsdp.planning.program.collectives import parse_groups
from xla_fsdp.planning.program.hlo import Tuple, leaves, parse_module, read_shape
from xla_fsdp.planning.program.scopes import asked, scope


@pytest.mark.parametrize(
    ("text", "expected"),  # bytes of the elements and memory space of each array
    [
        ("f32[]{:T(128)}", [(4, 0)]),
        ("bf16[1000]{0:T(1024)(128)(2,1)}", [(2000, 0)]),
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
    assert [(leaf.bytes, leaf.space) for leaf in leaves(read_shape(text))] == expected


def test_nested_tuples():
    shape = read_shape("((f32[2]{0}), bf16[3,4]{1,0:T(8,128)(2,1)S(5)}, ())")
    assert isinstance(shape, Tuple) and len(shape.parts) == 3
    assert [str(leaf) for leaf in leaves(shape)] == ["f32[2]", "bf16[3,4]"]
    inner = shape.parts[1]
    assert (inner.dims, inner.layout, inner.space) == ((3, 4), "1,0:T(8,128)(2,1)S(5)", 5)
    with pytest.raises(ValueError, match="not a shape"):
        read_shape("f32 of 2")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("", ()),
        ("{}", ()),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("[8]<=[8]", (tuple(range(8)),)),
        ("{{0}, {1,2,3}}", ((0,), (1, 2, 3))),
        # As libtpu 0.0.51 writes them.
        ("mesh['axis_0'=4] {'axis_0'}", ((0, 1, 2, 3),)),
        ("mesh['axis_0'=2,'axis_1'=3] {'axis_0'}", ((0, 3), (1, 4), (2, 5))),
        ("mesh['axis_0'=2,'axis_1'=3] {'axis_1'}", ((0, 1, 2), (3, 4, 5))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
    ],
)
def test_groups(text, groups):
    assert parse_groups(text) == groups


@pytest.mark.parametrize(
    "text",
    ["[2,4]<=[9]", "[2,2]<=[4]T(1)", "{{0,1}", "all of them", "mesh['a'=4] {'b'}", "mesh['a'=4]"],
)
def test_groups_that_are_none(text):
    with pytest.raises(ValueError, match="groups"):
        parse_groups(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward[blocks.3.f1].12/aten__mm.3/aten__mm", ("forward", "blocks.3.f1")),
        (
            "backward[blocks.3].2/all_gather[blocks.3.f1.weight].1/xla__all_gather",
            ("backward", "blocks.3.f1.weight"),
        ),
        ("optimizer[].1/aten__addcdiv", ("optimizer", "")),
        ("recompute[blocks.1].4/aten__mm", ("backward", "blocks.1")),
        ("backward[].1/forward[blocks.2].3/aten__mm", ("backward", "blocks.2")),
        ("forward[].1/forward[a].2/forward[a.b]/aten__mm", ("forward", "a.b")),
        ("reduce_scatter[w].1/xla__reduce_scatter", ("", "w")),
        ("xla__all_gather", ("", "")),
        ("jit(f)/while/body/dot_general", ("", "")),
        ("", ("", "")),
    ],
)
def test_scopes(name, expected):
    assert scope(name) == expected


def test_what_was_asked_for():
    assert asked("backward[a].1/reduce_scatter[w].2/xla__reduce_scatter") == "reduce-scatter"
    assert asked("jit(f)/psum_scatter") == asked("jit(f)/reduce_scatter") == "reduce-scatter"
    assert asked("jit(f)/psum") == asked("all-reduce.32") == "all-reduce"
    assert asked("jit(f)/ppermute") == "collective-permute"
    assert asked("aten__mm") == ""


def test_instructions():
    text = "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {\n" + (
        """  %p = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="a \\"b\\" {c}, d=("}
  %c = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  %k.1 = (f32[8]{0}, /*index=1*/(u32[]{:S(2)})) custom-call(%p, /*index=1*/%c), """
        """custom_call_target="x{y(", metadata={op_name="n/m" source_file="a b.py" """
        """source_line=7}, backend_config={"a":{"b":["}",1]},"estimated_cycles":"12"}
  ROOT %e = f32[8,128]{1,0:T(8,128)} exponential(f32[8,128]{1,0:T(8,128)} %p)
}
"""
    )
    entry = parse_module(text).entry
    p, c, k, e = entry.instructions
    assert (p.opcode, p.operands, p.op_name) == ("parameter", ("0",), 'a "b" {c}, d=(')
    assert c.operands == ("{ { 1, 2 }, { 3, 4 } }",)
    assert (k.name, k.operands) == ("k.1", ("p", "c"))
    assert k.attribute("custom_call_target") == '"x{y("' and k.attribute("calls") is None
    assert k.backend_config == {"a": {"b": ["}", 1]}, "estimated_cycles": "12"}
    assert e.operands == ("p",) and entry.root is e and entry.parameters == (p,)


def test_names_without_signs_and_tables():
    """Other ways to print the same thing."""
    text = """HloModule m, is_scheduled=true, num_partitions=4, replica_count=2

FileNames
1 "a.py"

add.1 (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}, execution_thread="main"

ENTRY main (p: f32[8]) -> (f32[8]) {
  p = f32[8]{0} parameter(0)
  r = f32[8]{0} all-reduce(f32[8]{0} p), to_apply=add.1,
    replica_groups={}
  ROOT t = (f32[8]{0}) tuple(r)
}
"""
    read = parse_module(text)
    assert read.devices == 8 and set(read.computations) == {"add.1", "main"}
    reduce = read.entry.by_name["r"]
    assert reduce.called == ("add.1",) and reduce.attribute("replica_groups") == "{}"
    assert reduce.operands == ("p",)


ELEMENTS = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %pair = (f32[4]{0}, bf16[2]{0}) tuple(%x, %x)
  %first = f32[4]{0} negate(%pair#0)
  ROOT %sum = f32[4]{0} add(%pair#0, %first)
}
"""


def test_operands_that_are_elements_of_tuples():
    """As libtpu 0.0.51 writes them: without an instruction that takes the element."""
    entry = parse_module(ELEMENTS).entry
    names = [one.name for one in entry.instructions]
    assert names == ["x", "pair", "pair#0", "first", "sum"]
    element = entry.by_name["pair#0"]
    assert (element.opcode, element.operands) == ("get-tuple-element", ("pair",))
    assert str(element.shape) == "f32[4]" and element.attribute("index") == "0"
    assert entry.by_name["sum"].operands == ("pair#0", "first")
    for wrong in ("pair#2", "x#0", "gone#0"):
        with pytest.raises(ValueError, match=f"first uses '{wrong}', which is not defined"):
            parse_module(ELEMENTS.replace("negate(%pair#0)", f"negate(%{wrong})"))
