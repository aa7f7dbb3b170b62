"""Kinds through operations that hold a body: scan, while, cond, remat and custom derivative rules.

A carried value's kind is a fixed point: it starts as the initial value's and joins with what the body makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar.frontend.microbatch.analysed import Body, Setting, Step
from autopar.frontend.microbatch.constants import Constants
from autopar.frontend.microbatch.same_program import where
from autopar.frontend.opened_calls import known_primitives, opened
from autopar.frontend.traced_apart import traced_apart
from autopar.ir.errors import MicrobatchError, TraceError
from autopar.jax_compat import bind, differentiable, scan_counts
from autopar.primitives.kinds import Coupled, Fact, InOrder, Kind, Max, Min, Rows, Same, Sorted, Sum, join, name
from autopar.primitives.view import default_layout

Analyse = Callable[..., Body]
"""`analyse.analyse`, which these rules call for their bodies."""

BodyRule = Callable[[Analyse, Step, list[Fact], Setting, bool], list[Fact]]
"""(`analyse`, the step, facts of its operands, setting, whether values inside may be hoisted) → facts of its results.
Sets the step's ``bodies`` and ``masked``. What is not exact comes out as `Coupled`, with the reason."""


def _joined(a: Fact, b: Fact) -> Fact:
    return Fact(kind=join(a.kind, b.kind), trained=a.trained or b.trained)


def _masks(outs: list[Fact], wanted: list[Fact]) -> frozenset[int]:
    """Results that are the same in every microbatch where a sum is wanted: they count in microbatch 0 only."""
    pairs = zip(outs, wanted, strict=True)
    return frozenset(i for i, (a, b) in enumerate(pairs) if isinstance(a.kind, Same) and isinstance(b.kind, Sum))


def _coupled(step: Step, facts: list[Fact], why: str) -> list[Fact]:
    reason = next((f.kind for f in facts if isinstance(f.kind, Coupled)), Coupled(f"{where(step.full)} {why}"))
    return [Fact(kind=reason, trained=any(f.trained for f in facts))] * len(step.full.outvars)


def scan(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting, hoistable: bool) -> list[Fact]:
    """A scan over layers, time or chunks; over the examples themselves only without a carry. See `BodyRule`."""
    num_consts, num_carry = scan_counts(step.full)
    full, small = step.full.params["jaxpr"], step.small.params["jaxpr"]
    consts, carry, xs = facts[:num_consts], facts[num_consts : num_consts + num_carry], facts[num_consts + num_carry :]
    over_examples = step.full.params["length"] != step.small.params["length"]
    if over_examples:
        if num_carry or not all(isinstance(f.kind, Same) for f in consts):
            return _coupled(step, facts, "loops over the examples of the batch with a carry")
        if not all(isinstance(f.kind, Rows) and f.kind.dim == 0 for f in xs):
            return _coupled(step, facts, "loops over the examples of the batch and something else")
        inner = [Fact(kind=Same(), trained=f.trained) for f in xs]
    else:
        inner = [_unstacked(f) for f in xs]
    while True:
        body = analyse(
            full.jaxpr, full.consts, small.jaxpr, small.consts, [*consts, *carry, *inner], setting,
            hoistable=hoistable and not over_examples, outside=step.full.invars[:num_consts],
        )  # fmt: skip
        after = [_joined(a, b) for a, b in zip(carry, body.outs[:num_carry], strict=True)]
        if after == carry:
            break
        carry = after
    ys = body.outs[num_carry:]
    step.bodies = (body,)
    step.masked = frozenset(num_consts + i for i in _masks(facts[num_consts : num_consts + num_carry], carry))
    body.out_masks = _masks(body.outs[:num_carry], carry)
    if over_examples:
        merged = default_layout(0, step.full.params["length"], setting.batch, setting.blocks_first)
        for f in xs:
            merged = f.kind if isinstance(f.kind, Rows) and not f.kind.uniform else merged
        return [Fact(kind=merged if isinstance(f.kind, Same) else f.kind, trained=f.trained) for f in ys]
    return [*carry, *(_stacked(f) for f in ys)]


