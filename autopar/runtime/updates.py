"""The update of a stage, in rounds → functions of its tasks (`runtime.stages`), ready for `jax.jit`.

A round runs the nodes that `inter_op.update_rounds` says, each layer's with its own shardings; between two rounds
stages exchange what others need, whole on every device of their meshes. Arrays of a round beside those of other tasks:

    ("argument", …), ("sum", layer, number)   as elsewhere
    ("combined", value, microbatch)           what a layer made of each microbatch
    ("part", value, spec)                     part of a gradient, from another stage by a cut of the plan
    ("crossing", value, stage)                what ``stage`` has of a value of the update
    ("held", layer, value)                    of one round for a later one: a value of the layer's graph
    ("output", number, first, last)           the step's output, or rows of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.inter_op.layer_tasks import Versions
from autopar.inter_op.update_rounds import START, Fill, Made, Part, Time, UpdateSchedule
from autopar.ir.graph import Constant, Graph, Node, TensorType
from autopar.ir.layers import MADE
from autopar.ir.plan import RegionPlan
from autopar.ir.sharding import ShardingSpec
from autopar.jax_compat import JaxprEqn
from autopar.microbatch.kinds import Kind, Max, Min, Rows, Same
from autopar.microbatch.replay import join_rows
from autopar.runtime.carry import carried, cut, settled, whole
from autopar.runtime.lower import Equations, Held, Lowering
from autopar.runtime.order import Order
from autopar.runtime.stages import Array, Key, StagedLayer, StageLowering, StageTask

_SHAPES = ("shape", "new_sizes")
"""Parameters that hold a result's shape."""


@dataclass
class _Inputs:
    """What a task takes, while it is found out."""

    arrays: dict[Key, Array] = field(default_factory=dict)

    def add(self, array: Array) -> Array:
        return self.arrays.setdefault(array.key, array)


