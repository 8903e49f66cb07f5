"""A trace: recorded with the names of a plan, matched with a plan, drawn; of others, refused."""

import dataclasses
import io
import json
import random
from collections import OrderedDict
from contextlib import nullcontext, suppress

import pytest
import torch
from lazy_modules import torch_xla
from on_ranks import finish_step, raises
from planned import hlo
from reports import HOSTILE, given_up, make, refused
from test_report import Page
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.planning.__main__ import main
from xla_fsdp.planning.program.hlo import messages as hlo_messages
from xla_fsdp.planning.recorded import messages, read_program, read_trace


def table(beside, title):
    (found,) = [section for section in beside.sections() if section.title.startswith(title)]
    return {row[0]: dict(zip(found.columns, row[1:], strict=True)) for row in found.rows}


def refusal(report, path):
    """An error in one line, or None."""
    try:
        assert str(report.compare_trace(path))
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 400
        return error


def test_a_damaged_trace_is_refused(tmp_path):
    """Cut short anywhere, changed, or something else: an error in one line, or what is left."""
    report, path, draw = make(), tmp_path / "host.xplane.pb", random.Random(0)
    data = tpu_trace(hlo_proto())
    for cut in [0, 1, 2, 9, *(draw.randrange(len(data)) for _ in range(30))]:
        path.write_bytes(data[:cut])
        assert refusal(report, path)
    for wrong in (b"PK\x03\x04" * 99, bytes(500), b"\x0a\x05hello", data[::-1]):
        path.write_bytes(wrong)
        assert refusal(report, path)
    for _ in range(12):
        changed = bytearray(data)
        for _ in range(8):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        refusal(report, path)


