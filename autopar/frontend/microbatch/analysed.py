"""What the analysis makes: two traces of one program side by side, with a fact for every value.

A `Body` is one jaxpr (the loss, or the body of a scan), a `Step` one of its equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.frontend.microbatch.inline import bodies
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from autopar.primitives import record_of
from autopar.primitives.kinds import Coupled, Fact, Kind, Same
from autopar.primitives.view import Action, default_layout, differing


@dataclass(frozen=True, kw_only=True)
class Setting:
    """n microbatches of a batch of ``batch`` units (examples, mostly: `units`); ``blocks_first`` orders dimensions that
    nothing else orders (see `Rows`). ``checked``: operators whose derivative rules are being checked; where a rule uses
    its operator on tangents, that is linear, and its own derivative."""

    n: int
    batch: int
    blocks_first: bool = False
    checked: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class Step:
    """One equation in both traces. ``same``: it is bound as in the full trace. ``hoisted``: results that come from
    the full batch. ``chosen``: of a selection, the operand that it always takes. ``bodies``: its analysed bodies, in
    the order of `bodies.BODY_RULES`."""

    full: JaxprEqn
    small: JaxprEqn
    same: bool
    masked: frozenset[int] = frozenset()
    action: Action | None = None
    hoisted: tuple[int, ...] = ()
    chosen: int | None = None
    bodies: tuple[Body, ...] = ()

    @property
    def used(self) -> Sequence[int]:
        """The operands that its results depend on."""
        return range(len(self.full.invars)) if self.chosen is None else (0, self.chosen)

    @property
    def plain(self) -> bool:
        """True if binding the microbatch trace's equation is all there is to do."""
        if self.masked or self.action or self.hoisted or not all(b.plain for b in self.bodies):
            return False
        if self.same and not params_equal(self.full, self.small):
            return False
        return all(literals_equal(self.full.invars[i], self.small.invars[i]) for i in self.used)


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
        """What is known of an operand; of a literal, that it is the same in every microbatch."""
        return Fact(kind=Same(), trained=False) if isinstance(atom, Literal) else self.facts[atom]

    @property
    def outs(self) -> list[Fact]:
        """The facts of the results, before ``out_masks``."""
        return [self.fact(v) for v in self.full.outvars]

    @property
    def plain(self) -> bool:
        """True if the microbatch trace can be used as it is; what comes to nothing in it may be anything."""
        needed: set[Any] = {v for v in self.full.outvars if isinstance(v, Var)}
        for step in reversed(self.steps):
            if needed.isdisjoint(step.full.outvars) and not step.full.effects:
                continue
            if not step.plain:
                return False
            operands = (step.full.invars[i] for i in step.used)
            needed.update(v for v in operands if isinstance(v, Var))
        outs = zip(self.full.outvars, self.small.outvars, strict=True)
        return not self.out_masks and all(literals_equal(a, b) for a, b in outs)

    @property
    def hoists(self) -> bool:
        """True if anything inside is hoisted."""
        return any(s.hoisted or any(b.hoists for b in s.bodies) for s in self.steps)


def from_shapes(full: tuple[int, ...], small: tuple[int, ...], setting: Setting) -> Kind:
    """The kind of a value of shapes ``full`` and ``small`` that is at hand for the full batch: `Same`, or `Rows` to be
    sliced; `Coupled` where the shapes do not say."""
    changed = differing(full, small)
    if not changed:
        return Same()
    if len(changed) == 1 and full[changed[0]] == setting.n * small[changed[0]]:
        return default_layout(changed[0], full[changed[0]], setting.batch, setting.blocks_first)
    return Coupled(f"a value has shape {full} for the full batch and {small} for a microbatch")


def literals_equal(a: Any, b: Any) -> bool:
    """True unless both or one of two atoms are literals and they differ (a batch size, say); NaNs equal each other."""
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
        if x.primitive is not y.primitive or not params_equal(x, y, besides=record_of(x.primitive.name).sized):
            return False
        if not all(literals_equal(p, q) for p, q in zip(x.invars, y.invars, strict=True)):
            return False
    return all(literals_equal(p, q) for p, q in zip(a.outvars, b.outvars, strict=True))
