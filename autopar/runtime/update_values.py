"""What a stage has, takes and gives of the values of an update, round by round: `UpdateValues`.

In: a stage as it is lowered, and how rounds divide the update (`inter_op.update_rounds`). Out: each round's arrays.
Arrays of a round beside those of other tasks:

    ("argument", …), ("sum", layer, number)   as elsewhere
    ("combined", value, microbatch)           what a layer made of each microbatch
    ("part", value, spec)                     part of a gradient, from another stage by a cut of the plan
    ("crossing", value, stage)                what ``stage`` has of a value of the update
    ("held", layer, version, own)             of one round for a later one: a version of a value of the layer's graph,
                                              ``own``: as the layer made it, where all of it takes its place
    ("output", number, first, last)           the step's output, or rows of it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.inter_op.layer_tasks import Version, Versions
from autopar.inter_op.update_rounds import START, Part, Time, UpdateSchedule
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import ReshardStep
from autopar.primitives.kinds import Same
from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.lowering import Held, Lowering
from autopar.runtime.one_program.reshard_whole import carried
from autopar.runtime.stage_arrays import Array, Key
from autopar.runtime.stages import StagedLayer, StageLowering

Stored = tuple[int, int, bool]
"""(layer, value of its graph, whether as the layer made it where all of it takes its place)."""


@dataclass
class _Inputs:
    """What a task takes, while it is found out. ``anew``: values that it makes of what is there in all rounds;
    ``held``: value → its versions that an earlier round made; ``reads``: all versions that it reads."""

    arrays: dict[Key, Array] = field(default_factory=dict)
    anew: set[Stored] = field(default_factory=set)
    held: dict[Stored, list[Array]] = field(default_factory=dict)
    reads: list[tuple[Stored, Version]] = field(default_factory=list)

    def add(self, array: Array) -> Array:
        return self.arrays.setdefault(array.key, array)


class UpdateValues:
    """What stage ``number`` has, takes and gives of the update's values, round by round. Values of the update are
    called ``o``, values of a layer's graph ``stored``, layers ``k``, outputs of the step ``j``, rounds ``r``."""

    def __init__(self, stage: StageLowering, number: int, schedule: UpdateSchedule) -> None:
        self.stage, self.number, self.schedule = stage, number, schedule
        self.layered, self.graph, self.update = stage.layered, stage.graph, stage.graph.update
        self.layers = {layer.number: layer for layer in stage.layers}
        self.versions = {k: Versions(x.part.graph, x.sharding.root, x.sharding) for k, x in self.layers.items()}
        self.kinds = dict(zip(self.graph.combined, self.layered.combine, strict=True))
        self.times = {(k, q): t for k in self.layers for q, t in schedule.times[k]}
        self.maker = {
            (k, r): q for k, x in self.layers.items() for q, n in enumerate(x.part.graph.nodes) for r in n.results
        }
        self.fills = {(f.layer, f.stored): f for f in schedule.fills if f.layer in self.layers}
        self.crossing = {c.value: c for c in schedule.crossings}
        self.here = {o: tuple(p for p in made.parts if p.layer in self.layers) for o, made in schedule.made.items()}
        self.first: dict[tuple[Stored, Version], int] = {}
        """When a version of a value is made first: a value's steps are run once, as plans have it, and what later
        rounds read of them is held."""
        self.takes = [self._takes(r) for r in range(schedule.rounds + 1)]

    # --- what is where ---------------------------------------------------------------------------------------------

    def whole_spec(self, value_type: TensorType) -> ShardingSpec:
        """The spec of a value of that type which every device has whole."""
        return ShardingSpec(dims=((),) * len(value_type.shape))

    def type_of(self, k: int, stored: int) -> TensorType:
        """The type of value ``stored`` of layer ``k``'s graph."""
        return self.layers[k].part.graph.values[stored]

    def held(self, what: Stored, version: Version) -> Array:
        """The array that holds a version of a value from one round for later ones."""
        k, stored, own = what
        return Array(("held", k, version, own), self.type_of(k, stored), self.versions[k].spec(version))

    def held_first(self, r: int) -> dict[Key, Array]:
        """What round ``r`` makes for later ones to take."""
        later = [
            (what, array) for takes in self.takes[r + 1 :] for what, found in takes.held.items() for array in found
        ]
        return {a.key: a for what, a in later if self.first[what, a.key[2]] == r}

    def inside(self, what: Stored) -> int | None:
        """The round that makes a value; None of what there is in all rounds: arguments, results of the loop, gradients
        that are received."""
        k, stored, own = what
        if not own and (k, stored) in self.fills:
            return self.fills[k, stored].time[0]
        time = self.times.get((k, self.maker.get((k, stored), -1)))
        return None if time is None else time[0]

    def crossed(self, o: int, stage: int) -> Array:
        """The array of what stage ``stage`` has of value ``o``, whole on every device: its rows, where parts are
        rows."""
        made, t = self.schedule.made[o], self.value_type(o)
        if made.join == "rows":
            count = sum(p.stop - p.start for p in made.parts if self.schedule.home[p.layer] == stage)
            t = TensorType(shape=(count, *t.shape[1:]), dtype=t.dtype)
        return Array(("crossing", o, stage), t, self.whole_spec(t))

    def value_type(self, o: int) -> TensorType:
        """The type of value ``o`` of the update."""
        return self.update.values[o]

    def _made(self, k: int, stored: int) -> Time:
        """When a layer has made a value itself."""
        return self.times.get((k, self.maker.get((k, stored), -1)), START)

    def ready(self, o: int) -> int:
        """The round in which all of value ``o``, an output, is there."""
        made = self.schedule.made[o]
        if made.join in ("one", "rows"):
            return max(self._made(p.layer, p.stored)[0] for p in self.parts(o))
        if o in self.crossing:
            return self.crossing[o].after + 1
        return max(self._made(p.layer, p.stored)[0] for p in self.here[o])

    def parts(self, o: int) -> tuple[Part, ...]:
        """The parts of value ``o`` that this stage's layers make, in order; the first where each is all of it."""
        return self.here[o][:1] if self.schedule.made[o].join == "one" else self.here[o]

    def outputs(self) -> dict[int, list[tuple[int, int]]]:
        """Output of the step → which rows of it this stage gives; 0, 0 for all."""
        out: dict[int, list[tuple[int, int]]] = {}
        for j, o in enumerate(self.update.outputs):
            if not isinstance(o, int) or o not in self.schedule.made or not self.here[o]:
                continue
            made = self.schedule.made[o]
            if made.join in ("one", "rows"):
                out[j] = [(p.start, p.stop) for p in self.parts(o)]
            elif self.schedule.home[made.parts[0].layer] == self.number:
                out[j] = [(0, 0)]
        return out

    # --- what a round takes ----------------------------------------------------------------------------------------

    def positions(self, r: int) -> dict[Time, list[tuple[int, int]]]:
        """Time → nodes (layer, position in its graph) of round ``r``, in order; times of fills alone have none."""
        out: dict[Time, list[tuple[int, int]]] = {}
        for (k, q), time in sorted(self.times.items()):
            if time[0] == r:
                out.setdefault(time, []).append((k, q))
        for fill in self.fills.values():
            if fill.time[0] == r:
                out.setdefault(fill.time, [])
        return dict(sorted(out.items()))

    def sends(self, r: int) -> list[int]:
        """Values of which this stage sends its parts after round ``r``."""
        return [o for o, c in self.crossing.items() if c.after == r and self.number in c.sources]

    def gives(self, r: int) -> list[tuple[int, int]]:
        """(output, value of the update) of all outputs that round ``r`` gives."""
        found = ((j, self.update.outputs[j]) for j in self.outputs())
        return [(j, o) for j, o in found if isinstance(o, int) and self.ready(o) == r]

    def _takes(self, r: int) -> _Inputs:
        takes = _Inputs()
        for time, nodes in self.positions(r).items():
            for fill in self.fills.values():
                if fill.time == time:
                    self._take_parts(takes, fill.value, fill.crosses, r)
            for k, q in nodes:
                for stored, want in self.versions[k].reads([q]):
                    self._take(takes, (k, stored, False), (stored, self.versions[k].path(stored, want)), r)
        for o in self.sends(r):
            self._take_parts(takes, o, False, r)
        for _, o in self.gives(r):
            if self.schedule.made[o].join in ("one", "rows"):
                for part in self.parts(o):
                    self._take(takes, self.part_of(part), (part.stored, self._output_path(part)), r)
            else:
                self._take_parts(takes, o, o in self.crossing, r)
        for what, (stored, steps) in takes.reads:
            made = self.inside(what)
            self.first.setdefault((what, (stored, ())), r if made is None else made)
            for n in range(len(steps)):
                self.first.setdefault((what, (stored, steps[: n + 1])), r)
        return takes

    def _take_parts(self, takes: _Inputs, o: int, crosses: bool, r: int) -> None:
        if crosses:
            for stage in self.crossing[o].sources:
                takes.add(self.crossed(o, stage))
            return
        for part in self.parts(o):
            self._take(takes, self.part_of(part), (part.stored, ()), r)

    def part_of(self, part: Part) -> Stored:
        """A part of a value of the update, as its layer made it."""
        return part.layer, part.stored, (part.layer, part.stored) in self.fills

    def _output_path(self, part: Part) -> tuple[ReshardStep, ...]:
        """The steps to how a part leaves as an output."""
        layer = self.layers[part.layer]
        if part.stored not in layer.part.graph.outputs or self._is_combined(part):
            return ()
        want = layer.sharding.root.outputs[layer.part.graph.outputs.index(part.stored)]
        return self.versions[part.layer].path(part.stored, want)

    def _take(self, takes: _Inputs, what: Stored, version: Version, r: int) -> None:
        """A version of a value of a layer's graph: the nearest that an earlier round made, or what it is made of."""
        (stored, steps), made = version, self.inside(what)
        takes.reads.append((what, version))
        there = [n for n in range(len(steps) + 1) if self.first.get((what, (stored, steps[:n])), r) < r]
        nearest = stored, steps[: max(there, default=0)]
        if made is None and not (there and self._moves(what, nearest)):
            self._take_made(takes, what)
        elif made != r and nearest not in (a.key[2] for a in takes.held.get(what, ())):
            takes.held.setdefault(what, []).append(takes.add(self.held(what, nearest)))

    def _moves(self, what: Stored, version: Version) -> bool:
        """Whether data moved between devices for a version of what there is in all rounds: else it costs more to hold
        than to make again (as does what is combined over microbatches, small and of another shape)."""
        k, stored, _ = what
        layer, q, base = self.layers[k], self.maker.get((k, stored)), self.versions[k].bases[stored]
        moved = any(step.kind not in ("slice", "mask") for step in version[1])
        if q is None:
            where = layer.part.inputs[layer.part.graph.inputs.index(stored)]
            return moved or self.stage.arguments[where].spec != base
        if q != layer.part.loop:
            return True
        loop = layer.part.graph.nodes[q]
        i = loop.results.index(stored)
        return i < loop.params["num_carry"] and (moved or self.stage.sums(layer)[i].spec != base)

    def _take_made(self, takes: _Inputs, what: Stored) -> None:
        """What a value that no round makes is made of."""
        k, stored, _ = what
        layer, part, q = self.layers[k], self.layers[k].part, self.maker.get((k, stored))
        takes.anew.add(what)
        if q is None:
            takes.add(self.stage.arguments[part.inputs[part.graph.inputs.index(stored)]])
        elif q == part.loop:
            self._take_result(takes, layer, stored)
        else:
            self._take_parts_of_gradient(takes, layer, stored)

    def _take_result(self, takes: _Inputs, layer: StagedLayer, stored: int) -> None:
        """A result of the loop: a gradient sum, or what is combined over microbatches."""
        loop = layer.part.graph.nodes[layer.part.loop]
        i, sums = loop.results.index(stored), loop.params["num_carry"]
        if i < sums:
            takes.add(self.stage.sums(layer)[i])
            return
        array = self.stage.combined(layer)[i - sums]
        count = 1 if isinstance(self.kinds[array.key[1]], Same) else self.graph.num_microbatches
        for j in range(count):
            takes.add(replace(array, key=(*array.key, j)))

    def _take_parts_of_gradient(self, takes: _Inputs, layer: StagedLayer, stored: int) -> None:
        v = self.gradient_port(layer, stored)[0].value
        for other, _, i in self.givers(v):
            takes.add(self.stage.sums(other)[i])
        for array in self.arriving(v):
            takes.add(array)

    def gradient_port(self, layer: StagedLayer, stored: int) -> tuple[Any, ShardingSpec]:
        """(port, its spec) through which a layer receives the parts of the gradient that is ``stored`` in its graph."""
        for port, spec in self.stage.ports(layer, "gradient", receives=True):
            if port.stored == stored:
                return port, spec
        raise AssertionError(f"layer {layer.number} has no port for value {stored}")

    def givers(self, v: int) -> list[tuple[StagedLayer, ShardingSpec, int]]:
        """Layers of this stage that send a part of the gradient of trained value ``v``: (layer, spec at its port,
        number of its sum)."""
        out: list[tuple[StagedLayer, ShardingSpec, int]] = []
        for layer in self.layers.values():
            loop = layer.part.graph.nodes[layer.part.loop]
            for port, spec in self.stage.ports(layer, "gradient", receives=False):
                if port.value == v and v in self.schedule.gradient_parts:
                    out.append((layer, spec, loop.results.index(port.stored)))
        return out

    def arriving(self, v: int) -> list[Array]:
        """The arrays of what other stages send of the gradient of trained value ``v``: one, or none."""
        crossing = self.stage.crossing.get(("gradient", v, False))
        if crossing is None:
            return []
        return [Array(("part", v, crossing.dst_spec), crossing.type, crossing.dst_spec)]

    # --- values as arrays ------------------------------------------------------------------------------------------

    def parts_of_gradient(self, v: int, want: ShardingSpec, given: Mapping[Key, Any], order: Order) -> Any:
        """The sum of this stage's parts of the gradient of ``v``, in spec ``want``, on this device's shards ``given``
        by key; None where it has none."""
        total: Any = None
        for layer, spec, i in self.givers(v):
            array = self.stage.sums(layer)[i]
            port = next(p for p, _ in self.stage.ports(layer, "gradient", receives=False) if p.value == v)
            env = self.started(layer, port.stored, array.spec, given[array.key], self.lowering(layer, order))
            held = Held(spec, array.type, {(): self.lowering(layer, order).read(env, spec)})
            x = self.stage.joined(held, want, order)
            total = x if total is None else total + x
        return total

    def lowering(self, layer: StagedLayer, order: Order) -> Lowering:
        """What evaluates a layer's nodes under its shardings, its collectives in ``order``."""
        return Lowering(layer.sharding, self.stage.user_rules, self.stage.platform, order=order)

    def started(self, layer: StagedLayer, stored: int, have: ShardingSpec, x: Any, lowering: Lowering) -> Held:
        """Value ``stored`` of a layer's graph, which is ``x`` in spec ``have``, in the spec in which its readers
        start."""
        versions = self.versions[layer.number]
        base = versions.bases[stored]
        x = carried(x, have, base, lowering.emit)
        return Held(base, layer.part.graph.values[stored], {(): x}, versions.copies.get(stored, []))

    def output_type(self, o: int, part: Part) -> TensorType:
        """The type of a part of value ``o``: its rows, where it has some only."""
        t = self.value_type(o)
        return t if part.stop == 0 else TensorType(shape=(part.stop - part.start, *t.shape[1:]), dtype=t.dtype)

    def output_spec(self, o: int, part: Part) -> ShardingSpec:
        """The spec in which a part of value ``o`` leaves as an output: as the layer's plan has it, without partial
        sums."""
        graph = self.layers[part.layer].part.graph
        if self._is_combined(part):
            return self.whole_spec(self.value_type(o))
        if part.stored in graph.outputs:
            return self.layers[part.layer].sharding.root.outputs[graph.outputs.index(part.stored)]
        return ShardingSpec(dims=self.versions[part.layer].bases[part.stored].dims)

    def _is_combined(self, part: Part) -> bool:
        loop = self.layers[part.layer].part.graph.nodes[self.layers[part.layer].part.loop]
        return part.stored in loop.results[loop.params["num_carry"] :]

    def output_arrays(self, j: int, o: int) -> list[Array]:
        """The arrays in which this stage gives output ``j``, value ``o`` of the update: one for each of its parts, or
        all of a combined value, whole on every device."""
        made = self.schedule.made[o]
        if made.join not in ("one", "rows"):
            t = self.value_type(o)
            return [Array(("output", j, 0, 0), t, self.whole_spec(t))]
        return [
            Array(("output", j, p.start, p.stop), self.output_type(o, p), self.output_spec(o, p)) for p in self.parts(o)
        ]

    def new_values(self, j: int) -> list[Array]:
        """The arrays in which output ``j`` is sent to other stages that read the argument it takes the place of."""
        values = [self.graph.arguments[a] for a, out in self.graph.state if out == j]
        found = [(v, self.stage.crossing.get(("update", v, True))) for v in values]
        return [Array(("send", v), c.type, c.src_spec) for v, c in found if c is not None]
