"""Pictures, pages and traces of reports, on schedules made by hand."""

import dataclasses
import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import pytest
from reports import GIB, HOSTILE, NOTHING, given_up, make, refused

from xla_fsdp.planning.records import HostCopy, Op, Schedule
from xla_fsdp.planning.reporting.page import page as report_html
from xla_fsdp.planning.reporting.pictures import COLORS, canvas, draw, draw_lanes, hbm, png, trace
from xla_fsdp.planning.reporting.report import Report
from xla_fsdp.planning.reporting.tables import unit_names
from xla_fsdp.planning.timing import time_step
from xla_fsdp.tpu.topology import resolve


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
