"""A function run as planned beside the same under plain `jax.jit`: what every acceptance test of a program does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

import autopar
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives
from tests.random_plans import random_strategies


def check_planned(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    seed: int | None = None,
    mesh: tuple[int, ...] = (2, 4),
    tolerance: float = 1e-9,
    least_norm: float = 1.0,
    **options: Any,
) -> Any:
    """Results equal those of ``jax.jit(fun)``, collectives are the plan's. Returns the plan.

    Args:
        seed: of a random plan; None: the planner's own.
        tolerance, least_norm: see `assert_close`.
        options: of `autopar.parallelize`.
    """
    step = autopar.parallelize(fun, mesh=mesh, cluster=SLOW_8, **options)
    with contextlib.nullcontext() if seed is None else random_strategies(seed):
        plan = step.plan(*args)
    compiled = step.lower(*args).compile()
    want = jax.jit(fun)(*args)
    got = compiled(*jax.device_put(tuple(args), compiled.input_shardings[0]))
    assert_close(got, want, tolerance, least_norm=least_norm)
    assert_same_collectives(plan, compiled.as_text())
    return plan
