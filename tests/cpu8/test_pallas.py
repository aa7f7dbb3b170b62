"""Pallas kernels that nobody wrote a rule for: which axes of their grids split, and that what is split is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox import gmm

from autopar.frontend.trace import trace
from autopar.primitives import rule_for
from tests.attention import ATTENTION, interpreted_flash
from tests.cpu8.op_harness import check_case
from tests.op_case import case
from tests.planned import check_planned
from tests.shares import each

X = np.random.default_rng(0).normal(size=(8, 16, 32)).astype(np.float32)


def rules(fun: Callable[..., Any], *args: Any) -> list[str]:
    """Rules of the kernels that a function calls, verified."""
    nodes = [n for n in trace(fun, *args).graph.nodes if n.primitive == "pallas_call"]
    for node in nodes:
        shapes = [tuple(t.shape for t in types) for types in (node.operand_types, node.result_types)]
        rule_for(node).verify(*shapes)
    return [str(rule_for(node)).partition(" replicate")[0] for node in nodes]


def blocked(
    body: Callable[..., None],
    *,
    index: Callable[..., Any] = lambda i, j: (i, j, 0),
    out_index: Callable[..., Any] | None = None,
    grid: Sequence[int] = (8, 4),
    block: Sequence[int | None] = (None, 4, 32),
    scratch: Sequence[Any] = (),
) -> Callable[[Any], Any]:
    """A kernel from an array of the shape of X to another, (4, 32) blocks unless said."""

    def call(x: Any) -> Any:
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=tuple(grid),
            in_specs=[pl.BlockSpec(tuple(block), index)],
            out_specs=pl.BlockSpec(tuple(block), out_index or index),
            scratch_shapes=list(scratch),
            interpret=True,
        )(x)

    return call


def _double(x: Any, y: Any) -> None:
    y[...] = 2 * x[...]


def _by_group(x: Any, y: Any) -> None:
    y[...] = x[...] * (pl.program_id(0) % 4 + 1)


def _by_number(x: Any, y: Any) -> None:
    y[...] = x[...] * (pl.program_id(0) + 1)


def _first_only(x: Any, y: Any) -> None:
    y[...] = x[...]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y[...] = -x[...]


def _last_only(x: Any, y: Any) -> None:
    y[...] = jnp.where(pl.program_id(1) == pl.num_programs(1) - 1, x[...], 0)


def _summed(x: Any, y: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y[...] = jnp.zeros_like(y)

    y[...] += x[...]


def _looped(x: Any, y: Any) -> None:
    y[...] = lax.fori_loop(0, pl.program_id(1), lambda _, v: v + 1.0, x[...])


def _carried(x: Any, y: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...]
    y[...] = total[...]


KERNELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "each block": (blocked(_double), "([i,jk,_])->([i,jl,_]) {i=8,j=4,k=4,l=4} whole={k,l}"),
    "blocks of several": (
        blocked(_double, grid=(2, 4), block=(4, 4, 32)),
        "([ij,lm,_])->([ik,ln,_]) {i=2,j=4,k=4,l=4,m=4,n=4} whole={j,k,m,n}",
    ),
    "groups of programs": (blocked(_by_group), "([ij,lm,_])->([ik,ln,_]) {i=2,j=4,k=4,l=4,m=4,n=4} whole={j,k,m,n}"),
    "its number": (blocked(_by_number), "([_,ij,_])->([_,ik,_]) {i=4,j=4,k=4} whole={j,k}"),
    "the first": (blocked(_first_only), "([i,_,_])->([i,_,_]) {i=8}"),
    "the last": (blocked(_last_only), "([i,_,_])->([i,_,_]) {i=8}"),
    "as often as its number": (blocked(_looped), "([i,_,_])->([i,_,_]) {i=8}"),
    "in reverse": (blocked(_double, index=lambda i, j: (i, 3 - j, 0)), "([i,_,_])->([i,_,_]) {i=8}"),
    "a sum": (blocked(_summed, out_index=lambda i, j: (i, 0, 0)), "([i,_,_])->([i,_,_]) {i=8}"),
    "a running sum": (blocked(_carried, scratch=[pltpu.VMEM((4, 32), jnp.float32)]), "([i,_,_])->([i,_,_]) {i=8}"),
    "every second": (blocked(_double, index=lambda i, j: (i // 2 * 2 + i % 2, j, 0)),
                     "([i,jk,_])->([i,jl,_]) {i=8,j=4,k=4,l=4} whole={k,l}"),
    "pairs read one": (
        blocked(_double, index=lambda i, j: (i // 2, j, 0), out_index=lambda i, j: (i, j, 0)),
        "([_,ij,_])->([_,ik,_]) {i=4,j=4,k=4} whole={j,k}",  # the operand has blocks that nobody reads
    ),
    "one grid axis for two dimensions": (
        blocked(_double, index=lambda i: (i // 4, i % 4, 0), grid=(32,)),
        "([i,_,_])->([i,_,_]) {i=8}",
    ),
}  # fmt: skip
"""Name → kernel, its rule."""


@pytest.mark.parametrize("name", KERNELS)
def test_which_axes_split(name: str) -> None:
    fun, rule = KERNELS[name]
    (found,) = rules(fun, X)
    assert found == rule


@pytest.mark.parametrize("name", each(2, KERNELS))
def test_what_splits_is_right(name: str) -> None:
    check_case(case(name, KERNELS[name][0], "f32[8,16,32]", limit=20, rtol=0.0))


def _matmul(x: Any, y: Any, o: Any) -> None:
    o[...] = x[...] @ y[...]


def _grouped(x: Any, y: Any) -> Any:
    """Eight heads of x, two of y."""
    return pl.pallas_call(
        _matmul,
        out_shape=jax.ShapeDtypeStruct((2, 8, 16, 4), x.dtype),
        grid=(2, 8),
        in_specs=[pl.BlockSpec((None, None, 16, 32), lambda b, h: (b, h, 0, 0)),
                  pl.BlockSpec((None, None, 32, 4), lambda b, h: (b, h // 4, 0, 0))],
        out_specs=pl.BlockSpec((None, None, 16, 4), lambda b, h: (b, h, 0, 0)),
        interpret=True,
    )(x, y)  # fmt: skip


def test_grouped_heads_split_by_group() -> None:
    args = jnp.zeros((2, 8, 16, 32)), jnp.zeros((2, 2, 32, 4))
    assert rules(_grouped, *args) == ["([i,jk,_,_],[i,j,_,_])->([i,jl,_,_]) {i=2,j=2,k=4,l=4} whole={k,l}"]
    check_case(case("grouped heads", _grouped, "f32[2,8,16,32]", "f32[2,2,32,4]"))


def test_kernels_with_random_numbers_stay_whole() -> None:
    def noisy(x: Any, y: Any) -> None:
        pltpu.prng_seed(0)
        y[...] = x[...] + pltpu.prng_random_bits(x.shape).astype(jnp.float32)

    call = pl.pallas_call(noisy, out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32), grid=(2,),
                          in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
                          out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)))  # fmt: skip
    (node,) = trace(call, jnp.zeros((16, 128))).graph.nodes
    assert rule_for(node).why == (
        "no axis of the pallas kernel's grid is independent of the others; decorate the function that calls it with "
        "@autopar.sharding_rule(name, '… -> …') to split it"
    )


def _grouped_products(x: Any, w: Any, sizes: Any) -> Any:
    """Products of the rows of each group with its own matrix, and their gradients: a grid whose size is a value."""
    loss = lambda x, w: jnp.sum(jnp.sin(gmm(x, w, sizes, interpret=True)))
    return jax.value_and_grad(loss, argnums=(0, 1))(x, w)


def test_grouped_products_split_by_columns() -> None:
    rng = np.random.default_rng(2)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((256, 256), (4, 256, 256)))
    plan = check_planned(_grouped_products, (x, w, np.array([100, 0, 60, 96], np.int32)), tolerance=1e-5)
    assert plan.sharding.replicated == ()


def _attend(name: str, q: Any, k: Any, v: Any) -> Any:
    """A step of gradient descent on attention."""
    loss = lambda q, k, v: jnp.mean(jnp.sin(ATTENTION[name](q, k, v)))
    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    return [x - g for x, g in zip((q, k, v), grads)], value


def _attend_scanned(name: str, q: Any, k: Any, v: Any) -> Any:
    """The same over two layers, rematerialised."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        layer = jax.checkpoint(lambda x, _: (jnp.tanh(ATTENTION[name](x, k, v)) + x, None))
        return jnp.mean(lax.scan(layer, q, None, length=2)[0])

    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    return [x - g for x, g in zip((q, k, v), grads)], value


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs in Pallas' interpreter."""
    interpreted_flash(monkeypatch)


def _qkv(kv_heads: int = 4) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    shapes = (4, 4, 256, 128), (4, kv_heads, 256, 128), (4, kv_heads, 256, 128)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


@pytest.mark.parametrize("name", each(2, ["flash", "splash", "gpu"]))
def test_attention_is_split_and_right(name: str, interpreted: None) -> None:
    plan = check_planned(partial(_attend, name), _qkv(), tolerance=1e-5)
    assert plan.sharding.replicated == ()


@pytest.mark.full
@pytest.mark.parametrize("name", ["flash", "splash", "gpu"])
@pytest.mark.parametrize("fun", [_attend, _attend_scanned])
@pytest.mark.parametrize(("mesh", "seed"), [((8,), 1), ((2, 2, 2), 2), ((4, 2), 3), ((2, 4), None)])
def test_attention_under_many_plans(
    name: str, fun: Any, mesh: tuple[int, ...], seed: int | None, interpreted: None
) -> None:
    check_planned(partial(fun, name), _qkv(2), tolerance=1e-5, seed=seed, mesh=mesh)
