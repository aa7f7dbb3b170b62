"""docs/api has every public name once, and what docstrings say of arguments and errors is there."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir import errors
from autopar.ir.plan import Plan
from autopar.step.step import Step
from autopar.step.step_plan import StepPlan

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))}
NAMED = [
    (page, kind, name)
    for page, text in PAGES.items()
    for kind, name in re.findall(r"^ *\.\. auto(function|class|exception|data|method):: ([\w.]+)", text, re.MULTILINE)
]
"""(page, directive, name) of all that pages show."""
SOURCES = sorted((ROOT / "autopar").rglob("*.py"))
CLASSES = [name for _, kind, name in NAMED if kind == "class"]
FUNCTIONS = [name for _, kind, name in NAMED if kind in ("function", "method")]
OWN = {name for path in SOURCES for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
"""Classes of autopar at the top of their modules."""
SECTION = re.compile(r"^( *)Raises:\n((?:\1 +\S.*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"(\w+(?:, \w+)*)(?:, …)?: ")


def found(name: str) -> Any:
    """What a dotted name means: a module's attribute, or an attribute of that."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            at = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            at = getattr(at, part)
        return at
    raise AssertionError(name)


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class has itself."""
    for name, value in vars(cls).items():
        if not name.startswith("_") and isinstance(value, property | types.FunctionType | classmethod | staticmethod):
            yield name, value


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(where, docstring) of a module and all that is defined in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'name', '')}", text


def raised(text: str) -> list[str]:
    """Lines of a docstring's Raises section that begin an entry."""
    lines: list[str] = []
    for _, section in SECTION.findall(text + "\n"):
        kept = [line for line in section.splitlines() if line.strip()]
        first = len(kept[0]) - len(kept[0].lstrip())
        lines += [line.strip() for line in kept if len(line) - len(line.lstrip()) == first]
    return lines


def unsaid(function: Callable[..., Any]) -> list[str]:
    """Arguments of a function that its docstring does not tell of, in a section if it has one; of a single one the word
    itself will do. What a call passes on (``*args``, ``**options``) need not be told."""
    text = inspect.getdoc(function) or ""
    if re.search(r"Arguments and errors as `\w+`'s", " ".join(text.split())):
        return []
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    names = [p.name for p in found if p.name not in ("self", "cls") and p.kind not in passed_on]
    if len(names) == 1 and re.search(rf"\b{names[0]}\b", text):
        return []
    entry = r"^ +(\w+, )*{}(, \w+)*:" if "Args:" in text else "``{}``"
    return [name for name in names if not re.search(entry.format(name), text, re.MULTILINE)]


def used(tree: ast.Module) -> Iterator[str]:
    """Names that a module's code has."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                pass


@pytest.mark.parametrize("name", autopar.__all__)
def test_each_public_name_is_on_one_page(name: str) -> None:
    assert [page for page, _, named in NAMED if named == f"autopar.{name}"] != []
    assert len([page for page, _, named in NAMED if named == f"autopar.{name}"]) == 1
    assert PAGES["index.md"].count(f"<autopar.{name}>`:") == 1


def test_what_pages_name_is_there_and_nothing_twice() -> None:
    values = [found(name) for _, kind, name in NAMED if kind != "data"]
    assert len({id(value) for value in values}) == len(values)
    assert all(value is not None for value in values) and len(values) > 60
    members = re.findall(r"{py:\w+}`(?:[^`<]*<)?([\w.]+)>?`", PAGES["index.md"])
    assert all(found(name) is not None for name in members) and len(members) > len(autopar.__all__)


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"^## \[[^]]+\]\((\S+\.md)\)", PAGES["index.md"], re.MULTILINE))
    assert listed == set(PAGES) - {"index.md"}
    assert all(f"\n{page.removesuffix('.md')}\n" in PAGES["index.md"] for page in listed)


@pytest.mark.parametrize("cls", [Step, StepPlan, Plan, *map(found, CLASSES)], ids=lambda cls: cls.__name__)
def test_public_methods_have_docstrings(cls: type) -> None:
    assert [name for name, value in public_methods(cls) if not inspect.getdoc(value)] == []


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_arguments_are_told(name: str) -> None:
    value = found(name)
    if not isinstance(value, type):
        assert unsaid(value) == []
        return
    methods = {name: of for name, of in public_methods(value) if isinstance(of, types.FunctionType)}
    assert {name: unsaid(of) for name, of in methods.items() if unsaid(of)} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_errors_in_docstrings_exist(path: Path) -> None:
    known = {*vars(errors), *vars(builtins), *OWN, *used(ast.parse(path.read_text()))}
    for where, text in docstrings(path):
        named = set(re.findall(r"(?<![\w.])[A-Z]\w*(?:Error|Warning)\b", text))
        assert named <= known, f"{where}: {', '.join(sorted(named - known))}"


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_raises_sections_name_classes(name: str) -> None:
    value = found(name)
    owned = [of for _, of in public_methods(value)] if isinstance(value, type) else [value]
    for of in owned:
        for line in raised(inspect.getdoc(of) or ""):
            entry = ENTRY.match(line)
            assert entry is not None, f"{name}: {line}"
            for error in entry[1].split(", "):
                assert hasattr(errors, error) or hasattr(builtins, error), f"{name}: {error}"
