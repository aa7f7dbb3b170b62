"""The HLO oracle on hand-written shard_map programs, whose collectives are known by construction."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autopar.verify.hlo_collectives import HloCollective, instruction_counts, parse_collectives, tally

SHAPE, NAMES = (2, 4), ("a", "b")
BYTES = 8 * 16 * 4


def compile_rows(
    f: Any, *inputs: Any, shape: tuple[int, ...] = SHAPE, names: tuple[str, ...] = NAMES
) -> tuple[HloCollective, ...]:
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return parse_collectives(jax.jit(mapped).lower(*inputs).compile().as_text())


def x() -> jax.Array:
    return jnp.ones((8, 16))


CASES: dict[str, tuple[Any, dict[Any, int]]] = {
    "psum": (lambda x: lax.psum(x, "b"), {("all-reduce", ("b",), BYTES): 1}),
    "psum_major": (lambda x: lax.psum(x, "a"), {("all-reduce", ("a",), BYTES): 1}),
    "psum_both": (lambda x: lax.psum(x, ("b", "a")), {("all-reduce", ("a", "b"), BYTES): 1}),
    "pmax": (lambda x: lax.pmax(x, "a"), {("all-reduce", ("a",), BYTES): 1}),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
        {("reduce-scatter", ("b",), BYTES): 1},
    ),
    "all_gather": (lambda x: lax.all_gather(x, "a", axis=1, tiled=True), {("all-gather", ("a",), BYTES): 1}),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "b", split_axis=0, concat_axis=1, tiled=True),
        {("all-to-all", ("b",), BYTES): 1},
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]),
        {("collective-permute", ("b",), BYTES): 1},
    ),
    "ppermute_open": (
        lambda x: lax.ppermute(x, "a", [(0, 1)]),
        {("collective-permute", ("a",), BYTES): 1},
    ),
    "two_kinds": (
        lambda x: lax.all_gather(lax.psum(x, "b") * 2, "a", axis=0, tiled=True),
        {("all-reduce", ("b",), BYTES): 1, ("all-gather", ("a",), BYTES): 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_collective(name: str) -> None:
    f, expected = CASES[name]
    known, unknown = tally(compile_rows(f, x()), SHAPE, NAMES)
    assert known == expected
    assert not unknown


def test_combined_all_reduce_counts_each_element() -> None:
    rows = compile_rows(lambda x, y: lax.psum((x, y * 2), "b"), x(), jnp.ones((4, 4)))
    known, _ = tally(rows, SHAPE, NAMES)
    assert known == {("all-reduce", ("b",), BYTES): 1, ("all-reduce", ("b",), 64): 1}
    assert instruction_counts(rows) == {"all-reduce": len({r.instruction for r in rows})}


def test_loops_multiply() -> None:
    def f(x: jax.Array) -> jax.Array:
        def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            c, _ = lax.scan(lambda d, _: (lax.psum(d, "a") * 0.5, None), c, None, length=3)
            return c + lax.all_gather(c, "b", axis=0, tiled=True).sum(), None

        return lax.scan(outer, x, None, length=5)[0]

    rows = compile_rows(f, x())
    known, unknown = tally(rows, SHAPE, NAMES)
    assert known == {("all-reduce", ("a",), BYTES): 15, ("all-gather", ("b",), BYTES): 5}
    assert not unknown
    assert instruction_counts(rows) == {"all-reduce": 1, "all-gather": 1}
    assert instruction_counts(rows, times_trips=True) == {"all-reduce": 15, "all-gather": 5}


def test_loop_of_unknown_length() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c.sum() < 1e6, lambda c: lax.psum(c, "b"), x)

    known, unknown = tally(compile_rows(f, x()), SHAPE, NAMES)
    assert not known
    assert unknown == {("all-reduce", ("b",), BYTES): 1}


def test_both_branches_of_a_conditional() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "a"), lambda x: lax.pmax(x, "b"), x)

    known, _ = tally(compile_rows(f, x()), SHAPE, NAMES)
    assert known == {("all-reduce", ("a",), BYTES): 1, ("all-reduce", ("b",), BYTES): 1}


def test_three_axes_of_which_one_is_trivial() -> None:
    shape, names = (2, 1, 4), ("a", "b", "c")
    rows = compile_rows(lambda x: lax.psum(lax.psum(x, "b") * 2, ("a", "b")), x(), shape=shape, names=names)
    known, _ = tally(rows, shape, names)
    assert known == {("all-reduce", ("a",), BYTES): 1}


def test_scalars_are_left_out_of_instruction_counts() -> None:
    rows = compile_rows(lambda x: (lax.psum(x.sum(), "b"), lax.all_gather(x, "a", axis=0, tiled=True)), x())
    assert instruction_counts(rows) == collections.Counter({"all-gather": 1, "all-reduce": 0})
    assert instruction_counts(rows, scalars=True) == {"all-gather": 1, "all-reduce": 1}
