"""Fixtures of tests on 8 CPU devices."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield
