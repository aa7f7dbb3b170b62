"""The layouts that a search chose → the shardings of every layer's operators, and what is resharded between layers.

In: a step in layers, its pipeline, the layout of each layer (`ir.pipeline.Layout`), whose ``choice`` is the state of
every cluster of that layer's problem. Nothing is solved again: the choice is spelled out from the problem that solved
it (`LayerProblems`; posed again where that was in another process), as for plans of one mesh. So what a runtime runs is
what was costed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from autopar.inter_op.layer_problems import LayerProblems, MeshKind, Parts
from autopar.intra_op.assumptions import assumptions
from autopar.intra_op.axis_uses import axis_uses
from autopar.intra_op.batch_bound import ExampleDims
from autopar.intra_op.extract import collectives, spell_out
from autopar.intra_op.specs import Mesh, reshard_step
from autopar.intra_op.stage_costs import StageProblem
from autopar.ir.cluster import LogicalMesh, MeshAxis
from autopar.ir.graph import TensorType
from autopar.ir.layer_sharding import Join, JoinChains, LayerSharding, LayerShardings, LayerWiring, joins
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.pipeline import Layout, PipelinePlan
from autopar.ir.plan import ArgPlan, Place
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain
from autopar.ir.strategy import Collective, CollectiveKind

PRICED = ("forward", "backward", "gradient", "argument")
"""What crosses between layers of one stage at a cost (`inter_op.ranges`): the first two in every microbatch."""


def layer_shardings(problems: LayerProblems, plan: PipelinePlan, layouts: Sequence[Layout]) -> LayerShardings:
    """How the operators of every layer are sharded, and what is resharded between layers of one stage. ``layouts[k]``:
    layer k's, solved on its stage's mesh."""
    return _Speller(problems, plan, layouts).run()


def placed(
    parts: Parts, plan: PipelinePlan, spelled: LayerShardings
) -> tuple[tuple[ArgPlan, ...], tuple[ArgPlan, ...]]:
    """The step's arguments and results: how each stage holds what its layers read of an argument, as the first of
    these layers wants it; an argument's new value lies as it does, other results where they are made."""
    layered = parts.layered
    places: dict[int, dict[tuple[int, int, int], Place]] = {}
    for number, stage in enumerate(plan.stages):
        for k in stage.layers:
            sharding = spelled.distinct[spelled.of[k]]
            for i, (argument, start, stop) in enumerate(parts.layers[k].inputs):
                here = Place(stage=number, spec=sharding.inputs[i], start=start, stop=stop)
                places.setdefault(argument, {}).setdefault((number, start, stop), here)
    fed: dict[int, dict[int, Place]] = {}
    """Value → stage → how the first of its layers that is given that value has it."""
    for k, part in enumerate(parts.layers):
        sharding, home = spelled.distinct[spelled.of[k]], plan.home[k]
        for port, spec in zip(part.receives, sharding.receives, strict=True):
            if port.phase == "forward" and port.value not in layered.makers:
                fed.setdefault(port.value, {}).setdefault(home, Place(stage=home, spec=spec))
    new, update = dict(layered.state), layered.update
    roles = [_role(layered, a) for a in range(len(layered.arguments))]
    inputs = tuple(
        ArgPlan(
            path=path,
            type=value_type,
            places=tuple(places.get(a, {}).values()),
            role=roles[a],
            fed=tuple(fed.get(layered.arguments[a], {}).values()) if roles[a] == "batch" else (),
            fed_type=layered.values[layered.arguments[a]]
            if roles[a] == "batch" and layered.arguments[a] in fed
            else None,
            becomes=new.get(a, -1),
            donated_to=new[a] if a in layered.donated else -1,
        )
        for a, (path, value_type) in enumerate(zip(layered.arg_paths, layered.argument_types, strict=True))
    )
    of_result = {j: (inputs[a].places, roles[a]) for a, j in layered.state}
    outputs: list[ArgPlan] = []
    for j, (path, o) in enumerate(zip(update.out_paths, update.outputs, strict=True)):
        held, role = of_result.get(j, ((), "other"))
        value_type = update.values[o] if isinstance(o, int) else o.type
        outputs.append(ArgPlan(path=path, type=value_type, places=held, role=role))
    return inputs, tuple(outputs)


