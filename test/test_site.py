"""The site in a browser: every page opens without an error, and no link is dead."""

import functools
import http.server
import re
import shutil
import threading
from html.parser import HTMLParser
from urllib.parse import urldefrag, urljoin

import pytest
from processes import run_command
from test_docs import build_site


class Links(HTMLParser):
    """Where a page, as the browser shows it, leads to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.to, self.anchors = set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.to.add(given["href"])


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def served(tmp_path):
    """The folder of the built site, and its address."""
    build_site(tmp_path / "site")
    handler = functools.partial(Handler, directory=tmp_path / "site")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "site", f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.full
def test_every_page_opens_in_chromium_and_no_link_is_dead(served, tmp_path):
    folder, address = served
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "install Chromium first: apt-get install chromium"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        url = address + path.relative_to(folder).as_posix()
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        shown = run_command(chromium, *options, profile, "--dump-dom", url)
        assert re.findall(r".*CONSOLE.*", shown.stderr) == [], url
        assert "xla_fsdp</title>" in shown.stdout and "<h1" in shown.stdout, url
        pages[url] = Links(shown.stdout)
    assert len(pages) > 60
    dead, followed = [], 0
    for url, links in pages.items():
        for link in links.to:
            target, anchor = urldefrag(urljoin(url, link))
            if not target.startswith(address):
                continue
            followed += 1
            target += "index.html" if target.endswith("/") else ""
            if target in pages:
                alive = anchor in pages[target].anchors
            else:
                alive = (folder / target.removeprefix(address)).is_file()
            if not alive:
                dead.append((url, link))
    assert dead == [] and followed > 5000
