"""Reports: text, file, comparison, pictures, pages and traces, on schedules made by hand."""

import dataclasses
import io
import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from types import MappingProxyType
from unittest import mock

import numpy
import pytest
from reports import GIB, HOSTILE, NOTHING, given_up, make, refused

from xla_fsdp.planning.compiling.plan_cache import CompiledStep
from xla_fsdp.planning.make_report import report_on_parts
from xla_fsdp.planning.records import Buffer, CompilerMemory, HostCopy, Op, Schedule
from xla_fsdp.planning.reporting.page import page as report_html
from xla_fsdp.planning.reporting.pictures import COLORS, canvas, draw, draw_lanes, hbm, png, trace
from xla_fsdp.planning.reporting.report import Report
from xla_fsdp.planning.reporting.tables import unit_names
from xla_fsdp.planning.timing import time_step
from xla_fsdp.planning.tracing.step import TracedPart, TracedStep
from xla_fsdp.planning.tracing.traced import TracedProgram
from xla_fsdp.tpu.topology import resolve


def test_text_says_whether_it_fits_and_names_units():
    lines = str(make(planner_host_memory=GIB, compiler_host_memory=3 * GIB)).splitlines()
    assert lines[0] == "FITS: 1.6 of 4.0 GiB a device on v3-128 (59 % headroom)"
    assert len(lines) <= 72 and max(map(len, lines)) <= 110
    for pattern in (
        r"HBM of a device +GiB +how obtained", r"required +1\.625 ", r"capacity +4\.000 +libtpu",
        r"bf16\[2000,2000\] +7\.6 +all-gather +blocks\.\d\.mlp +temporary, \w+ward",
        r"all-gather +4 +2 +2 +0 +28\.0", r"sent / bound +2\.00 ×", r"exposed +2\.00 ms",
        r"MFU +42\.0 %", r"compile time +12\.5 s",
        r"executables +1 of 3 +ranks 0, 1, 127: all run one program", r"by module",
        r"memory, planning +1\.00 GiB +peak of host memory", r"memory, compiler +3\.00 GiB",
    ):  # fmt: skip
        assert re.search(pattern, "\n".join(lines)), pattern
    assert lines[-1] == "  * The last block is not wrapped."
    assert "memory, " not in str(make())  # a report of an older version
    unnamed = make().to_json().replace("blocks.0.mlp", "").replace("blocks.1.mlp", "")
    noted = dataclasses.replace(Report.from_json(unnamed).schedule, notes=("A count was assumed.",))
    text = str(make(schedule=noted))
    assert "by module" not in text and "\nNotes\n  * A count was assumed.\n" in text


def test_where_the_time_goes():
    """Two blocks forward and backward, three operations each: a matmul, a kernel and another. The
    first of each backward is recomputed."""
    report = make()
    one = report.timing.compute / 12
    assert report.time_by_kind == pytest.approx(
        {
            "matmuls and what is fused with them": 2 * one,
            "attention and other Pallas kernels": 4 * one,
            "normalization and other elementwise": 4 * one,
            "recomputation": 2 * one,
            "collectives, exposed": report.timing.exposed,
        }
    )
    data = json.loads(report.to_json())
    assert data["time_by_kind"] == report.time_by_kind
    # Equal blocks are one row: forward, recomputed, backward, optimizer, other.
    assert list(data["time_by_module"]["blocks.N (2)"])[1:3] == ["recomputed", "backward"]
    assert re.search(r"blocks\.N \(2\) +9\.00 +3\.00 +6\.00 +0\.00 +0\.00", str(report))
    ops = tuple(dataclasses.replace(op, phase="optimizer") for op in report.schedule.ops)
    report = make(schedule=dataclasses.replace(report.schedule, ops=ops))
    assert report.time_by_kind["optimizer"] == pytest.approx(report.timing.compute)
    assert not refused().time_by_kind and not given_up().time_by_kind


def test_page_has_the_tables_of_the_text():
    report = make()
    cells = re.sub(r"</td><td[^>]*>", "  ", re.sub("<img[^>]*>", "", report_html(report)))
    lines = [line.strip() for line in re.sub("<[^>]+>", "\n", cells).splitlines()]
    kind, seconds = next(iter(report.time_by_kind.items()))
    for title, row in (
        (
            "Where the time goes: MODEL",
            f"{kind}  {1e3 * seconds:.2f} ms  {100 * seconds / report.timing.step:.1f} %",
        ),
        ("Compute by module, ms: MODEL", "blocks.N (2)  9.00  3.00  6.00  0.00  0.00"),
        ("HBM at the peak, by kind", ""),
    ):
        (start,) = [n for n, line in enumerate(lines) if line.startswith(title)]
        assert row in lines[start:], (title, row)


