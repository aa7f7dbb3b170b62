"""A step that runs as a pipeline: its layers, how each is sharded, its stages, what crosses between them.

With ``exchange``, `Pipelined.plan` is all that `program.emit` needs. It is part of an `ir.plan.Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.cluster import LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import VerifyError
from autopar.ir.layer_sharding import Join, JoinChains, LayerSharding, LayerWiring, joins
from autopar.ir.layers import REMAT
from autopar.ir.pipeline import PipelinePlan, ScalarExchange
from autopar.ir.sharding import Pin, ShardingSpec
from autopar.ir.strategy import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What the user fixed.

    Attributes:
        schedules: names of those allowed; None: all that train (or infer).
        stages: the least and the most stages; a most of None: as many as are best. None: as (1, None).
        virtual_stages: stages on each mesh, in turn; 1: no schedule that has several. None: chosen.
        starts: the first layer of every stage; None: chosen.
        submeshes: (hosts, devices a host) that stages may run on; with ``starts`` and as many entries as stages, the
            submesh of each. None: every one.
        logical_shapes: shapes of logical meshes that stages may have; None: every one.
        mesh_axes: the most axes of logical meshes where ``logical_shapes`` is None, one of `ir.plan.MESH_AXES`.
        batch_axes: positions in the logical mesh of the axes that the batch is split over, in all that has it, and
            over no others; () splits it nowhere, a None leaves it to the planner. One entry for all stages or, with
            ``starts``, one each. None: chosen everywhere.
        degrees: of parallelism, on every stage's mesh.
        whole_examples: no example is split, neither its positions nor its rows of pixels.
        uniform: all stages on submeshes of one kind.
        memory_bytes: limit per device; None: what programs can have of its memory.
        remat: what layers may keep of their forward pass (`ir.layers.REMAT`).
        forbid: collectives not to use.
        resharding: how values get from mesh to mesh, one of `resharding.planning`'s strategies or ``auto``.
        pins: shardings that are fixed, by names of a stage's mesh axes.
        solver: for each layer's sharding, as in `ir.plan.PlanConfig`.
        time_limit_s: of the whole search, as there.
        workers: processes; None: one a core.
    """

    schedules: tuple[str, ...] | None = None
    stages: tuple[int, int | None] | None = None
    virtual_stages: int | None = None
    starts: tuple[int, ...] | None = None
    submeshes: tuple[tuple[int, int], ...] | None = None
    logical_shapes: tuple[tuple[int, ...], ...] | None = None
    mesh_axes: int = 2
    batch_axes: tuple[tuple[int, ...] | None, ...] | None = None
    degrees: Degrees = field(default_factory=Degrees)
    whole_examples: bool = False
    uniform: bool = False
    memory_bytes: int | None = None
    remat: tuple[str, ...] = REMAT
    forbid: tuple[str, ...] = ()
    resharding: str = "auto"
    pins: tuple[Pin, ...] = ()
    solver: str = "auto"
    time_limit_s: float | None = None
    workers: int | None = None

    @property
    def num_stages(self) -> int | None:
        """How many stages, where only one number is allowed."""
        least, most = self.stages or (1, None)
        return least if least == most else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """A layer: its name for people, the lines ``sources`` that it begins and ends with, what it reads and gives.
    Layers of one ``kind`` compute the same; ``sharding`` is the number of its among the file's."""

    name: str
    kind: int
    sources: tuple[str, ...]
    sharding: int
    wiring: LayerWiring


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A step in stages. ``shardings`` are those of layers' operators, ``joins`` the chains between layers of one
    stage, ``between[s]`` the collectives that run between those of stage s."""

    layers: tuple[PlannedLayer, ...]
    shardings: tuple[LayerSharding, ...]
    joins: tuple[JoinChains, ...]
    between: tuple[tuple[Collective, ...], ...]
    plan: PipelinePlan
    exchange: ScalarExchange | None

    def sharding_of(self, layer: int) -> LayerSharding:
        """How a layer's operators are sharded."""
        return self.shardings[self.layers[layer].sharding]

    def worker_meshes(self) -> tuple[LogicalMesh, ...]:
        """The logical mesh of each worker's first stage."""
        first: dict[int, LogicalMesh] = {}
        for stage, worker in zip(self.plan.stages, self.plan.schedule.mesh_of_stage, strict=True):
            first.setdefault(worker, stage.mesh)
        return tuple(first[w] for w in sorted(first))

    def verify(self) -> None:
        """Raises VerifyError where the plan is malformed, layers are not those of the stages, rematerialisation is not
        what the layers' shardings say, layers send and receive in other shardings than the cuts between their stages
        say, or nothing says how a value gets from one layer's sharding into another's."""
        self.plan.verify()
        stages = self.plan.stages
        if not stages or len(self.layers) != stages[-1].stop:
            raise VerifyError(f"{len(self.layers)} layers, but stages of {stages[-1].stop if stages else 0}")
        if len(self.between) != len(stages):
            raise VerifyError(f"{len(self.between)} lists of collectives between layers for {len(stages)} stages")
        self._verify_layers()
        self._verify_joins()
        if (x := self.exchange) is not None:
            if len(x.compute_s) != len(self.plan.stages):
                raise VerifyError(f"exchange has {len(x.compute_s)} times for {len(self.plan.stages)} stages")
            if not all(figure >= 0 for figure in (*x.compute_s, x.reduce_s, x.device_bytes)):
                raise VerifyError(f"exchange has a negative figure: {x}")

    def _verify_layers(self) -> None:
        for number, sharding in enumerate(self.shardings):
            try:
                sharding.verify()
            except VerifyError as fault:
                raise VerifyError(f"sharding {number}: {fault}") from None
        for mine in self.joins:
            mine.verify()
        for s, stage in enumerate(self.plan.stages):
            for k in stage.layers:
                layer = self.layers[k]
                if not 0 <= layer.sharding < len(self.shardings):
                    raise VerifyError(f"layer {k} has sharding {layer.sharding} of {len(self.shardings)}")
                sharding = self.sharding_of(k)
                if sharding.axes != stage.mesh.axes:
                    raise VerifyError(f"layer {k} is sharded over other axes than stage {s}'s mesh {stage.mesh} has")
                if sharding.remat != stage.remat[k - stage.start]:
                    raise VerifyError(f"stage {s} and the sharding of layer {k} disagree about rematerialisation")
                ends = (
                    (layer.wiring.receives, sharding.receives, "receives"),
                    (layer.wiring.sends, sharding.sends, "sends"),
                    (layer.wiring.inputs, sharding.inputs, "reads"),
                )
                for wires, specs, does in ends:
                    if len(wires) != len(specs):
                        raise VerifyError(f"layer {k} {does} {len(wires)} values, its sharding {len(specs)}")

    def _verify_joins(self) -> None:
        home = self.plan.home
        cuts = {(c.source, c.target, c.phase, v.value): v for c in self.plan.cuts for v in c.values}
        known = {(mine.axes, c.src, c.dst) for mine in self.joins for c in mine.chains}
        met: dict[tuple[int, int, str, int], list[bool]] = {}
        """Of every value that crosses: whether a layer gives it as the cut has it, and whether one takes it so."""

        def check(join: Join, stage: int, have: ShardingSpec, want: ShardingSpec) -> None:
            if have != want and (self.plan.stages[stage].mesh.axes, have, want) not in known:
                raise VerifyError(
                    f"nothing says how {join.phase} value {join.value}, from layer {join.source} to layer "
                    f"{join.target}, gets from {have} to {want}"
                )

        for join in joins([layer.wiring for layer in self.layers]):
            source, target = home[join.source], home[join.target]
            if join.phase == "argument":
                if source == target:
                    a, b = self.sharding_of(join.source).inputs[join.at], self.sharding_of(join.target).inputs[join.to]
                    check(join, source, a, b)
                continue
            a, b = self.sharding_of(join.source).sends[join.at], self.sharding_of(join.target).receives[join.to]
            if source == target:
                check(join, source, a, b)
            elif join.phase in ("forward", "backward", "gradient"):
                key = (source, target, join.phase, join.value)
                if key not in cuts:
                    raise VerifyError(
                        f"{join.phase} value {join.value} crosses from stage {source} to stage {target}, and no cut "
                        "has it"
                    )
                check(join, source, a, cuts[key].src_spec)
                check(join, target, cuts[key].dst_spec, b)
                seen = met.setdefault(key, [False, False])
                seen[0] |= a == cuts[key].src_spec
                seen[1] |= b == cuts[key].dst_spec
        for (source, target, phase, value), _ in cuts.items():
            if phase != "update" and met.get((source, target, phase, value)) != [True, True]:
                raise VerifyError(
                    f"no layers of stages {source} and {target} give and take {phase} value {value} as the cut has it"
                )