def test_what_is_no_trace_is_refused(tmp_path, capsys, monkeypatch):
    make().save(tmp_path / "plan.json")
    for report in (refused(), given_up()):
        raises(ValueError, "nothing to compare a trace with. No", report.compare_trace, tmp_path)
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main([str(tmp_path / "plan.json"), "--trace", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"{folder}: has no trace" in said and said.count("\n") == 1
    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "Pass one that Report.save wrote" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))  # has no "×"
        assert main([str(tmp_path / "plan.json")]) == 0
    assert main([str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{make()}\n"


MS = 10**9  # picoseconds
HLO = """HloModule step, is_scheduled=true

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %inner = f32[8] negate(%x), metadata={op_name="forward[blocks.1.mlp].1/neg"}
  ROOT %t = (s32[], f32[8]) tuple(%next, %inner)
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%j, %three), direction=LT
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %plus = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> f32[16] {
  %p = f32[8] parameter(0)
  %gather = (f32[8], f32[16]) all-gather-start(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="forward[blocks.0.mlp].1/all_gather[blocks.0.mlp.weight].2/xla__all_gather"}
  %neg.1 = f32[8] negate(%p), metadata={op_name="forward[blocks.0.mlp].1/neg"}
  %got = f32[16] all-gather-done(%gather)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]) tuple(%zero, %neg.1)
  %loop = (s32[], f32[8]) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %neg.2 = f32[16] negate(%got), metadata={op_name="backward[blocks.1.mlp].1/neg"}
  %reduced = f32[16] all-reduce(%neg.2), channel_id=2, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%sum, metadata={op_name="backward[blocks.1.mlp].1/all_reduce[blocks.1.mlp.bias].2/xla__cross_replica_sum"}
  ROOT %neg.3 = f32[16] negate(%reduced), metadata={op_name="optimizer[].1/neg"}
}
"""  # noqa: E501
# Each with begin and length, in ms from the begin of a step; the gather is under way from 0 to 4.
STEP = (
    ("gather", 0.0, 0.1), ("neg.1", 0.1, 2.9), ("got", 3.0, 1.0), ("loop", 4.0, 3.0),
    ("inner", 4.0, 0.5), ("inner", 5.0, 0.5), ("inner", 6.0, 0.5), ("neg.2", 7.0, 2.0),
    ("reduced", 9.0, 3.0), ("neg.3", 12.0, 1.0),
)  # fmt: skip


def hlo_proto():
    return hlo_messages()["HloProto"](hlo_module=hlo(HLO))


def tpu_trace(proto, begins=(5.0, 25.0, 46.0), also="", names=1):
    """What chips 0 and 1 did, in terms of the profiler. ``also``: an instruction of another program
    of that name, of which ``names`` are there."""
    kinds = messages()
    space = kinds["XSpace"]()
    for chip in (1, 0):
        plane = space.planes.add(name=f"/device:TPU:{chip}".encode())
        ids = {name: n for n, name in enumerate(dict.fromkeys(n for n, _, _ in STEP), start=1)}
        plane.stat_metadata.add(key=7, value={"name": b"program_id"})
        for name, number in ids.items():
            about = {
                "name": f"%{name} = f32[8] something(%p)".encode(),
                "display_name": name.encode(),
            }
            entry = plane.event_metadata.add(key=number, value=about)
            entry.value.stats.add(metadata_id=7, int64_value=-81)
        other = plane.event_metadata.add(key=99, value={"name": b"%copy = f32[8] copy(%p)"})
        other.value.stats.add(metadata_id=7, uint64_value=12)
        modules = plane.lines.add(name=b"XLA Modules", timestamp_ns=1000)
        ops = plane.lines.add(name=b"XLA Ops", timestamp_ns=1000)
        ops.events.add(metadata_id=99, offset_ps=0, duration_ps=4 * MS)
        if also:
            entry = plane.event_metadata.add(key=97, value={"display_name": also.encode()})
            entry.value.stats.add(metadata_id=7, int64_value=-81)
            ops.events.add(metadata_id=97, offset_ps=0, duration_ps=MS)
        for begin in begins:
            modules.events.add(metadata_id=98, offset_ps=int(begin * MS), duration_ps=13 * MS)
            for name, at, length in STEP:
                at, length = int((begin + at + chip) * MS), int(length * MS)
                ops.events.add(metadata_id=ids[name], offset_ps=at, duration_ps=length)
    host = space.planes.add(name=b"/host:CPU")
    host.event_metadata.add(key=1, value={"name": b"train"})
    host.stat_metadata.add(key=1, value={"name": b"step_num"})
    line = host.lines.add(name=b"python", timestamp_ns=1000)
    for number, begin in enumerate(begins):
        event = line.events.add(metadata_id=1, offset_ps=int(begin * MS), duration_ps=MS)
        event.stats.add(metadata_id=1, int64_value=number)
    known = space.planes.add(name=b"/host:metadata")
    for number in range(names):
        called = {"name": f"step({2**64 - 81})".encode()}
        entry = known.event_metadata.add(key=81 + number, value=called)
        entry.value.stats.add(metadata_id=1, bytes_value=proto.SerializeToString())
    return space.SerializeToString()


def test_a_trace_of_a_tpu(tmp_path):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(tpu_trace(hlo_proto()))
    recorded = read_trace(path)
    assert (recorded.device, recorded.on_cpu, recorded.steps) == ("TPU:0", False, 3)
    assert recorded.seconds == pytest.approx(13e-3)
    assert recorded.period == pytest.approx(20.5e-3)  # of 20 and 21
    found = [
        (one.kind, one.phase, one.module, round(1e3 * one.seconds, 6), round(1e3 * one.waited, 6))
        for one in recorded.shares
    ]
    assert sorted(found) == [
        ("all-gather", "forward", "blocks.0.mlp.weight", 4.0, 1.0),
        ("all-reduce", "backward", "blocks.1.mlp.bias", 3.0, 3.0),
        ("compute", "backward", "blocks.1.mlp", 2.0, 0.0),
        ("compute", "forward", "blocks.0.mlp", 2.9, 0.0),
        ("compute", "forward", "blocks.1.mlp", 1.5, 0.0),  # in the loop, three times
        ("compute", "optimizer", "", 1.0, 0.0),
    ]
    slots = [(s.label, round(1e3 * s.begin, 6), round(1e3 * s.end, 6)) for s in recorded.slots]
    assert slots[:2] == [("gather", 0.0, 4.0), ("neg.1", 0.1, 3.0)]
    assert [name for name, _, _ in slots].count("inner") == 3 and len(slots) == 8
    beside = make().compare_trace(path)
    assert beside.verdict.startswith("A step on TPU:0 took 13.00 ms; modelled for v3-128: 38.00 ms")
    step = table(beside, "A step")
    assert step["collectives that compute waits for"] == {
        "modelled": "2.000 ms", "measured": "4.000 ms", "ratio": "2.00"
    }  # fmt: skip
    assert table(beside, "By kind")["forward compute"]["ratio"] == "0.24"  # 4.4 of 18
    assert "are not those of a TPU" not in str(beside)
    report = dataclasses.replace(make(), title=HOSTILE, topology=HOSTILE)
    report.compare_trace(path).plot(tmp_path / "both.html")
    written = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<script>alert" not in written and "script" not in Page(written).tags


def test_programs_without_names_and_steps_that_were_cut_off(tmp_path):
    path = tmp_path / "host.xplane.pb"
    proto = hlo_proto()
    path.write_bytes(tpu_trace(proto).replace(b"ward[", b"ward_"))
    raises(ValueError, "host.xplane.pb: no program in this trace has modu", read_trace, path)
    path.write_bytes(tpu_trace(proto, begins=()))
    raises(ValueError, "no program in this trace has module names", read_trace, path)
    # Another program of that name, as CPU ranks have them: if it ran, nobody knows which did what.
    for also, told in (("", False), ("copy.7", True)):
        path.write_bytes(tpu_trace(proto, also=also, names=2))
        with pytest.raises(ValueError, match="cannot be assigned") if told else nullcontext():
            assert read_trace(path).steps == 3
    for number in range(0, 8 * len(proto.hlo_module), 37):
        damaged = bytearray(proto.hlo_module)
        damaged[number // 8] ^= 1 << number % 8
        with suppress(ValueError):
            assert read_program("step", type(proto)(hlo_module=bytes(damaged)).SerializeToString())
    proto.hlo_module = proto.hlo_module[:-9]
    path.write_bytes(tpu_trace(proto))
    with pytest.raises(
        ValueError, match=r"cannot read program step \(not an HLO module, or damaged\): record"
    ):
        read_trace(path)


def train(rank, folder, steps, rows=2, enter_late=False):
    from rank_warnings import warnings_of_ranks

    torch.manual_seed(0)
    blocks = nn.Sequential(*(FSDP(nn.Linear(8, 8)) for _ in range(2)))
    model = FSDP(nn.Sequential(OrderedDict(blocks=blocks)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, compiled = [], []

    def step():
        loss = model(torch.full((rows, 8), rank + 1.0).to("xla")).square().mean()
        loss.backward()
        finish_step(optimizer)
        losses.append(loss.item())
        compiled.append(xla_fsdp.compilation_counts().compiled)

    if enter_late:
        step()
    recording = xla_fsdp.profile(folder, steps) if steps else nullcontext()
    with warnings_of_ranks(rank) as told, recording as profiler:
        for number in range(1, 6):
            step()
            if steps:
                profiler.step()
                if rank == 0 and number == steps[0]:
                    raises(RuntimeError, "already", xla_fsdp.profile(folder, (0, 1)).__enter__)
    told = [one for one in told if "no names" in one]
    return losses, compiled, steps and profiler.file, told, torch_xla._XLAC._get_ir_debug()


# First in this file: a trace also holds the programs that its process ran before.
def test_a_trace_without_names_is_told_of(run_ranks, tmp_path):
    (_, _, file, told, _), _ = run_ranks(train, 2, str(tmp_path), (1, 2), rows=3, enter_late=True)
    assert file is not None and "compiled before xla_fsdp.profile was entered" in told[0]


def test_a_trace_has_the_names_of_a_plan_and_is_compared_with_one(run_ranks, tmp_path, capsys):
    first, second = run_ranks(train, 2, str(tmp_path / "trace"), (1, 4))
    # In the same process: the program that was compiled with names is the one without.
    plain = run_ranks(train, 2, "", None)
    assert [first[0], second[0]] == [one[0] for one in plain]
    assert plain[0][1][-1] == first[1][-1]
    _, compiled, file, told, debug = first
    assert compiled[0] == compiled[-1]  # once, with names; the steps after have the same program
    assert not told and not debug and second[2] is None
    assert list((tmp_path / "trace/plugins/profile").glob("*/*.xplane.pb")) == [file]
    trace = file.read_bytes()
    scopes = "forward[blocks.0] backward[blocks.1] optimizer[ all_gather[ reduce_scatter["
    assert [name for name in scopes.split() if name.encode() not in trace] == []

    recorded = read_trace(tmp_path / "trace")
    assert (recorded.source, recorded.device, recorded.steps) == (str(file), "2 CPU ranks", 3)
    assert recorded.on_cpu and recorded.ranks == 2 and recorded.seconds < recorded.period
    assert {"blocks.0", "blocks.1", "blocks.1.weight"} < recorded.modules
    spans = [(slot.begin, slot.end) for slot in recorded.slots]
    assert min(spans)[0] == 0 and 0 < max(end for _, end in spans) < 1
    phases = {slot.phase for slot in recorded.slots if slot.lane == "compute"}
    assert {"forward", "backward", "optimizer"} <= phases
    gathers = [s for s in recorded.slots if s.module == "blocks.0.weight" and s.phase == "forward"]
    assert sum(slot.lane == "collective" for slot in gathers) == 2  # of two ranks
    took = {share.kind for share in recorded.shares if share.seconds > 0}
    assert took == {"compute", "all-gather", "reduce-scatter"}

    report = type(make()).from_json(make(blocks=3).to_json().replace(".mlp", ""))
    beside = report.compare_trace(tmp_path / "trace")
    kinds, unit = table(beside, "By kind"), table(beside, "By unit")
    assert {"forward compute", "backward compute", "all-gather, forward"} <= set(kinds)
    assert kinds["forward compute"]["modelled"] == "27.000 ms"
    assert kinds["reduce-scatter, backward"]["modelled"] == "–"
    assert unit["blocks.1: compute"]["modelled"] == "18.000 ms"
    assert float(unit["blocks.1: compute"]["measured"].split()[0]) > 0
    assert unit["blocks.2: compute"]["measured"] == unit["blocks.2: compute"]["ratio"] == "–"
    shares = [row["share"] for row in unit.values() if row["share"] != "–"]
    assert sum(float(share.removesuffix(" %")) for share in shares) == pytest.approx(100, abs=1)
    text = str(beside)
    assert "are not those of a TPU" in text and "Only in the plan: blocks.2." in text
    assert "Only in the trace: blocks.0.bias, blocks.0.weight" in text

    # The command: both timelines on one page, which needs nothing else.
    report.save(tmp_path / "plan.json")
    command = [str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace")]
    assert main([*command, "--plot", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == text + "\n"
    written = (tmp_path / "both.html").read_text(encoding="utf-8")
    page = Page(written)
    assert page.tags.count("img") == 2 and not page.fetched
    words = "".join(page.words)
    assert "Modelled" in words and "Measured: step " in words and "blocks.1: collectives" in words
    assert main([*command, "--plot", str(tmp_path / "both.trace.json")]) == 0
    events = json.loads((tmp_path / "both.trace.json").read_text())["traceEvents"]
    (one,) = [event for event in events if event["name"] == "fusion.1"]
    assert one["args"]["module"] == "blocks.0" and one["dur"] == pytest.approx(3000)
    measured = {e["args"].get("module") for e in events if e["pid"] == 1 and "args" in e}
    assert "blocks.1.weight" in measured
    capsys.readouterr()
    assert main([*command, "--plot", str(tmp_path / "both.png")]) == 2
    error = capsys.readouterr().err
    assert "allowed are .html, .trace.json" in error and error.count("\n") == 1
    other = type(report).from_json(report.to_json().replace("blocks.", "layers."))
    with pytest.raises(ValueError, match="another model than the plan: its modules are blocks.0, "):
        other.compare_trace(file)


def test_wrong_use_is_told(tmp_path):
    for error, message, *wrong in (
        (ValueError, r"steps must be \(a, b\) with 0 <= a < b", tmp_path, (3, 3)),
        (ValueError, r"steps must be \(a, b\) with 0 <= a < b", tmp_path, (-1, 2)),
        (TypeError, "steps must be two", tmp_path, 3),
        (TypeError, "steps must be two", tmp_path, (True, 2)),
        (ValueError, "folder is empty", "", (1, 2)),
        (TypeError, r"ranks must be a tuple of numbers, such as \(0,\), got 0", "x", (1, 2), 0),
    ):
        raises(error, message, xla_fsdp.profile, *wrong)
