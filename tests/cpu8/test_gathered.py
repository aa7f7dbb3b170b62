"""What lands split further than it is wanted is gathered on its mesh."""

from __future__ import annotations

import jax
import pytest

from tests.compare import assert_close
from tests.gathered import PARAMS, ROWS, descend, one_to_several


@pytest.mark.parametrize("devices", [2, 4])
def test_from_one_device_to_several(devices: int) -> None:
    step = one_to_several(devices)
    state, plain = (PARAMS, ROWS), (PARAMS, ROWS)
    for _ in range(2):
        new, loss = step(*state)
        want, expected = jax.jit(descend)(*plain)
        assert_close((new, loss), (want, expected), 1e-5, least_norm=1e-6)
        state, plain = (new, ROWS), (want, ROWS)
