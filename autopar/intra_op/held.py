"""What a device holds at one time under a plan, by name: `live_at`.

In: `Decisions`, and when values are live (`Liveness`). Out: `ir.plan.Live` rows whose bytes are those of `peak.spans`
at that time, named for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.passes import passes
from autopar.intra_op.peak import spans
from autopar.intra_op.places import Places, Spot
from autopar.ir.plan import ArgPlan, Live
from autopar.ir.pretty import fold_paths

NAMED = 60
"""Rows, before the rest is summed up (chosen)."""


def live_at(out: Decisions, live: Liveness, time: int, inputs: Sequence[ArgPlan]) -> tuple[Live, ...]:
    """What a device holds at a time, the largest first, equal names together; of a TPU also what stays on the chip.

    ``inputs`` are the graph's, which are of the kinds of their roles. *Gradients* are what the backward pass hands to
    the update, *temporaries* what else it makes, *activations* what the forward pass makes.
    """
    found, flat = spans(out, live), out.graph.flat
    rows = np.flatnonzero((found.start <= time) & (time < found.stop) & (found.size > 0)).tolist()
    read_by: dict[int, set[str]] = {int(found.value[k]): set() for k in rows}
    """Value → the passes that read it."""
    names = _Names(out, inputs)
    for value, user in zip(flat.source, flat.columns().user.tolist(), strict=True):
        if value in read_by:
            read_by[value].add("loop" if flat.node[user] is None else names.passes[user])
    total: dict[tuple[str, str], list[float]] = {}
    for k in rows:
        value, buffer = int(found.value[k]), int(found.buffer[k])
        if value >= 0:
            key = names.of_value(value, read_by[value])
        else:
            key = ("resharded", names.of_buffer(buffer)) if buffer >= 0 else ("workspaces", "of operators")
        row = total.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += float(found.size[k])
    every = [Live(kind=kind, what=what, count=int(n), bytes=size) for (kind, what), (n, size) in total.items()]
    every.sort(key=lambda row: (-row.bytes, row.kind, row.what))
    return (*every[:NAMED], *_others(every[NAMED:]))


def _others(rows: Sequence[Live]) -> Iterator[Live]:
    """The rest, a row of each kind."""
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        count, size = sum(row.count for row in mine), math.fsum(row.bytes for row in mine)
        yield Live(kind=kind, what="others", count=count, bytes=size)


class _Names:
    """What values and buffers are called: arguments by paths, indices left out, all else by operators and lines."""

    def __init__(self, out: Decisions, inputs: Sequence[ArgPlan]) -> None:
        self.out, self.flat, self.places = out, out.graph.flat, Places(out.graph)
        self.passes = passes(self.flat)
        folded = fold_paths([(a.path, a.role) for a in inputs])
        self.given = {self.flat.args[i]: (inputs[i].role, fold.path) for fold in folded for i in fold.rows}

    def of_value(self, value: int, read_by: set[str]) -> tuple[str, str]:
        """Kind and name; the passes ``read_by`` read it."""
        n = self.flat.maker[value]
        return self.given[n] if n in self.given else (self._kind(n, read_by), self.places.text(n))

    def _kind(self, n: int, read_by: set[str]) -> str:
        if self.flat.node[n] is None:
            return "loops"
        if self.passes[n] == "backward":
            return "gradients" if read_by == {"update"} else "temporaries"
        return "activations" if self.passes[n] == "forward" else "new state"

    def of_buffer(self, number: int) -> str:
        """For whom it is resharded."""
        buffer = self.out.buffers[number]
        texts = self.places.texts(Spot("pattern", buffer.pattern, buffer.first))
        return f"for {next(iter(texts))}"