def _role(layered: LayeredGraph, a: int) -> str:
    """One of `ir.plan.ROLES` for argument ``a``."""
    if layered.per_microbatch[a] or layered.arguments[a] in dict(layered.examples):
        return "batch"
    before, state = layered.before, a in dict(layered.state)
    cast = state and before is not None and before.inputs[a] in before.last_use
    if layered.arguments[a] in layered.users or a in layered.slices_of or cast:
        return "weights"
    return "optimizer state" if state else "other"


class _Speller:
    def __init__(self, problems: LayerProblems, plan: PipelinePlan, layouts: Sequence[Layout]) -> None:
        self.problems, self.parts, self.plan, self.layouts = problems, problems.parts, plan, layouts
        layered = problems.parts.layered
        self.examples = {v: ExampleDims.of_batch(layered.values[v], dim) for v, dim in layered.examples}
        """Value → where examples are in it, of those that layers spelled out so far take and give."""

    def run(self) -> LayerShardings:
        parts = self.parts
        numbers: dict[tuple[int, MeshKind, Layout], int] = {}
        distinct: list[LayerSharding] = []
        given: list[dict[int, ExampleDims]] = []
        of: list[int] = []
        for k, (number, layout) in enumerate(zip(parts.number, self.layouts, strict=True)):
            logical = self.plan.stages[self.plan.home[k]].mesh
            key = (number, (logical.axes, logical.device), layout)
            if key not in numbers:
                numbers[key] = len(distinct)
                made, gives = self.sharding(k, layout, logical)
                distinct.append(made)
                given.append(gives)
            of.append(numbers[key])
            sends = parts.layers[k].sends
            self.examples |= {sends[i].value: dims for i, dims in given[of[k]].items() if sends[i].phase == "forward"}
        wiring = tuple(
            LayerWiring(
                receives=tuple((port.value, port.phase) for port in part.receives),
                sends=tuple((port.value, port.phase) for port in part.sends),
                inputs=tuple((v, *where) for v, where in zip(part.input_values, part.inputs, strict=True)),
            )
            for part in parts.layers
        )
        chains, between = self.chains(parts.layers, [distinct[n] for n in of], joins(wiring))
        return LayerShardings(wiring=wiring, of=tuple(of), distinct=tuple(distinct), chains=chains, between=between)

    def sharding(self, k: int, layout: Layout, logical: LogicalMesh) -> tuple[LayerSharding, dict[int, ExampleDims]]:
        """The decisions of layer ``k``, in full, and where examples are in what it sends, by its number there."""
        number = self.parts.number[k]
        part = self.parts.graphs[layout.remat][number]
        posed = self.problems.posed(number, layout.remat, logical)
        mesh, out = posed.mesh, posed.decided(layout.choice)
        found = spell_out(out)
        [body] = dict(found.root.bodies)[part.loop]
        stage = StageProblem(part, posed, layout.remat)
        known = {
            i: self.examples[port.value]
            for i, port in enumerate(self.parts.layers[k].receives)
            if port.phase == "forward" and port.value in self.examples
        }
        examples, gives = stage.examples(known)

        def spec(value_type: TensorType, code: int) -> ShardingSpec:
            return mesh.spec(value_type, code)

        made = LayerSharding(
            axes=mesh.logical.axes,
            remat=layout.remat,
            cost=layout.cost,
            receives=tuple(spec(p.type, code) for p, code in zip(part.receives, layout.receives, strict=True)),
            sends=tuple(spec(p.type, code) for p, code in zip(part.sends, layout.sends, strict=True)),
            strategies=found.strategies,
            root=found.root,
            chains=found.chains,
            collectives=tuple(collectives(out)),
            operators=found.operators,
            uses=axis_uses(out, examples),
            replicated=found.replicated,
            assumptions=assumptions(posed.flat),
        )
        for ports, specs, results in ((part.receives, made.receives, True), (part.sends, made.sends, False)):
            for port, want in zip(ports, specs, strict=True):
                region = body if port.phase in ("forward", "backward") else found.root
                strategy = found.strategies[region.nodes[port.node]]
                assert (strategy.results if results else strategy.operands)[0] == want, "a choice of another problem"
        return made, gives

    def chains(
        self, parts: Sequence[StageGraph], shardings: Sequence[LayerSharding], every: Sequence[Join]
    ) -> tuple[tuple[JoinChains, ...], tuple[tuple[Collective, ...], ...]]:
        """What is resharded between layers of one stage; on both sides of a cut, between the layer whose value crosses
        and others of its stage that give or read it too. Of every stage, the collectives of the first."""
        cuts = {
            (cut.source, cut.target, cut.phase, value.value): value for cut in self.plan.cuts for value in cut.values
        }
        found: dict[tuple[MeshAxis, ...], dict[tuple[TensorType, ShardingSpec, ShardingSpec], Chain]] = {}

        def add(stage: int, value_type: TensorType, have: ShardingSpec, want: ShardingSpec) -> None:
            mesh = self.problems.mesh(self.plan.stages[stage].mesh)
            if have != want and (value_type, have, want) not in found.setdefault(mesh.logical.axes, {}):
                steps = mesh.chain(value_type, mesh.code_of(value_type, have), mesh.code_of(value_type, want))
                found[mesh.logical.axes][value_type, have, want] = Chain(
                    type=value_type, src=have, dst=want, steps=tuple(reshard_step(mesh, s) for s in steps)
                )

        home = self.plan.home
        count = self.plan.schedule.num_microbatches
        between = [Between(self.problems.mesh(stage.mesh), count) for stage in self.plan.stages]
        for join in every:
            source, target = home[join.source], home[join.target]
            if join.phase == "argument":
                if source == target:
                    graph = parts[join.target].graph
                    value_type = graph.values[graph.inputs[join.to]]
                    have, want = shardings[join.source].inputs[join.at], shardings[join.target].inputs[join.to]
                    add(source, value_type, have, want)
                    between[source].add(join, value_type, have, want)
                continue
            value_type = parts[join.target].receives[join.to].type
            have, want = shardings[join.source].sends[join.at], shardings[join.target].receives[join.to]
            if source == target:
                add(source, value_type, have, want)
                between[source].add(join, value_type, have, want)
            elif (crossing := cuts.get((source, target, join.phase, join.value))) is not None:
                add(source, value_type, have, crossing.src_spec)
                add(target, value_type, crossing.dst_spec, want)
        chains = tuple(
            JoinChains(
                axes=axes, chains=tuple(sorted(mine.values(), key=lambda c: (str(c.type), str(c.src), str(c.dst))))
            )
            for axes, mine in found.items()
        )
        return chains, tuple(stage.rows() for stage in between)


