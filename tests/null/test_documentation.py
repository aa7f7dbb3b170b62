"""The documentation is built without a warning, none of its links leads nowhere, and all of it can be reached."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("documentation")]  # they share what is built


class _Links(HTMLParser):
    """Where a page leads to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.links += [link for name in ("href", "src") if (link := told.get(name))]
        self.anchors |= {name for key in ("id", "name") if (name := told.get(key))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install 'autopar[docs]'")
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out


def _read(site: Path) -> dict[Path, _Links]:
    pages: dict[Path, _Links] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def _broken(pages: dict[Path, _Links]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            at = urlsplit(link)
            if at.scheme or at.netloc:
                continue
            target = (path.parent / unquote(at.path)).resolve() if at.path else path
            anchors = pages[target].anchors if target in pages else {unquote(at.fragment)}
            if not target.is_file() or (at.fragment and unquote(at.fragment) not in anchors):
                yield f"{path.name}: {link}"


def test_no_link_leads_nowhere(site: Path) -> None:
    pages = {path.resolve(): page for path, page in _read(site).items()}
    assert len(pages) > 60
    assert list(_broken(pages)) == []


def test_every_page_is_reached_from_the_first(site: Path) -> None:
    pages = {path.resolve(): page for path, page in _read(site).items()}
    seen, left = set[Path](), [(site / "index.html").resolve()]
    while left:
        at = left.pop()
        if at in seen or at not in pages:
            continue
        seen.add(at)
        left += [(at.parent / unquote(urlsplit(link).path)).resolve() for link in pages[at].links]
    built = {(site / f"{page[5:-3]}.html").resolve() for page in PAGES if page.startswith("docs/")}
    assert built - seen == set()


def test_links_of_files_that_are_read_where_they_lie() -> None:
    """README, examples: relative links lead to files of the repository."""
    for name in ("README.md", "examples/README.md", "examples/gpt/README.md", "CHANGELOG.md"):
        path = ROOT / name
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if not urlsplit(link).scheme:
                assert (path.parent / urlsplit(link).path).exists(), f"{name}: {link}"