class UpdateLowering:
    """The rounds of the update of one stage. ``homes``: layer → stage."""

    def __init__(self, stage: StageLowering, number: int, schedule: UpdateSchedule, homes: Sequence[int]) -> None:
        self.stage, self.number, self.schedule, self.homes = stage, number, schedule, homes
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

    def _whole_spec(self, value_type: TensorType) -> ShardingSpec:
        return ShardingSpec(dims=((),) * len(value_type.shape))

    def _type(self, k: int, stored: int) -> TensorType:
        return self.layers[k].part.graph.values[stored]

    def _held(self, k: int, stored: int) -> Array:
        return Array(("held", k, stored), self._type(k, stored), self.versions[k].bases[stored])

    def crossed(self, o: int, stage: int) -> Array:
        """What a stage sends of a value."""
        made, t = self.schedule.made[o], self._value_type(o)
        if made.join == "rows":
            count = sum(p.stop - p.start for p in made.parts if self.homes[p.layer] == stage)
            t = TensorType(shape=(count, *t.shape[1:]), dtype=t.dtype)
        return Array(("crossing", o, stage), t, self._whole_spec(t))

    def _value_type(self, o: int) -> TensorType:
        return self.update.values[o]

    def _made(self, k: int, stored: int) -> Time:
        """When a layer has made a value itself."""
        return self.times.get((k, self.maker.get((k, stored), -1)), START)

    def ready(self, o: int) -> int:
        """The round in which all of an output is there."""
        made = self.schedule.made[o]
        if made.join in ("one", "rows"):
            return max(self._made(p.layer, p.stored)[0] for p in self._some(o))
        if o in self.crossing:
            return self.crossing[o].after + 1
        return max(self._made(p.layer, p.stored)[0] for p in self.here[o])

    def _some(self, o: int) -> tuple[Part, ...]:
        """The parts of an output that this stage gives."""
        return self.here[o][:1] if self.schedule.made[o].join == "one" else self.here[o]

    def outputs(self) -> dict[int, list[tuple[int, int]]]:
        """Output of the step → which rows of it this stage gives; 0, 0 for all."""
        out: dict[int, list[tuple[int, int]]] = {}
        for j, o in enumerate(self.update.outputs):
            if not isinstance(o, int) or o not in self.schedule.made or not self.here[o]:
                continue
            made = self.schedule.made[o]
            if made.join in ("one", "rows"):
                out[j] = [(p.start, p.stop) for p in self._some(o)]
            elif self.homes[made.parts[0].layer] == self.number:
                out[j] = [(0, 0)]
        return out

    # --- what a round takes ----------------------------------------------------------------------------------------

    def _positions(self, r: int) -> dict[Time, list[tuple[int, int]]]:
        """Times of a round → nodes, by layer."""
        out: dict[Time, list[tuple[int, int]]] = {}
        for (k, q), time in sorted(self.times.items()):
            if time[0] == r:
                out.setdefault(time, []).append((k, q))
        for fill in self.fills.values():
            if fill.time[0] == r:
                out.setdefault(fill.time, [])
        return dict(sorted(out.items()))

    def _sends(self, r: int) -> list[int]:
        """Values of which this stage sends its part after a round."""
        return [o for o, c in self.crossing.items() if c.after == r and self.number in c.sources]

    def _gives(self, r: int) -> list[tuple[int, int]]:
        """(output, value of the update) that a round gives."""
        found = ((j, self.update.outputs[j]) for j in self.outputs())
        return [(j, o) for j, o in found if isinstance(o, int) and self.ready(o) == r]

    def _takes(self, r: int) -> _Inputs:
        takes = _Inputs()
        for time, nodes in self._positions(r).items():
            for fill in self.fills.values():
                if fill.time == time:
                    self._take_parts(takes, fill.value, fill.crosses, r)
            for k, q in nodes:
                for o in self.layers[k].part.graph.nodes[q].operands:
                    if isinstance(o, int):
                        self._take(takes, k, o, r)
        for o in self._sends(r):
            self._take_parts(takes, o, False, r)
        for _, o in self._gives(r):
            if self.schedule.made[o].join in ("one", "rows"):
                for part in self._some(o):
                    self._take(takes, part.layer, part.stored, r, raw=True)
            else:
                self._take_parts(takes, o, o in self.crossing, r)
        return takes

    def _take_parts(self, takes: _Inputs, o: int, crosses: bool, r: int) -> None:
        if crosses:
            for stage in self.crossing[o].sources:
                takes.add(self.crossed(o, stage))
            return
        for part in self._some(o):
            self._take(takes, part.layer, part.stored, r, raw=True)

    def _take(self, takes: _Inputs, k: int, stored: int, r: int, raw: bool = False) -> None:
        """A value of layer k's graph; ``raw``: as the layer made it, where all of it takes its place."""
        layer, part = self.layers[k], self.layers[k].part
        fill = None if raw else self.fills.get((k, stored))
        if fill is not None:
            if fill.time[0] < r:
                takes.add(self._held(k, stored))
            return
        q = self.maker.get((k, stored))
        if q is None:
            where = part.inputs[part.graph.inputs.index(stored)]
            takes.add(self.stage.arguments[where])
        elif (k, q) in self.times:
            if self.times[k, q][0] < r:
                takes.add(self._held(k, stored))
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
        v = self._gradient_port(layer, stored)[0].value
        for other, _, i in self._givers(v):
            takes.add(self.stage.sums(other)[i])
        for array in self._arriving(v):
            takes.add(array)

    def _gradient_port(self, layer: StagedLayer, stored: int) -> tuple[Any, ShardingSpec]:
        for port, spec in self.stage.ports(layer, "gradient", receives=True):
            if port.stored == stored:
                return port, spec
        raise AssertionError(f"layer {layer.number} has no port for value {stored}")

    def _givers(self, v: int) -> list[tuple[StagedLayer, ShardingSpec, int]]:
        """Layers of this stage that send a part of v's gradient: (layer, spec at its port, number of its sum)."""
        out: list[tuple[StagedLayer, ShardingSpec, int]] = []
        for layer in self.layers.values():
            loop = layer.part.graph.nodes[layer.part.loop]
            for port, spec in self.stage.ports(layer, "gradient", receives=False):
                if port.value == v and v in self.schedule.gradient_parts:
                    out.append((layer, spec, loop.results.index(port.stored)))
        return out

    def _arriving(self, v: int) -> list[Array]:
        crossing = self.stage.crossing.get(("gradient", v, False))
        if crossing is None:
            return []
        return [Array(("part", v, crossing.dst_spec), crossing.type, crossing.dst_spec)]

    # --- tasks -----------------------------------------------------------------------------------------------------

    def gradients(self) -> StageTask | None:
        """After the last backward task: gradient sums → parts of gradients that other stages take."""
        values = [v for v in self.schedule.gradient_parts if ("gradient", v, True) in self.stage.crossing]
        if not values:
            return None
        takes = {a.key: a for v in values for x, _, i in self._givers(v) for a in [self.stage.sums(x)[i]]}
        gives: list[Array] = []
        for v in values:
            crossing = self.stage.crossing["gradient", v, True]
            gives.append(Array(("send", v), crossing.type, crossing.src_spec))

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            given = dict(zip(takes, xs, strict=True))
            return [
                self._parts_of_gradient(v, array.spec, given, order) for v, array in zip(values, gives, strict=True)
            ]

        return self.stage.task(tuple(takes.values()), gives, local)

    def _parts_of_gradient(self, v: int, want: ShardingSpec, given: Mapping[Key, Any], order: Order) -> Any:
        total: Any = None
        for layer, spec, i in self._givers(v):
            array = self.stage.sums(layer)[i]
            port = next(p for p, _ in self.stage.ports(layer, "gradient", receives=False) if p.value == v)
            env = self._start(layer, port.stored, array.spec, given[array.key], self._lowering(layer, order))
            held = Held(spec, array.type, {(): self._lowering(layer, order).read(env, spec)})
            x = self.stage.joined(held, want, order)
            total = x if total is None else total + x
        return total

    def _lowering(self, layer: StagedLayer, order: Order) -> Lowering:
        return Lowering(layer.sharding, self.stage.user_rules, in_order=order)

    def _start(self, layer: StagedLayer, stored: int, have: ShardingSpec, x: Any, lowering: Lowering) -> Held:
        """A value of a layer's graph, in the spec in which its readers start."""
        versions = self.versions[layer.number]
        base = versions.bases[stored]
        x = carried(x, have, base, lowering.emit)
        return Held(base, layer.part.graph.values[stored], {(): x}, versions.copies.get(stored, []))

    def rounds(self) -> list[StageTask]:
        """The tasks of all rounds."""
        return [self._round(r) for r in range(self.schedule.rounds + 1)]

    def _round(self, r: int) -> StageTask:
        takes = list(self.takes[r].arrays.values())
        later = {key: a for inputs in self.takes[r + 1 :] for key, a in inputs.arrays.items() if key[0] == "held"}
        made_now = {key: a for key, a in later.items() if self._is_made(key, r)}
        gives = [self.crossed(o, self.number) for o in self._sends(r)]
        gives += [array for j, o in self._gives(r) for array in self._output_arrays(j, o)]
        copies = [(o, array) for j, o in self._gives(r) for array in self._new_values(j)]
        gives += [array for _, array in copies]
        gives += made_now.values()

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            run = _Round(self, {a.key: x for a, x in zip(takes, xs, strict=True)}, order, r)
            run.all(self._positions(r))
            out: dict[Key, Any] = {}
            for o in self._sends(r):
                out["crossing", o, self.number] = run.mine(o)
            for j, o in self._gives(r):
                for array, x in zip(self._output_arrays(j, o), run.output(o, j), strict=True):
                    out[array.key] = x
            for o, array in copies:
                held, lowering = run.output_held(o), run.lowerings[self._some(o)[0].layer]
                out[array.key] = carried(held.arrays[()], held.base, array.spec, lowering.emit)
            for key in made_now:
                held = run.env[key[1]][key[2]]
                out[key] = held.arrays[()]
            return [out[a.key] for a in gives]

        return self.stage.task(takes, gives, local)

    def _is_made(self, key: Key, r: int) -> bool:
        _, k, stored = key
        fill = self.fills.get((k, stored))
        return (fill.time[0] if fill is not None else self._made(k, stored)[0]) == r

    def _output_arrays(self, j: int, o: int) -> list[Array]:
        made = self.schedule.made[o]
        if made.join not in ("one", "rows"):
            t = self._value_type(o)
            return [Array(("output", j, 0, 0), t, self._whole_spec(t))]
        return [
            Array(("output", j, p.start, p.stop), self.output_type(o, p), self.output_spec(o, p)) for p in self._some(o)
        ]

    def _new_values(self, j: int) -> list[Array]:
        """An output that takes the place of an argument that other stages read: as it is sent to them."""
        values = [self.graph.arguments[a] for a, out in self.graph.donated if out == j]
        found = [(v, self.stage.crossing.get(("update", v, True))) for v in values]
        return [Array(("send", v), c.type, c.src_spec) for v, c in found if c is not None]

    def output_type(self, o: int, part: Part) -> TensorType:
        """The type of a stage's part of a value of the update."""
        t = self._value_type(o)
        return t if part.stop == 0 else TensorType(shape=(part.stop - part.start, *t.shape[1:]), dtype=t.dtype)

    def output_spec(self, o: int, part: Part) -> ShardingSpec:
        """How an output leaves: as the layer's plan has it, without partial sums."""
        graph = self.layers[part.layer].part.graph
        if self._is_combined(part):
            return self._whole_spec(self._value_type(o))
        if part.stored in graph.outputs:
            return self.layers[part.layer].sharding.root.outputs[graph.outputs.index(part.stored)]
        return ShardingSpec(dims=self.versions[part.layer].bases[part.stored].dims)

    def _is_combined(self, part: Part) -> bool:
        loop = self.layers[part.layer].part.graph.nodes[self.layers[part.layer].part.loop]
        return part.stored in loop.results[loop.params["num_carry"] :]


