"""When every part of the update runs: rounds, between which stages exchange what others need of them.

In: a step in layers, the stage of each layer, and the layers' graphs (`stage_graph` of each alone), whose nodes after
the loop are that layer's copies of the update's. Out: an `UpdateSchedule`.

A node runs at a *time* (round, turn). All that is at hand in its own layer is there at once; what another layer of its
stage makes costs a turn, what another stage makes a round: it is sent between two rounds. A *part* is a value that
several layers have of one sum, maximum or minimum (the scalars of a global norm), or rows of one array; it is put
together by whoever reads it, always in the order of the layers, so that all compute the same.

    time(node in k)  = max over operands of at(k, operand)
    at(k, o)         = time(o's node in k)                       k makes all of it
                       max over makers + one turn                 all that make it are in k's stage
                       (1 + max over makers' rounds, 0)           else
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.ir.errors import VerifyError
from autopar.ir.graph import Operand
from autopar.ir.layers import MADE, LayeredGraph, StageGraph
from autopar.primitives import joined_by
from autopar.primitives.record import JoinedBy

Time: TypeAlias = tuple[int, int]
"""(round, turn)."""
Join: TypeAlias = Literal["one", "rows"] | JoinedBy
"""How parts make a value: any one of them is it, one behind the other, or by an operator."""
START: Time = (0, 0)
NEVER: Time = (sys.maxsize, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What layer ``layer`` makes of a value: ``stored`` in its graph; with ``start`` < ``stop`` these rows of it."""

    layer: int
    stored: int
    start: int = 0
    stop: int = 0


Wanted: TypeAlias = dict[int, tuple[int, set[int]]]
"""Value of the update → (the round after which it crosses, the stages that want it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A value of the update: how its parts make it, in the order of layers."""

    join: Join
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Before a layer's nodes of ``time``: value ``value`` of the update takes the place of ``stored`` in its graph.
    ``crosses``: it comes from other stages too."""

    layer: int
    time: Time
    stored: int
    value: int
    crosses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Parts of ``value`` go from stages ``sources`` to stages ``targets`` after round ``after``."""

    value: int
    after: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """The update of all stages.

    Attributes:
        rounds: how many times stages exchange values; the last round runs after the last of these.
        made: value of the update → how it comes about; arguments are left out.
        times: layer → (position in its graph, when it runs), of all nodes that run.
        fills, crossings: see there.
        gradient_parts: trained values whose parts cross by the plan's cuts → the layer that takes them.
        home: layer → the stage that it is in.
    """

    rounds: int
    made: Mapping[int, Made]
    times: Mapping[int, tuple[tuple[int, Time], ...]]
    fills: tuple[Fill, ...]
    crossings: tuple[Crossing, ...]
    gradient_parts: Mapping[int, int]
    home: Sequence[int]


def update_schedule(layered: LayeredGraph, home: Sequence[int], parts: Sequence[StageGraph]) -> UpdateSchedule:
    """The rounds in which all stages' parts of the update run.

    Args:
        home: layer → the stage that it is in.
        parts: layer → its graph as a stage of its own (`stage_graph`).

    Raises:
        VerifyError: a layer reads a value of the update that no layer makes.
    """
    return _Scheduler(layered, home, parts).run()


