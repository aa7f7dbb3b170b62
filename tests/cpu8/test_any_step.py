"""Steps that others wrote, and what once failed in them: each is planned, runs, and equals ``jax.jit`` of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.runtime.one_program.reductions import scattered_total, total
from tests.compare import OPTIMISED
from tests.planned import check_planned
from tests.shares import each

X = np.arange(8.0)
GRID = np.random.default_rng(0).normal(size=(8, 4))
BITS = GRID > 0
WAVES = GRID + 1j * GRID[::-1]
ROWS = np.array([3, 1, 3, 0, 7, 2, 2, 5])
IMAGES = np.random.default_rng(3).normal(size=(2, 8, 8, 4))
HALVES = np.random.default_rng(2).integers(0, 2**32, size=(8, 4))


def _newton(s: Any, b: Any) -> Any:
    """Square roots by Newton's method, as many turns as each needs."""
    root = lambda x: lax.while_loop(lambda r: jnp.abs(r * r - x) > 1e-9 * (x + 1), lambda r: (r + x / r) / 2, x + 1)
    return s, jax.vmap(root)(b)


def _sampled(s: Any, b: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 8)
    return s, jax.vmap(jax.random.poisson)(keys, b)


def _bfgs(s: Any, b: Any) -> Any:
    found = jax.scipy.optimize.minimize(lambda x: jnp.sum((x - b) ** 2), s, method="BFGS", options={"maxiter": 3})
    return s, found.x


def _nested_predicates(s: Any, b: Any) -> Any:
    """A predicate for each of 8 x 4 examples, one carried value with dimensions behind them."""

    def turns(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 1.5 + b), (0.0, jnp.ones(8)))[1]

    return s, jax.vmap(jax.vmap(turns))(s)


def _pools(x: Any, w: Any) -> Any:
    """As in Inception: a convolution and pools of one image."""

    def loss(x: Any, w: Any) -> Any:
        same = ((0, 0), (1, 1), (1, 1), (0, 0))
        window = (1, 3, 3, 1), (1, 1, 1, 1), same
        conv = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        pools = [lax.reduce_window(x, -jnp.inf, lax.max, *window), lax.reduce_window(x, 0.0, lax.add, *window)]
        return jnp.mean(jnp.concatenate([conv, *pools], axis=-1) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(x, w)


_SCATTER = lax.ScatterDimensionNumbers(range(0), (0,), (0,))
_GATHER = lax.GatherDimensionNumbers(range(0), (0,), (0,))

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    # weakly typed arrays that a loop carries
    "fori_loop": (lambda s, b: (s + lax.fori_loop(0, 3, lambda i, c: c + 1, jnp.full(8, 0.0)), b.sum()), (X, X)),
    "scan": (lambda s, b: (s + lax.scan(lambda c, x: (c + x, c), jnp.full(8, 0.0), b[:3])[0], b.sum()), (X, X)),
    "while": (lambda s, b: s + lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, jnp.full(8, 0.0)), (X, X)),
    "cond": (lambda s, b: s + lax.cond(b.sum() > 3, lambda: jnp.full(8, 1.0), lambda: jnp.full(8, 2.0)), (X, X)),
    "bfgs": (_bfgs, (X, X)),
    # a predicate for each example
    "newton": (_newton, (X, X + 1)),
    "gcd": (lambda s, b: (s, jax.vmap(jnp.gcd)(b, 12 + b[::-1])), (X, np.arange(8))),
    "poisson": (_sampled, (X, X + 1)),
    "nested predicates": (_nested_predicates, (np.abs(3 * GRID), X)),
    # operands that broadcast against each other
    "pairwise": (lambda s, b: (s - b, s[:, None] - b[None, :]), (X, X[::-1] ** 2)),
    # parameters of any kind
    "scatter": (lambda s, i: lax.scatter_add(s, i[:, None], jnp.ones(8), _SCATTER), (X, ROWS)),
    "gather": (lambda s, i: lax.gather(s, i[:, None], _GATHER, (1,)), (X, ROWS)),
    # sums of what cannot be summed by a collective
    "product of booleans": (lambda a, b: a.T @ b, (BITS, BITS[::-1])),
    "counts of booleans": (lambda a, b: lax.dot(a.T, b, preferred_element_type=jnp.int32), (BITS, BITS[::-1])),
    "gathered booleans": (lambda a, i: a[i], (BITS, ROWS)),
    "sliced booleans": (lambda a, i: lax.dynamic_slice(a, (i[0], 0), (1, 4)), (BITS, ROWS)),
    "complex maximum": (lambda z, i, u: z.at[i].max(u), (WAVES[:, 0], ROWS, WAVES[:, 1])),
    "complex minimum": (lambda z: z.min(0), (WAVES,)),
    # nothing at all
    "no rows": (lambda z: z[:0], (WAVES,)),
    "no turns": (lambda s, b: lax.scan(lambda c, x: (c + x, c * x), s, b), (X, np.zeros((0, 8)))),
    "no turns, nothing read": (lambda s, b: lax.scan(lambda c, _: (c + b, c * 2), s, None, length=0), (X, X)),
    "no keys": (
        lambda s, k: lax.scan(lambda c, _: (jax.random.split(c)[0], jax.random.split(c)), k, None, length=0),
        (X, jax.random.key(3)),
    ),
    # what jax 0.12 keeps as one primitive that is made of others
    "histogram": (
        lambda s, b: (s + jnp.histogram(b, bins=8, range=(0, 40))[0], jnp.interp(s, s, b)),
        (X, X[::-1] ** 2),
    ),
    "searched in a loop": (
        lambda s, b: lax.scan(lambda c, x: (c + jnp.searchsorted(s, x + c[:3]).sum(), jnp.digitize(c, s)), b, s),
        (X, X[::-1] ** 2),
    ),
    # windows that overlap
    "a window further than its rows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 13), (1, 4), ((0, 0), (6, 6))),
        (np.random.default_rng(4).normal(size=(8, 8)),),
    ),
    "pools": (_pools, (IMAGES, IMAGES[0, :3, :3, :, None] * np.ones(4))),
    # what JAX itself does not do right inside a shard_map
    "upper halves": (lambda a, b: lax.mulhi(a, b), (HALVES, HALVES[::-1])),
    "upper halves of whole numbers": (lambda a, b: lax.mulhi(a[0], b[0]), (HALVES - 2**31, HALVES[::-1])),
    "fft, rows gathered": (lambda z, i: jnp.fft.fft(z, axis=2)[:, i], (WAVES.reshape(2, 4, 4), ROWS[:4] % 4)),
    "real fft and back": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1), axis=1).sum(1), (IMAGES[..., 0],)),
    # operators made of others
    "linear solve": (
        lambda a, b: jnp.linalg.solve(jnp.einsum("bij,bkj->bik", a, a) + jnp.eye(4), b),
        (np.random.default_rng(1).normal(size=(8, 4, 4)), GRID[:, :, None]),
    ),
    "conjugate gradients": (
        lambda a, b: jax.vmap(lambda d, r: jax.scipy.sparse.linalg.cg(lambda x: d * x, r, maxiter=5)[0])(a, b),
        (GRID**2 + 1, GRID),
    ),
}
"""Name → step, arguments."""


