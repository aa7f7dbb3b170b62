"""Two traces of one loss, at the full batch and at one microbatch → what every value is to its counterpart.

`analyse` walks both equation lists together. A value's `Kind` follows from its operands' by the primitive's record
(`primitives.batch`) or by its bodies (`bodies`). A value that is no `Same` or `Rows` but does not depend on what is
differentiated by is *hoisted*: computed once, on the full batch, before the loop over microbatches (a masked mean's
denominator, ``arange(batch)``, random numbers of a generator that cannot draw a slice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from autopar.frontend.algebra import evaluated
from autopar.frontend.microbatch.analysed import (
    Body,
    Setting,
    Step,
    from_shapes,
    params_equal,
)
from autopar.frontend.microbatch.bodies import BODY_RULES, is_made_of_others, made_of_others
from autopar.frontend.microbatch.constants import Constants
from autopar.frontend.microbatch.counted import counts, sorted_by_group
from autopar.frontend.microbatch.inline import bodies, flatten
from autopar.frontend.microbatch.same_program import check_same_equations, different, where
from autopar.frontend.to_graph import node_of
from autopar.frontend.user_rules import registered_rules
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from autopar.primitives import PRIMITIVES, record_of, rule_for
from autopar.primitives.batch import kinds_through
from autopar.primitives.kinds import Coupled, Fact, InOrder, Kind, Max, Min, Rows, Same, Sorted, Sum, name, split_size
from autopar.primitives.view import View, differing


def analyse(
    full: Jaxpr,
    full_consts: Sequence[Any],
    small: Jaxpr,
    small_consts: Sequence[Any],
    facts: Sequence[Fact],
    setting: Setting,
    *,
    hoistable: bool = True,
    outside: Sequence[Any] = (),
    outer: Constants | None = None,
) -> Body:
    """Compares two traces of one function whose inputs are described by ``facts``.

    Args:
        full, full_consts: the trace at the full batch, and its constants.
        small, small_consts: likewise at one microbatch.
        hoistable: False inside bodies whose values cannot be computed before the loop over microbatches.
        outside, outer: of a body that is inside another, as in `Constants`.

    Raises:
        MicrobatchError: the traces are not the same list of equations.
    """
    full, full_values = flatten(full, list(full_consts), markers=True)
    small, _ = flatten(small, list(small_consts), markers=True)
    body = Body(full=full, small=small, full_consts=full_values)
    check_same_equations(full, small)
    for var, fact in zip(full.invars, facts, strict=True):
        body.facts[var] = fact
    for a, b in zip(full.constvars, small.constvars, strict=True):
        body.facts[a] = Fact(kind=from_shapes(a.aval.shape, b.aval.shape, setting), trained=False)
    constants = Constants(full, outside, outer)
    inside = partial(analyse, outer=constants)
    same_var: dict[Var, Var] = dict(
        zip((*full.constvars, *full.invars), (*small.constvars, *small.invars), strict=True)
    )
    for a, b in zip(full.eqns, small.eqns, strict=True):
        for x, y in zip(a.invars, b.invars, strict=True):
            if isinstance(x, Literal) != isinstance(y, Literal) or (isinstance(x, Var) and same_var[x] is not y):
                raise different(a, b, "uses other operands")
        same_var.update(zip(a.outvars, b.outvars, strict=True))
        body.steps.append(_step(body, inside, a, b, setting, constants, hoistable))
    return body


def _step(
    body: Body,
    inside: Callable[..., Body],
    full: JaxprEqn,
    small: JaxprEqn,
    setting: Setting,
    constants: Constants,
    hoistable: bool,
) -> Step:
    inputs = [body.fact(a) for a in full.invars]
    trained = any(f.trained for f in inputs)
    kinds = [f.kind for f in inputs]
    shapes_same = all(a.aval.shape == b.aval.shape for a, b in zip(full.outvars, small.outvars, strict=True))
    step = Step(full=full, small=small, same=False)
    trains = [trained] * len(full.outvars)
    coupled = next((k for k in kinds if isinstance(k, Coupled)), None)
    if coupled is not None and _orders_lines(full, kinds, setting, constants):
        coupled = None
    ruled = trained and _has_backward_rule(full)
    if coupled is None and shapes_same and all(isinstance(k, Same) for k in kinds) and not ruled:
        step.same = True
        outs: list[Kind] = [Same()] * len(full.outvars)
    elif full.primitive.name in BODY_RULES:
        out_facts = BODY_RULES[full.primitive.name](inside, step, inputs, setting, hoistable)
        outs, trains = [f.kind for f in out_facts], [f.trained for f in out_facts]
    elif coupled is not None:
        sorting = sorted_by_group(full, constants)
        outs = [coupled if sorting is None else Sorted(sorting=sorting, dim=0)] * len(full.outvars)
    elif full.primitive.name not in PRIMITIVES and is_made_of_others(full):
        out_facts = made_of_others(inside, step, inputs, setting)
        outs, trains = [f.kind for f in out_facts], [f.trained for f in out_facts]
    else:
        outs = _by_rule(step, kinds, setting, constants)
    if step.bodies:  # one jaxpr may be the body of several equations, and its sorts are other ones in each
        known = {k.sorting for k in kinds if isinstance(k, InOrder)}
        outs = [_left(full, k) if isinstance(k, InOrder) and k.sorting not in known else k for k in outs]
    for i, (a, b) in enumerate(zip(full.outvars, small.outvars, strict=True)):
        outs[i] = checked(outs[i], a.aval.shape, b.aval.shape, setting, full)
        if hoistable and not trains[i] and not isinstance(outs[i], (Same, Rows)) and not full.effects:
            kind = from_shapes(a.aval.shape, b.aval.shape, setting)
            if not isinstance(kind, Coupled):
                outs[i] = kind
                step.hoisted += (i,)
        body.facts[a] = Fact(kind=outs[i], trained=trains[i])
        constants.kinds[a] = outs[i]
    return step


def _orders_lines(eqn: JaxprEqn, kinds: Sequence[Kind], setting: Setting, constants: Constants) -> bool:
    """True where all that is coupled numbers rows, and is put in order. It could not be hoisted: each microbatch makes
    its own."""
    ordered = eqn.primitive.name == "sort" or any(isinstance(k, InOrder) for k in kinds)
    if not ordered or record_of(eqn.primitive.name).sorted_batch is None:
        return False
    coupled = [a for a, k in zip(eqn.invars, kinds, strict=True) if isinstance(k, Coupled)]
    return all(constants.numbers(a, setting.batch) is not None for a in coupled)


def _left(eqn: JaxprEqn, kind: Kind) -> Coupled:
    return Coupled(f"{where(eqn)} gives a {name(kind)}; the sort and what puts rows back have to be inside, or outside")


def _has_backward_rule(eqn: JaxprEqn) -> bool:
    """True if a custom_vjp is inside. Its rule may not be linear in the cotangent, of which a microbatch has a part."""
    return eqn.primitive.name == "custom_vjp_call" or any(_has_backward_rule(e) for b in bodies(eqn) for e in b.eqns)


def _by_rule(step: Step, kinds: list[Kind], setting: Setting, constants: Constants) -> list[Kind]:
    full, small = step.full, step.small
    view = View(
        traced=lambda whole: node_of(full if whole else small),
        kinds=kinds,
        results=len(full.outvars),
        n=setting.n,
        batch=setting.batch,
        blocks_first=setting.blocks_first,
        constant=lambda operand, component: constants.component(full.invars[operand], component),
        scalar=lambda operand: constants.scalar(full.invars[operand]),
        numbers=lambda operand, examples: constants.numbers(full.invars[operand], examples),
        variable=lambda operand: constants.origin(full.invars[operand])[0],
        counts=lambda operand, key: counts(full.invars[operand], key, constants),
        evaluated=lambda operands: evaluated(full, operands),
    )
    record = record_of(full.primitive.name)
    outs = kinds_through(view, record, lambda: rule_for(view.full, registered_rules()))
    if all(isinstance(k, Coupled) for k in outs):
        return outs
    follows = any(isinstance(k, (Rows, InOrder)) for k in (*kinds, *outs))
    if not params_equal(full, small, besides=record.sized if follows else frozenset()):
        return [view.fail("has a parameter that depends on the batch size")] * len(outs)
    step.masked = frozenset(view.masked)
    step.action, step.chosen = view.action, view.chosen
    return outs


def checked(kind: Kind, full: tuple[int, ...], small: tuple[int, ...], setting: Setting, eqn: JaxprEqn) -> Kind:
    """``kind`` where the shapes of both traces fit it, else `Coupled` with the reason; ``full``, ``small``: a value's
    shape in each."""
    changed = differing(full, small)
    match kind:
        case Rows():
            fits = changed == [kind.dim] and full[kind.dim] == setting.n * small[kind.dim]
            if fits and split_size(kind, full[kind.dim], setting.n) is not None:
                return kind
            return Coupled(f"{where(eqn)} makes {full} of the full batch and {small} of a microbatch")
        case InOrder():
            fits = changed == [kind.dim] and full[kind.dim] == kind.sorting.size == setting.n * small[kind.dim]
            return kind if fits else Coupled(f"{where(eqn)} makes {full} of the full batch and {small} of a microbatch")
        case Same() | Sum() | Max() | Min() if changed:
            return Coupled(f"{where(eqn)} makes {full} of the full batch and {small} of a microbatch")
        case _:
            return kind
