"""A program run as planned beside the same under plain `jax.jit`, and what came of it."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

import autopar
from autopar.ir.errors import AutoparError
from tests.clusters import SLOW_8
from tests.compare import FAST_COMPILE, assert_same_collectives
from tests.random_plans import random_strategies
from tests.rounding import differences
from tests.worker import CallEndedError, Worker

EQUAL, REFUSED, SKIPPED = "equal", "refused", "not runnable in plain jax"
WRONG, COLLECTIVES, ERROR, ENDED = "wrong", "other collectives", "internal error", "hung or crashed"
UPSTREAM = "upstream fault"
FAULTS = (WRONG, COLLECTIVES, ERROR, ENDED)
OUTCOMES = (EQUAL, REFUSED, *FAULTS, UPSTREAM)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``kind`` is one of OUTCOMES or SKIPPED; ``detail`` the refusal, the differences, the traceback, or an upstream
    fault's name."""

    kind: str
    detail: str = ""
    seconds: float = 0.0


def outcome(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    mesh: tuple[int, ...],
    seed: int | None,
    settle: Callable[[], bool] = lambda: False,
    least_norm: float = 0.0,
) -> Outcome:
    """Runs ``fun`` both ways.

    Args:
        seed: of a random plan; None: the planner's own.
        settle: asked where floats differ: True where that was rounding.
        least_norm: see `differences`.
    """
    try:
        want = jax.block_until_ready(jax.jit(fun, compiler_options=FAST_COMPILE)(*args))
    except Exception as error:  # noqa: BLE001 -- whatever keeps plain JAX from running it
        return Outcome(kind=SKIPPED, detail=f"{type(error).__name__}: {error}"[:300])
    started_s = time.monotonic()
    kind, detail = _planned(fun, args, mesh, seed, want, settle, least_norm)
    return Outcome(kind=kind, detail=detail, seconds=time.monotonic() - started_s)


def _planned(
    fun: Callable[..., Any], args: tuple[Any, ...], mesh: tuple[int, ...], seed: int | None, want: Any,
    settle: Callable[[], bool], least_norm: float,
) -> tuple[str, str]:  # fmt: skip
    step = autopar.parallelize(fun, mesh=mesh, cluster=SLOW_8)
    try:
        with contextlib.nullcontext() if seed is None else random_strategies(seed):
            plan = step.plan(*args)
    except AutoparError as error:
        return REFUSED, f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return ERROR, "in plan(): " + traceback.format_exc(limit=-6)
    try:
        compiled = step.lower(*args).compile(FAST_COMPILE)
        got = jax.block_until_ready(compiled(*jax.device_put(tuple(args), compiled.input_shardings[0])))
    except Exception:  # noqa: BLE001
        return ERROR, "after plan(): " + traceback.format_exc(limit=-6)
    lines = differences(got, want, least_norm=least_norm)
    if lines and not settle():
        return WRONG, "\n".join(lines)
    try:
        assert_same_collectives(plan, compiled.as_text())
    except AssertionError as error:
        return COLLECTIVES, str(error)
    return EQUAL, ""


def outcome_within(worker: Worker, job: Any, limit_s: float) -> Outcome:
    """What the worker's function says of the job, or that it did not."""
    try:
        return worker.call(job, limit_s)
    except CallEndedError as error:
        return Outcome(kind=ENDED, detail=str(error), seconds=limit_s)
