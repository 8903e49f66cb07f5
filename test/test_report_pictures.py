"""Pictures and pages of reports, on schedules made by hand."""

import dataclasses
import io
import json
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import pytest
from reports import GIB, HOSTILE, NOTHING, given_up, make, refused

from xla_fsdp.planning.records import CompilerMemory, Schedule
from xla_fsdp.planning.reporting.amounts import units
from xla_fsdp.planning.reporting.page import page as report_html
from xla_fsdp.planning.reporting.pictures import memory_picture, picture, timeline_picture
from xla_fsdp.planning.reporting.report import Report
from xla_fsdp.planning.reporting.series import COLORS, hbm, lanes
from xla_fsdp.planning.reporting.spans import Span, by_unit, captions, merge, numbered


class Page(HTMLParser):
    """Checks that elements nest, and collects what a browser would run or fetch."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.fetched, self.tips, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        self.tips += [v for k, v in attrs if k == "data-t"]
        assert not [k for k, _ in attrs if k.startswith("on")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def image(content):
    from matplotlib.image import imread

    return imread(io.BytesIO(content))


def near(pixels, color):
    """How many pixels have about that colour."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).sum())


def test_png(tmp_path):
    path = tmp_path / "plan.PNG"
    make().plot(path)
    pixels = image(path.read_bytes())
    assert 800 < pixels.shape[0] < 2000 and 1200 < pixels.shape[1] < 2400
    for color in ("forward", "backward", "synchronous", "asynchronous", "arguments"):
        assert near(pixels, COLORS[color]) > 100, color
    assert [p.name for p in tmp_path.iterdir()] == ["plan.PNG"]


@pytest.mark.parametrize("draw", [timeline_picture, report_html])
def test_threads_may_draw_at_once(draw):
    reports = [make(blocks=n) for n in (1, 2, 3, 4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, reports))
    assert together == [draw(report) for report in reports]


def test_png_of_every_kind_of_report():
    empty = make(schedule=Schedule(0, (), (), (), (), 0, {}), timing=NOTHING)
    schedule = make().schedule
    named = [dataclasses.replace(b, module="名$前" + HOSTILE) for b in schedule.buffers]
    foreign = dataclasses.replace(schedule, buffers=tuple(named))
    for report in (empty, make(schedule=foreign), make(hbm_capacity=100 * GIB)):
        for draw in (memory_picture, timeline_picture):
            assert image(draw(report)).min() < 0.5
        assert str(report) and Page(report_html(report)).tags


def test_units_with_any_name_are_numbered():
    """The name of what holds the blocks stands at the axis."""
    text = make(blocks=12).to_json().replace("blocks.", json.dumps("$x^$\x01前")[1:-1] + ".")
    report = Report.from_json(text)
    assert image(timeline_picture(report)).min() < 0.5
    assert r"$x^$\x01\u524d.N" in "".join(Page(report_html(report)).words)


def test_no_timeline_without_estimates():
    written = report_html(refused())
    page = Page(written)
    words = "".join(page.words)
    assert page.tags.count("svg") == 1 and "modelled time" not in words
    assert "No timeline: the compiler stopped" in words and "Ran out of memory" in words
    assert '"ms"' not in written and words.count("unknown") >= 10
    pixels = image(picture(refused()))
    assert pixels.shape[0] < 800 and near(pixels, COLORS["backward"]) > 100
    assert not near(pixels, COLORS["synchronous"]) > 2000  # but for the capacity


def test_nothing_to_draw():
    written = Page(report_html(given_up()))
    words = "".join(written.words)
    assert "svg" not in written.tags and "Nothing to draw: the compiler stopped" in words
    pixels = image(picture(given_up()))
    assert pixels.shape[0] < 250 and pixels.min() < 0.5


def test_html_needs_nothing_else(tmp_path):
    path = tmp_path / "plan.html"
    make().plot(path)
    written = path.read_text(encoding="utf-8")
    assert "href=" not in written and "url(" not in written
    page = Page(written)
    assert page.tags.count("svg") == 2 and page.tags.count("script") == 2
    assert not page.fetched and not {"link", "img", "iframe", "object"} & set(page.tags)
    text = "".join(page.words)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text
    for words in ("FITS: 1.6 of 4.0 GiB", "modelled time, ms", "HBM in use, GiB", "sent / bound"):
        assert words in text
    assert any(tip.startswith("fusion.1, blocks.0.mlp\n3.000 ms") for tip in page.tips)
    assert {"forward", "blocks.1\nbackward"} <= set(page.tips)
    assert len(page.tips) == 2 + 4 + 12 + 4  # phases, modules, compute, collectives


