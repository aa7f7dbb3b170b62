"""One round of a stage's update (`runtime.updates`), as it runs on the local parts of arrays inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.frontend.microbatch.replay import join_rows
from autopar.inter_op.update_rounds import Fill, Made, Time
from autopar.ir.graph import Constant, Graph, Node
from autopar.ir.layers import MADE
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import RegionPlan
from autopar.jax_compat import JaxprEqn
from autopar.primitives.elementwise import JOIN
from autopar.primitives.kinds import Kind, Max, Min, Rows, Same
from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.lowering import Equations, Held, Lowering
from autopar.runtime.one_program.reshard_whole import carried, cut, settled, whole
from autopar.runtime.stage_arrays import Key
from autopar.runtime.stages import StagedLayer
from autopar.runtime.update_values import Stored, UpdateValues

_SHAPES = ("shape", "new_sizes")
"""Parameters that hold a result's shape."""


class Round:
    """Round number ``r`` of a stage's update, inside `jax.shard_map`. ``given``: this device's shard of each array that
    the round takes, by key. ``env``: layer → values of its graph as its nodes read them; ``raw``: (layer, value) → the
    layer's own part, where `fill` put all of a value in its place."""

    def __init__(self, update: UpdateValues, given: Mapping[Key, Any], order: Order, r: int) -> None:
        self.update, self.given, self.order, self.r = update, given, order, r
        self.env: dict[int, dict[int, Held]] = {k: {} for k in update.layers}
        self.raw: dict[tuple[int, int], Held] = {}
        self.lowerings = {k: update.lowering(layer, order) for k, layer in update.layers.items()}
        self.read = update.stage.reader(given, order)

    def all(self, positions: Mapping[Time, list[tuple[int, int]]]) -> None:
        """Runs the round: at each time its fills, then its nodes. ``positions``: time → (layer, position in its graph),
        as `UpdateValues.positions` gives them."""
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
        """Puts all of a value of the update in the place of what a layer's graph has of it."""
        k, lowering, versions = fill.layer, self.lowerings[fill.layer], self.update.versions[fill.layer]
        t, base = self.update.type_of(k, fill.stored), versions.bases[fill.stored]
        x = cut(self.total(fill.value, fill.crosses), base, lowering.emit)
        if fill.stored in self.env[k]:
            self.raw[k, fill.stored] = self.env[k][fill.stored]
        self.env[k][fill.stored] = Held(base, t, {(): x}, versions.copies.get(fill.stored, []))

    def total(self, o: int, crosses: bool) -> Any:
        """All of value ``o`` of the update, whole on every device: this stage's parts, or where it ``crosses`` those of
        all stages, put together."""
        if not crosses:
            return self.mine(o)
        made = self.update.schedule.made[o]
        crossing = self.update.crossing[o]
        return _join(made, [self.given["crossing", o, stage] for stage in crossing.sources])

    def mine(self, o: int) -> Any:
        """All that this stage has of value ``o`` of the update, whole on every device."""
        parts: list[Any] = []
        for part in self.update.parts(o):
            held = self.value(part.layer, part.stored, raw=True)
            parts.append(whole(held.arrays[()], held.base, self.lowerings[part.layer].emit))
        return _join(self.update.schedule.made[o], parts)

    def output(self, o: int, j: int) -> list[Any]:
        """The shards of output ``j``, value ``o`` of the update, that this stage gives, in the order of
        `UpdateValues.output_arrays`."""
        update = self.update
        made = update.schedule.made[o]
        if made.join not in ("one", "rows"):
            return [self.total(o, o in update.crossing)]
        out: list[Any] = []
        for part in update.parts(o):
            held, lowering = self.value(part.layer, part.stored, raw=True), self.lowerings[part.layer]
            want = update.output_spec(o, part)
            if part.stored in update.layers[part.layer].part.graph.outputs:
                out.append(lowering.read(held, want))
            else:
                out.append(carried(held.arrays[()], held.base, want, lowering.emit))
        return out

    def output_held(self, o: int) -> Held:
        """Value ``o`` of the update, which one layer makes, in the spec in which that layer makes it."""
        [part] = self.update.parts(o)
        return self.value(part.layer, part.stored, raw=True)

    def value(self, k: int, stored: int, raw: bool = False) -> Held:
        """Value ``stored`` of layer ``k``'s graph; ``raw``: as the layer made it, before `fill`."""
        own = raw and (k, stored) in self.update.fills
        if own and ((k, stored) in self.raw or self.update.inside((k, stored, True)) != self.r):
            if (k, stored) not in self.raw:
                self.raw[k, stored] = self.taken((k, stored, True))
            return self.raw[k, stored]
        if stored not in self.env[k]:
            self.env[k][stored] = self.taken((k, stored, False))
        return self.env[k][stored]

    def taken(self, what: Stored) -> Held:
        """A value of a layer's graph from what is there before the round: versions that earlier ones made, and where
        the round makes it anew, that."""
        update, (k, stored, _) = self.update, what
        takes, versions = update.takes[self.r], update.versions[k]
        if what in takes.anew:
            held = self.anew(k, stored)
        else:
            held = Held(versions.bases[stored], update.type_of(k, stored), {}, versions.copies.get(stored, []))
        held.arrays.update({a.key[2][1]: self.given[a.key] for a in takes.held.get(what, ())})
        return held

    def anew(self, k: int, stored: int) -> Held:
        """Value ``stored`` of layer ``k``'s graph from what there is in all rounds: an argument, a result of the loop,
        or a gradient whose parts several layers have."""
        update, layer, lowering = self.update, self.update.layers[k], self.lowerings[k]
        part = layer.part
        q = update.maker.get((k, stored))
        if q is None:
            held = self.read(layer, part.inputs[part.graph.inputs.index(stored)])
            return update.started(layer, stored, held.base, held.arrays[()], lowering)
        if q == part.loop:
            return self.result(layer, stored)
        port, spec = update.gradient_port(layer, stored)
        x: Any = update.parts_of_gradient(port.value, spec, self.given, self.order)
        for array in update.arriving(port.value):
            held = Held(array.spec, array.type, {(): self.given[array.key]})
            arrived = update.stage.joined(held, spec, self.order)
            x = arrived if x is None else x + arrived
        return update.started(layer, stored, spec, x, lowering)

    def result(self, layer: StagedLayer, stored: int) -> Held:
        """A result of a layer's loop: a gradient sum, or what is combined over microbatches, whole on every device."""
        update, lowering = self.update, self.lowerings[layer.number]
        loop = layer.part.graph.nodes[layer.part.loop]
        i, sums = loop.results.index(stored), loop.params["num_carry"]
        if i < sums:
            array = update.stage.sums(layer)[i]
            return update.started(layer, stored, array.spec, self.given[array.key], lowering)
        array = update.stage.combined(layer)[i - sums]
        keys = ((*array.key, j) for j in range(update.graph.num_microbatches))
        parts = [self.given[key] for key in keys if key in self.given]
        n, kind = update.graph.num_microbatches, update.kinds[array.key[1]]
        x = _over_microbatches(kind, parts, array.spec, n, lowering)
        slot = update.update.inputs[len(update.graph.trained) + update.graph.combined.index(array.key[1])]
        t = update.value_type(slot)
        return Held(update.whole_spec(t), t, {(): x})

    def nodes(self, k: int, positions: Sequence[int]) -> None:
        """Runs the nodes at ``positions`` of layer ``k``'s graph; ``env`` learns their results."""
        update, layer = self.update, self.update.layers[k]
        graph, region = layer.part.graph, layer.sharding.root
        bases = update.versions[k].bases
        nodes = [_typed(graph.nodes[q]) for q in positions]
        made = {r for n in nodes for r in n.results}
        reads = {o: self.value(k, o) for n in nodes for o in n.operands if isinstance(o, int) and o not in made}
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

        def run(order: Order, reads: Mapping[int, Held], env: dict[int, Held]) -> list[Any]:
            lowering = self.lowerings[k] if order is self.order else update.lowering(layer, order)
            eqns = [self.equation(layer, q, node) for q, node in zip(positions, nodes, strict=True)]
            env.update(reads)
            return lowering.run(some, Equations(eqns, [None] * len(results)), plan, [], env)

        which = "update", tuple(positions), update.stage.looks(layer)
        update.stage.once(which, run, self.order, reads, self.env[k])

    def equation(self, layer: StagedLayer, q: int, node: Node) -> JaxprEqn:
        """The equation behind node ``node`` at position ``q`` of a layer's graph: an addition where none is, else the
        update's, with the shape of the rows that the layer works on."""
        number, p = layer.part.origins[q]
        if (number, p) == MADE:
            t = node.result_types[0]
            struct = jax.ShapeDtypeStruct(t.shape, t.dtype)
            return jax.make_jaxpr(jax.lax.add)(struct, struct).jaxpr.eqns[0]
        eqn = self.update.layered.update.eqns[p]
        if number < 0:
            return eqn
        if node.primitive == JOIN:
            return eqn.replace(invars=[eqn.invars[eqn.params["owners"].index(number)]])
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
        case "add_any":
            operator = jnp.add
        case "max":
            operator = jnp.maximum
        case "min":
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
