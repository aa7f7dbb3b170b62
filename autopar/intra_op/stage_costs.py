"""One layer (or a whole stage) on one mesh → layouts: how it may be sharded, and what each takes.

A *layout* is a solution of the sharding problem of a `StageGraph`, with what it costs per microbatch and per step, what
it holds, and how it wants what it receives and makes what it sends. Memory enters by prices: the problem that is solved
is that of `ir.strategy` without a limit, each strategy s dearer by

    state_price · state(s)  +  activation_price · activation(s)          seconds a byte

where state is held all the time (arguments, gradient sums) and activations from a microbatch's forward to its backward
task. So the layouts of several prices are the corners of the trade of time for memory, and layouts of neighbouring
layers at one price add up to a layout of a stage (`inter_op.ranges`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.intra_op.batch_bound import Bound, ExampleDims, Found, find_examples
from autopar.intra_op.decisions import Decisions, collective_s, hideable_part
from autopar.intra_op.degrees import Met, degree_states, expert_dims
from autopar.intra_op.flatten import Flat
from autopar.intra_op.mesh_problem import Asked, Masks, MeshProblem
from autopar.intra_op.overlap import exposed_s
from autopar.intra_op.peak import Spans, buffer_spans, spans, value_spans
from autopar.intra_op.search import PLAN, Effort
from autopar.intra_op.specs import Mesh
from autopar.intra_op.usages import usages
from autopar.ir.degrees import Degrees
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from autopar.ir.layers import Port, StageGraph
from autopar.ir.pipeline import Layout, StageCost, Transients
from autopar.ir.strategy import ProblemEdge, ProblemNode
from autopar.primitives import record_of

GAP = 2e-3
"""Relative gap at which a layout counts as optimal (chosen: a fifth of what ranges of layers may be off by; ten times
less takes twice the time for layers of a thousand operators)."""
LAYER_S = 8.0
"""Seconds for a layer at one price (chosen: what an ILP proves after 3 of them rarely changes the choice, measured on
experts' layers of 950 operators on 4 x 8 devices, whose bound by messages is 9 % off)."""
_FORWARD, _INPUT, _WEIGHT = range(3)
UNFOLDED = 1 << 62
"""More planning nodes than any graph has: nothing is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solving:
    """How a layer is solved at one price: as in `solve.solve`."""

    solver: str = "auto"
    time_limit_s: float = LAYER_S
    effort: Effort = PLAN


@dataclass(frozen=True, slots=True)
class _Waits:
    """What weight gradients read when input gradients are done: ``context_bytes``, ``kept_bytes`` of these the forward
    pass's; values and resharded buffers that the input gradients make, and those that the forward pass makes."""

    context_bytes: float
    kept_bytes: float
    values: list[int]
    buffers: list[int]
    kept_values: list[int]
    kept_buffers: list[int]


def pose_stage(stage: StageGraph, mesh: Mesh, asked: Asked | None = None) -> MeshProblem:
    """A stage's sharding problem, in the form that a whole step's has; the forward and the backward pass of a
    microbatch are programs of their own. Solved node by node (``asked.fold_above`` is not used): equal layers are one
    problem already."""
    asked = replace(asked or Asked(), fold_above=UNFOLDED)
    return MeshProblem(stage.graph, mesh, asked, loop=stage.loop, turn=lambda flat: _times(flat, stage).turn)


class StageProblem:
    """The sharding problem of one stage graph on one mesh (``posed`` by `pose_stage`), to be solved at several prices.
    ``remat``: what layers keep (`ir.layers.REMAT`), only recorded in layouts. Raises ShardingError as
    `MeshProblem.masks`."""

    def __init__(
        self, stage: StageGraph, posed: MeshProblem, remat: str = "none", solving: Solving | None = None
    ) -> None:
        self.stage, self.posed, self.remat, self.solving = stage, posed, remat, solving or Solving()
        self.mesh, self.flat, self.live, self.graph = posed.mesh, posed.flat, posed.live, posed.graph
        times = _times(self.flat, stage)
        self.region, self.start, self.turn, self.stop = times.region, times.start, times.turn, times.stop
        self.positions = times.positions
        self._kinds()
        self._held()
        self.allowed = dict(posed.masks)

    def held_to(self, masks: Masks) -> StageProblem:
        """This problem with no other states than these as well: cluster → bool[states], what `bind` found."""
        held = copy(self)
        held.allowed = {**self.allowed, **{k: mask & self.allowed.get(k, True) for k, mask in masks.items()}}
        return held

    def bind(
        self, examples: Mapping[int, ExampleDims], degrees: Degrees, bound: Bound
    ) -> tuple[Met, dict[int, ExampleDims]]:
        """What layouts are left that do as ``degrees`` and ``bound`` say.

        Args:
            examples: index among ``stage.receives`` → where examples are in it.

        Returns:
            (what is allowed, for `held_to`; index among ``stage.sends`` → where examples are in it, if
            anywhere).

        Raises:
            ShardingError: as `degree_states`.
        """
        found, made = self.examples(examples, experts=degrees.experts is not None)
        return degree_states(self.graph, degrees, found, bound, self.stage.loop), made

    def examples(
        self, received: Mapping[int, ExampleDims], *, experts: bool = True
    ) -> tuple[Found, dict[int, ExampleDims]]:
        """Where examples are, and (``experts``) experts, given where they are in what the stage receives.

        Args:
            received: index among ``stage.receives`` → where examples are in it.

        Returns:
            (in all that is computed; index among ``stage.sends`` → where they are in it, if anywhere).
        """
        known = [(self._port(self.stage.receives[i], True)[0], dims) for i, dims in received.items()]
        found = find_examples(self.graph, [*known, *(expert_dims(self.graph) if experts else ())])
        classes = [self._port(port, False)[0] for port in self.stage.sends]
        made = {i: found.of(self.graph.classes[c].inputs[0].keys()) for i, c in enumerate(classes)}
        return found, {i: dims for i, dims in made.items() if dims}

    def solve(
        self,
        state_price: float = 0.0,
        activation_price: float = 0.0,
        pins: Mapping[tuple[str, int], int] | None = None,
        left_s: float = math.inf,
    ) -> Layout:
        """The best layout at a price, with some ports held to a code.

        Args:
            state_price, activation_price: seconds a byte.
            pins: ("receive", "send" or "input", index) → code.
            left_s: seconds that are left of the whole search.

        Raises:
            KeyError: a port cannot have the code that it is held to.
            InfeasibleError: no layout has that, and all that is asked for.
            SolverTimeoutError: none that has was found in time.
        """
        problem = self.posed.problem
        if state_price or activation_price:
            nodes = tuple(
                ProblemNode(costs_s=n.costs_s + state_price * held[0] + activation_price * held[1])
                for n, held in zip(problem.nodes, self.node_bytes, strict=True)
            )
            edges = tuple(
                e if held is None else _dearer(e, state_price * held[0] + activation_price * held[1])
                for e, held in zip(problem.edges, self.edge_bytes, strict=True)
            )
            problem = replace(problem, nodes=nodes, edges=edges)
        masks = self._masks(pins or {})
        limit_s = min(self.solving.time_limit_s, max(0.0, left_s))
        found = self.posed.solve(
            problem, limit_s, self.solving.solver, masks=masks, gap=GAP, effort=self.solving.effort
        )
        if not math.isfinite(found.report.objective_s):
            one = self.stage.stop == self.stage.start + 1
            layers = f"layer {self.stage.start}" if one else f"layers {self.stage.start} to {self.stage.stop - 1}"
            where = f"{layers} on mesh {self.mesh.logical}"
            if found.report.status == "time_limit":
                raise SolverTimeoutError(f"{limit_s:.3g} s passed before a layout of {where} was found")
            raise InfeasibleError(
                f"no layout of {where} has all that is asked for: values would have to be resharded by what is "
                "forbidden, or operators run as no strategy of theirs does"
            )
        return self.layout(found.choice)

    def layout(self, choice: Sequence[int]) -> Layout:
        """The layout of a choice, a state per cluster, counted in full."""
        out = self.posed.decided(tuple(choice))
        kept, sends_kept = self._kept_ports(out)
        return Layout(
            remat=self.remat,
            cost=self._cost(out, choice),
            receives=tuple(self._code(out, port, True) for port in self.stage.receives),
            sends=tuple(self._code(out, port, False) for port in self.stage.sends),
            inputs=tuple(out.result_code(self.graph.class_of[n], 0) for n in self.flat.args),
            kept=kept,
            sends_kept=sends_kept,
            choice=tuple(map(int, choice)),
        )

    def codes(self, side: str, index: int) -> Any:
        """int64[…]: the codes that a port can have, ascending; ``side`` is "receive" or "send"."""
        port = (self.stage.receives if side == "receive" else self.stage.sends)[index]
        c, codes = self._port(port, side == "receive")
        return np.unique(codes[self.graph.classes[c].follow])

    # --- phases ----------------------------------------------------------------------------------------------------

    def _kinds(self) -> None:
        """Of the backward pass, what is for gradients towards weights alone: nothing that is sent to earlier layers
        depends on it (Qi et al., Zero Bubble Pipeline Parallelism, 2024)."""
        stage, body = self.stage, self.stage.body
        makers = {r: p for p, node in enumerate(body.nodes) for r in node.results}
        wanted = [port.stored for port in stage.sends if port.phase == "backward"]
        found: set[int] = set()
        while wanted:
            p = makers.get(wanted.pop(), -1)
            if p >= stage.boundary and p not in found:
                found.add(p)
                wanted += [o for o in body.nodes[p].operands if isinstance(o, int)]
        self.for_inputs = found | {p.node for p in (*stage.receives, *stage.sends) if p.phase == "backward"}
        self.phases = np.full(self.live.horizon, -1)
        """int64[planning nodes]: `_FORWARD`, `_INPUT` or `_WEIGHT`; −1 once a step."""
        self.phases[self.start : self.turn] = _FORWARD
        for n in range(self.turn, self.stop):
            self.phases[n] = _INPUT if self.positions.get(n, -1) in self.for_inputs else _WEIGHT

    def _held(self) -> None:
        """float64[2, states] per cluster and [2, rows, columns] per edge: bytes of state, held before the loop's first
        operator; of activations, held across the turn on top."""
        held = usages(self.graph, self.live, (self.start, self.turn))
        self.node_bytes = [self._at(len(n.costs_s), held.nodes[k]) for k, n in enumerate(self.posed.problem.nodes)]
        self.edge_bytes = [
            self._at(np.shape(e.costs_s), held.edges[e.a, e.b]) if (e.a, e.b) in held.edges else None
            for e in self.posed.problem.edges
        ]

    def _at(self, shape: Any, held: Sequence[tuple[Any, Any]]) -> Any:
        out = np.zeros((2, *(shape if isinstance(shape, tuple) else (shape,))))
        for size, times in held:
            state = sum(start < self.start < stop for start, stop in times)
            both = sum(start < self.turn < stop for start, stop in times)
            out[0] += state * size
            out[1] += (both - state) * size
        return out

    # --- ports -----------------------------------------------------------------------------------------------------

    def _port(self, port: Port, receives: bool) -> tuple[int, Any]:
        """(class, code per strategy) of a port's operator."""
        region = self.region if port.phase in ("forward", "backward") else 0
        c = self.graph.class_of[self.flat.at[region][port.node]]
        signature = self.graph.classes[c].signature
        return c, signature.results[0] if receives else signature.operands[0]

    def _code(self, out: Decisions, port: Port, receives: bool) -> int:
        c, codes = self._port(port, receives)
        return int(codes[out.strategy[c]])

    def _kept_ports(self, out: Decisions) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes that are kept across the turn of each value that is received, and sent, as it lies there."""
        flat, stage = self.flat, self.stage
        size, start, stop = value_spans(out, self.live)

        def kept(port: Port, receives: bool) -> float:
            if port.phase != "forward":
                return 0.0
            v = flat.env[self.region][port.stored]
            n = flat.maker[v]
            made = out.result_code(self.graph.class_of[n], v - flat.first_value[n])
            same = made == self._code(out, port, receives)
            return float(size[v]) if same and start[v] < self.turn < stop[v] else 0.0

        return tuple(kept(p, True) for p in stage.receives), tuple(kept(p, False) for p in stage.sends)

    def _masks(self, pins: Mapping[tuple[str, int], int]) -> Masks:
        masks = dict(self.allowed)
        for (side, index), code in pins.items():
            if side == "input":
                c = self.graph.class_of[self.flat.args[index]]
                codes = self.graph.classes[c].signature.results[0]
            else:
                port = (self.stage.receives if side == "receive" else self.stage.sends)[index]
                c, codes = self._port(port, side == "receive")
            this = self.graph.classes[c]
            mask = codes[this.follow] == code
            mask = mask & masks.get(this.cluster, True)
            if not mask.any():
                raise KeyError((side, index, code))
            masks[this.cluster] = mask
        return masks

    # --- costs -----------------------------------------------------------------------------------------------------

    def _kept(self, choice: Sequence[int]) -> tuple[float, float]:
        """Bytes of state and of activations, as prices see them."""
        total = np.zeros(2)
        for held, s in zip(self.node_bytes, choice, strict=True):
            total += held[:, s]
        for e, held in zip(self.posed.problem.edges, self.edge_bytes, strict=True):
            if held is not None:
                total += held[:, e.rows[choice[e.a]], e.cols[choice[e.b]]]
        return float(total[0]), max(0.0, float(total[1]))

    def _cost(self, out: Decisions, choice: Sequence[int]) -> StageCost:
        compute_s, once_s = self._compute(out)
        communication_s, sync_s = self._communication(out, compute_s)
        times = compute_s + communication_s
        found = spans(out, self.live)
        state, activations = self._kept(choice)
        waits = self._waits(out)
        held = found.live_bytes()
        transients = self._transients(out, found, waits, held, state)
        tasks_bytes = max(transients.forward_bytes, transients.backward_bytes)
        results = found.size[(found.start >= self.stop) & (found.stop >= found.horizon)]
        return StageCost(
            forward_s=float(times[0]),
            input_grad_s=float(times[1]),
            weight_grad_s=float(times[2]),
            grad_sync_s=sync_s,
            update_s=once_s,
            state_bytes=state,
            activation_bytes=activations,
            weight_context_bytes=waits.context_bytes,
            weight_kept_bytes=waits.kept_bytes,
            results_bytes=min(float(results.sum()), transients.update_bytes),
            transient_bytes=max(tasks_bytes, float(held.max(initial=0.0)) - state - activations),
            transients=transients,
        )

    def _transients(self, out: Decisions, found: Spans, waits: _Waits, held: Any, state: float) -> Transients:
        """What each phase needs beside the buffers of a program (`program.emit`): no state, no activations, nothing
        that waits for the weight gradients, nothing that is received or sent as it lies. What a task reads is there for
        all of it. So is what it gives, which until it is made has room for what the task needs for a moment. Where two
        tasks are one, activations make room when they have been read."""
        start, stop, value = found.start, found.stop, found.value
        always, kept = ((start < time) & (time < stop) for time in (self.start, self.turn))
        kept &= ~always
        received, sent = self._crossing(out)
        own = ~(always | kept | np.isin(value, received + sent))
        later = self.phases[np.minimum(start, found.horizon - 1)] == _WEIGHT
        waiting = own & (np.isin(value, waits.values) | np.isin(found.buffer, waits.buffers)) & (stop > start)

        def size(chosen: Any) -> float:
            return float(found.size[chosen].sum())

        def peak(chosen: Any, given: Any, first: int, last: int) -> float:
            """Of ``chosen``, and of all of what the task gives from when it is made on."""
            there = replace(found, stop=np.where(given, found.horizon, stop)).live_bytes(chosen | given)[first:last]
            return float(there.max(initial=0.0))

        def most(chosen: Any, given: Any, first: int, last: int) -> float:
            """That beside all of what the task gives in its end."""
            return max(0.0, peak(chosen, given, first, last) - size(given))

        nothing = np.zeros(len(start), bool)
        stays = waiting | (kept & (np.isin(value, waits.kept_values) | np.isin(found.buffer, waits.kept_buffers)))
        once = np.concatenate((held[: self.start], held[self.stop :]))
        both = peak(own | kept, nothing, self.start, self.stop) - size(kept)
        halves = peak((own & ~later & ~waiting) | kept, stays, self.start, self.stop) - waits.context_bytes
        return Transients(
            forward_bytes=most(own, kept, self.start, self.turn),
            backward_bytes=most(own, nothing, self.turn, self.stop),
            input_grad_bytes=most(own & ~later & ~waiting, waiting, self.turn, self.stop),
            weight_grad_bytes=most(own & later, nothing, self.turn, self.stop),
            fused_bytes=max(0.0, both),
            fused_input_grad_bytes=max(0.0, halves),
            received_bytes=size(kept & np.isin(value, received)),
            update_bytes=max(0.0, float(once.max(initial=0.0)) - state),
        )

    def _crossing(self, out: Decisions) -> tuple[list[int], list[int]]:
        """Values of the loop that are received, and those that are sent, as they are made."""
        env = self.flat.env[self.region]
        values: tuple[list[int], list[int]] = [], []
        for port, receives in (*((p, True) for p in self.stage.receives), *((p, False) for p in self.stage.sends)):
            if port.phase in ("forward", "backward"):
                v = env[port.stored]
                n = self.flat.maker[v]
                if out.result_code(self.graph.class_of[n], v - self.flat.first_value[n]) == self._code(
                    out, port, receives
                ):
                    values[not receives].append(v)
        return values

    def _phase(self, n: int) -> int:
        """`_FORWARD`, `_INPUT` or `_WEIGHT`; −1 once a step."""
        return int(self.phases[n])

    def _compute(self, out: Decisions) -> tuple[Any, float]:
        times, once = np.zeros(3), 0.0
        trips = self.flat.regions[self.region].trips
        for this, s in zip(self.graph.classes, out.strategy, strict=False):
            if this.copy_of is not None or not (seconds := float(this.compute_s[s])):
                continue
            for n in this.members:
                phase = self._phase(n)
                if phase < 0:
                    once += seconds * this.trips
                else:
                    times[phase] += seconds * this.trips / trips
        return times, once

    def _communication(self, out: Decisions, compute_s: Any) -> tuple[Any, float]:
        """Seconds that show: float64[phases] of a microbatch, and once a step; ``compute_s`` is float64[phases]."""
        shown, hideable, once, hideable_once = np.zeros(3), np.zeros(3), 0.0, 0.0
        trips = self.flat.regions[self.region].trips
        for what, count in out.counted.items():
            seconds, part = collective_s(out, what), hideable_part(out, what)
            if what.region == 0:
                hideable_once += part * seconds * count
                once += (1 - part) * seconds * count
                continue
            readers = self._readers(what.spot)
            for n in readers:
                phase, each_s = max(self._phase(n), 0), seconds * count / len(readers) / trips
                hideable[phase] += part * each_s
                shown[phase] += (1 - part) * each_s
        platform = self.mesh.logical.device.platform
        exposed = [exposed_s(platform, float(f), float(c)) for f, c in zip(hideable, compute_s, strict=True)]
        return shown + np.array(exposed), once + exposed_s(platform, hideable_once, float(compute_s[1:].sum()))

    def _readers(self, spot: Any) -> list[int]:
        """The planning nodes for which a collective runs."""
        if spot.kind == "pattern":
            uses = self.graph.uses
            return [int(n) for n in uses.user[uses.edges(spot.number, spot.position)]]
        return [spot.number] if spot.kind == "node" else list(self.graph.classes[spot.number].members)

    def _waits(self, out: Decisions) -> _Waits:
        """What waits for the weight gradients: what they read of the input gradients, as it is made even where a
        compiler would make it again; of the forward pass what is materialised; and what both want resharded alike."""
        body, stage = self.stage.body, self.stage
        env = self.flat.env[self.region]
        makers = {r: p for p, node in enumerate(body.nodes) for r in node.results}
        context = kept = 0.0
        values: list[int] = []
        kept_values: list[int] = []
        for v in self._read_later(makers):
            value = env[v]
            n = self.flat.maker[value]
            r = value - self.flat.first_value[n]
            c = self.graph.class_of[n]
            size = float(self.graph.classes[c].signature.usage[r][out.strategy[c]])
            if makers[v] >= stage.boundary:
                context += size
                values.append(value)
            elif self.live.interval(n, r) is not None:
                kept += size
                kept_values.append(value)
        buffers: list[int] = []
        kept_buffers: list[int] = []
        for number, buffer in enumerate(out.buffers):
            start, _ = buffer_spans(self.flat, self.graph.uses, self.live, buffer)
            edges = [self.graph.uses.edges(buffer.pattern, k) for k in (*buffer.readers, *buffer.passing)]
            readers = [self.phases[self.graph.uses.user[e]] for e in edges]
            late, early = (np.any([r == phase for r in readers], axis=0) for phase in (_WEIGHT, _INPUT))
            ahead = self.phases[start]
            ahead = np.where(early & (ahead == _WEIGHT), _INPUT, ahead)  # the program may have weight gradients first
            if stays := int((late & (ahead == _FORWARD)).sum()):
                kept += buffer.size_bytes * stays
                kept_buffers.append(number)
            if handed := int((late & (ahead == _INPUT)).sum()):
                context += buffer.size_bytes * handed
                buffers.append(number)
        return _Waits(context + kept, kept, values, buffers, kept_values, kept_buffers)

    def _read_later(self, makers: Mapping[int, int]) -> list[int]:
        """Values of the loop's body that others make and weight gradients read; of the forward pass's reshapes, what
        they are reshapes of."""
        body, stage = self.stage.body, self.stage
        out: dict[int, None] = {}
        for p in range(stage.boundary, len(body.nodes)):
            if p in self.for_inputs:
                continue
            for v in (o for o in body.nodes[p].operands if isinstance(o, int)):
                while makers.get(v, stage.boundary) < stage.boundary:
                    maker = body.nodes[makers[v]]
                    if not record_of(maker.primitive).traits.aliases:
                        break
                    base = maker.operands[0]
                    if not isinstance(base, int):
                        break
                    v = base
                if v in makers and (makers[v] < stage.boundary or makers[v] in self.for_inputs):
                    out[v] = None
        return list(out)


@dataclass(frozen=True, slots=True)
class _Times:
    """Of the loop, region ``region``: its first operator, the first of its backward pass, which is a program of its
    own, and its end, as planning nodes. ``positions``: planning node of the loop, of its bodies too → position in the
    loop's body."""

    region: int
    start: int
    turn: int
    stop: int
    positions: dict[int, int]


def _times(flat: Flat, stage: StageGraph) -> _Times:
    [region] = flat.children[0, stage.loop]
    first, last = flat.span[region]
    positions = {n: p for p, n in enumerate(flat.at[region]) if n >= 0}
    for inner in flat.regions[region + 1 :]:
        at, position = inner, -1
        while at.parent >= 0 and at.id != region:
            position, at = at.position, flat.regions[at.parent]
        if at.id == region:
            positions |= {n: position for n in flat.at[inner.id] if n >= 0}
    operators = [n for n in range(first, last) if flat.kind[n] in ("op", "recv", "send")]
    backward = [n for n in operators if positions.get(n, -1) >= stage.boundary]
    return _Times(
        region=region,
        start=operators[0] if operators else first,
        turn=backward[0] if backward else last,
        stop=last,
        positions=positions,
    )


def _dearer(edge: ProblemEdge, more: Any) -> ProblemEdge:
    return replace(edge, costs_s=edge.costs_s + more, usages=(), suspected=())
