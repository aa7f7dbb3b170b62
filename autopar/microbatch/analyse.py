"""Two traces of one loss, at the full batch and at one microbatch → what every value is to its counterpart.

`analyse` walks both equation lists together. A value's `Kind` follows from its operands' by the rules of
`rules_shape`, `rules_index` and `bodies`. A value that is no `Same` or `Rows` but does not depend on what is
differentiated by is *hoisted*: computed once, on the full batch, before the loop over microbatches (a masked
mean's denominator, ``arange(batch)``, random numbers of a generator that cannot draw a slice).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.ir.errors import MicrobatchError
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from autopar.microbatch.constants import Constants
from autopar.microbatch.inline import bodies, flatten
from autopar.microbatch.kinds import Coupled, Fact, Kind, Max, Min, Rows, Same, Sum, split_size
from autopar.microbatch.rules_index import INDEX_RULES
from autopar.microbatch.rules_shape import SHAPE_RULES, Rule
from autopar.microbatch.view import Action, View, default_layout, differing, where

RULES: dict[str, Rule] = {**SHAPE_RULES, **INDEX_RULES}

SHAPE_PARAMETERS = frozenset({"shape", "new_sizes", "start_indices", "limit_indices", "slice_sizes", "sizes"})
"""Parameters that follow the operands' shapes: a microbatch has its own."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """n microbatches of a batch; ``blocks_first`` orders dimensions that nothing else orders (see `Rows`)."""

    n: int
    batch: int
    blocks_first: bool = False


@dataclass(kw_only=True)
class Step:
    """One equation in both traces. ``same``: it is bound as in the full trace. ``hoisted``: results that come from
    the full batch. ``bodies``: its analysed bodies, in the order of `bodies.BODY_RULES`."""

    full: JaxprEqn
    small: JaxprEqn
    same: bool
    masked: frozenset[int] = frozenset()
    action: Action | None = None
    hoisted: tuple[int, ...] = ()
    bodies: tuple[Body, ...] = ()

    @property
    def plain(self) -> bool:
        """True if binding the microbatch trace's equation is all there is to do."""
        if self.masked or self.action or self.hoisted or not all(b.plain for b in self.bodies):
            return False
        if self.same and not params_equal(self.full, self.small):
            return False
        return all(literals_equal(a, b) for a, b in zip(self.full.invars, self.small.invars, strict=True))


@dataclass(kw_only=True)
class Body:
    """An analysed jaxpr: both traces inlined, a fact for every variable of the full one. ``out_masks``: results that
    count in microbatch 0 only."""

    full: Jaxpr
    small: Jaxpr
    full_consts: list[Any]
    steps: list[Step] = field(default_factory=list)
    facts: dict[Var, Fact] = field(default_factory=dict)
    out_masks: frozenset[int] = frozenset()

    def fact(self, atom: Any) -> Fact:
        """What is known of an operand."""
        return Fact(kind=Same(), trained=False) if isinstance(atom, Literal) else self.facts[atom]

    @property
    def outs(self) -> list[Fact]:
        """The facts of the results, before ``out_masks``."""
        return [self.fact(v) for v in self.full.outvars]

    @property
    def plain(self) -> bool:
        """True if the microbatch trace can be used as it is."""
        if self.out_masks or not all(s.plain for s in self.steps):
            return False
        return all(literals_equal(a, b) for a, b in zip(self.full.outvars, self.small.outvars, strict=True))

    @property
    def hoists(self) -> bool:
        """True if anything inside is hoisted."""
        return any(s.hoisted or any(b.hoists for b in s.bodies) for s in self.steps)


