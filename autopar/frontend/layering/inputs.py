"""Where the inputs of a step's forward come from: arguments, what is computed before, rows of stacked arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.frontend.layering.surgery import Env
from autopar.jax_compat import Literal, Var
from autopar.primitives.kinds import Rows

FROM_ARGUMENT, FROM_BEFORE, FROM_INDEX, FROM_ROW = "argument", "before", "index", "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Where an input of the forward comes from: ``which`` argument or value of before, the microbatch's number, or
    ``count`` rows of an argument from ``at`` on.
    ``rows``: how it carries the batch, None where every microbatch has all of it. ``trained``: gradients are taken by
    it."""

    source: str
    which: int = 0
    rows: Rows | None = None
    trained: bool = False
    at: int = 0
    count: int = 1


class Sources:
    """Gives every operand of the loss its source. An argument that is read twice, once differentiated by and once
    not, is two values: the second one goes through before."""

    def __init__(self, arguments: Sequence[Var]) -> None:
        self.position = {v: i for i, v in enumerate(arguments)}
        self.before: list[Any] = []

    def inputs(
        self, atoms: Sequence[Any], wrt: Sequence[int], invars: Sequence[Var], rows: Callable[[int], Rows | None]
    ) -> tuple[tuple[Input, ...], Env]:
        """The sources of the forward's inputs, and the atoms that take the place of its other inputs.

        Args:
            atoms: the loss's operands, in terms of the step's arguments; None for the microbatch's number.
            wrt: positions of those that gradients are taken by.
            invars: the loss's own variables for them.
            rows: position → how the operand carries the batch.
        """
        env: Env = {}
        taken: dict[Any, tuple[int, Var]] = {}
        found: dict[int, Input] = {}
        order = [*wrt, *(i for i in range(len(atoms)) if i not in set(wrt))]
        shared: dict[Any, Var] = {}
        for i in order:
            atom, trained = atoms[i], i in set(wrt)
            if atom is None:
                found[i] = Input(source=FROM_INDEX)
            elif isinstance(atom, Literal) and not trained:
                env[invars[i]] = atom
            elif not trained and atom in shared:
                env[invars[i]] = shared[atom]
            elif isinstance(atom, Var) and atom in self.position and atom not in taken:
                taken[atom] = (i, invars[i])
                found[i] = Input(source=FROM_ARGUMENT, which=self.position[atom], rows=rows(i), trained=trained)
                if not trained:
                    shared[atom] = invars[i]
            else:
                found[i] = Input(source=FROM_BEFORE, which=len(self.before), rows=rows(i), trained=trained)
                self.before.append(atom)
                if not trained and isinstance(atom, Var):
                    shared[atom] = invars[i]
        return tuple(found[i] for i in sorted(found)), env
