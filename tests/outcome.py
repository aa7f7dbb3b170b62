"""A program run as planned beside the same under plain `jax.jit`, and what came of it."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.ir.errors import AutoparError
from tests.clusters import SLOW_8
from tests.compare import assert_same_collectives
from tests.random_plans import random_strategies
from tests.rounding import differences
from tests.upstream import Seen, upstream_fault
from tests.worker import CallEndedError, Worker

EQUAL, REFUSED, SKIPPED = "equal", "refused", "not runnable in plain jax"
WRONG, COLLECTIVES, ERROR, ENDED = "wrong", "other collectives", "internal error", "hung or crashed"
UPSTREAM = "upstream fault"
FAULTS = (WRONG, COLLECTIVES, ERROR, ENDED)
OUTCOMES = (EQUAL, REFUSED, *FAULTS, UPSTREAM)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``kind`` is one of OUTCOMES or SKIPPED; ``detail`` the refusal, the differences, the traceback, or an upstream
    fault's name; ``got`` are the planned program's results while the outcome is judged."""

    kind: str
    detail: str = ""
    seconds: float = 0.0
    got: Any = None


def outcome(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: tuple[int, ...],
    seed: int | None,
    settle: Callable[[], bool] = lambda: False,
    least_norm: float = 0.0,
    inside: Any = None,
) -> Outcome:
    """Runs ``fun`` both ways.

    Args:
        seed: of a random plan; None: the planner's own.
        settle: asked where floats differ: True where that was rounding.
        least_norm, inside: see `differences`.
    """
    try:
        want = jax.block_until_ready(jax.jit(fun)(*args))
    except Exception as error:  # noqa: BLE001 -- whatever keeps plain JAX from running it
        return Outcome(kind=SKIPPED, detail=f"{type(error).__name__}: {error}"[:300])
    started_s = time.monotonic()
    found = _planned(fun, args, mesh, seed, want, {"least_norm": least_norm, "inside": inside})
    if found.kind == WRONG and (settle() or not differences(found.got, fun(*args), least_norm=least_norm)):
        # plain JAX gives these numbers too, operator by operator: rounding decided a comparison, say
        found = replace(found, kind=EQUAL, detail="")
    if found.kind in FAULTS:
        seen = Seen(
            wrong=found.kind == WRONG,
            detail=found.detail,
            equal_with_nans=lambda: _equal_with_nans(fun, args, found.got, want),
        )
        name = upstream_fault(seen)
        found = replace(found, kind=UPSTREAM, detail=name) if name else found
    return replace(found, seconds=time.monotonic() - started_s, got=None)


def _equal_with_nans(fun: Callable[..., Any], args: tuple[Any, ...], got: Any, want: Any) -> bool:
    """Whether ``got`` is ``want`` but for NaNs that the operators one by one give too."""
    with jax.disable_jit():
        eager = fun(*jax.tree.map(jnp.asarray, args))
    return not differences(got, jax.tree.map(_with_common_nans, got, eager, want))


def _with_common_nans(got: Any, eager: Any, want: Any) -> Any:
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return want
    return jnp.where(jnp.isnan(got) & jnp.isnan(eager), eager, want)


def _planned(
    fun: Callable[..., Any], args: tuple[Any, ...], mesh: tuple[int, ...], seed: int | None, want: Any,
    rounding: dict[str, Any],
) -> Outcome:  # fmt: skip
    step = autopar.parallelize(fun, mesh=mesh, cluster=SLOW_8)
    try:
        with contextlib.nullcontext() if seed is None else random_strategies(seed):
            plan = step.plan(*args)
    except AutoparError as error:
        return Outcome(kind=REFUSED, detail=f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001
        return Outcome(kind=ERROR, detail="in plan(): " + traceback.format_exc(limit=-6))
    try:
        compiled = step.lower(*args).compile()
        got = jax.block_until_ready(compiled(*jax.device_put(tuple(args), compiled.input_shardings[0])))
    except Exception:  # noqa: BLE001
        return Outcome(kind=ERROR, detail="after plan(): " + traceback.format_exc(limit=-6))
    lines = differences(got, want, **rounding)
    if lines:
        return Outcome(kind=WRONG, detail="\n".join(lines), got=got)
    try:
        assert_same_collectives(plan, compiled.as_text())
    except AssertionError as error:
        return Outcome(kind=COLLECTIVES, detail=str(error))
    return Outcome(kind=EQUAL)


def outcome_within(worker: Worker, job: Any, limit_s: float) -> Outcome:
    """What the worker's function says of the job, or that it did not."""
    try:
        return worker.call(job, limit_s)
    except CallEndedError as error:
        return Outcome(kind=ENDED, detail=str(error), seconds=limit_s)
