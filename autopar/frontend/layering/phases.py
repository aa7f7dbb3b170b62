"""A train step → its parts: what runs once before, the loss of one microbatch (not differentiated), the update.

    before    arguments → values that every microbatch takes (casts outside the loss, step keys, the denominator of a
              masked mean, which needs the full batch)
    forward   [microbatch's number], arguments, values of before → loss and what the update wants beside gradients
    update    gradients, combined results of forward, arguments → the step's outputs

The forward is what `microbatch.serial` differentiates in its loop, so both give the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.frontend.gradient import Markers, Reached, grad_p
from autopar.frontend.layering.inputs import FROM_ARGUMENT, Input, Sources
from autopar.frontend.layering.surgery import Env, plain, renamed, rewired, without_constants, zeros
from autopar.frontend.microbatch.accumulate import (
    MarkerPlan,
    after_values,
    hoisted_values,
    loss_of_microbatch,
    needs_index,
)
from autopar.frontend.microbatch.batch_args import BatchArgnums, batch_leaves, is_operand, leaf_dims
from autopar.frontend.microbatch.inline import bodies, flatten, holds_marker
from autopar.frontend.microbatch.one_unit import cannot_trace
from autopar.frontend.microbatch.units import plan_in_units
from autopar.frontend.opened_calls import planned_for
from autopar.frontend.trace import Call, staged
from autopar.garbage import collection_paused
from autopar.ir.errors import MicrobatchError, TraceError
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    fresh_var,
    source_line,
    with_constants,
)
from autopar.primitives.kinds import Kind, Rows, Sum


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A step's parts, inlined jaxprs without constants. ``update`` takes gradients by the forward's trained inputs, in
    order, then the forward's outputs combined by ``combine`` (loss first, at full size), then all arguments.
    ``before`` takes all arguments. ``consts`` are the values of the first arguments."""

    before: Jaxpr
    forward: Jaxpr
    inputs: tuple[Input, ...]
    update: Jaxpr
    combine: tuple[Kind, ...]
    consts: tuple[Any, ...]
    call: Call
    name: str
    differentiated: bool


@dataclass(frozen=True, kw_only=True)
class Inlined:
    """A step traced with all of its examples, and inlined but for what its marker holds: the same for any number of
    microbatches. ``values`` are those of ``outer.constvars``; ``markers``: all that tracing came to."""

    outer: Jaxpr
    values: Sequence[Any]
    call: Call
    markers: Markers


@collection_paused()
def inlined(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int],
    donate_argnums: Sequence[int],
    platform: str | None,
) -> Inlined:
    """Traces ``step``; arguments as `layers.layered` takes them. Raises TraceError where it cannot be traced."""
    with planned_for(platform):
        with Markers() as markers:
            traced = staged(step, args, kwargs, static_argnums, donate_argnums)
        outer, values = flatten(traced.jaxpr.jaxpr, list(traced.jaxpr.consts), markers=False)
    return Inlined(outer=outer, values=values, call=traced.call, markers=markers)