class _Scheduler:
    def __init__(self, layered: LayeredGraph, home: Sequence[int], parts: Sequence[StageGraph]) -> None:
        self.layered, self.home, self.parts = layered, home, parts
        self.update = layered.update
        self.num_trained, self.num_combined = len(layered.trained), len(layered.combined)
        self.parts_of: dict[int, list[Part]] = {}
        self.joins: dict[int, Join] = {}
        self.skipped: set[tuple[int, int]] = set()
        self.wanted: list[dict[int, int]] = [{} for _ in parts]
        """Layer → stored value → the value of the update that is filled in."""
        self.gradient_parts: dict[int, int] = {}
        self.times: list[dict[int, Time]] = [{} for _ in parts]
        """Layer → position in its graph → when that node runs."""
        self.ready: list[dict[int, Time]] = [{} for _ in parts]
        """Layer → value of its graph → when a node makes it."""

    def run(self) -> UpdateSchedule:
        for k, part in enumerate(self.parts):
            self._inputs(k, part)
        self._gradients()
        for k, part in enumerate(self.parts):
            self._nodes(k, part)
        return self._timed()

    # --- what layers make and want --------------------------------------------------------------------------------

    def _inputs(self, k: int, part: StageGraph) -> None:
        """Values of other layers that a layer reads; results of its own layers, combined over microbatches."""
        for port in part.receives:
            if port.phase == "update":
                self.wanted[k][port.stored] = port.value
        makes = set(self.layered.layers[k].results)
        loop = part.graph.nodes[part.loop]
        stacked = loop.results[loop.params["num_carry"] :]
        for v, stored in zip([v for v in self.layered.combined if v in makes], stacked, strict=True):
            slot = self.update.inputs[self.num_trained + self.layered.combined.index(v)]
            self._part(slot, "one", Part(layer=k, stored=stored))
            for q, node in enumerate(part.graph.nodes):
                if part.origins[q] == MADE and node.primitive == "reduce_sum" and node.operands == (stored,):
                    self.skipped.add((k, q))
                    self.wanted[k][node.results[0]] = slot

    def _part(self, value: int, join: Join, part: Part) -> None:
        self.parts_of.setdefault(value, []).append(part)
        self.joins[value] = join

    def _gradients(self) -> None:
        """Where gradients are: whole at one layer, in rows, or in parts of a sum."""
        layered = self.layered
        sums = [self._sums(k) for k in range(len(self.parts))] if layered.loss >= 0 else []
        for i, v in enumerate(layered.trained):
            slot = self.update.inputs[i]
            users = [k for k in layered.users.get(v, ()) if v in sums[k]]
            argument, *_ = layered.argument_of.get(v, (-1,))
            for k, each in sorted(layered.slices_of.get(argument, {}).items()):
                if each.value in sums[k]:
                    self._part(
                        slot, "rows", Part(layer=k, stored=sums[k][each.value], start=each.start, stop=each.stop)
                    )
            if slot in self.parts_of and users:
                raise VerifyError(f"{layered.arg_paths[argument]} is read by rows and as a whole")
            takers = [k for k in users if any(p.phase == "gradient" and p.value == v for p in self.parts[k].receives)]
            givers = [k for k in users if any(p.phase == "gradient" and p.value == v for p in self.parts[k].sends)]
            if len(takers) == 1 and len(givers) == len(users) - 1:
                self.gradient_parts[v] = takers[0]
                self._part(slot, "one", Part(layer=takers[0], stored=self._added(takers[0], v)))
                continue
            for k in users:
                self._part(slot, "one" if len(users) == 1 else "add_any", Part(layer=k, stored=sums[k][v]))
                if k in takers:
                    added = self._added(k, v)
                    self.wanted[k][added] = slot
                    self.skipped.add(
                        (k, next(q for q, n in enumerate(self.parts[k].graph.nodes) if added in n.results))
                    )

    def _sums(self, k: int) -> dict[int, int]:
        """Trained value (or rows of one) → its gradient sum in layer k's graph."""
        part, layered = self.parts[k], self.layered
        return dict(zip(layered.summed(layered.layers[k].operands), part.graph.nodes[part.loop].results, strict=False))

    def _added(self, k: int, v: int) -> int:
        """The value of layer k's graph that is its own gradient and what it receives."""
        part = self.parts[k]
        port = next(p for p in part.receives if p.phase == "gradient" and p.value == v)
        return next(n.results[0] for n in part.graph.nodes if port.stored in n.operands)

    def _nodes(self, k: int, part: StageGraph) -> None:
        for node, (layer, p) in zip(part.graph.nodes, part.origins, strict=True):
            if p < 0:
                continue
            whole = self.update.nodes[p]
            if layer < 0:
                for o, stored in zip(whole.results, node.results, strict=True):
                    self._part(o, "one", Part(layer=k, stored=stored))
                continue
            length, by_layer = self.layered.rows_together.get(frozenset(self.layered.update_layers[p]), (-1, {}))
            for o, stored, t in zip(whole.results, node.results, whole.result_types, strict=True):
                if t.shape[:1] == (length,):
                    each = by_layer[k]
                    self._part(o, "rows", Part(layer=k, stored=stored, start=each.start, stop=each.stop))
                else:
                    self._part(o, joined_by(whole), Part(layer=k, stored=stored))

    # --- when ------------------------------------------------------------------------------------------------------

    def _timed(self) -> UpdateSchedule:
        filled = [dict(wanted) for wanted in self.wanted]
        """Layer → value of its graph → the value of the update that takes its place: all but what is a whole there."""
        for o, parts in self.parts_of.items():
            if self.joins[o] not in ("one", "rows"):
                for part in parts:
                    filled[part.layer].setdefault(part.stored, o)
        fills: dict[tuple[int, int], Fill] = {}
        crossings: Wanted = {}

        def at(k: int, stored: int) -> Time:
            """When a layer has a value of its graph that is not a whole there."""
            if (k, stored) in fills:
                return fills[k, stored].time
            o = filled[k][stored]
            parts = self.parts_of.get(o)
            if parts is None:
                raise VerifyError(f"nobody makes value {o} of the update, which layer {k} reads")
            here = [p for p in parts if self.home[p.layer] == self.home[k]]
            if len(here) == len(parts) or (here and self.joins[o] == "one"):
                latest = max(self._made_at(p) for p in (here[:1] if self.joins[o] == "one" else here))
                time, crosses = (latest[0], latest[1] + 1), False
            else:
                after = self._crosses(o, parts, self.home[k], crossings)
                time, crosses = (after + 1, 0), True
            fills[k, stored] = Fill(layer=k, time=time, stored=stored, value=o, crosses=crosses)
            return time

        order = sorted(
            (p, k, q)
            for k, part in enumerate(self.parts)
            for q, (_, p) in enumerate(part.origins)
            if p >= 0
        )  # fmt: skip
        first = [
            (-1, k, q)
            for k, part in enumerate(self.parts)
            for q, n in enumerate(part.graph.nodes)
            if q > part.loop and part.origins[q] == MADE and n.primitive == "add_any" and (k, q) not in self.skipped
        ]
        for _, k, q in (*first, *order):
            node, ready, others = self.parts[k].graph.nodes[q], self.ready[k], filled[k]
            time = START
            for o in node.operands:
                if isinstance(o, int) and (found := at(k, o) if o in others else ready.get(o, START)) > time:
                    time = found
            self.times[k][q] = time
            ready.update(dict.fromkeys(node.results, time))
        for o in self.update.outputs:
            self._output(o, crossings)
        found = tuple(
            Crossing(value=o, after=after, sources=self._sources(o), targets=tuple(sorted(targets)))
            for o, (after, targets) in sorted(crossings.items())
        )
        rounds = max((c.after + 1 for c in found), default=0)
        self._put_off(rounds, {*crossings, *(f.value for f in fills.values())})
        return UpdateSchedule(
            rounds=rounds,
            made={o: Made(join=self.joins[o], parts=tuple(parts)) for o, parts in self.parts_of.items()},
            times={k: tuple(sorted(times.items())) for k, times in enumerate(self.times)},
            fills=tuple(sorted(fills.values(), key=lambda f: (f.time, f.layer, f.stored))),
            crossings=found,
            gradient_parts=self.gradient_parts,
            home=self.home,
        )

    def _made_at(self, part: Part) -> Time:
        return self.ready[part.layer].get(part.stored, START)

    def _put_off(self, last: int, elsewhere: set[int]) -> None:
        """Moves nodes to the round in which their results are first read: else devices hold these from round to round
        (of Adam behind a clip by the global norm, both moments a second time).

        Args:
            last: the last round, to which outputs have time.
            elsewhere: values of the update of which other layers read parts; they are made as soon as they can be.
        """
        stays, gives = self._stored(elsewhere), self._stored(self.update.outputs)
        for k, part in enumerate(self.parts):
            nodes, times, end = part.graph.nodes, self.times[k], (last, 0)
            behind = {r for node in nodes[part.loop + 1 :] for r in node.results}  # the rest is there in all rounds
            read: dict[int, Time] = dict.fromkeys(gives[k], end)
            for q in sorted(times, reverse=True):
                node, time = nodes[q], times[q]
                later = min((read[r] for r in node.results if r in read), default=time)
                if later > time and stays[k].isdisjoint(node.results):
                    made = [o for o in node.operands if isinstance(o, int) and o in behind]
                    if _bytes(part, node.results) >= _bytes(part, made):
                        times[q] = time = later
                for o in node.operands:
                    if isinstance(o, int) and time < read.get(o, NEVER):
                        read[o] = time

    def _stored(self, values: Iterable[Operand]) -> list[set[int]]:
        """Layer → its parts of values of the update."""
        out: list[set[int]] = [set() for _ in self.parts]
        for o in values:
            for part in self.parts_of.get(o, ()) if isinstance(o, int) else ():
                out[part.layer].add(part.stored)
        return out

    def _sources(self, o: int) -> tuple[int, ...]:
        parts = self.parts_of[o]
        if self.joins[o] == "one":
            return (self.home[parts[0].layer],)
        return tuple(dict.fromkeys(self.home[p.layer] for p in parts))

    def _crosses(self, o: int, parts: Sequence[Part], target: int, crossings: Wanted) -> int:
        """Notes that a stage wants a value of others; the round after which it crosses."""
        of = parts[:1] if self.joins[o] == "one" else parts
        after = max(self._made_at(p)[0] for p in of)
        crossings.setdefault(o, (after, set()))[1].add(target)
        return after

    def _output(self, o: Operand, crossings: Wanted) -> None:
        """An output that is the sum of parts in several stages is put together at the first of them."""
        if not isinstance(o, int) or o not in self.parts_of or self.joins[o] in ("one", "rows"):
            return
        parts = self.parts_of[o]
        first = self.home[parts[0].layer]
        if any(self.home[p.layer] != first for p in parts):
            self._crosses(o, parts, first, crossings)


def _bytes(part: StageGraph, values: Sequence[int]) -> int:
    return sum(part.graph.values[v].size_bytes for v in values)