def analyse(
    full: Jaxpr,
    full_consts: Sequence[Any],
    small: Jaxpr,
    small_consts: Sequence[Any],
    facts: Sequence[Fact],
    setting: Setting,
    *,
    hoistable: bool = True,
) -> Body:
    """Compares two traces of one function whose inputs are described by ``facts``.

    Raises:
        MicrobatchError: the traces are not the same list of equations.
    """
    full, full_values = flatten(full, list(full_consts), markers=True)
    small, small_values = flatten(small, list(small_consts), markers=True)
    body = Body(full=full, small=small, full_consts=full_values)
    _compare_lists(full, small)
    for var, fact in zip(full.invars, facts, strict=True):
        body.facts[var] = fact
    for a, b in zip(full.constvars, small.constvars, strict=True):
        body.facts[a] = Fact(kind=from_shapes(a.aval.shape, b.aval.shape, setting), trained=False)
    producers = {v: eqn for eqn in full.eqns for v in eqn.outvars}
    constants = Constants(producers)
    same_var: dict[Var, Var] = dict(zip((*full.constvars, *full.invars), (*small.constvars, *small.invars), strict=True))
    for a, b in zip(full.eqns, small.eqns, strict=True):
        for x, y in zip(a.invars, b.invars, strict=True):
            if isinstance(x, Literal) != isinstance(y, Literal) or (isinstance(x, Var) and same_var[x] is not y):
                raise _different(a, b, "uses other operands")
        same_var.update(zip(a.outvars, b.outvars, strict=True))
        body.steps.append(_step(body, a, b, setting, constants, hoistable))
    return body


def _step(body: Body, full: JaxprEqn, small: JaxprEqn, setting: Setting, constants: Constants, hoistable: bool) -> Step:
    inputs = [body.fact(a) for a in full.invars]
    trained = any(f.trained for f in inputs)
    kinds = [f.kind for f in inputs]
    shapes_same = all(a.aval.shape == b.aval.shape for a, b in zip(full.outvars, small.outvars, strict=True))
    step = Step(full=full, small=small, same=False)
    trains = [trained] * len(full.outvars)
    coupled = next((k for k in kinds if isinstance(k, Coupled)), None)
    if coupled is None and shapes_same and all(isinstance(k, Same) for k in kinds):
        step.same = True
        outs: list[Kind] = [Same()] * len(full.outvars)
    elif full.primitive.name in BODY_RULES:
        out_facts = BODY_RULES[full.primitive.name](step, inputs, setting, hoistable)
        outs, trains = [f.kind for f in out_facts], [f.trained for f in out_facts]
    elif coupled is not None:
        outs = [coupled] * len(full.outvars)
    else:
        outs = _by_rule(step, kinds, setting, constants)
    for i, (a, b) in enumerate(zip(full.outvars, small.outvars, strict=True)):
        outs[i] = checked(outs[i], a.aval.shape, b.aval.shape, setting, full)
        if hoistable and not trains[i] and not isinstance(outs[i], (Same, Rows)) and not full.effects:
            kind = from_shapes(a.aval.shape, b.aval.shape, setting)
            if not isinstance(kind, Coupled):
                outs[i] = kind
                step.hoisted += (i,)
        body.facts[a] = Fact(kind=outs[i], trained=trains[i])
    return step


def _by_rule(step: Step, kinds: list[Kind], setting: Setting, constants: Constants) -> list[Kind]:
    count = len(step.full.outvars)
    view = View(
        full=step.full,
        small=step.small,
        kinds=kinds,
        n=setting.n,
        batch=setting.batch,
        blocks_first=setting.blocks_first,
        constant=constants.component,
    )
    rule = RULES.get(step.full.primitive.name)
    if rule is None:
        return [view.fail("has no rule for the batch dimension")] * count
    out = rule(view)
    outs = list(out) if isinstance(out, list) else [out] * count
    if all(isinstance(k, Coupled) for k in outs):
        return outs
    if not params_equal(step.full, step.small, besides=SHAPE_PARAMETERS):
        return [view.fail("has a parameter that depends on the batch size")] * count
    step.masked = frozenset(view.masked)
    step.action = view.action
    return outs