def split_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole: Inlined,
    *,
    num_microbatches: int,
    batch_argnums: BatchArgnums,
    static_argnums: Sequence[int],
) -> Parts:
    """Takes ``step``, of which ``whole`` is the trace, apart; arguments as `layers.layered` takes them.

    Raises:
        TraceError: the step has several gradient markers, one inside a loop or branch, or gradients of gradients.
        MicrobatchError: the step would not be exact in microbatches, or has no marker for more than one of them.
    """
    name = getattr(step, "__name__", type(step).__name__)
    outer, values, call = whole.outer, list(whole.values), whole.call
    marker = _marker(outer, name, num_microbatches)
    batch = _Batch.of(args, kwargs, batch_argnums, static_argnums, num_microbatches)
    if marker is None:
        return _forward_only(outer, values, call, name, batch)
    if num_microbatches == 1:
        return _one(outer, values, marker, call, name, batch)

    @functools.cache
    def smaller(size: int) -> JaxprEqn:
        """The marker with ``size`` examples."""
        small_args, small_kwargs = batch.small(args, kwargs, size)
        try:
            with Markers(end=whole.markers.number(marker)):  # an optimizer takes as long to trace as a loss
                small = staged(step, small_args, small_kwargs, static_argnums)
        except Reached as end:
            return marker.replace(invars=[Var(t) for t in end.operands], params=marker.params | end.params)
        except (TraceError, TypeError, ValueError) as error:
            raise cannot_trace(name, num_microbatches, batch.size, size, error) from error
        small_outer, _ = flatten(small.jaxpr.jaxpr, list(small.jaxpr.consts), markers=False)
        found = _marker(small_outer, name, num_microbatches)
        if found is None:
            raise MicrobatchError(f"{name} has no autopar.value_and_grad with {size} examples: do not branch on it")
        return found

    small_marker, plan = plan_in_units(marker, smaller, num_microbatches, batch.size)
    return _several(outer, values, marker, small_marker, plan, call, name)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """``dims`` of every leaf that jax traces, None where it carries no batch."""

    n: int
    size: int
    dims: tuple[int | None, ...]
    static: frozenset[int]

    @staticmethod
    def of(args: Any, kwargs: Any, batch_argnums: BatchArgnums, static_argnums: Sequence[int], n: int) -> _Batch:
        static = frozenset(i % len(args) for i in static_argnums) if args else frozenset[int]()
        dynamic = tuple(None if i in static else a for i, a in enumerate(args))
        size = 0
        if n > 1:
            dims, size = batch_leaves(dynamic, kwargs, batch_argnums, n)
        elif batch_argnums is None and len(args) < 2:
            dims = [None] * len(jax.tree_util.tree_leaves((dynamic, kwargs)))
        else:
            dims, _ = leaf_dims(dynamic, kwargs, batch_argnums)
        return _Batch(n=n, size=size, dims=tuple(dims), static=static)

    def small(self, args: Sequence[Any], kwargs: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``size`` examples, as shapes."""
        dynamic = tuple(None if i in self.static else a for i, a in enumerate(args))
        leaves, tree = jax.tree_util.tree_flatten((dynamic, kwargs))
        made: list[Any] = []
        for value, dim in zip(leaves, self.dims, strict=True):
            if dim is None or not is_operand(value):
                made.append(value)
                continue
            aval = jax.typeof(value) if not isinstance(value, jax.ShapeDtypeStruct) else value
            shape = tuple(size if d == dim else s for d, s in enumerate(aval.shape))
            made.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))))
        out_args, out_kwargs = jax.tree_util.tree_unflatten(tree, made)
        return tuple(args[i] if i in self.static else a for i, a in enumerate(out_args)), out_kwargs


def _marker(outer: Jaxpr, name: str, n: int) -> JaxprEqn | None:
    found = [eqn for eqn in outer.eqns if eqn.primitive is grad_p]
    if any(holds_marker(b) for eqn in outer.eqns if eqn.primitive is not grad_p for b in bodies(eqn)):
        raise TraceError(
            f"{name} takes gradients by autopar.value_and_grad inside a loop or branch: its layers cannot be told "
            "apart there. Move the loop out of the step."
        )
    if len(found) > 1:
        raise TraceError(
            f"{name} has {len(found)} autopar.value_and_grad; a pipeline runs the layers of one loss, forwards and "
            "then backwards. Take the gradients of one loss, a sum of them if need be."
        )
    if found and any(eqn.primitive is grad_p for b in bodies(found[0]) for eqn in b.eqns):
        raise TraceError(f"{name} takes gradients of gradients: its layers cannot be cut.")
    if not found and n > 1:
        raise MicrobatchError(
            f"{name} has num_microbatches={n} but no autopar.value_and_grad or autopar.grad: nothing says which part "
            "runs once per microbatch. Replace jax.value_and_grad by autopar.value_and_grad (same arguments) around "
            "the loss."
        )
    return found[0] if found else None


# --- one microbatch is the batch -----------------------------------------------------------------------------


def _one(outer: Jaxpr, values: list[Any], marker: JaxprEqn, call: Call, name: str, batch: _Batch) -> Parts:
    closed: ClosedJaxpr = marker.params["jaxpr"]
    loss, consts = flatten(closed.jaxpr, list(closed.consts), markers=True)
    outer, values, marker_operands = _with_constants(outer, values, marker, loss, consts)
    loss = loss.replace(constvars=[], invars=[*loss.constvars, *loss.invars])
    wrt = tuple(len(consts) + i for i in marker.params["wrt"])
    arguments = (*outer.constvars, *outer.invars)
    dims: list[Rows | None] = [None] * len(outer.constvars)
    dims += [None if d is None else Rows(dim=d) for d in batch.dims]
    maker = Sources(arguments)
    rows = dict(zip(arguments, dims, strict=True))
    inputs, env = maker.inputs(marker_operands, wrt, loss.invars, lambda i: _rows_of(marker_operands[i], rows))
    forward = rewired(loss, [v for v in loss.invars if v not in env], env, loss.outvars)
    wanted, kept = _distinct(forward)
    forward = forward.replace(outvars=wanted)
    return _parts(
        outer=outer,
        marker=marker,
        wrt=wrt,
        forward=forward,
        inputs=inputs,
        before=_before(outer, arguments, maker.before, _others(outer), name),
        aux=lambda combined: (
            [],
            [_aux(kept[k], combined, forward, marker_operands, loss) for k in range(1, len(kept))],
        ),
        combine=tuple([Sum()] * len(wanted)),
        out_avals=[v.aval for v in wanted],
        consts=values,
        call=call,
        name=name,
    )


def _rows_of(atom: Any, rows: dict[Any, Rows | None]) -> Rows | None:
    return rows.get(atom) if isinstance(atom, Var) else None


def _distinct(forward: Jaxpr) -> tuple[list[Any], list[Any]]:
    """(distinct results of the forward that an equation makes, loss first; per result, its place among those or the
    atom that it is)."""
    made = {v for eqn in forward.eqns for v in eqn.outvars}
    if forward.outvars[0] not in made:
        raise TraceError("the loss is an argument or a constant: there is nothing to cut into layers")
    wanted: list[Any] = []
    places: list[Any] = []
    for atom in forward.outvars:
        if isinstance(atom, Literal) or atom not in made:
            places.append(atom)
            continue
        if atom not in wanted:
            wanted.append(atom)
        places.append(wanted.index(atom))
    return wanted, places


def _aux(place: Any, combined: Sequence[Var], forward: Jaxpr, operands: Sequence[Any], loss: Jaxpr) -> Any:
    """What an auxiliary result is in the update."""
    if isinstance(place, int):
        return combined[place]
    return place if isinstance(place, Literal) else operands[loss.invars.index(place)]


def _with_constants(
    outer: Jaxpr, values: list[Any], marker: JaxprEqn, loss: Jaxpr, consts: list[Any]
) -> tuple[Jaxpr, list[Any], list[Any]]:
    """The outer jaxpr with the loss's own constants as constants; the operands of the loss, those first."""
    fresh = [fresh_var(v) for v in loss.constvars]
    values = [*values, *consts]
    return with_constants(outer, [*outer.constvars, *fresh], values), values, [*fresh, *marker.invars]


# --- several microbatches --------------------------------------------------------------------------------------


def _several(
    outer: Jaxpr, values: list[Any], marker: JaxprEqn, small: JaxprEqn, plan: MarkerPlan, call: Call, name: str
) -> Parts:
    kinds = [plan.body.facts[v].kind for v in plan.body.full.invars]
    for i in plan.wrt:
        if isinstance(kinds[i], Rows):
            raise MicrobatchError(
                f"{name} takes gradients by something that carries the batch: a pipeline adds gradients up over the "
                "microbatches, and has none per example. Use num_microbatches=1."
            )
    hoists = plan.hoists
    full_operands = [_struct(v.aval) for v in marker.invars]
    small_operands = [_struct(v.aval) for v in small.invars]
    made = jax.make_jaxpr(lambda *xs: list(hoisted_values(plan, xs).values()))(*full_operands)
    hoist_types = {h.key: _struct(t) for h, t in zip(hoists, made.out_avals, strict=True)}
    hoist_rows = [h.rows for h in hoists]
    hoist_structs = [_rows_struct(hoist_types[h.key], h.rows, plan.setting.n) for h in hoists]
    index = [jax.ShapeDtypeStruct((), np.int32)] if needs_index(plan) else []

    def one(*flat: Any) -> list[Any]:
        given = list(flat)
        number = given.pop(0) if index else None
        operands, hoisted = given[: len(kinds)], given[len(kinds) :]
        loss, taps = loss_of_microbatch(
            plan, number, operands, {h.key: x for h, x in zip(hoists, hoisted, strict=True)}
        )
        return [loss, *taps]

    closed = jax.make_jaxpr(one)(*index, *small_operands, *hoist_structs)
    loss, consts = flatten(closed.jaxpr, list(closed.consts), markers=True)
    # hoisted values and auxiliary results as equations of the outer jaxpr
    hoisted_vars: list[Any] = []
    eqns = _others(outer)
    if hoists:
        extra, hoisted_vars = _spliced(made, list(marker.invars))
        eqns += extra
    outer, values, operands = _with_constants(outer, values, marker, loss, consts)
    loss = loss.replace(constvars=[], invars=[*loss.constvars, *loss.invars])
    offset = len(consts) + len(index)
    wrt = tuple(offset + i for i in plan.wrt)
    arguments = (*outer.constvars, *outer.invars)
    maker = Sources(arguments)
    atoms = [*operands[: len(consts)], *([None] if index else []), *operands[len(consts) :], *hoisted_vars]
    rows: list[Rows | None] = [*[None] * offset, *(k if isinstance(k, Rows) else None for k in kinds), *hoist_rows]
    inputs, env = maker.inputs(atoms, wrt, loss.invars, lambda i: rows[i])
    forward = rewired(loss, [v for v in loss.invars if v not in env], env, loss.outvars)
    wanted, kept = _distinct(forward)
    forward = forward.replace(outvars=wanted)
    tap_kinds = [plan.body.facts[v].kind for v in plan.after.taps]
    outs = [Sum(), *tap_kinds]
    combine = [outs[kept.index(k)] for k in range(len(wanted))]
    tap_avals = [plan.body.full.outvars[0].aval, *(v.aval for v in plan.after.taps)]

    def aux(combined: Sequence[Var]) -> tuple[list[JaxprEqn], list[Any]]:
        if not plan.body.full.outvars[1:]:
            return [], []
        taps = [combined[p] if isinstance(p, int) else _aux(p, combined, forward, atoms, loss) for p in kept[1:]]
        made = jax.make_jaxpr(
            lambda xs, hs, ts: after_values(plan, xs, {h.key: x for h, x in zip(hoists, hs, strict=True)}, ts)
        )(full_operands, [hoist_types[h.key] for h in hoists], [_struct(v.aval) for v in plan.after.taps])
        return _spliced(made, [*marker.invars, *hoisted_vars, *taps])

    return _parts(
        outer=outer.replace(eqns=_in_order(outer, marker, eqns)),
        marker=marker,
        wrt=wrt,
        forward=forward,
        inputs=inputs,
        before=_before(outer, arguments, maker.before, eqns, name),
        aux=aux,
        combine=tuple(combine),
        out_avals=[tap_avals[kept.index(k)] for k in range(len(wanted))],
        consts=values,
        call=call,
        name=name,
    )


def _in_order(outer: Jaxpr, marker: JaxprEqn, eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """The outer equations with what is not the marker's before it: hoisted values need only its operands."""
    at = next(i for i, eqn in enumerate(outer.eqns) if eqn is marker)
    extra = eqns[len(outer.eqns) - 1 :]
    return [*outer.eqns[:at], *extra, *outer.eqns[at:]]


def _before(outer: Jaxpr, arguments: Sequence[Var], wanted: list[Any], eqns: Sequence[JaxprEqn], name: str) -> Jaxpr:
    """What makes the values that the loss takes. Equations with effects are the update's, which has all of them."""
    needed = {v for v in wanted if isinstance(v, Var)}
    chosen: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        if eqn.effects:
            raise TraceError(
                f"{name}: the loss takes what {eqn.primitive.name} ({source_line(eqn)}) gives, which has effects: a "
                "pipeline's stages would each call it. Call it outside the step, and pass its result as an argument"
            )
        chosen.append(eqn)
        needed.update(v for v in eqn.invars if isinstance(v, Var))
    return plain(outer, list(arguments), wanted, chosen[::-1])


def _others(outer: Jaxpr) -> list[JaxprEqn]:
    return [eqn for eqn in outer.eqns if eqn.primitive is not grad_p]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _rows_struct(full: Any, rows: Rows | None, n: int) -> jax.ShapeDtypeStruct:
    shape = tuple(s // n if rows is not None and d == rows.dim else s for d, s in enumerate(full.shape))
    return jax.ShapeDtypeStruct(shape, full.dtype, weak_type=bool(getattr(full, "weak_type", False)))


def _spliced(closed: ClosedJaxpr, operands: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and results of ``closed`` on ``operands``."""
    jaxpr = without_constants(*flatten(closed.jaxpr, list(closed.consts), markers=True))
    env: Env = dict(zip(jaxpr.invars, operands, strict=True))
    eqns = renamed(jaxpr.eqns, env)
    return eqns, [env.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]


# --- what both share -------------------------------------------------------------------------------------------


def _parts(
    *,
    outer: Jaxpr,
    marker: JaxprEqn,
    wrt: tuple[int, ...],
    forward: Jaxpr,
    inputs: tuple[Input, ...],
    before: Jaxpr,
    aux: Callable[[Sequence[Var]], tuple[list[JaxprEqn], list[Any]]],
    combine: tuple[Kind, ...],
    out_avals: Sequence[Any],
    consts: Sequence[Any],
    call: Call,
    name: str,
) -> Parts:
    """The parts, with the marker's results in the update as inputs, or as what ``aux`` makes of them."""
    combined = [Var(aval) for aval in out_avals]
    extra, flat_aux = aux(combined)
    num_aux = len(flat_aux)
    grads = marker.outvars[1 + num_aux :]
    env: Env = {marker.outvars[0]: combined[0]}
    env.update(zip(marker.outvars[1 : 1 + num_aux], flat_aux, strict=True))
    used = {v for eqn in forward.eqns for v in eqn.invars if isinstance(v, Var)}
    trained = [v for v, source in zip(forward.invars, inputs, strict=True) if source.trained]
    fresh: list[Var] = []
    unused: list[JaxprEqn] = []
    for var, grad in zip(_in_wrt_order(trained, wrt), grads, strict=True):
        new = fresh_var(grad)
        env[grad] = new
        if var in used:
            fresh.append(new)
        else:
            unused.append(zeros(new, like=marker))
    eqns: list[JaxprEqn] = []
    for eqn in outer.eqns:
        eqns += [*extra, *unused] if eqn is marker else [eqn]
    arguments = [*outer.constvars, *outer.invars]
    update = rewired(
        outer.replace(constvars=[], invars=[*fresh, *combined, *arguments], eqns=eqns),
        [*fresh, *combined, *arguments],
        env,
        outer.outvars,
    )
    keep = [i for i, v in enumerate(forward.invars) if v in used]
    return Parts(
        before=before,
        forward=forward.replace(invars=[forward.invars[i] for i in keep]),
        inputs=tuple(inputs[i] for i in keep),
        update=update,
        combine=combine,
        consts=tuple(consts),
        call=call,
        name=name,
        differentiated=True,
    )


def _in_wrt_order(trained: list[Var], wrt: tuple[int, ...]) -> list[Var]:
    """``trained``, which is in the order of the loss's inputs, in the order of ``wrt``."""
    rank = {position: k for k, position in enumerate(sorted(wrt))}
    return [trained[rank[position]] for position in wrt]


def _forward_only(outer: Jaxpr, values: list[Any], call: Call, name: str, batch: _Batch) -> Parts:
    """A step without gradients: all of it is forward, and the update hands its results on."""
    arguments = [*outer.constvars, *outer.invars]
    dims: list[int | None] = [*[None] * len(outer.constvars), *batch.dims]
    forward = outer.replace(constvars=[], invars=arguments)
    made = {v for eqn in forward.eqns for v in eqn.outvars}
    wanted = list(dict.fromkeys(v for v in forward.outvars if isinstance(v, Var) and v in made))
    combined = [fresh_var(v) for v in wanted]
    env: Env = dict(zip(wanted, combined, strict=True))
    outs = [env.get(v, v) if isinstance(v, Var) else v for v in forward.outvars]
    empty = outer.replace(constvars=[], invars=[*combined, *arguments], eqns=[], outvars=outs)
    used = {v for eqn in forward.eqns for v in eqn.invars if isinstance(v, Var)}
    keep = [i for i, v in enumerate(arguments) if v in used]
    rows = [None if d is None else Rows(dim=d) for d in dims]
    return Parts(
        before=outer.replace(constvars=[], invars=arguments, eqns=[], outvars=[]),
        forward=forward.replace(invars=[arguments[i] for i in keep], outvars=wanted),
        inputs=tuple(Input(source=FROM_ARGUMENT, which=i, rows=rows[i]) for i in keep),
        update=empty,
        combine=tuple([Sum()] * len(wanted)),
        consts=tuple(values),
        call=call,
        name=name,
        differentiated=False,
    )
