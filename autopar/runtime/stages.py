"""A stage of a pipeline plan → functions of its tasks, ready for `jax.jit`: what a runtime's `Run` runs.

A task runs its layers' parts (`inter_op.layer_tasks`) one after the other inside one `jax.shard_map`, each lowered from
its jaxpr as steps on one mesh are (`one_program.lowering`), and between them the chains that the plan has for values
that cross from layer to layer. Partial sums that leave a task do so with a leading dimension, split over the axes that
they are to be added over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.frontend.layering.layers import Layered
from autopar.inter_op.graph_builder import Alike
from autopar.inter_op.layer_tasks import LayerTask, LayerTasks, Version, Versions, by_value, layer_tasks
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.layer_sharding import LayerSharding
from autopar.ir.layers import REMAT, LayeredGraph, StageGraph
from autopar.ir.pipelined import Pipelined
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import ReshardStep
from autopar.jax_compat import JaxprEqn, abstract_mesh
from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.lowering import Equations, Held, Lowering, emit_step
from autopar.runtime.stage_arrays import Array, Key, Rows, StageTask, distinct, outer_spec
from autopar.runtime.traced_once import Once, in_place


@dataclass
class StagedLayer:
    """Layer ``number`` of a stage: its graph, shardings and parts."""

    number: int
    part: StageGraph
    sharding: LayerSharding
    tasks: LayerTasks
    versions: Versions
    """Of the loop's body."""


def layers_apart(graph: LayeredGraph, pipelined: Pipelined) -> list[StageGraph]:
    """Every layer of a plan as a stage of its own."""
    alike = Alike()
    return [stage_graph(graph, k, k + 1, [pipelined.sharding_of(k).remat], alike) for k in range(len(graph.layers))]


def looks_of(graph: LayeredGraph, pipelined: Pipelined, part: StageGraph) -> Hashable:
    """Equal for layers that run the same operators on the same shards; ``part``: the layer as a stage of its own."""
    return graph.layers[part.start].kind, pipelined.layers[part.start].sharding, part.graph.fingerprint


def without_repeats(graph: LayeredGraph, pipelined: Pipelined, parts: Sequence[StageGraph], stage: int) -> list[int]:
    """The layers of a stage, of equal ones in a row the first two, and those that others than the next layer read."""
    about, looks = pipelined.plan.stages[stage], [looks_of(graph, pipelined, part) for part in parts]
    out: list[int] = []
    for k in range(about.start, about.stop):
        repeats = k - about.start >= 2 and looks[k] == looks[k - 1] == looks[k - 2]
        far = any(user > k + 1 for v in graph.layers[k].results for user in graph.users.get(v, ()))
        if far or not repeats:
            out.append(k)
    return out


