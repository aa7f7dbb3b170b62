"""What keys a plan file has is a promise of its schema's number: another key, another number."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from autopar.ir.plan import SCHEMA_VERSION, Plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_keys.txt"


def _inside(hint: Any) -> Iterator[Any]:
    """Dataclasses in a type."""
    if is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _inside(part)


def keys() -> str:
    """Of each type in a plan, the fields that are written, in order of first occurrence."""
    lines, left, seen = [f"schema {SCHEMA_VERSION}"], [Plan], {Plan}
    while left:
        cls = left.pop(0)
        hints = typing.get_type_hints(cls)
        lines.append(f"{cls.__name__}: {', '.join(field.name for field in fields(cls))}")
        for field in fields(cls):
            for found in _inside(hints[field.name]):
                if found not in seen:
                    seen.add(found)
                    left.append(found)
    return "\n".join(lines) + "\n"


def test_keys_are_those_of_the_schema(regen_goldens: bool) -> None:
    there, now = GOLDEN.read_text() if GOLDEN.exists() else "", keys()
    if regen_goldens and there.partition("\n")[0] != now.partition("\n")[0]:
        GOLDEN.write_text(now)
        there = now
    assert there == now, "plan files have other keys: raise SCHEMA_VERSION, then --regen-goldens"
    assert now.count("\n") > 40 and "PipelinePlan: " in now
