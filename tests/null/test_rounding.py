"""What counts as rounding, and what does not."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rounding import differences

NAN = float("nan")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_rounding_is_told_from_errors(dtype: str) -> None:
    want = np.array([1, 0.5, -2]).astype(jnp.dtype(dtype))
    unit = float(jnp.finfo(dtype).eps)
    assert not differences(want, want)
    assert not differences((want * (1 + unit)).astype(want.dtype), want)
    assert "error" in differences((want * 1.5).astype(want.dtype), want)[0]


def test_specials_are_compared_by_their_places() -> None:
    want = np.array([NAN, np.inf, 1.0])
    assert not differences(np.array([NAN, np.inf, 1.0]), want)
    for other in ([1.0, np.inf, NAN], [NAN, -np.inf, 1.0], [NAN, np.inf, NAN], [0.0, np.inf, 1.0]):
        assert "1 of 3" in differences(np.array(other), want)[0] or "2 of 3" in differences(np.array(other), want)[0]


def test_integers_dtypes_and_structures_are_exact() -> None:
    assert "1 of 2 elements of int32" in differences(np.array([1, 2], np.int32), np.array([1, 3], np.int32))[0]
    assert "int8[2], not int32[2]" in differences(np.array([1, 2], np.int8), np.array([1, 2], np.int32))[0]
    assert "structure" in differences([np.zeros(1)], (np.zeros(1),))[0]


def test_a_norm_can_be_given() -> None:
    assert differences(np.array(1e-14), np.array(0.0))
    assert not differences(np.array(1e-14), np.array(0.0), least_norm=1.0)
