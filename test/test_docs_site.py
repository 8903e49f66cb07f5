"""The site that `make docs` builds: no page has a dead link, and every public name is described."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from conftest import ROOT

import xla_fsdp
from xla_fsdp import consolidate, optim

REFERENCE = ROOT / "docs/reference/api"


class Page(HTMLParser):
    """Where a page leads, and what can be led to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a":
            self.links |= {found["href"]} if found.get("href") else set()
        elif tag in ("link", "script", "img") and found.get("rel") != "canonical":
            self.loads |= {found[name] for name in ("href", "src") if found.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of a site that was built anew, by path."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_an_anchor(site):
    dead, checked = [], 0
    for path, page in site.items():
        for link in page.links | page.loads:
            if re.match(r"\w+:", link):
                continue
            target, anchor = urldefrag(link)
            # The page for a wrong address is the one that counts from the site's first folder.
            base = path.parent / unquote(target.lstrip("/") if path.name == "404.html" else target)
            place = path if not target else Path(os.path.normpath(base))
            place = place / "index.html" if place.is_dir() else place
            there = place in site and unquote(anchor) in {*site[place].anchors, "", "__top"}
            if not (there or (place.is_file() and not anchor)):
                dead.append(f"{path.name}: {link}")
            checked += 1
    assert dead == [] and checked > 1000


@pytest.mark.slow
def test_the_site_has_no_files_of_its_hook(site):
    files = {path.name for path in Path(os.path.commonpath(site)).rglob("*")}
    assert len(files) > 50 and not files & {"hooks.py", "__pycache__"}


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site):
    assert {link for page in site.values() for link in page.loads if "//" in link} == set()


def test_every_public_name_is_described():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    described = re.findall(r"^::: xla_fsdp\.([\w.]+)$", pages, re.MULTILINE)
    public = [*xla_fsdp.__all__, *(f"optim.{name}" for name in optim.__all__)]
    public += [f"consolidate.{name}" for name in consolidate.__all__ if name not in public]
    assert sorted(set(public) - set(described)) == []
    assert len(described) == len(set(described))
