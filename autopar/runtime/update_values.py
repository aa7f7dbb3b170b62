"""What a stage has, takes and gives of the values of an update, round by round: `UpdateValues`.

In: a stage as it is lowered, and how rounds divide the update (`inter_op.update_rounds`). Out: each round's arrays.
Arrays of a round beside those of other tasks:

    ("argument", …), ("sum", layer, number)   as elsewhere
    ("combined", value, microbatch)           what a layer made of each microbatch
    ("part", value, spec)                     part of a gradient, from another stage by a cut of the plan
    ("crossing", value, stage)                what ``stage`` has of a value of the update
    ("held", layer, value)                    of one round for a later one: a value of the layer's graph
    ("output", number, first, last)           the step's output, or rows of it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.inter_op.layer_tasks import Versions
from autopar.inter_op.update_rounds import START, Part, Time, UpdateSchedule
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.primitives.kinds import Same
from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.lowering import Held, Lowering
from autopar.runtime.one_program.reshard_whole import carried
from autopar.runtime.stage_arrays import Array, Key
from autopar.runtime.stages import StagedLayer, StageLowering


@dataclass
class _Inputs:
    """What a task takes, while it is found out."""

    arrays: dict[Key, Array] = field(default_factory=dict)

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
        self.takes = [self._takes(r) for r in range(schedule.rounds + 1)]

    # --- what is where ---------------------------------------------------------------------------------------------

    def whole_spec(self, value_type: TensorType) -> ShardingSpec:
        """The spec of a value of that type which every device has whole."""
        return ShardingSpec(dims=((),) * len(value_type.shape))

    def type_of(self, k: int, stored: int) -> TensorType:
        """The type of value ``stored`` of layer ``k``'s graph."""
        return self.layers[k].part.graph.values[stored]

    def held(self, k: int, stored: int) -> Array:
        """The array that holds value ``stored`` of layer ``k`` from one round for a later one, in the spec in which its
        readers start."""
        return Array(("held", k, stored), self.type_of(k, stored), self.versions[k].bases[stored])

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
                for o in self.layers[k].part.graph.nodes[q].operands:
                    if isinstance(o, int):
                        self._take(takes, k, o, r)
        for o in self.sends(r):
            self._take_parts(takes, o, False, r)
        for _, o in self.gives(r):
            if self.schedule.made[o].join in ("one", "rows"):
                for part in self.parts(o):
                    self._take(takes, part.layer, part.stored, r, raw=True)
            else:
                self._take_parts(takes, o, o in self.crossing, r)
        return takes

    def _take_parts(self, takes: _Inputs, o: int, crosses: bool, r: int) -> None:
        if crosses:
            for stage in self.crossing[o].sources:
                takes.add(self.crossed(o, stage))
            return
        for part in self.parts(o):
            self._take(takes, part.layer, part.stored, r, raw=True)

    def _take(self, takes: _Inputs, k: int, stored: int, r: int, raw: bool = False) -> None:
        """A value of layer k's graph; ``raw``: as the layer made it, where all of it takes its place."""
        layer, part = self.layers[k], self.layers[k].part
        fill = None if raw else self.fills.get((k, stored))
        if fill is not None:
            if fill.time[0] < r:
                takes.add(self.held(k, stored))
            return
        q = self.maker.get((k, stored))
        if q is None:
            where = part.inputs[part.graph.inputs.index(stored)]
            takes.add(self.stage.arguments[where])
        elif (k, q) in self.times:
            if self.times[k, q][0] < r:
                takes.add(self.held(k, stored))
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

    def is_made(self, key: Key, r: int) -> bool:
        """True where the array with key ("held", layer, value) comes about in round ``r``."""
        _, k, stored = key
        fill = self.fills.get((k, stored))
        return (fill.time[0] if fill is not None else self._made(k, stored)[0]) == r

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