class _Round:
    """One round inside `jax.shard_map`. ``env``: layer → values of its graph; ``raw``: as the layer made them."""

    def __init__(self, update: UpdateLowering, given: Mapping[Key, Any], order: Order, r: int) -> None:
        self.update, self.given, self.order, self.r = update, given, order, r
        self.env: dict[int, dict[int, Held]] = {k: {} for k in update.layers}
        self.raw: dict[tuple[int, int], Held] = {}
        self.lowerings = {k: update._lowering(layer, order) for k, layer in update.layers.items()}
        self.read = update.stage.reader(given, order)

    def all(self, positions: Mapping[Time, list[tuple[int, int]]]) -> None:
        for time, nodes in positions.items():
            for fill in self.update.fills.values():
                if fill.time == time:
                    self.fill(fill)
            by_layer: dict[int, list[int]] = {}
            for k, q in nodes:
                by_layer.setdefault(k, []).append(q)
            for k, rows in by_layer.items():
                self.nodes(k, rows)

    def fill(self, fill: Fill) -> None:
        k, lowering, versions = fill.layer, self.lowerings[fill.layer], self.update.versions[fill.layer]
        t, base = self.update._type(k, fill.stored), versions.bases[fill.stored]
        x = cut(self.total(fill.value, fill.crosses), base, lowering.emit)
        if fill.stored in self.env[k]:
            self.raw[k, fill.stored] = self.env[k][fill.stored]
        self.env[k][fill.stored] = Held(base, t, {(): x}, versions.copies.get(fill.stored, []))

    def total(self, o: int, crosses: bool) -> Any:
        """All of a value."""
        if not crosses:
            return self.mine(o)
        made = self.update.schedule.made[o]
        crossing = self.update.crossing[o]
        return _join(made, [self.given["crossing", o, stage] for stage in crossing.sources])

    def mine(self, o: int) -> Any:
        """All that this stage has of a value, on every device."""
        parts: list[Any] = []
        for part in self.update._some(o):
            held = self.value(part.layer, part.stored, raw=True)
            parts.append(whole(held.arrays[()], held.base, self.lowerings[part.layer].emit))
        return _join(self.update.schedule.made[o], parts)

    def output(self, o: int, j: int) -> list[Any]:
        update = self.update
        made = update.schedule.made[o]
        if made.join not in ("one", "rows"):
            return [self.total(o, o in update.crossing)]
        out: list[Any] = []
        for part in update._some(o):
            held, lowering = self.value(part.layer, part.stored, raw=True), self.lowerings[part.layer]
            want = update.output_spec(o, part)
            if part.stored in update.layers[part.layer].part.graph.outputs:
                out.append(lowering.read(held, want))
            else:
                out.append(carried(held.arrays[()], held.base, want, lowering.emit))
        return out

    def output_held(self, o: int) -> Held:
        """An output that one layer makes, as it makes it."""
        [part] = self.update._some(o)
        return self.value(part.layer, part.stored, raw=True)

    def value(self, k: int, stored: int, raw: bool = False) -> Held:
        """A value of a layer's graph."""
        if raw and (k, stored) in self.raw:
            return self.raw[k, stored]
        if stored not in self.env[k]:
            self.env[k][stored] = self.taken(k, stored)
        return self.env[k][stored]

    def taken(self, k: int, stored: int) -> Held:
        """A value that is there before the round."""
        update, layer, lowering = self.update, self.update.layers[k], self.lowerings[k]
        part = layer.part
        copies = update.versions[k].copies.get(stored, [])
        if ("held", k, stored) in self.given:
            array = update._held(k, stored)
            return Held(array.spec, array.type, {(): self.given[array.key]}, copies)
        q = update.maker.get((k, stored))
        if q is None:
            held = self.read(layer, part.inputs[part.graph.inputs.index(stored)])
            return update._start(layer, stored, held.base, held.arrays[()], lowering)
        if q == part.loop:
            return self.result(layer, stored)
        port, spec = update._gradient_port(layer, stored)
        x: Any = update._parts_of_gradient(port.value, spec, self.given, self.order)
        for array in update._arriving(port.value):
            held = Held(array.spec, array.type, {(): self.given[array.key]})
            arrived = update.stage.joined(held, spec, self.order)
            x = arrived if x is None else x + arrived
        return update._start(layer, stored, spec, x, lowering)

    def result(self, layer: StagedLayer, stored: int) -> Held:
        update, lowering = self.update, self.lowerings[layer.number]
        loop = layer.part.graph.nodes[layer.part.loop]
        i, sums = loop.results.index(stored), loop.params["num_carry"]
        if i < sums:
            array = update.stage.sums(layer)[i]
            return update._start(layer, stored, array.spec, self.given[array.key], lowering)
        array = update.stage.combined(layer)[i - sums]
        keys = ((*array.key, j) for j in range(update.graph.num_microbatches))
        parts = [self.given[key] for key in keys if key in self.given]
        n, kind = update.graph.num_microbatches, update.kinds[array.key[1]]
        x = _over_microbatches(kind, parts, array.spec, n, lowering)
        slot = update.update.inputs[len(update.graph.trained) + update.graph.combined.index(array.key[1])]
        t = update._value_type(slot)
        return Held(update._whole_spec(t), t, {(): x})

    def nodes(self, k: int, positions: Sequence[int]) -> None:
        """Some nodes of a layer."""
        update, layer = self.update, self.update.layers[k]
        graph, region = layer.part.graph, layer.sharding.root
        bases = update.versions[k].bases
        nodes = [_typed(graph.nodes[q]) for q in positions]
        made = {r for n in nodes for r in n.results}
        for node in nodes:
            for o in node.operands:
                if isinstance(o, int) and o not in made:
                    self.value(k, o)
        results = [r for n in nodes for r in n.results]
        bodies = dict(region.bodies)
        some = Graph(values=graph.values, nodes=tuple(nodes), inputs=(), outputs=tuple(results))
        plan = RegionPlan(
            inputs=(),
            outputs=tuple(bases[r] for r in results),
            nodes=tuple(region.nodes[q] for q in positions),
            rebased=region.rebased,
            copies=region.copies,
            bodies=tuple((i, bodies[q]) for i, q in enumerate(positions) if q in bodies),
        )
        eqns = [self.equation(layer, q, node) for q, node in zip(positions, nodes, strict=True)]
        self.lowerings[k].run(some, Equations(eqns, [None] * len(results)), plan, [], self.env[k])

    def equation(self, layer: StagedLayer, q: int, node: Node) -> JaxprEqn:
        number, p = layer.part.origins[q]
        if (number, p) == MADE:
            t = node.result_types[0]
            struct = jax.ShapeDtypeStruct(t.shape, t.dtype)
            return jax.make_jaxpr(jax.lax.add)(struct, struct).jaxpr.eqns[0]
        eqn = self.update.layered.update.eqns[p]
        if number < 0:
            return eqn
        shape = node.result_types[0].shape
        return eqn.replace(params={k: shape if k in _SHAPES else v for k, v in eqn.params.items()})