def checked(kind: Kind, full: tuple[int, ...], small: tuple[int, ...], setting: Setting, eqn: JaxprEqn) -> Kind:
    """``kind`` if the shapes of both traces bear it out."""
    changed = differing(full, small)
    match kind:
        case Rows():
            fits = changed == [kind.dim] and full[kind.dim] == setting.n * small[kind.dim]
            if fits and split_size(kind, full[kind.dim], setting.n) is not None:
                return kind
            return Coupled(f"{where(eqn)} makes {full} of the full batch and {small} of a microbatch")
        case Same() | Sum() | Max() | Min() if changed:
            return Coupled(f"{where(eqn)} makes {full} of the full batch and {small} of a microbatch")
        case _:
            return kind


def from_shapes(full: tuple[int, ...], small: tuple[int, ...], setting: Setting) -> Kind:
    """The kind of a value of the full batch that is at hand whole: `Same`, or `Rows` to be sliced."""
    changed = differing(full, small)
    if not changed:
        return Same()
    if len(changed) == 1 and full[changed[0]] == setting.n * small[changed[0]]:
        return default_layout(changed[0], full[changed[0]], setting.batch, setting.blocks_first)
    return Coupled(f"a value has shape {full} for the full batch and {small} for a microbatch")


def literals_equal(a: Any, b: Any) -> bool:
    """False for literals that differ, a batch size for one."""
    if not isinstance(a, Literal):
        return True
    if not isinstance(b, Literal):
        return False
    x, y = np.asarray(a.val), np.asarray(b.val)
    return x.shape == y.shape and bool(np.all((x == y) | ((x != x) & (y != y))))


def params_equal(a: JaxprEqn, b: JaxprEqn, besides: frozenset[str] = frozenset()) -> bool:
    """True if two equations have the same plain parameters (callables aside) and bodies with the same literals."""
    plain = (int, float, complex, str, tuple, bool, np.generic)
    for key, x in a.params.items():
        y = b.params[key]
        nan = isinstance(x, float) and isinstance(y, float) and x != x and y != y
        if key not in besides and isinstance(x, plain) and not _holds_objects(x) and x != y and not nan:
            return False
    return all(_bodies_equal(x, y) for x, y in zip(bodies(a), bodies(b), strict=True))


def _holds_objects(x: Any) -> bool:
    return isinstance(x, tuple) and any(isinstance(item, (ClosedJaxpr, Jaxpr)) or _holds_objects(item) for item in x)


def _bodies_equal(a: Jaxpr, b: Jaxpr) -> bool:
    if len(a.eqns) != len(b.eqns):
        return False
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if x.primitive is not y.primitive or not params_equal(x, y, besides=SHAPE_PARAMETERS):
            return False
        if not all(literals_equal(p, q) for p, q in zip(x.invars, y.invars, strict=True)):
            return False
    return all(literals_equal(p, q) for p, q in zip(a.outvars, b.outvars, strict=True))


def _compare_lists(full: Jaxpr, small: Jaxpr) -> None:
    for a, b in zip(full.eqns, small.eqns, strict=False):
        if a.primitive is not b.primitive:
            raise _different(a, b, f"is {b.primitive.name} instead")
        if [len(v.aval.shape) for v in a.outvars] != [len(v.aval.shape) for v in b.outvars]:
            raise _different(a, b, "has results of another rank")
    if len(full.eqns) != len(small.eqns):
        longer = max(full.eqns, small.eqns, key=len)
        extra = longer[min(len(full.eqns), len(small.eqns))]
        raise _different(extra, extra, "is there at one of both sizes only")


def _different(a: JaxprEqn, b: JaxprEqn, how: str) -> MicrobatchError:
    return MicrobatchError(
        f"{where(a)}: the loss is another program at the microbatch's size than at the full batch's: this operation "
        f"{how}. Microbatches are exact only where both traces have the same equations: do not branch on the batch "
        "size, and take sizes from the arrays' shapes, not from constants. (With one example per microbatch jax.numpy "
        "itself may branch, on dimensions of size 1: use at least two.)"
    )


from autopar.microbatch.bodies import BODY_RULES  # noqa: E402  (bodies are analysed by this module)
