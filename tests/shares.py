"""Parameters of which `make test` runs a share, and `make test-all` all: `each`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def each(every: int, values: Iterable[Any]) -> list[Any]:
    """Parameters for one name, or ``pytest.param``s: all ``values``, of which `make test` runs the first and every
    ``every``-th after it."""
    return [x if n % every == 0 else _full(x) for n, x in enumerate(values)]


def _full(x: Any) -> Any:
    if isinstance(x, type(pytest.param())):
        return pytest.param(*x.values, id=x.id, marks=(*x.marks, pytest.mark.full))
    return pytest.param(x, marks=pytest.mark.full)