def _typed(node: Node) -> Node:
    """Constants in the shapes that a node on rows has them in."""
    operands = tuple(
        Constant(type=t, value=o.value) if isinstance(o, Constant) and o.type != t else o
        for o, t in zip(node.operands, node.operand_types, strict=True)
    )
    return node if operands == node.operands else replace(node, operands=operands)


def _join(made: Made, parts: Sequence[Any]) -> Any:
    operator: Callable[[Any, Any], Any]
    match made.join:
        case "one":
            return parts[0]
        case "rows":
            return parts[0] if len(parts) == 1 else jnp.concatenate(list(parts))
        case "reduce_sum":
            operator = jnp.add
        case "reduce_max":
            operator = jnp.maximum
        case "reduce_min":
            operator = jnp.minimum
    total = parts[0]
    for part in parts[1:]:
        total = operator(total, part)
    return total


def _over_microbatches(kind: Kind, parts: Sequence[Any], spec: ShardingSpec, n: int, lowering: Lowering) -> Any:
    """What microbatches made of a value, on every device."""
    if n == 1 or isinstance(kind, Same):
        return whole(parts[0], spec, lowering.emit)
    match kind:
        case Rows():
            return join_rows(jnp.stack([whole(x, spec, lowering.emit) for x in parts]), kind, n)
        case Max() | Min():
            apart = jnp.stack([settled(x, spec, lowering.emit)[0] for x in parts])
            best = apart.max(0) if isinstance(kind, Max) else apart.min(0)
            return whole(best, ShardingSpec(dims=spec.dims), lowering.emit)
        case _:
            return whole(jnp.stack(list(parts)).sum(0), spec, lowering.emit)
