"""docs/architecture.md names what is there: files, folders, modules, and functions and classes in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))
NAMES = [
    s
    for s in SPANS
    if re.fullmatch(r"[a-z_]+(\.[A-Za-z_]+)+", s) and not s.endswith((".py", ".json")) and not s.startswith("jax.")
]
PATHS = [s for s in SPANS if re.fullmatch(r"[a-z_0-9]+(/[A-Za-z_0-9.]*)*", s) and s.endswith(("/", ".py"))]


def defined(path: Path) -> set[str]:
    """What a module defines at its top."""
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    """``room.module`` or ``room.module.function``; within `step/`, ``module.Class``."""
    for base in (ROOT / "autopar", ROOT / "autopar" / "step"):
        at, parts = base, name.split(".")
        while parts and (at / parts[0]).is_dir():
            at /= parts.pop(0)
        if not parts:
            return
        if (at / f"{parts[0]}.py").exists():
            assert len(parts) == 1 or parts[1] in defined(at / f"{parts[0]}.py"), name
            return
    pytest.fail(f"{name} is nowhere in autopar/")


@pytest.mark.parametrize("path", PATHS)
def test_paths(path: str) -> None:
    assert any((base / path).exists() for base in (ROOT, ROOT / "autopar", ROOT / "autopar" / "inter_op")) or any(
        (ROOT / "autopar" / room / path).exists() for room in ("intra_op", "runtime", "frontend")
    ), path


def test_every_room_is_named() -> None:
    rooms = {p.name for p in (ROOT / "autopar").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert {room for room in rooms if f"`{room}/`" not in PAGE and f"`{room}/" not in PAGE} == set()
    assert len(NAMES) > 30 and len(PATHS) > 20


def test_a_dozen_modules_at_the_top() -> None:
    assert len(list((ROOT / "autopar").glob("*.py"))) <= 12
