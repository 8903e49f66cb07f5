"""What `make docs` adds to mkdocs: links from pages to files outside of docs/, and docstrings.

A page links to a script or a table of this repository by a relative path, so that the link works
where the repository is read. The site gets a copy of each such file, under repository/.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
COPIES = "repository"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
ROLE = re.compile(r":[a-z]+:<code>~?([\w.]+)</code>")


def _outside(page: str, target: str) -> str | None:
    """The path in the repository of what ``page`` links to, if that is not in docs/."""
    path = posixpath.normpath(posixpath.join(page, "..", target))
    if page.startswith(f"{COPIES}/"):
        path = path.removeprefix(f"{COPIES}/")
        return None if path.startswith("docs/") else path
    return path.removeprefix("../") if path.startswith("../") else None


def _rewritten(page: str, text: str) -> tuple[str, set[str]]:
    """The text with links into the site, and the files that these need."""
    needed: set[str] = set()
    here = posixpath.dirname(page)

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = _outside(page, target)
        if path is None:
            if page.startswith(f"{COPIES}/"):
                inside = posixpath.normpath(posixpath.join(here, target))
                inside = inside.removeprefix(f"{COPIES}/").removeprefix("docs/")
                return posixpath.relpath(inside, here) + anchor
            return match[0]
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        needed.add(path)
        return posixpath.relpath(f"{COPIES}/{path}", here or ".") + anchor

    return LINK.sub(link, text), needed


def on_files(files, config):
    """Adds what pages link to, and what these link to."""
    waiting = [file.src_uri for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        file = files.get_file_from_path(page)
        _, needed = _rewritten(page, Path(file.abs_src_path).read_text(encoding="utf-8"))
        for path in sorted(needed):
            uri = f"{COPIES}/{path}"
            if files.get_file_from_path(uri) is None and (ROOT / path).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                if uri.endswith(".md"):
                    waiting.append(uri)
    return files


def on_page_markdown(markdown, page, config, files):
    return _rewritten(page.file.src_uri, markdown)[0]


def on_page_content(html, page, config, files):
    """Docstrings name others as Sphinx does, ``:class:`~xla_fsdp.Report```."""
    return ROLE.sub(lambda match: f"<code>{match[1].rpartition('.')[2]}</code>", html)