def _unstacked(fact: Fact) -> Fact:
    if not isinstance(fact.kind, (Rows, InOrder)):
        return fact
    return Fact(kind=fact.kind.at(fact.kind.dim - 1), trained=fact.trained)


def _stacked(fact: Fact) -> Fact:
    if not isinstance(fact.kind, (Rows, InOrder)):
        return fact
    return Fact(kind=fact.kind.at(fact.kind.dim + 1), trained=fact.trained)


def while_(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting, hoistable: bool) -> list[Fact]:
    """A while loop whose number of turns does not depend on the batch; or each example's on itself alone, under vmap.
    See `BodyRule`."""
    full, small = step.full.params, step.small.params
    split = full["cond_nconsts"], full["cond_nconsts"] + full["body_nconsts"]
    cond_consts, consts, carry = facts[: split[0]], facts[split[0] : split[1]], facts[split[1] :]
    start = carry
    while True:
        body = analyse(
            full["body_jaxpr"].jaxpr, full["body_jaxpr"].consts, small["body_jaxpr"].jaxpr,
            small["body_jaxpr"].consts, [*consts, *carry], setting, hoistable=False,
            outside=step.full.invars[split[0] : split[1]],
        )  # fmt: skip
        after = [_joined(a, b) for a, b in zip(carry, body.outs, strict=True)]
        if after == carry:
            break
        carry = after
    test = analyse(
        full["cond_jaxpr"].jaxpr, full["cond_jaxpr"].consts, small["cond_jaxpr"].jaxpr, small["cond_jaxpr"].consts,
        [*cond_consts, *carry], setting, hoistable=False,
    )  # fmt: skip
    decides = test.outs[0]
    each = bool(full["cond_jaxpr"].out_avals[0].shape) and isinstance(decides.kind, Rows)
    if not each and not isinstance(decides.kind, Same):
        return _coupled(step, facts, f"decides when to stop by a {name(decides.kind)}")
    body.out_masks = _masks(body.outs, carry)
    step.bodies = (test, body)
    step.masked = frozenset(split[1] + i for i in _masks(start, carry))
    return [Fact(kind=f.kind, trained=f.trained or decides.trained) for f in carry]


def cond(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting, hoistable: bool) -> list[Fact]:
    """A cond whose index does not depend on the batch. See `BodyRule`."""
    index, operands = facts[0], facts[1:]
    if not isinstance(index.kind, Same):
        return _coupled(step, facts, f"chooses a branch by a {name(index.kind)}")
    branches = [
        analyse(a.jaxpr, a.consts, b.jaxpr, b.consts, operands, setting, hoistable=False, outside=step.full.invars[1:])
        for a, b in zip(step.full.params["branches"], step.small.params["branches"], strict=True)
    ]
    outs = branches[0].outs
    for branch in branches[1:]:
        outs = [_joined(a, b) for a, b in zip(outs, branch.outs, strict=True)]
    for branch in branches:
        branch.out_masks = _masks(branch.outs, outs)
    step.bodies = tuple(branches)
    return [Fact(kind=f.kind, trained=f.trained or index.trained) for f in outs]


def remat(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting, hoistable: bool) -> list[Fact]:
    """A rematerialised body. See `BodyRule`."""
    full, small = step.full.params["jaxpr"], step.small.params["jaxpr"]
    body = analyse(full, (), small, (), facts, setting, hoistable=hoistable, outside=step.full.invars)
    step.bodies = (body,)
    return body.outs


