"""What is run of a case: the case itself, vmapped, inside a scan, and gradients of each of these."""

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
FORMS = ("plain", "vmap", "scan", "gradient", "vmap gradient", "scan gradient")

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
            program = jax.vmap(case.fun), _stacked(case, BATCH)
        case "scan":
            program = _scanned(case.fun), _stacked(case, TURNS)
        case _:
            raise AssertionError(form)
    return _gradient(*program) if gradient else program


def _stacked(case: Case, count: int) -> tuple[Any, ...]:
    draws = [case.arguments(k) for k in range(count)]
    if not draws[0]:
        raise NoFormError("no arguments")
    return tuple(jnp.stack(xs) if isinstance(xs[0], jax.Array) else np.stack(xs) for xs in zip(*draws, strict=True))


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
