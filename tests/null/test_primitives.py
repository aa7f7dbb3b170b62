"""The records of primitives: each complete, none twice, and what the lists beside them say."""

from __future__ import annotations

from autopar import primitives
from autopar.frontend.opened_calls import BODIES, INLINED
from autopar.primitives import PRIMITIVES


def test_records_are_complete() -> None:
    primitives.verify()
    assert not set(PRIMITIVES) & (set(INLINED) | set(BODIES))
