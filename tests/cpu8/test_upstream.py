"""What runs are excused for is still wrong in plain JAX; a fault that this finds mended leaves the table."""

from __future__ import annotations

import pytest

from tests.upstream import UPSTREAM_FAULTS, UpstreamFault


@pytest.mark.parametrize("fault", UPSTREAM_FAULTS, ids=lambda fault: fault.name)
def test_plain_jax_shows_it(fault: UpstreamFault) -> None:
    assert fault.shows()
