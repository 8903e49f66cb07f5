"""What the documents point to is there, and the README stays one page."""

import re

import pytest
from conftest import ROOT

DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "consolidate", "examples/pod")
    for path in (ROOT / folder).glob("*.md")
)


def titles(path):
    """The headings of a document, as links name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [one for one in targets if not (path.parent / one).exists()] == []
    for target, title in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)", text):
        assert title in titles(path.parent / target if target else path), f"{target}#{title}"
    modules = re.findall(r"python -m (benchmarks\.\w+)", text)
    assert [one for one in modules if not (ROOT / f"{one.replace('.', '/')}.py").exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_are_closed(path):
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            language = line.strip().removeprefix("```")
            assert not (inside and language), f"line {number}: a block begins inside a block"
            inside = not inside
            # A block that is empty but for this is a fence too many.
            start = number if inside else 0
        elif inside and not line.strip():
            assert number != start + 1, f"line {start}: a block begins with an empty line"
    assert not inside, "the last block is not closed"


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_example_prints_what_it_returns(run_script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    done = run_script(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(r"\[(\d\.\d+(, )?){4}\]\n", done.stdout)
