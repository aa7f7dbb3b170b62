"""Random bits drawn in parts equal the unsharded draw bit for bit, whatever the widths, shapes and flags."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.one_program.local.random import flat_positions
from tests.cpu8.op_harness import check_case
from tests.op_case import case


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ((2**20, 2**20), (2**19, 2**10 + 3)),
        ((7, 2**16 + 1, 2**17), (5, 2**16 - 2, 2**17 - 3)),
        ((2**31 - 1, 2**31 - 1, 3), (2**31 - 7, 2**31 - 8, 0)),
        ((2**33,), (2**32 - 2,)),
        ((3, 2**33), (1, 5)),
        ((4, 5, 6), (1, 2, 3)),
        ((), ()),
    ],
)
def test_positions_are_64_bit(shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    local = (3,) * len(shape)
    hi, lo = flat_positions(shape, local, [np.uint32(o) for o in offsets])
    got = np.array(np.asarray(hi).astype(object) * 2**32 + np.asarray(lo).astype(object))
    for at in np.ndindex(*local):
        flat = sum(
            (o + i) % 2**32 * math.prod(shape[d + 1 :]) for d, (o, i) in enumerate(zip(offsets, at, strict=True))
        )
        assert got[at] == flat % 2**64


@pytest.mark.parametrize("seed", range(6))
def test_bits_of_any_shape(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 5, 8], rng.integers(1, 5)))
    width = (8, 16, 32)[seed % 3]
    batch = (8,) if seed % 2 else ()

    def fun(k: Any) -> Any:
        return jax.random.bits(k, shape, f"uint{width}")

    check_case(
        case(f"bits {seed}", jax.vmap(fun) if batch else fun, f"key[{8 if batch else ''}]", primitive="random_bits")
    )


def test_without_partitionable_threefry() -> None:
    with jax.threefry_partitionable(False):
        check_case(case("old threefry", lambda k: jax.random.bits(k, (4, 8, 3)), "key[]", primitive="random_bits"))


def test_dropout_masks_equal() -> None:
    check_case(
        case("dropout", lambda k, x: jnp.where(jax.random.bernoulli(k, 0.7, x.shape), x, 0), "key[]", "f32[8,12]")
    )