def custom(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting, hoistable: bool) -> list[Fact]:
    """A call with derivative rules of its own: neither its body nor these may depend on the batch size. See
    `BodyRule`."""
    full, small = step.full.params["call_jaxpr"], step.small.params["call_jaxpr"]
    body = analyse(
        full.jaxpr, full.consts, small.jaxpr, small.consts, facts, setting, hoistable=False, outside=step.full.invars
    )
    step.bodies = (body,)
    if not body.plain:
        return _coupled(step, facts, "has derivative rules of its own and a body that needs the full batch's size")
    outs = body.outs
    if any(isinstance(f.kind, Coupled) for f in outs) or not any(f.trained for f in outs):
        return outs
    if setting.checked and _what(step.full) in setting.checked:
        return outs
    check = _check_forward if step.full.primitive.name == "custom_jvp_call" else _check_backward
    problem = check(analyse, step, facts, outs, setting)
    return outs if problem is None else [Fact(kind=Coupled(problem), trained=f.trained) for f in outs]


def is_made_of_others(eqn: Any) -> bool:
    """True for operators that no rule describes, and that are implemented by others."""
    return opened(eqn, known_primitives()) is not None


def made_of_others(analyse: Analyse, step: Step, facts: list[Fact], setting: Setting) -> list[Fact]:
    """An operator that no rule describes, by the equations it is made of; and by its derivative rule, where it is
    differentiated. As `BodyRule`, with nothing hoisted."""
    full, small = (opened(eqn, known_primitives()) for eqn in (step.full, step.small))
    if full is None or small is None:
        return _coupled(step, facts, "is made of other operators at one size only")
    body = analyse(
        full.jaxpr, full.consts, small.jaxpr, small.consts, facts, setting, hoistable=False, outside=step.full.invars
    )
    if not body.plain:
        return _coupled(step, facts, "needs the full batch's size")
    outs = body.outs
    derived = any(f.trained for f in outs) and differentiable(step.full.primitive)
    derived = derived and not (setting.checked and _what(step.full) in setting.checked)
    if any(isinstance(f.kind, Coupled) for f in outs) or not derived:
        return outs
    problem = _check_forward(analyse, step, facts, outs, setting)
    return outs if problem is None else [Fact(kind=Coupled(problem), trained=f.trained) for f in outs]


def _what(eqn: Any) -> str:
    """What an operator computes, by which its derivative rule is known again inside that rule."""
    return f"{eqn.primitive.name} {eqn.params.get('call_jaxpr', '')}"