def test_a_step_of_several_programs_says_why_nothing_is_suggested():
    program = TracedProgram(b"", {}, ())
    step = TracedStep(program, None, (), 0, True, parts=(TracedPart(program, False, 0, 0, 0),))
    one = CompiledStep("key", b"", b"", "", None, "", 1.0, False, 1e12)
    report = report_on_parts(step, [one], lambda *_: make(suggestions=("zero-2",)), 1e15)
    assert not report.suggestions
    assert "The plan of a step of several programs has no suggestions: " in " ".join(report.notes)


def test_text_of_changes():
    schedule = make().schedule
    change = {"kind": "all-reduce", "asked": "reduce-scatter", "times": 10, "bytes": 100}
    looped = dataclasses.replace(schedule.collectives[0], **change)
    changed = (looped, *schedule.collectives[1:])
    report = make(schedule=dataclasses.replace(schedule, collectives=changed))
    pattern = r"all-reduce \(traced as reduce-scatter\) +10 +10 +0 +10 +70\.0"
    assert re.search(pattern, str(report))
    assert report.wire_bytes == 13 * 7_000_000
    text = str(make(memory=CompilerMemory(2**20, 0, 0, 2**21, 2**20, 2**21), ranks_traced=(0,)))
    assert text.startswith("FITS: 4.0 MiB of 4.0 GiB")
    assert re.search(r"HBM of a device +MiB .*\n +arguments +1\.0 ", text)
    assert re.search(r"executables +1 of 1 +rank 0, no other", text)


def test_text_of_what_does_not_fit():
    for name, figure in (("devices", 0), ("hbm_capacity", -1)):
        with pytest.raises(ValueError, match=f"{name} is {figure}"):
            make(**{name: figure})
    report = make(hbm_capacity=GIB, bound_wire_bytes=None)
    assert not report.fits and report.headroom < 0 and report.wire_ratio is None
    text = str(report)
    assert text.startswith("DOES NOT FIT: 1.6 of 1.0 GiB a device on v3-128 (0.62 GiB too much)")
    assert re.search(r"bound +unknown", text)
    assert "DOES NOT FIT" in repr(report) and len(repr(report)) < 200


