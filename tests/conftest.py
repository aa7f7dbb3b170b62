"""Eight CPU devices for every test, and the option that rewrites golden files."""

from __future__ import annotations

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen-goldens", action="store_true", help="rewrite tests/golden/* (review the difference)")


@pytest.fixture
def regen_goldens(request: pytest.FixtureRequest) -> bool:
    """True where golden files are to be rewritten."""
    return bool(request.config.getoption("--regen-goldens"))
