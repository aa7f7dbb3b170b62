"""docs/errors/ has a page for each error and warning that a user can meet, all with the same sections, and an index."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "errors"
BASES = ("AutoparError", "AutoparWarning")
SECTIONS = ("When it is raised", "An example", "What to do")
INTERNAL = {"OverLimitError": "step.choice and step.again catch it, and plan under the limit"}
"""Errors that no user meets: class → who catches it."""


def classes(folder: Path) -> dict[str, tuple[str, ...]]:
    """The public classes that modules in ``folder`` define at their tops, with the names of their bases."""
    return {
        node.name: tuple(base.id if isinstance(base, ast.Name) else ast.unparse(base) for base in node.bases)
        for path in sorted(folder.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def derived(of: dict[str, tuple[str, ...]]) -> set[str]:
    """`BASES`, and all classes that derive from one of them."""
    found = set[str](BASES)
    while new := {name for name, bases in of.items() if found & set(bases)} - found:
        found |= new
    return found


DEFINED = classes(ROOT / "autopar")
WANTED = sorted(derived(DEFINED) - INTERNAL.keys())
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
INDEX = PAGES.pop("index")


def test_what_is_derived() -> None:
    of = {
        "AutoparError": ("Exception",),
        "One": ("AutoparError", "ValueError"),
        "Two": ("One",),
        "Other": ("Exception",),
    }
    assert derived(of) == {*BASES, "One", "Two"}
    assert INTERNAL.keys() <= derived(DEFINED)


def test_all_of_ir_errors_are_wanted() -> None:
    here = [n.name for n in ast.parse((ROOT / "autopar/ir/errors.py").read_text()).body if isinstance(n, ast.ClassDef)]
    assert len(here) > 20 and set(here) <= set(WANTED)


def test_no_page_is_of_a_class_that_is_not_there() -> None:
    assert set(PAGES) - set(WANTED) == set()


@pytest.mark.parametrize("name", WANTED)
def test_page(name: str) -> None:
    assert name in PAGES, f"docs/errors/{name}.md"
    page = re.sub(r"^( *)```.*?^\1```", "", PAGES[name], flags=re.DOTALL | re.MULTILINE)  # headings, not comments
    assert re.findall(r"^# (.*)$", page, re.MULTILINE) == [name]
    assert tuple(re.findall(r"^## (.*)$", page, re.MULTILINE)) == SECTIONS
    parts = re.split(r"^#+ .*$", page, flags=re.MULTILINE)[1:]
    assert all(len(part.split()) > 5 for part in (parts[0], parts[1], parts[3])), f"{name}: an empty section"
    example = PAGES[name].partition("## An example")[2].partition("\n## ")[0]
    assert re.search(r"^```(python|sh)$", example, re.MULTILINE), f"{name}: its example has no code"


@pytest.mark.parametrize("name", sorted(set(WANTED) - {*BASES}))
def test_page_says_what_it_derives_from(name: str) -> None:
    opening = PAGES[name].partition("\n## ")[0]
    assert [base for base in DEFINED[name] if f"`{base}`" not in opening] == []


def test_index() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|", INDEX, re.MULTILINE)
    assert sorted(name for name, _ in rows) == WANTED
    assert [name for name, link in rows if name != link] == []
    listed = INDEX.partition("```{toctree}")[2].partition("```")[0].split()
    assert sorted(name for name in listed if not name.startswith(":")) == WANTED