class StageLowering:
    """The tasks of stage ``stage`` of a plan, for any devices of ``platform``: jit them with arrays that lie on a mesh
    of the stage's axes.

    Args:
        parts: every layer as a stage of its own (`layers_apart`).
        once: how parts of layers are traced (`runtime.traced_once`).
        here: its layers; None for all. Those that are left out are as if they were another stage's.
    """

    def __init__(
        self, layered: Layered, pipelined: Pipelined, parts: Sequence[StageGraph], stage: int, platform: str,
        user_rules: Mapping[str, str] | None = None, once: Once = in_place, here: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.layered, self.pipelined, self.platform = layered, pipelined, platform
        self.user_rules, self.once = dict(user_rules or {}), once
        self.graph = layered.graph
        self.splits_backward = any(t.phase == "weight_grad" for tasks in pipelined.plan.schedule.tasks for t in tasks)
        self.about = pipelined.plan.stages[stage]
        self.here = range(self.about.start, self.about.stop) if here is None else here
        self.layers: list[StagedLayer] = []
        for k in self.here:
            part, sharding = parts[k], pipelined.sharding_of(k)
            [region] = dict(sharding.root.bodies)[part.loop]
            self.layers.append(
                StagedLayer(
                    k,
                    part,
                    sharding,
                    layer_tasks(part, sharding, self.splits_backward),
                    Versions(part.body, region, sharding),
                )
            )
        self.arguments: dict[Rows, Array] = {}
        """What the stage holds of the step's arguments, as the first layer that reads it does."""
        for layer in self.layers:
            top = layer.part.graph
            for where, spec, v in zip(layer.part.inputs, layer.sharding.inputs, top.inputs, strict=True):
                self.arguments.setdefault(where, Array(("argument", *where, spec), top.values[v], spec))
        self.kept_as = self._kept_as()
        axes = self.about.mesh.axes
        self.axis_sizes = {a.name: a.size for a in axes}
        self.chains = {
            (c.type, c.src, c.dst): c.steps for mine in pipelined.joins if mine.axes == axes for c in mine.chains
        }
        self.crossing = {
            (cut.phase, v.value, cut.source == stage): v
            for cut in pipelined.plan.cuts if stage in (cut.source, cut.target) for v in cut.values
        }  # fmt: skip

    def _kept_as(self) -> dict[tuple[int, Version], tuple[int, Version]]:
        """(layer, version) that is kept → the first that is the same value, as it lies: what crosses from layer to
        layer is kept once."""
        out: dict[tuple[int, Version], tuple[int, Version]] = {}
        first: dict[tuple[int, ShardingSpec], tuple[int, Version]] = {}
        for layer in self.layers:
            both = (*layer.part.receives, *layer.part.sends)
            crosses = {port.stored: port.value for port in both if port.phase == "forward"}
            for version in layer.tasks.forward.gives:
                stored, steps = version
                me = layer.number, version
                shared = stored in crosses and not steps
                out[me] = first.setdefault((crosses[stored], layer.versions.spec(version)), me) if shared else me
        return out

    # --- the tasks -------------------------------------------------------------------------------------------------

    def begin(self) -> StageTask:
        """Once a step: what the layers read of the step's arguments (and of what is computed before the layers), as
        they hold it → the versions that their loops read."""
        takes: dict[Key, Array] = {}
        gives: list[Array] = []
        same: list[tuple[Key, Key]] = []
        for layer in self.layers:
            top = layer.part.graph
            inputs = dict(zip(top.inputs, layer.part.inputs, strict=True))
            before = {port.stored: (port.value, spec) for port, spec in self.ports(layer, "before", receives=True)}
            for value, operand, _ in layer.tasks.weights:
                if operand in inputs:
                    takes[layer.number, value] = self.arguments[inputs[operand]]
                else:
                    key: Key = ("before", *before[operand])
                    takes[layer.number, value] = Array(key, top.values[operand], key[-1])
            for array in self._versions("weight", layer, layer.tasks.begins):
                value, steps = array.key[2]
                taken = takes[layer.number, value]
                if not steps and array.spec == taken.spec:  # a copy of the weights would be as large as they are
                    same.append((array.key, taken.key))
                else:
                    gives.append(array)
        given = {array.key for array in gives}
        once = distinct(takes.values())
        at = {array.key: i for i, array in enumerate(once)}

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            out: list[Any] = []
            read = self.reader({array.key: x for array, x in zip(once, xs, strict=True)}, order)
            for layer in self.layers:
                lowering = Lowering(layer.sharding, self.user_rules, self.platform, order=order)
                inputs = dict(zip(layer.part.graph.inputs, layer.part.inputs, strict=True))
                made: dict[int, Held] = {}
                for value, operand, spec in layer.tasks.weights:
                    array = takes[layer.number, value]
                    if operand in inputs:
                        held = read(layer, inputs[operand])
                    else:
                        held = Held(array.spec, array.type, {(): xs[at[array.key]]})
                    held = replace(held, copies=self._top_copies(layer, value))
                    made[value] = Held(spec, array.type, {(): lowering.read(held, spec)})
                for value, paths in by_value(layer.tasks.begins).items():
                    for steps in paths:
                        if ("weight", layer.number, (value, steps)) in given:
                            out.append(_along(lowering, made[value], steps))
            return out

        return replace(self.task(once, gives, local), same=tuple(same))

    def reader(self, given: Mapping[Key, Any], order: Order) -> Callable[[StagedLayer, Rows], Held]:
        """A function (layer, rows of an argument) → what that layer reads, resharded from how the layer before it that
        reads the argument has it. ``given``: this device's shards by key."""
        known: dict[tuple[Rows, int], Held] = {}

        def read(layer: StagedLayer, where: Rows) -> Held:
            held: Held | None = None
            for other in self.layers[: self.layers.index(layer) + 1]:
                if where not in other.part.inputs:
                    continue
                if (where, other.number) not in known:
                    array = self.arguments[where]
                    held = Held(array.spec, array.type, {(): given[array.key]}) if held is None else held
                    spec = other.sharding.inputs[other.part.inputs.index(where)]
                    known[where, other.number] = Held(spec, array.type, {(): self.joined(held, spec, order)})
                held = known[where, other.number]
            assert held is not None
            return held

        return read

    def _top_copies(self, layer: StagedLayer, value: int) -> list[ShardingSpec]:
        operand = next(o for v, o, _ in layer.tasks.weights if v == value)
        return [spec for v, spec in layer.sharding.root.copies if v == operand]

    def forward(self) -> StageTask:
        """For each microbatch: what arrives → what leaves, what is combined over microbatches, what is kept."""
        takes, gives = self._weights(lambda layer: layer.tasks.forward), list[Array]()
        made = {v for k in self.here for v in self.graph.layers[k].results}
        for layer in self.layers:
            for port, spec in self.ports(layer, "forward", receives=True):
                if port.value not in made:
                    spec = self._arrives("forward", port.value, spec)
                    takes.append(Array(("receive", port.value, spec), port.type, spec))
            for port, spec in self.ports(layer, "forward", receives=False):
                if any(k not in self.here for k in self.graph.users.get(port.value, ())):
                    gives.append(Array(("send", port.value), port.type, spec))
            gives += self.combined(layer)
            gives += self._versions("kept", layer, layer.tasks.forward.gives)
        takes, gives = distinct(takes), distinct(gives)

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            given = {array.key: x for array, x in zip(takes, xs, strict=True)}
            env: dict[int, Held] = {}
            out: dict[Key, Any] = {}
            for layer in self.layers:
                task = layer.tasks.forward
                fresh: list[Any] = []
                for port, spec in self.ports(layer, "forward", receives=True):
                    if port.value not in env:
                        arrived = self._arrives("forward", port.value, spec)
                        env[port.value] = Held(arrived, port.type, {(): given["receive", port.value, arrived]})
                    held = env[port.value]
                    if held.base != spec and (port.type, held.base, spec) not in self.chains:
                        held = Held(spec, port.type, {(): given["receive", port.value, spec]})  # of the batch
                    fresh.append(self.joined(held, spec, order))
                inside: dict[int, Held] = {}
                results = self._run(layer, "forward", task, fresh, given, order, inside)
                sends = self.ports(layer, "forward", receives=False)
                for (port, spec), x in zip(sends, results, strict=False):
                    env[port.value] = Held(spec, port.type, {(): x})
                    out["send", port.value] = x
                for array, x in zip(self.combined(layer), results[len(sends) :], strict=False):
                    out[array.key] = x
                for value, steps in task.gives:
                    key = "kept", *self.kept_as[layer.number, (value, steps)]
                    out.setdefault(key, inside[value].arrays[steps])
            return [out[array.key] for array in gives]

        return self.task(takes, gives, local)

    @property
    def differentiated(self) -> list[StagedLayer]:
        """The layers that have a backward pass: those of which something depends on parameters."""
        return [layer for layer in self.layers if layer.tasks.backward is not None]

    def backward(self) -> StageTask:
        """For each microbatch: what arrives, what was kept, gradient sums so far → what leaves, gradient sums."""
        return self._backward(split=False)

    def input_grad(self) -> StageTask:
        """The first part of a backward pass: what arrives, what was kept → what leaves, what `weight_grad` reads."""
        return self._backward(split=True)

    def weight_grad(self) -> StageTask:
        """The rest of it: what was kept, by `input_grad` too, gradient sums so far → gradient sums."""
        takes, gives = list[Array](), list[Array]()
        for layer in self.differentiated:
            takes += self._weights(lambda x: x.tasks.weight_grad, [layer])
            takes += self._later(layer, layer.tasks.weight_grad)
            takes += self.sums(layer)
            gives += self.sums(layer)
        takes = distinct(takes)

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            given = {array.key: x for array, x in zip(takes, xs, strict=True)}
            out: list[Any] = []
            for layer in self.differentiated:
                task = layer.tasks.weight_grad
                assert task is not None
                fresh = [given[array.key] for array in self.sums(layer)]
                out += self._run(layer, "weight_grad", task, fresh, given, order, {})
            return out

        return self.task(takes, gives, local)

    def _later(self, layer: StagedLayer, task: LayerTask | None) -> list[Array]:
        """What a part of the backward pass takes of parts before it."""
        assert task is not None and layer.tasks.input_grad is not None
        handed = set(layer.tasks.input_grad.gives) if task is layer.tasks.weight_grad else set[Version]()
        versions = [v for v in task.takes if v not in set(layer.tasks.begins)]
        return [
            *self._versions("context", layer, [v for v in versions if v in handed]),
            *self._versions("kept", layer, [v for v in versions if v not in handed]),
        ]

    def _backward(self, split: bool) -> StageTask:
        def task_of(layer: StagedLayer) -> LayerTask:
            task = layer.tasks.input_grad if split else layer.tasks.backward
            assert task is not None
            return task

        takes, gives = list[Array](), list[Array]()
        senders: dict[int, list[tuple[StagedLayer, ShardingSpec]]] = {}
        for layer in reversed(self.differentiated):
            takes += self._weights(task_of, [layer])
            if split:
                takes += self._later(layer, task_of(layer))
            else:
                takes += self._versions("kept", layer, layer.tasks.forward.gives)
            for port, spec in self.ports(layer, "backward", receives=True):
                if any(k not in self.here for k in self.graph.users[port.value]):
                    spec = self._arrives("backward", port.value, spec)
                    takes.append(Array(("receive", port.value, spec), port.type, spec))
            if split:
                gives += self._versions("context", layer, task_of(layer).gives)
            else:
                takes += self.sums(layer)
                gives += self.sums(layer)
            for port, spec in self.ports(layer, "backward", receives=False):
                senders.setdefault(port.value, []).append((layer, spec))
        for layer in self.differentiated:
            for port, spec in self.ports(layer, "backward", receives=False):
                if self.graph.makers[port.value] not in self.here and ("send", port.value) not in {
                    a.key for a in gives
                }:
                    crossing = self.crossing.get(("backward", port.value, True))
                    gives.append(Array(("send", port.value), port.type, crossing.src_spec if crossing else spec))
        takes = distinct(takes)
        where = {array.key: array for array in gives}

        def local(xs: Sequence[Any], order: Order) -> list[Any]:
            given = {array.key: x for array, x in zip(takes, xs, strict=True)}
            env: dict[int, list[Held]] = {}
            out: dict[Key, Any] = {}
            for layer in reversed(self.differentiated):
                task = task_of(layer)
                fresh: list[Any] = []
                for port, spec in self.ports(layer, "backward", receives=True):
                    parts = [self.joined(held, spec, order) for held in env.get(port.value, [])]
                    arrived = self._arrives("backward", port.value, spec)
                    if ("receive", port.value, arrived) in given:
                        held = Held(arrived, port.type, {(): given["receive", port.value, arrived]})
                        parts.append(self.joined(held, spec, order))
                    fresh.append(_total(parts))
                if not split:
                    fresh += [given[array.key] for array in self.sums(layer)]
                inside: dict[int, Held] = {}
                name = "input_grad" if split else "backward"
                results = self._run(layer, name, task, fresh, given, order, inside)
                sends = self.ports(layer, "backward", receives=False)
                for (port, spec), x in zip(sends, results, strict=False):
                    env.setdefault(port.value, []).append(Held(spec, port.type, {(): x}))
                for array, x in zip([] if split else self.sums(layer), results[len(sends) :], strict=False):
                    out[array.key] = x
                for value, steps in task.gives:
                    out["context", layer.number, (value, steps)] = inside[value].arrays[steps]
            for key, array in where.items():
                if key[0] == "send":
                    out[key] = _total([self.joined(held, array.spec, order) for held in env[key[1]]])
            return [out[array.key] for array in gives]

        return self.task(takes, gives, local)

    # --- parts of them ---------------------------------------------------------------------------------------------

    def ports(self, layer: StagedLayer, phase: str, *, receives: bool) -> list[Any]:
        """(port, spec) of a layer's ports of that phase, in order: those through which it receives, or sends."""
        ports = layer.part.receives if receives else layer.part.sends
        specs = layer.sharding.receives if receives else layer.sharding.sends
        return [(port, spec) for port, spec in zip(ports, specs, strict=True) if port.phase == phase]

    def _arrives(self, phase: str, value: int, spec: ShardingSpec) -> ShardingSpec:
        """How a value comes to the stage: as its cut has it, or as who reads it wants it."""
        crossing = self.crossing.get((phase, value, False))
        return spec if crossing is None else crossing.dst_spec

    def sums(self, layer: StagedLayer) -> list[Array]:
        """The arrays of a layer's gradient sums, in order."""
        task = layer.tasks.backward
        assert task is not None
        received = len(self.ports(layer, "backward", receives=True))
        values = task.graph.inputs[received : task.fresh]
        return [
            Array(("sum", layer.number, i), task.graph.values[v], layer.versions.bases[v]) for i, v in enumerate(values)
        ]

    def combined(self, layer: StagedLayer) -> list[Array]:
        """The arrays of a layer's results that are combined over microbatches, in the order of
        `LayeredGraph.combined`."""
        sends = len(self.ports(layer, "forward", receives=False))
        task = layer.tasks.forward
        made = set(self.graph.layers[layer.number].results)
        values = [v for v in self.graph.combined if v in made]
        return [
            Array(("combined", v), self.graph.values[v], spec)
            for v, spec in zip(values, task.region.outputs[sends:], strict=False)
        ]

    def _versions(self, what: str, layer: StagedLayer, versions: Sequence[Version]) -> list[Array]:
        values, known = layer.part.body.values, self.kept_as if what == "kept" else {}
        names = [known.get((layer.number, v), (layer.number, v)) for v in versions]
        return [
            Array((what, *name), values[v[0]], layer.versions.spec(v)) for name, v in zip(names, versions, strict=True)
        ]

    def _weights(self, of: Callable[[StagedLayer], Any], layers: Sequence[StagedLayer] | None = None) -> list[Array]:
        out: list[Array] = []
        for layer in self.layers if layers is None else layers:
            begins = set(layer.tasks.begins)
            out += self._versions("weight", layer, [v for v in of(layer).takes if v in begins])
        return out

    def _run(
        self, layer: StagedLayer, name: str, task: LayerTask, fresh: Sequence[Any], given: Mapping[Key, Any],
        order: Order, env: dict[int, Held],
    ) -> list[Any]:  # fmt: skip
        taken: list[Held] = []
        begins = set(layer.tasks.begins)
        for value, paths in by_value(task.takes).items():
            arrays: dict[tuple[ReshardStep, ...], Any] = {}
            for steps in paths:
                key = layer.number, (value, steps)
                kept = "kept", *self.kept_as.get(key, key)
                if (value, steps) in begins:
                    arrays[steps] = given["weight", *key]
                else:
                    arrays[steps] = given[kept] if kept in given else given["context", *key]
            copies = [] if any((value, steps) in begins for steps in paths) else layer.versions.copies.get(value, [])
            taken.append(Held(layer.versions.bases[value], layer.part.body.values[value], arrays, copies))

        def run(order: Order, reads: Mapping[int, Any], env: dict[int, Held]) -> list[Any]:
            lowering = Lowering(layer.sharding, self.user_rules, self.platform, order=order)
            eqns = [self._equation(layer, task, p) for p in range(len(task.graph.nodes))]
            return lowering.run(task.graph, Equations(eqns, self._ends(task)), task.region, list(reads.values()), env)

        return self.once((name, self.looks(layer)), run, order, dict(enumerate([*fresh, *taken])), env)

    def looks(self, layer: StagedLayer) -> Hashable:
        """As `looks_of`."""
        return looks_of(self.graph, self.pipelined, layer.part)

    def _ends(self, task: LayerTask) -> list[Any]:
        """Atoms of results; only those of constants are looked at."""
        return [o if isinstance(o, int) else jax.make_jaxpr(lambda: 0)().jaxpr.outvars[0] for o in task.graph.outputs]

    def _equation(self, layer: StagedLayer, task: LayerTask, p: int) -> JaxprEqn:
        _, number = task.origins[p]
        if number < 0:  # a sum of cotangents
            t = task.graph.nodes[p].result_types[0]
            struct = jax.ShapeDtypeStruct(t.shape, t.dtype)
            return jax.make_jaxpr(jax.lax.add)(struct, struct).jaxpr.eqns[0]
        code = self.layered.kinds[self.graph.layers[layer.number].kind]
        jaxpr = code.joint[REMAT.index(layer.sharding.remat)] if self.graph.loss >= 0 else code.forward
        return jaxpr.eqns[number]

    def joined(self, held: Held, want: ShardingSpec, order: Order) -> Any:
        """A value between two layers on this device's shard, resharded to ``want`` by the plan's chain; ``held`` learns
        the versions on the way."""
        if held.base == want:
            return held.arrays[()]
        steps: tuple[ReshardStep, ...] = ()
        for step in self.chains[held.type, held.base, want]:
            longer = (*steps, step)
            if longer not in held.arrays:
                x = held.arrays[steps]
                moves = step.kind not in ("slice", "mask")
                x = emit_step(step, order.after_loop(x) if moves else x, self.axis_sizes, self.platform)
                if moves:
                    order.communicated(x)
                held.arrays[longer] = x
            steps = longer
        return held.arrays[steps]

    def task(
        self, takes: Sequence[Array], gives: Sequence[Array], local: Callable[[Sequence[Any], Order], list[Any]]
    ) -> StageTask:
        """A task as one `jax.shard_map` over the stage's mesh.

        Args:
            takes, gives: its arrays; partial sums have a leading dimension of their own outside (`outer_spec`).
            local: (this device's shards of ``takes``, the order of collectives) → those of ``gives``.
        """
        axis = next((a.name for a in self.about.mesh.axes if a.size > 1), None)
        mesh = abstract_mesh(self.about.mesh.shape, self.about.mesh.axis_names)

        def run(*xs: Any) -> list[Any]:
            inner = [x.reshape(x.shape[1:]) if a.spec.unreduced else x for a, x in zip(takes, xs, strict=True)]
            out = local(inner, Order.on(self.platform, axis))
            return [x[None] if a.spec.unreduced else x for a, x in zip(gives, out, strict=True)]

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=tuple(outer_spec(a.spec) for a in takes),
            out_specs=[outer_spec(a.spec) for a in gives], check_vma=False,
        )  # fmt: skip
        return StageTask(tuple(takes), tuple(gives), mapped)


def _along(lowering: Lowering, held: Held, steps: tuple[ReshardStep, ...]) -> Any:
    """A version of a value, its steps emitted where they have not been."""
    for n in range(len(steps)):
        if steps[: n + 1] not in held.arrays:
            held.arrays[steps[: n + 1]] = lowering.emit(steps[n], held.arrays[steps[:n]])
    return held.arrays[steps]


def _total(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