def test_hbm_at_the_peak_by_kind():
    report = make()
    at = report.schedule.peak_index

    def held(name, size, category="temporary", module="", phase=""):
        return Buffer(name, size, at, at, category, "f32[1]", "fusion", module, phase)

    buffers = (
        held("blocks.0.mlp.weight", GIB, "argument"),
        held("exp_avg of blocks.0.mlp.weight", 2 * GIB, "argument"),
        held("p7", GIB, "argument"),
        *(held(f"fusion.{n}", GIB, module=f"blocks.{n}.mlp", phase="forward") for n in range(3)),
        *(held(f"f.{n}", GIB // 2, module=f"{n}", phase="forward") for n in "abcd"),
        held("grad", 4 * GIB, phase="backward"),
    )
    curve = tuple(16 * GIB for _ in report.schedule.curve)
    schedule = dataclasses.replace(report.schedule, buffers=buffers, curve=curve)
    report = make(schedule=schedule, hbm_capacity=16 * GIB)
    text = str(report)
    section = text[text.index("HBM at the peak, by kind") :].partition("\n\n")[0]
    for row in (
        r"parameters +1\.000 +6\.2 %", r"optimizer state +2\.000", r"other arguments +1\.000",
        r"activations of blocks\.N\.mlp +3\.000 +18\.8 %", r"activations of c +0\.500",
        r"other activations +0\.500", r"made in backward +4\.000",
    ):  # fmt: skip
        assert re.search(row, section), (row, section)
    assert "activations of d" not in section
    assert json.loads(report.to_json())["hbm_by_kind"]["optimizer state"] == 2 * GIB


def test_text_of_what_the_compiler_refused():
    report = refused(hbm_capacity=100 * GIB)
    assert not report.fits and not report.timed and report.placed
    kernels = dataclasses.replace(refused().timing, compute=0.003, step=0.007)
    assert not refused(timing=kernels).timed  # kernels state their time, which is not the step's
    text = str(refused())
    assert text.startswith("DOES NOT FIT: 6.0 of 4.0 GiB a device")
    said = "\nRan out of memory in memory space hbm. Used 19.06G of 15.48G hbm. .* by 3.57G.\n"
    assert re.search(said, text) and "reserved" not in text
    for name in (
        "donated", "code", "asynchronous with compute", "compute", "overlapped", "exposed",
        "step", "MFU",
    ):  # fmt: skip
        assert re.search(rf"^  {name} +unknown", text, re.M), name
    assert re.search(r"^  collectives +4\.00 ms", text, re.M)


def test_text_of_what_was_never_laid_out():
    report = given_up()
    lines = str(report).splitlines()
    assert not report.fits and report.wire_ratio is None
    assert lines[0] == "DOES NOT FIT: v3-128 has 4.0 GiB a device"
    assert lines[1].startswith("Ran out of memory") and lines[-2] == "Warnings"
    titles = [line.split("  ")[0] for line in lines if line.endswith("how obtained")]
    assert titles == ["HBM of a device", "Program"]
    assert not re.search(r"required|headroom|step|MB|\b0\.", str(report))


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    report = make(notes=("n",), versions=MappingProxyType({"torch": "2"}))
    report.save(path)
    assert Report.load(path) == report
    data = json.loads(report.to_json())
    data["report"]["schedule"]["aliased"] = {"1": 5}  # a field that reports had before
    assert Report.from_json(json.dumps(data)) == report
    older = json.dumps(data).replace('"other_programs"', '"beside"')
    assert Report.from_json(older) == report
    counted = dataclasses.replace(report, devices=numpy.int64(8))
    assert type(Report.from_json(counted.to_json()).devices) is int
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("no json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "some other JSON"),
        ('{"format": "other"}', "some other JSON"),
        ('{"format": "xla_fsdp plan", "version": 99}', "version 99, allowed is 1"),
        ('{"format": "xla_fsdp plan", "version": 1}', "damaged"),
        ('{"format": "xla_fsdp plan", "version": 1, "report": {"chip": 3}}', "damaged"),
        (b"\xff\xfe\x00", "is not JSON"),
        (re.sub(r'("peak": )\d+', r'\1"much"', make().to_json()), "'much' where int belongs"),
    ],
)
def test_other_files_are_refused(tmp_path, text, complaint):
    path = tmp_path / "other.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=complaint) as caught:
        Report.load(path)
    assert "expected a report" in str(caught.value) or "plan again" in str(caught.value)
    assert "other.json" in str(caught.value)


def test_compare():
    other = make(title="in-tree", hbm_capacity=8 * GIB, compile_seconds=25.0, bound_wire_bytes=None)
    comparison = make().compare(other)
    assert comparison["compile time"].ratio == 0.5
    assert comparison["sent"].ratio == 1 and comparison["sent / bound"].ratio is None
    assert re.search(r"compile time, s +12\.5 +25\.0 +0\.50", str(comparison))
    for words in ("ours", "in-tree", "sent, MB (10^6 bytes)"):
        assert words in str(comparison)
    assert "Not the same slice" not in str(comparison)
    assert "Not the same slice" in str(make().compare(make(devices=8, topology="v3-8")))
    with pytest.raises(KeyError, match="allowed are required HBM"):
        comparison["speed"]
    with pytest.raises(TypeError, match="cannot compare dict"):
        make().compare({})
    comparison = refused().compare(make())
    assert comparison["step (model)"].left is None and comparison["code"].left is None
    assert comparison["sent"].ratio == 1 and comparison["required HBM"].left == 6
    comparison = make().compare(given_up())
    assert comparison["required HBM"].right is None and comparison["sent"].ratio is None


def test_other_suffixes_missing_folders_and_failed_writes(tmp_path, monkeypatch):
    for name in ("plan.pdf", "plan"):
        with pytest.raises(ValueError, match=r"allowed are \.png, \.html, \.trace\.json"):
            make().plot(tmp_path / name)
    for write in (make().save, make().plot):
        with pytest.raises(FileNotFoundError, match="make the folder"):
            write(tmp_path / "none" / "plan.html")
        with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
            write(tmp_path)
    path = tmp_path / "plan.json"
    make().save(path)

    monkeypatch.setattr(os, "access", lambda *of: False)
    with pytest.raises(PermissionError, match="is read-only; name another"):
        make().save(path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make(title="new").save(path)
    assert Report.load(path).title == "ours" and len(list(tmp_path.iterdir())) == 1


class Page(HTMLParser):
    """Checks that elements nest, and collects what a browser would run or fetch."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.fetched, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        urls = [v for k, v in attrs if k in ("src", "href", "action")]
        self.fetched += [url for url in urls if not url.startswith("data:image/png;base64,")]
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def picture(report):
    return png(draw(report))


def trace_of(report):
    return trace({"modelled": report.timing.slots}, report)


def image(content):
    from matplotlib.image import imread

    return imread(io.BytesIO(content))


def near(pixels, name):
    color = next(value for key, value in COLORS.items() if key.startswith(name))
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).sum())


def test_png_and_html_need_nothing_else(tmp_path):
    make().plot(tmp_path / "plan.PNG")
    make().plot(tmp_path / "plan.html")
    assert {p.name for p in tmp_path.iterdir()} == {"plan.PNG", "plan.html"}
    pixels = image((tmp_path / "plan.PNG").read_bytes())
    assert 800 < pixels.shape[0] < 2000 and 1200 < pixels.shape[1] < 2400
    for color in ("forward", "backward", "synchronous", "asynchronous", "other arguments"):
        assert near(pixels, color) > 100, color
    written = (tmp_path / "plan.html").read_text(encoding="utf-8")
    page = Page(written)
    assert not {"link", "iframe", "object", "script"} & set(page.tags) and not page.fetched
    assert page.tags.count("img") == 1 and "@import" not in written and "url(" not in written
    text = "".join(page.words)
    for words in ("FITS: 1.6 of 4.0 GiB", "sent / bound", "The last block is not wrapped."):
        assert words in text


def test_legends_and_titles_are_inside_the_picture():
    report = make()
    kinds = ("forward", "backward", "optimizer", "")
    ops = [
        dataclasses.replace(op, phase=kinds[i % 4], recomputed=i % 5 == 4)
        for i, op in enumerate(report.schedule.ops)
    ]
    schedule = dataclasses.replace(report.schedule, ops=tuple(ops))
    timing = time_step(schedule, resolve("v5litepod-8"), 1.0)
    figure = draw(dataclasses.replace(report, schedule=schedule, timing=timing))
    figure.draw_without_rendering()
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert max(len(legend.get_texts()) for legend in legends) == 7
    for drawn in legends + [axes._left_title for axes in figure.axes]:
        box = drawn.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, drawn


@pytest.mark.slow
def test_threads_may_draw_at_once():
    reports = [make(blocks=n) for n in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(picture, reports))
    assert together == [picture(report) for report in reports]


FOREIGN = "名$前" + HOSTILE
KINDS = {
    "empty": lambda: make(schedule=Schedule(0, (), (), (), (), 0), timing=NOTHING),
    "foreign": lambda: Report.from_json(
        make(blocks=12, title=FOREIGN).to_json().replace("blocks.", json.dumps(FOREIGN)[1:-1] + ".")
    ),
    "capacity above the axis": lambda: make(hbm_capacity=100 * GIB),
    "many narrow units": lambda: make(blocks=300),
    "no module names": lambda: Report.from_json(
        make().to_json().replace("blocks.0.mlp", "").replace("blocks.1.mlp", "")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_report_is_drawn(kind):
    report = KINDS[kind]()
    assert image(picture(report)).min() < 0.5 and str(report)


@pytest.mark.parametrize(
    "report, said, height, pictures",
    [
        (refused(), "No timeline: the compiler stopped", (400, 800), 1),
        (given_up(), "Nothing to draw: the compiler stopped", (50, 250), 0),
    ],
)
def test_what_the_compiler_did_not_compute(report, said, height, pictures):
    page = Page(report_html(report))
    words = "".join(page.words)
    assert said in words and "Ran out of memory" in words and page.tags.count("img") == pictures
    assert words.count("unknown") >= 10 * pictures
    pixels = image(picture(report))
    assert height[0] < pixels.shape[0] < height[1] and pixels.min() < 0.5
    assert (near(pixels, "backward") > 100) == bool(pictures)
    assert not near(pixels, "asynchronous")


def test_html_escapes_names():
    text = make().to_json().replace("blocks.1.mlp", json.dumps(HOSTILE)[1:-1])
    changes = {"title": HOSTILE, "warnings": (HOSTILE,), "link_model": HOSTILE}
    written = report_html(dataclasses.replace(Report.from_json(text), **changes))
    assert "<script>alert" not in written and "script" not in Page(written).tags


def test_units_aggregate_blocks():
    names = ["blocks.0.attn.qkv", "blocks.11.norm", "embed.proj", "", "_fsdp.head"]
    assert list(map(unit_names(names).get, names)) == ["blocks.0", "blocks.11", "embed", "", "head"]
    names = ["model.layers.3.mlp.0", "model.norm", "lm_head"]
    assert list(map(unit_names(names).get, names)) == ["model.layers.3", "model.norm", "lm_head"]


def test_curve_of_many_operations_has_the_peak_and_all_purposes():
    report = make(blocks=1000, steps=10)
    places, stack = hbm(report)
    curve = report.schedule.curve
    assert len(places) <= 1500 and report.schedule.peak_index in places
    assert abs(sum(stack.values()) - [curve[place] for place in places]).max() < 1
    assert list(stack) == ["other arguments", "gathered weights"]


def test_timeline_of_a_scanned_step_shows_recomputation():
    """Of 50 iterations two are simulated; the others have the colours of their shares, too."""
    ops = (
        Op(0, "f", "fusion", 1000, 50, "blocks.0.mlp", "forward"),
        Op(1, "r", "fusion", 1000, 50, "blocks.0.mlp", "backward", recomputed=True),
        Op(2, "b", "fusion", 3000, 50, "blocks.0.mlp", "backward"),
    )
    slice_ = resolve("v3-8")
    timing = time_step(Schedule(3, ops, (), (), (), 0), slice_, 0.0)
    figure = canvas(8, 3)
    draw_lanes(figure.add_subplot(), timing.slots, timing.step)
    pixels = image(png(figure))
    recomputed, backward = near(pixels, "recomputation"), near(pixels, "backward")
    assert 0.25 < recomputed / backward < 0.42
    share = sum(s.end - s.begin for s in timing.slots if s.recomputed) / timing.step
    assert share == pytest.approx(1 / 5)
    assert {s.module for s in timing.slots} == {"blocks.0.mlp"}


def test_trace_has_copies_between_hbm_and_the_host_as_lanes():
    copies = HostCopy(0, 2, 10**8, True, 5), HostCopy(3, 3, 10**8, False)
    schedule = Schedule(4, (Op(1, "f", "fusion", 1000, 5),), (), (), (), 0, host_copies=copies)
    timing = time_step(schedule, resolve("v3-8"), 0.0)
    events = json.loads(trace_of(make(schedule=schedule, timing=timing)))["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    for lane, names in (
        ("copies to the host", ["copies to the host"] * 2 + ["3 more iterations"]),
        ("copies from the host", ["copies from the host"]),
    ):
        found = [e for e in events if e["ph"] == "X" and e["tid"] == rows[lane]]
        assert [e["name"] for e in found] == names
        for one, after in itertools.pairwise(found):
            assert one["ts"] + one["dur"] <= after["ts"] * (1 + 1e-9)


def test_trace_has_every_operation_and_the_memory(tmp_path):
    make().plot(tmp_path / "plan.trace.json")
    written = (tmp_path / "plan.trace.json").read_text()
    assert written == trace_of(make())
    events = json.loads(written)["traceEvents"]
    by_kind = {kind: [e for e in events if e["ph"] == kind] for kind in "MXbeC"}
    assert [len(some) for some in by_kind.values()] == [3, 12 + 2, 2, 2, 16]
    (one,) = [e for e in by_kind["X"] if e["name"] == "fusion.1"]
    assert (one["ts"], one["dur"]) == pytest.approx((1000, 3000))
    where = {"module": "blocks.0.mlp", "phase": "forward", "place": 1, "recomputed": False}
    assert one["args"] == where
    assert sum(e["args"]["recomputed"] for e in by_kind["X"]) == 2
    peak = max(sum(e["args"].values()) for e in by_kind["C"])
    assert peak == pytest.approx(max(make().schedule.curve) / GIB)
    assert {e["ph"] for e in json.loads(trace_of(given_up()))["traceEvents"]} == {"M"}