class Between:
    """The collectives between the layers of one stage, in a step of so many ``microbatches``. Several readers of a
    value take the same steps once."""

    def __init__(self, mesh: Mesh, microbatches: int) -> None:
        self.mesh, self.microbatches = mesh, microbatches
        self.seen: set[tuple[Any, ...]] = set()
        self.found: Counter[tuple[CollectiveKind, tuple[int, ...], int, str, int]] = Counter()

    def add(self, join: Join, value_type: TensorType, have: ShardingSpec, want: ShardingSpec) -> None:
        """Those of what ``join`` brings from ``have`` to ``want``."""
        if join.phase not in PRICED:
            return
        mesh, trips = self.mesh, self.microbatches if join.phase in ("forward", "backward") else 1
        path = (mesh.code_of(value_type, have),)
        for to, step, axes, _, _ in mesh.chain(value_type, path[0], mesh.code_of(value_type, want)):
            kind, moved, size = mesh.compiled(value_type, step, path[-1], to)
            path = (*path, to)
            key = join.phase, join.source, join.at, path
            if step not in ("slice", "mask") and key not in self.seen:
                self.seen.add(key)
                self.found[cast(CollectiveKind, kind), axes, int(size), moved.dtype, trips] += 1

    def rows(self) -> tuple[Collective, ...]:
        """Equal ones are one row."""
        return tuple(
            Collective(
                kind=kind, axes=tuple(self.mesh.names[a] for a in axes), operand_bytes=size, dtype=dtype, trips=trips,
                count=count, time_s=float(self.mesh.collective_s(kind, axes, size)) * trips * count,
                where="between layers", reduction="sum" if kind in ("all-reduce", "reduce-scatter") else "",
            )
            for (kind, axes, size, dtype, trips), count in sorted(self.found.items(), key=repr)
        )  # fmt: skip
