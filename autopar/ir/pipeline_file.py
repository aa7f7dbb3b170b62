"""A pipeline plan as it is saved: what was asked for, decided and predicted for one step on a whole cluster.

A `PipelineFile` is plain data (see `serde`, `plan_files`), made and read without jax. What it decided is an
`ir.pipeline.PipelinePlan`; with ``exchange`` that is all that `program.emit` needs. Plans of one mesh, without stages,
are `ir.plan.Plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import VerifyError
from autopar.ir.graph import TensorType
from autopar.ir.layer_sharding import Join, JoinChains, LayerSharding, LayerWiring, joins
from autopar.ir.layers import REMAT
from autopar.ir.pipeline import PipelinePlan, ScalarExchange
from autopar.ir.plan import ArgPlan
from autopar.ir.sharding import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What the user fixed.

    Attributes:
        schedules: names of those allowed; None: all that train (or infer).
        num_stages: how many stages; None: as many as are best.
        starts: the first layer of every stage; None: chosen.
        submeshes: (hosts, devices a host) that stages may run on; with ``starts`` and as many entries as stages, the
            submesh of each. None: every one.
        logical_shapes: shapes of logical meshes that stages may have; None: every one.
        batch_axes: positions in the logical mesh of the axes that the batch is split over, in all that has it, and
            over no others; () splits it nowhere, a None leaves it to the planner. One entry for all stages or, with
            ``starts``, one each. None: chosen everywhere.
        whole_examples: no example is split, neither its positions nor its rows of pixels.
        uniform: all stages on submeshes of one kind.
        memory_bytes: limit per device; None: the device's memory.
        remat: what layers may keep of their forward pass (`ir.layers.REMAT`).
        forbid: collectives not to use.
        workers: processes; None: one a core.
    """

    schedules: tuple[str, ...] | None = None
    num_stages: int | None = None
    starts: tuple[int, ...] | None = None
    submeshes: tuple[tuple[int, int], ...] | None = None
    logical_shapes: tuple[tuple[int, ...], ...] | None = None
    batch_axes: tuple[tuple[int, ...] | None, ...] | None = None
    whole_examples: bool = False
    uniform: bool = False
    memory_bytes: int | None = None
    remat: tuple[str, ...] = REMAT
    forbid: tuple[str, ...] = ()
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What was asked for. ``layers`` as in `autopar.plan_pipeline`: how many, "names", or None."""

    num_microbatches: int
    layers: int | str | None
    options: PipelineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayer:
    """A layer: its name for people, the lines ``sources`` that it begins and ends with, what it reads and gives.
    Layers of one ``kind`` compute the same; ``sharding`` is the number of its among the file's."""

    name: str
    kind: int
    sources: tuple[str, ...]
    sharding: int
    wiring: LayerWiring


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPrediction:
    """One worker (a mesh) in the simulated step: seconds in which its devices run something (collectives inside the
    mesh included), the most bytes that one of them holds, and the limit for that."""

    num_devices: int
    busy_s: float
    peak_bytes: float
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrediction:
    """Seconds in which something crosses from worker ``source`` to worker ``target``."""

    source: int
    target: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePredictions:
    """The simulated step."""

    step_s: float
    workers: tuple[WorkerPrediction, ...]
    links: tuple[LinkPrediction, ...]

    @property
    def bubble(self) -> float:
        """The part, 0 to 1, of the time of all devices that have a stage in which they run nothing."""
        devices = sum(w.num_devices for w in self.workers)
        busy = sum(w.num_devices * w.busy_s for w in self.workers)
        return 1 - busy / (devices * self.step_s) if devices and self.step_s else 0.0

    def bubble_of(self, worker: int) -> float:
        """The part, 0 to 1, of the step in which worker ``worker``'s devices run nothing."""
        return 1 - self.workers[worker].busy_s / self.step_s if self.step_s else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds in which the busiest worker's devices run something."""
        return max((w.busy_s for w in self.workers), default=0.0)

    @property
    def communication_s(self) -> float:
        """Seconds in which something crosses the busiest channel between two workers."""
        return max((link.busy_s for link in self.links), default=0.0)

    @property
    def peak_bytes(self) -> float:
        """The most bytes that any device holds."""
        return max((w.peak_bytes for w in self.workers), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProvenance:
    """How the plan came about; not part of its digest. ``seconds`` are (phase, wall seconds); ``simulated`` are
    (pipeline in a line, seconds a step) of all that the choice was made from."""

    autopar_version: str
    jax_version: str
    seconds: tuple[tuple[str, float], ...]
    simulated: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A whole pipeline plan. ``fingerprint`` is that of the step in layers. ``shardings`` are those of layers'
    operators, ``joins`` the chains between layers of one stage; ``inputs`` and ``outputs`` say by name
    what stages hold of the step's arguments and results."""

    kind: Literal["pipeline"] = "pipeline"
    schema_version: int
    name: str
    fingerprint: str
    cluster: ClusterSpec
    config: PipelineConfig
    layers: tuple[FileLayer, ...]
    inputs: tuple[ArgPlan, ...]
    outputs: tuple[ArgPlan, ...]
    shardings: tuple[LayerSharding, ...]
    joins: tuple[JoinChains, ...]
    plan: PipelinePlan
    exchange: ScalarExchange | None
    predictions: PipelinePredictions
    provenance: PipelineProvenance

    def sharding_of(self, layer: int) -> LayerSharding:
        """How a layer's operators are sharded."""
        return self.shardings[self.layers[layer].sharding]

    def meshes(self) -> tuple[LogicalMesh, ...]:
        """The logical mesh of each worker's first stage."""
        first: dict[int, LogicalMesh] = {}
        for stage, worker in zip(self.plan.stages, self.plan.schedule.mesh_of_stage, strict=True):
            first.setdefault(worker, stage.mesh)
        return tuple(first[w] for w in sorted(first))

    def verify(self) -> None:
        """Raises VerifyError or ClusterError where the cluster or the plan is malformed, layers are not those of the
        stages, stages use devices that the cluster does not have, microbatches or rematerialisation are not what the
        schedule and the layers' shardings say, a sharding does not fit its mesh or its value, layers send and
        receive in other shardings than the cuts between their stages say, or nothing says how a value gets from one
        layer's sharding into another's, or predictions are not of this many workers, negative, or above their
        limit."""
        self.cluster.verify()
        self.plan.verify()
        self._verify_stages()
        self._verify_layers()
        for where, mesh, value_type, spec in self._specs():
            spec.verify()
            unknown = ({a for dim in spec.dims for a in dim} | set(spec.unreduced)) - set(mesh.axis_names)
            if unknown:
                raise VerifyError(f"{where}: sharding {spec} uses {min(unknown)!r}, not an axis of mesh {mesh}")
            if len(spec.dims) != len(value_type.shape):
                raise VerifyError(f"{where}: sharding {spec} does not have the rank of {value_type}")
        self._verify_joins()
        if (x := self.exchange) is not None:
            if len(x.compute_s) != len(self.plan.stages):
                raise VerifyError(f"exchange has {len(x.compute_s)} times for {len(self.plan.stages)} stages")
            if not all(figure >= 0 for figure in (*x.compute_s, x.reduce_s, x.device_bytes)):
                raise VerifyError(f"exchange has a negative figure: {x}")
        self._verify_predictions()

    def _verify_stages(self) -> None:
        stages, schedule = self.plan.stages, self.plan.schedule
        if not stages or len(self.layers) != stages[-1].stop:
            raise VerifyError(f"{len(self.layers)} layers, but stages of {stages[-1].stop if stages else 0}")
        if schedule.num_microbatches != self.config.num_microbatches:
            raise VerifyError(
                f"the schedule has {schedule.num_microbatches} microbatches; asked for: {self.config.num_microbatches}"
            )
        for number, stage in enumerate(stages):
            if not all(0 <= d < self.cluster.num_devices for d in stage.mesh.device_ids):
                raise VerifyError(f"stage {number} uses devices that cluster {self.cluster.name} does not have")

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

    def _specs(self) -> Iterator[tuple[str, LogicalMesh, TensorType, ShardingSpec]]:
        stages = self.plan.stages
        for what, arguments in (("argument", self.inputs), ("result", self.outputs)):
            for argument in arguments:
                for place in argument.places:
                    where = f"{what} {argument.path}{place.rows} on stage {place.stage}"
                    if not 0 <= place.stage < len(stages):
                        raise VerifyError(f"{where}, which does not exist")
                    yield where, stages[place.stage].mesh, place.type_of(argument.type), place.spec
        for cut in self.plan.cuts:
            for value in cut.values:
                where = f"{value.name}, from stage {cut.source} to stage {cut.target}"
                yield where, stages[cut.source].mesh, value.type, value.src_spec
                yield where, stages[cut.target].mesh, value.type, value.dst_spec

    def _verify_predictions(self) -> None:
        p = self.predictions
        if len(p.workers) != len(self.plan.schedule.tasks):
            raise VerifyError(
                f"predictions of {len(p.workers)} workers, the schedule has {len(self.plan.schedule.tasks)}"
            )
        for number, (worker, mesh) in enumerate(zip(p.workers, self.meshes(), strict=True)):
            if worker.num_devices != mesh.num_devices:
                raise VerifyError(f"worker {number} is predicted with {worker.num_devices} devices, its mesh is {mesh}")
            if not 0 <= worker.busy_s <= p.step_s * (1 + 1e-9):
                raise VerifyError(f"worker {number} is busy for {worker.busy_s} s of a step of {p.step_s} s")
            if not 0 <= worker.peak_bytes <= worker.limit_bytes:
                raise VerifyError(f"worker {number} holds {worker.peak_bytes} bytes of {worker.limit_bytes}")
        for link in p.links:
            if not (0 <= link.source < len(p.workers) and 0 <= link.target < len(p.workers)) or not link.busy_s >= 0:
                raise VerifyError(f"no link from worker {link.source} to worker {link.target} for {link.busy_s} s")