def test_html_of_a_small_step():
    """Below a GiB its memory is told in MiB, among words that cannot be drawn as bars."""
    small = CompilerMemory(2**20, 0, 0, 2**21, 2**20, 2**21)
    page = report_html(dataclasses.replace(make(), memory=small))
    assert "FITS: 4.0 MiB of 4.0 GiB" in page


def test_html_escapes_names():
    plain = make()
    text = plain.to_json().replace("blocks.1.mlp", json.dumps(HOSTILE)[1:-1])
    hostile = dataclasses.replace(
        Report.from_json(text), title=HOSTILE, warnings=(HOSTILE,), link_model=HOSTILE
    )
    written, usual = report_html(hostile), Page(report_html(plain))
    assert "<script>alert" not in written
    page = Page(written)
    assert page.tags.count("script") == usual.tags.count("script")
    assert any(HOSTILE in tip for tip in page.tips)


def test_units_aggregate_blocks():
    names = ["blocks.0.attn.qkv", "blocks.11.norm", "embed.proj", "", "_fsdp.head"]
    assert list(map(units(names).get, names)) == ["blocks.0", "blocks.11", "embed", "", "head"]
    names = ["model.layers.3.mlp.0", "model.norm", "lm_head"]
    assert list(map(units(names).get, names)) == ["model.layers.3", "model.norm", "lm_head"]


def test_twenty_thousand_operations_stay_small():
    report = make(blocks=1000, steps=10)
    text = report_html(report)
    assert len(text) < 2_000_000
    assert max(map(len, lanes(report).values())) < 3100
    curve = hbm(report)
    assert curve.total.max() == max(report.schedule.curve)
    assert abs(sum(curve.stack.values()) - curve.total).max() < 1


def test_many_short_collectives_do_not_look_like_a_busy_lane():
    busy, quiet = lanes(make(blocks=4))["synchronous"], lanes(make(blocks=400, steps=20))
    assert all(span.height == 1 for span in busy)
    heights = [span.height for span in quiet["synchronous"]]
    assert max(heights) < 0.2 and len(heights) <= 300


def test_merge_keeps_time_and_what_can_be_drawn():
    spans = [Span(i, i + 1, "forward" if i < 50 else "backward", str(i), 1.0) for i in range(100)]
    assert merge(spans, 0.5) == spans
    merged = merge(spans, 10.0)
    assert len(merged) == 10 and sum(s.busy for s in merged) == 100
    assert [s.kind for s in merged] == ["forward"] * 5 + ["backward"] * 5


def test_captions_do_not_touch():
    spans = [Span(i, i + 1, "", f"blocks.{i}") for i in range(30)]
    assert [text for _, text in captions(spans, 10)][:2] == ["blocks.0", "blocks.1"]
    assert [text for _, text in captions(spans, 3)][10:13] == ["10", "11", "12"]
    assert [text for _, text in captions(spans, 2)][10:14].count("") == 2
    assert not any(text for _, text in captions(spans, 0.2))


def test_blocks_show_although_operations_of_others_are_among_them():
    spans, time = [], 0.0
    for label in (f"blocks.{i}" for i in range(4)):
        for step in range(50):
            for one, busy in ((label, 1.0), ("inp" if step % 2 else "blocks.3", 0.01)):
                spans.append(Span(time, time + busy, "forward", one, busy))
                time += busy
    assert [s.label for s in by_unit(spans, time)] == [f"blocks.{i}" for i in range(4)]


@pytest.mark.parametrize("blocks, first", [(32, "model.blocks.0"), (300, "model.blocks")])
def test_blocks_too_narrow_for_a_number_show_as_one(blocks, first):
    spans = [
        Span(i / 4, (i + 1) / 4, "forward", f"model.blocks.{i // 4}", 0.25)
        for i in range(4 * blocks)
    ]
    found = by_unit(spans, blocks)
    assert found[0].label == first and len(found) == (blocks if first.endswith("0") else 1)
    inside = numbered(found, 190 / blocks)
    assert inside == ("model.blocks" if blocks == 32 else "")


def test_gaps_within_a_unit_are_bridged():
    spans = [Span(i, i + 0.5, "", "head", 0.5) for i in range(10)]
    (found,) = by_unit(spans, 10)
    assert found.begin == 0 and found.busy == pytest.approx(5)
