"""What is run of a case: itself, vmapped over the first or the last dimensions, inside a scan, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax_cases.cases import Case

BATCH = 8
TURNS = 3
FORMS = ("plain", "vmap", "vmap_last", "scan", "gradient", "vmap gradient", "vmap_last gradient", "scan gradient")
SPECIALS = (np.nan, np.inf, -np.inf, -0.0)

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class NoFormError(Exception):
    """The case has no such form."""


def in_form(case: Case, form: str) -> Program:
    """A function and its arguments.

    Raises:
        NoFormError: no argument or no result of the case can be differentiated.
    """
    name, _, gradient = form.partition(" ")
    if name == "gradient":
        return _gradient(case.fun, case.arguments(0))
    match name:
        case "plain":
            return case.fun, case.arguments(0)
        case "vmap":
            program = jax.vmap(case.fun), _stacked(case, BATCH, 0)
        case "vmap_last":
            program = jax.vmap(case.fun, in_axes=-1, out_axes=-1), _stacked(case, BATCH, -1)
        case "scan":
            program = _scanned(case.fun), _stacked(case, TURNS, 0)
        case _:
            raise AssertionError(form)
    return _gradient(*program) if gradient else program


def with_specials(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """One element in eight of the floats is NaN, infinite or -0."""
    rng = np.random.default_rng(0)
    return tuple(_with_specials(x, rng) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in args)


def _with_specials(x: Any, rng: np.random.Generator) -> Any:
    x = np.asarray(x)
    return np.where(rng.random(x.shape) < 1 / 8, rng.choice(SPECIALS, x.shape), x).astype(x.dtype)


def _stacked(case: Case, count: int, axis: int) -> tuple[Any, ...]:
    draws = [case.arguments(k) for k in range(count)]
    if not draws[0]:
        raise NoFormError("no arguments")
    return tuple(
        jnp.stack(xs, axis) if isinstance(xs[0], jax.Array) else np.stack(xs, axis) for xs in zip(*draws, strict=True)
    )


def _scanned(fun: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return lax.scan(lambda turn, xs: (turn + 1, fun(*xs)), 0, args)

    return run


def _gradient(fun: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    """Of the results' sum, each element with a weight of its own."""
    wrt = tuple(k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact))
    results = jax.tree.leaves(jax.eval_shape(fun, *args))
    if not wrt or not any(jnp.issubdtype(r.dtype, jnp.inexact) for r in results):
        raise NoFormError("nothing to differentiate")
    return jax.grad(lambda *xs: _weighted_sum(fun(*xs)), argnums=wrt), args


def _weighted_sum(results: Any) -> Any:
    total = jnp.zeros((), jnp.float32)
    for result in jax.tree.leaves(results):
        if jnp.issubdtype(result.dtype, jnp.inexact):
            weight = jnp.asarray(1 + 0.5 * np.cos(np.arange(result.size)).reshape(result.shape), result.dtype)
            total += jnp.sum((weight * result).real)
    return total
