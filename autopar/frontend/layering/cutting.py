"""The loss of one microbatch as a sequence of equations, and where that is cut into layers: `Cutting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.frontend.layer_boundary import boundary_p
from autopar.frontend.layering.inputs import Input
from autopar.frontend.layering.layer_cuts import Repeated, balanced, crossing, named_blocks, repeated
from autopar.frontend.layering.sequence import Ordered, nbytes, work
from autopar.frontend.layering.surgery import plain
from autopar.frontend.layering.tokens import Tokens
from autopar.frontend.microbatch.inline import bodies
from autopar.jax_compat import Jaxpr, JaxprEqn, Var, dce, scopes
from autopar.primitives import UNKNOWN, record_of

DEFAULT_LAYERS = 8
"""Layers of a step without repeated structure, at most (guessed); at most one per contraction."""


class Cutting:
    """``forward``, the loss, in the order of ``sequence``; ``inputs``: what its inputs are; ``tokens`` number equal
    equations alike."""

    def __init__(self, forward: Jaxpr, sequence: Ordered, inputs: Mapping[Any, Input], tokens: Tokens) -> None:
        self.forward, self.sequence, self.inputs, self.tokens = forward, sequence, inputs, tokens
        self.numbers = self._numbers()
        """Equation, by identity → its number."""
        self.last_use = self._last_use()

    def _numbers(self) -> dict[int, int]:
        eqns = [*self.sequence.eqns, *{id(e): e for e in self.sequence.light.values()}.values()]
        return {id(e): self.tokens.eqn(e) for e in eqns}

    def _last_use(self) -> dict[Any, int]:
        """Variable that the sequence makes → position of its last user; the sequence's length where the update wants
        it."""
        out: dict[Any, int] = {}
        for i, eqn in enumerate(self.sequence.eqns):
            for v in eqn.outvars:
                out[v] = i
            for v in eqn.invars:
                if isinstance(v, Var) and v in out:
                    out[v] = i
        for v in self.forward.outvars:
            if v in out:
                out[v] = len(self.sequence.eqns)
        return out

    def cuts(self, layers: int | str | None) -> list[int]:
        """Positions in the sequence where layers begin, the first one's left out."""
        eqns = self.sequence.eqns
        marks = [i + 1 for i, e in enumerate(eqns) if e.primitive is boundary_p]
        if marks:
            return self._apart(marks)
        if layers == "names":
            return self._apart(named_blocks([scopes(e) for e in eqns]))
        amount = np.asarray([work(e) for e in eqns], float)
        made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
        cross = crossing(
            list(made.values()), [self.last_use[v] for v in made], [nbytes(v.aval) for v in made], len(eqns)
        )
        blocks = repeated(np.asarray([self.numbers[id(e)] for e in eqns], np.int64), amount, cross)
        if layers is None:
            if blocks is not None:
                return self._around(blocks)
            return list(balanced(amount, cross, min(DEFAULT_LAYERS, self._contractions())))
        assert isinstance(layers, int)
        if blocks is not None and layers <= blocks.count:
            return list(balanced(amount, cross, layers, allowed=blocks.cuts[1:-1]))
        if blocks is not None and len(self._around(blocks)) == layers - 1:
            return self._around(blocks)
        return list(balanced(amount, cross, layers))

    def _apart(self, cuts: Sequence[int]) -> list[int]:
        """``cuts`` with something to do between them: marks on several values in a row are one cut."""
        out: list[int] = []
        eqns = self.sequence.eqns
        for cut in cuts:
            start = out[-1] if out else 0
            if 0 < cut < len(eqns) and any(e.primitive is not boundary_p for e in eqns[start:cut]):
                out.append(cut)
            elif out and cut < len(eqns):
                out[-1] = cut
        return out

    def _contractions(self) -> int:
        """Equations with the work that layers are made of."""
        return max(1, sum(map(_works, self.sequence.eqns)))

    def _around(self, blocks: Repeated) -> list[int]:
        """The blocks' cuts; what is before and after them is a layer of its own where it reads parameters."""
        cuts = list(blocks.cuts)
        if not self._has_weights(0, blocks.cuts[0]):
            cuts = cuts[1:]
        if not self._has_weights(blocks.cuts[-1], len(self.sequence.eqns)):
            cuts = cuts[:-1]
        return [c for c in cuts if 0 < c < len(self.sequence.eqns)]

    def _has_weights(self, start: int, stop: int) -> bool:
        todo = [v for e in self.sequence.eqns[start:stop] for v in e.invars if isinstance(v, Var)]
        seen: set[Any] = set()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self.inputs and self.inputs[v].trained:
                return True
            if v in self.sequence.light:
                todo += [a for a in self.sequence.light[v].invars if isinstance(a, Var)]
        return False

    def layer(self, start: int, stop: int) -> Jaxpr:
        """Equations ``start`` to ``stop`` and the light ones that they need, as operands → results."""
        eqns = self.sequence.eqns
        last = stop == len(eqns)
        made: set[Any] = set()
        invars: dict[Any, None] = {}
        out: list[JaxprEqn] = []

        def use(v: Any) -> None:
            if not isinstance(v, Var) or v in made or v in invars:
                return
            eqn = self.sequence.light.get(v)
            if eqn is None:
                invars[v] = None
                return
            for a in eqn.invars:
                use(a)
            out.append(eqn)
            made.update(eqn.outvars)

        for eqn in eqns[start:stop]:
            for v in eqn.invars:
                use(v)
            out.append(eqn)
            made.update(eqn.outvars)
        ends = [v for v in self.forward.outvars if v not in self.last_use] if last else []
        for v in ends:
            use(v)
        results = [v for e in eqns[start:stop] for v in e.outvars if self.last_use[v] >= stop]
        return dce(plain(self.forward, list(invars), [*results, *ends], out))


def _works(eqn: JaxprEqn) -> bool:
    """True for contractions, and for what holds or hides some."""
    record, inner = record_of(eqn.primitive.name), bodies(eqn)
    if record is UNKNOWN and inner:
        return any(_works(e) for body in inner for e in body.eqns)
    return record.traits.contraction or record.traits.opaque
