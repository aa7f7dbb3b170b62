"""Hand-made plans as seeds."""

from __future__ import annotations

from typing import Any


def seeds_for(graph: Any, problem: Any) -> list[Any]:
    return []
