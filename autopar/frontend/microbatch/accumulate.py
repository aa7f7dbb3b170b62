"""One gradient marker, in two traces → its results as a loop over microbatches that adds up gradients.

    before the loop   hoisted values, on the full batch
    scan              carry: sums (loss, gradients, summed auxiliary values) from zeros, maxima and minima;
                      per turn: the differentiated program of one microbatch
    after the loop    auxiliary values that follow from the combined ones (an exp of the mean loss, say)

`plan_marker` decides, `run_marker` evaluates (traceable).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.microbatch.analyse import analyse
from autopar.frontend.microbatch.analysed import Body, Setting, from_shapes
from autopar.frontend.microbatch.replay import (
    After,
    Hoist,
    Microbatch,
    after_loop,
    hoists_of,
    join_rows,
    run_after,
    run_full,
    run_micro,
    split_rows,
)
from autopar.ir.errors import MicrobatchError
from autopar.jax_compat import ClosedJaxpr, JaxprEqn, dce
from autopar.primitives.kinds import Coupled, Fact, Max, Min, Rows, Same, Sum, name


@dataclass(frozen=True, kw_only=True)
class MarkerPlan:
    """A marker's analysed loss and what its loop carries. ``out_avals`` are the marker's results."""

    body: Body
    wrt: tuple[int, ...]
    setting: Setting
    hoists: tuple[Hoist, ...]
    after: After
    out_avals: tuple[Any, ...]


def plan_marker(full: JaxprEqn, small: JaxprEqn, n: int, batch: int) -> MarkerPlan:
    """Finds out how the marker's loss follows from microbatches.

    Args:
        full, small: the same marker traced at the full batch and at one microbatch.
        n: microbatches.
        batch: examples in the full batch.

    Raises:
        MicrobatchError: microbatches would not be exact; names the operation, its source line and the reason.
    """
    try:
        return _plan(full, small, Setting(n=n, batch=batch))
    except MicrobatchError:
        try:
            return _plan(full, small, Setting(n=n, batch=batch, blocks_first=True))
        except MicrobatchError:
            pass
        raise


def _plan(full: JaxprEqn, small: JaxprEqn, setting: Setting) -> MarkerPlan:
    wrt = full.params["wrt"]
    facts: list[Fact] = []
    for i, (a, b) in enumerate(zip(full.invars, small.invars, strict=True)):
        kind = from_shapes(a.aval.shape, b.aval.shape, setting)
        if isinstance(kind, Coupled):
            raise _refused(f"operand {i} of the loss cannot be split: {kind.reason}")
        facts.append(Fact(kind=kind, trained=i in wrt))
    closed, closed_small = full.params["jaxpr"], small.params["jaxpr"]
    body = analyse(closed.jaxpr, closed.consts, closed_small.jaxpr, closed_small.consts, facts, setting)
    loss = body.outs[0].kind
    if isinstance(loss, Coupled):
        raise _refused(loss.reason)
    if not isinstance(loss, (Sum, Same)):
        raise _refused(f"the loss is a {name(loss)}; gradients of microbatches add up only for sums and means")
    after = after_loop(body, body.full.outvars[1:])
    if isinstance(after, Coupled):
        raise _refused(f"an auxiliary result needs the whole batch at once: {after.reason}")
    return MarkerPlan(
        body=body,
        wrt=wrt,
        setting=setting,
        hoists=tuple(hoists_of(body)),
        after=after,
        out_avals=tuple(v.aval for v in full.outvars),
    )


def _refused(why: str) -> MicrobatchError:
    return MicrobatchError(
        f"the step cannot be split into microbatches exactly: {why}. Inside autopar.value_and_grad the loss must be "
        "a sum or a mean over examples that do not depend on one another. Use num_microbatches=1, or compute what "
        "couples the examples outside value_and_grad or per example."
    )


def run_marker(plan: MarkerPlan, operands: Sequence[Any]) -> list[Any]:
    """The marker's results (loss, auxiliary leaves, gradients) at full-batch ``operands``."""
    n = plan.setting.n
    operands = [jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic, int, float)) else x for x in operands]
    hoisted = hoisted_values(plan, operands)
    kinds = [plan.body.facts[v].kind for v in plan.body.full.invars]
    sliced = {i: split_rows(operands[i], k, n) for i, k in enumerate(kinds) if isinstance(k, Rows)}
    sliced_hoists = {h.key: split_rows(hoisted[h.key], h.rows, n) for h in plan.hoists if h.rows is not None}
    whole_hoists = {h.key: hoisted[h.key] for h in plan.hoists if h.rows is None}
    tap_kinds = [plan.body.facts[v].kind for v in plan.after.taps]
    grad_kinds = [kinds[i] for i in plan.wrt]

    def microbatch(index: Any, rows: dict[int, Any], hoists: dict[Any, Any]) -> tuple[Any, list[Any], list[Any]]:
        here = [rows.get(i, x) for i, x in enumerate(operands)]

        def loss_of(*chosen: Any) -> tuple[Any, list[Any]]:
            values = list(here)
            for i, x in zip(plan.wrt, chosen, strict=True):
                values[i] = x
            return loss_of_microbatch(plan, index, values, {**whole_hoists, **hoists})

        loss_of = _pruned(loss_of, [here[i] for i in plan.wrt])
        loss, pullback, taps = jax.vjp(loss_of, *(here[i] for i in plan.wrt), has_aux=True)
        return loss, taps, list(pullback(jnp.ones((), loss.dtype)))

    def turn(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        loss, taps, grads = microbatch(*xs)
        sum_loss, acc_taps, acc_grads = carry
        acc_taps = [_combine(k, a, t) for k, a, t in _carried(tap_kinds, acc_taps, taps)]
        acc_grads = [_combine(Sum(), a, g) for _, a, g in _carried(grad_kinds, acc_grads, grads)]
        per_row = ([t for t, k in zip(taps, tap_kinds, strict=True) if isinstance(k, Rows)],
                   [g for g, k in zip(grads, grad_kinds, strict=True) if isinstance(k, Rows)])  # fmt: skip
        return (sum_loss + loss, acc_taps, acc_grads), per_row

    loss_dtype = plan.out_avals[0].dtype
    start = (
        jnp.zeros((), loss_dtype),
        [_start(k, v.aval) for k, v in zip(tap_kinds, plan.after.taps, strict=True) if not isinstance(k, Rows)],
        [jnp.zeros(operands[i].shape, operands[i].dtype) for i in plan.wrt if not isinstance(kinds[i], Rows)],
    )
    xs = (lax.iota(np.int32, n) if needs_index(plan) else None, sliced, sliced_hoists)
    (loss, sums, grad_sums), (tap_rows, grad_rows) = lax.scan(turn, start, xs, length=n)
    taps = _assemble(tap_kinds, sums, tap_rows, n)
    grads = _assemble(grad_kinds, grad_sums, grad_rows, n)
    return [loss, *after_values(plan, operands, hoisted, taps), *grads]


def loss_of_microbatch(
    plan: MarkerPlan, index: Any, operands: Sequence[Any], hoisted: dict[Any, Any]
) -> tuple[Any, list[Any]]:
    """(loss, values of ``plan.after.taps``) of microbatch ``index``, not differentiated.

    Args:
        plan: the marker's.
        index: int32 scalar, or None where `needs_index` says that nothing asks for it.
        operands: the marker's, those that carry the batch with this microbatch's examples.
        hoisted: hoisted values by `Hoist.key`, likewise.
    """
    micro = Microbatch(index=index, n=plan.setting.n, hoisted=hoisted)
    results, taps = run_micro(plan.body, operands, micro, taps=plan.after.taps)
    loss = results[0]
    if isinstance(plan.body.outs[0].kind, Same):
        loss = micro.mask(loss)
    return loss, taps


def after_values(plan: MarkerPlan, operands: Sequence[Any], hoisted: dict[Any, Any], taps: Sequence[Any]) -> list[Any]:
    """The marker's auxiliary results, from ``taps`` combined over the microbatches."""
    known = dict(zip(plan.after.taps, taps, strict=True))
    known.update({plan.body.steps[h.step].full.outvars[h.result]: hoisted[h.key] for h in plan.hoists if not h.path})
    return run_after(plan.body, plan.after, plan.body.full.outvars[1:], operands, known)


def needs_index(plan: MarkerPlan) -> bool:
    """True if the loop's body asks which microbatch it is: for random bits, or to count something only once."""

    def asks(body: Body) -> bool:
        if body.out_masks or any(isinstance(body.facts[v].kind, Rows) for v in body.full.constvars):
            return True
        return any(s.masked or s.action or any(asks(b) for b in s.bodies) for s in body.steps)

    return isinstance(plan.body.outs[0].kind, Same) or asks(plan.body)


def hoisted_values(plan: MarkerPlan, operands: Sequence[Any]) -> dict[Any, Any]:
    """What microbatches take from the full batch, by `Hoist.key`; only the equations that it needs are bound."""
    if not plan.hoists:
        return {}
    keys = [h.key for h in plan.hoists]

    def compute(*values: Any) -> list[Any]:
        _, found = run_full(plan.body, values)
        return [found[k] for k in keys]

    return dict(zip(keys, _pruned(compute, operands)(*operands), strict=True))


def _pruned(fun: Any, operands: Sequence[Any]) -> Any:
    """``fun`` without the equations that its results do not use."""
    trees: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        leaves, tree = jax.tree_util.tree_flatten(fun(*values))
        trees[:] = [tree]
        return leaves

    closed = jax.make_jaxpr(flat)(*operands)
    needed = ClosedJaxpr(dce(closed.jaxpr), closed.consts)
    return lambda *values: jax.tree_util.tree_unflatten(
        trees[0], jax.core.eval_jaxpr(needed.jaxpr, needed.consts, *values)
    )


def _carried(kinds: list[Any], accumulated: list[Any], new: list[Any]) -> list[tuple[Any, Any, Any]]:
    kept = [(k, x) for k, x in zip(kinds, new, strict=True) if not isinstance(k, Rows)]
    return [(k, a, x) for (k, x), a in zip(kept, accumulated, strict=True)]


def _combine(kind: Any, accumulated: Any, new: Any) -> Any:
    match kind:
        case Max():
            return lax.max(accumulated, new)
        case Min():
            return lax.min(accumulated, new)
        case _:
            return lax.add(accumulated, new)


def _start(kind: Any, aval: Any) -> Any:
    """What combining starts from."""
    dtype = np.dtype(aval.dtype) if not isinstance(aval.dtype, np.dtype) else aval.dtype
    if isinstance(kind, Sum):
        return jnp.zeros(aval.shape, dtype)
    lowest = isinstance(kind, Max)
    if dtype == np.bool_:
        return jnp.full(aval.shape, not lowest, dtype)
    if jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return jnp.full(aval.shape, info.min if lowest else info.max, dtype)
    return jnp.full(aval.shape, -jnp.inf if lowest else jnp.inf, dtype)


def _assemble(kinds: list[Any], combined: list[Any], rows: list[Any], n: int) -> list[Any]:
    in_rows, in_sums = iter(rows), iter(combined)
    return [join_rows(next(in_rows), k, n) if isinstance(k, Rows) else next(in_sums) for k in kinds]