def _check_forward(analyse: Analyse, step: Step, facts: list[Fact], outs: list[Fact], setting: Setting) -> str | None:
    """None if the rule pushes each microbatch's part of a tangent to its part of the result's tangent, which makes its
    transpose add up over microbatches; else why not."""
    trained = [i for i in _inexact(step.full.invars) if facts[i].trained]
    results = _inexact(step.full.outvars)

    def traced(eqn: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

        def forward(operands: list[Any], tangents: list[Any]) -> list[Any]:
            run = _as_function(eqn, operands, trained, results)
            return jax.jvp(run, [operands[i] for i in trained], tangents)[1]

        return traced_apart(forward, structs, [structs[i] for i in trained])

    try:
        full, small = traced(step.full), traced(step.small)
    except TraceError as error:
        return f"{where(step.full)}: {error}"
    primals = [Fact(kind=f.kind, trained=False) for f in facts]  # rules inside the rule are of higher derivatives
    given = [*primals, *(facts[i] for i in trained)]
    setting = replace(setting, checked=setting.checked | {_what(step.full)})
    try:
        body = analyse(
            full.jaxpr, full.consts, small.jaxpr, small.consts, given, setting, hoistable=False,
            outside=step.full.invars,
        )  # fmt: skip
    except MicrobatchError as error:
        return f"{where(step.full)} has a derivative rule that differs with the batch size: {error}"
    if not body.plain:
        return f"{where(step.full)} has a derivative rule that uses the batch size"
    constants = Constants(body.full)
    for i, atom, fact in zip(results, body.full.outvars, body.outs, strict=True):
        zero = constants.value(atom)
        if zero is not None and not np.any(zero):
            continue
        wanted = outs[i].kind
        adds_up = isinstance(wanted, (Rows, Same, Sum, Sorted)) and type(fact.kind) is type(wanted)
        if not adds_up or join(fact.kind, wanted) != wanted:
            why = fact.kind.reason if isinstance(fact.kind, Coupled) else f"the tangent is a {name(fact.kind)}"
            return f"{where(step.full)} has a derivative rule that does not add up over microbatches: {why}"
    return None


def _inexact(variables: Sequence[Any]) -> list[int]:
    return [i for i, v in enumerate(variables) if jax.dtypes.issubdtype(v.aval.dtype, np.inexact)]


def _as_function(
    eqn: Any, operands: Sequence[Any], chosen: Sequence[int], results: Sequence[int]
) -> Callable[..., list[Any]]:
    """``results`` of ``eqn`` at ``operands`` as a function of those that are ``chosen``."""

    def run(*given: Any) -> list[Any]:
        values = list(operands)
        for i, value in zip(chosen, given, strict=True):
            values[i] = value
        found = bind(eqn, *values)
        return [found[i] for i in results]

    return run


def _check_backward(analyse: Analyse, step: Step, facts: list[Fact], outs: list[Fact], setting: Setting) -> str | None:
    """None if the derivative rules give each microbatch its part of the gradient, else why not."""
    floating, results = _inexact(step.full.invars), _inexact(step.full.outvars)
    if not floating or not results:
        return None
    for i in results:
        if isinstance(outs[i].kind, (Max, Min)):
            return f"{where(step.full)} has derivative rules of its own and takes an extreme over the batch"

    def traced(eqn: Any) -> Any:
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        cotangents = [jax.ShapeDtypeStruct(eqn.outvars[i].aval.shape, eqn.outvars[i].aval.dtype) for i in results]

        def backward(operands: list[Any], cts: list[Any]) -> Any:
            run = _as_function(eqn, operands, floating, results)
            return jax.vjp(run, *(operands[i] for i in floating))[1](cts)

        return traced_apart(backward, structs, cotangents)

    try:
        full, small = traced(step.full), traced(step.small)
    except TraceError as error:
        return f"{where(step.full)}: {error}"
    dual: dict[type, Kind] = {Same: Sum(), Sum: Same()}
    primals = [Fact(kind=f.kind, trained=False) for f in facts]  # rules inside the rule are of higher derivatives
    cotangents = [Fact(kind=dual.get(type(outs[i].kind), outs[i].kind), trained=False) for i in results]
    try:
        body = analyse(
            full.jaxpr, full.consts, small.jaxpr, small.consts, [*primals, *cotangents], setting, hoistable=False,
            outside=step.full.invars,
        )  # fmt: skip
    except MicrobatchError as error:
        return f"{where(step.full)} has derivative rules that differ with the batch size: {error}"
    if not body.plain:
        return f"{where(step.full)} has derivative rules that use the batch size"
    constants = Constants(body.full)
    for i, atom, fact in zip(floating, body.full.outvars, body.outs, strict=True):
        wanted = dual.get(type(facts[i].kind), facts[i].kind)
        zero = constants.value(atom)
        if zero is not None and not np.any(zero):
            continue
        each = isinstance(wanted, (Rows, Sorted))
        if type(fact.kind) is not type(wanted) or (each and join(fact.kind, wanted) != wanted):
            why = fact.kind.reason if isinstance(fact.kind, Coupled) else f"operand {i} gets a {name(fact.kind)}"
            return f"{where(step.full)} has derivative rules that do not add up over microbatches: {why}"
    return None


BODY_RULES: dict[str, BodyRule] = {
    "scan": scan,
    "while": while_,
    "cond": cond,
    "remat2": remat,
    "checkpoint": remat,
    "custom_jvp_call": custom,
    "custom_vjp_call": custom,
}
"""Primitives with bodies → how to analyse them."""
