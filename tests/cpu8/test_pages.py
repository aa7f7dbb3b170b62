"""Every code block of the documentation runs, and prints what is shown under it: `tests.pages`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks, missing, session

RUN = [page for page in PAGES if any(not block.left_out for block in blocks((ROOT / page).read_text()))]
QUICK = ("docs/start.md", "docs/recipes/equinox.md", "docs/errors/PlanFormatError.md")
"""What `make test` runs of them."""


def _marks(page: str) -> list[pytest.MarkDecorator]:
    group = [pytest.mark.xdist_group("ray")] if page == "docs/running.md" else []
    return group if page in QUICK else [*group, pytest.mark.full]


@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page)) for page in RUN])
def test_a_page_runs_as_it_is_read(page: str) -> None:
    session(page)


def test_pages_are_found() -> None:
    assert set(QUICK) <= set(RUN) and len(RUN) > 50


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    wrong = {
        "raises": "```python\n1 / 0\n```",
        "fails": "```sh\nfalse\n```",
        "prints something else": "```python\nprint(1)\n```\n\n```text\n2\n```",
        "is no JSON": "```json\n{\n```",
    }
    if not version("jax").startswith("0.10."):  # whose output pages show
        del wrong["prints something else"]
    for what, text in wrong.items():
        page = tmp_path / "page.md"
        page.write_text(text)
        with pytest.raises(ValueError, match=r"page\.md"):
            session(str(page))
        assert what
    with pytest.raises(ValueError, match="a block in no language"):
        blocks("```\nx\n```")
    with pytest.raises(ValueError, match="a block in bash"):
        blocks("```bash\nx\n```")


@pytest.mark.parametrize(
    ("shown", "line"),
    [("a\nb", ""), ("a…\nc", "c"), ("a\n…\nc d", ""), ("b\na", "a"), ("a\nx", "x"), ("c", "c"), ("c…", "")],
)
def test_what_is_shown_is_looked_for_in_order(shown: str, line: str) -> None:
    assert missing(shown, "a\nb\nc d\n") == line