@pytest.mark.parametrize(
    "seed", [None, 0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", each(2, CASES))
def test_equals_jit(name: str, seed: int | None, float64: None) -> None:
    fun, args = CASES[name]
    check_planned(fun, args, seed=seed)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fun", [jnp.max, jnp.min])
def test_a_nan_is_the_extreme(fun: Callable[..., Any], dtype: str, float64: None) -> None:
    """Collectives drop NaNs: ``jax.shard_map(lambda x: lax.pmax(x, "x"), …)`` of a NaN and 1 is 1 on CPU."""
    x = np.array([[1, np.nan, 3, -0.0], [4, 5, np.inf, -np.inf]] * 4, dtype)
    step = autopar.parallelize(lambda x: fun(x, axis=0), mesh=8, constraints={"args[0]": P("x")})
    np.testing.assert_array_equal(step(x), fun(x, axis=0))
    assert step.last_plan is not None and [c.kind for c in step.last_plan.sharding.collectives] == ["all-reduce"]


@pytest.mark.parametrize("options", [OPTIMISED, {}], ids=["optimised", "not optimised"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_equal_complex_numbers_are_summed_over_devices(dtype: str, options: dict[str, Any], float64: None) -> None:
    """``jax.shard_map(lambda x: lax.psum(jnp.full(8, 1j), "x"), …)`` aborts the process while XLA compiles."""

    def sums(_: Any) -> tuple[Any, Any]:
        x = jnp.full(8, 1j, dtype)
        return total(x, ("x",))[:1].imag, scattered_total(x, "x", 0)

    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    split = jax.shard_map(sums, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    whole, parts = jax.jit(split, compiler_options=options)(X)
    np.testing.assert_array_equal(whole, np.full(8, 8.0))
    np.testing.assert_array_equal(parts, np.full(8, 8j))


def test_an_fft_is_gathered_along_a_later_dimension() -> None:
    """``jax.shard_map(lambda x: lax.all_gather(jnp.fft.fft(x), "x", axis=1, tiled=True), …)`` fails when it runs."""
    x = WAVES.reshape(4, 8).astype(np.complex64)[:, :, None] * np.ones(4, np.complex64)
    layouts = {"args[0]": P(None, "x"), "out": P()}
    step = autopar.parallelize(jnp.fft.fft, mesh=8, constraints=layouts)
    np.testing.assert_allclose(step(x), jnp.fft.fft(x), rtol=1e-5)
    assert step.last_plan is not None and [c.kind for c in step.last_plan.sharding.collectives] == ["all-gather"]
