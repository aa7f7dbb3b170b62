"""The plan: everything that was decided, predicted and recorded for one train step.

A Plan is plain data (see `serde`), made and read without jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import VerifyError
from autopar.ir.graph import Graph, TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined, PipelineOptions
from autopar.ir.planned_step import PlannedStep, verify_layers, verify_shardings
from autopar.ir.sharding import Pin, ShardingSpec
from autopar.ir.sharding_plan import ShardingPlan, verify_spec

SCHEMA_VERSION = 10
FORCED_METHODS = ("data_parallel", "zero2", "zero3", "tensor_parallel")
METHODS = ("auto", *FORCED_METHODS)
MESH_AXES = (2, 3)
"""How many axes meshes may have at most that nobody asked for by their shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How the devices of stage ``stage`` hold a value: all of it, or, where ``stop`` is above 0, rows ``start`` to
    ``stop`` of its first dimension."""

    stage: int = 0
    spec: ShardingSpec
    start: int = 0
    stop: int = 0

    @property
    def rows(self) -> str:
        """What follows a path that stands for these rows, ``[2:4]``; nothing for all of a value."""
        return f"[{self.start}:{self.stop}]" if self.stop else ""

    def type_of(self, value_type: TensorType) -> TensorType:
        """The type of the rows of a value of ``value_type``."""
        if not self.stop:
            return value_type
        return replace(value_type, shape=(self.stop - self.start, *value_type.shape[1:]))


ROLES = ("batch", "weights", "optimizer state", "other")
"""What an argument is: examples; what the forward pass reads, and is not that; what only the update reads, and gives
anew; all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgPlan:
    """One flat argument or result: pytree path, type, where it lies. ``becomes`` is the output that is an argument's
    new value, and lies as it does unless pinned apart; ``donated_to`` the one that takes its buffer; ``role`` one of
    ROLES, of a result that of the argument whose new value it is, or other. ``fed``: of a batch that stages are given
    in microbatches, how each has one of them, of type ``fed_type``."""

    path: str
    type: TensorType
    places: tuple[Place, ...]
    role: str = "other"
    becomes: int = -1
    donated_to: int = -1
    fed: tuple[Place, ...] = ()
    fed_type: TensorType | None = None

    @property
    def spec(self) -> ShardingSpec:
        """How the only stage holds it."""
        (place,) = self.places
        return place.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What was asked for. ``mesh_shape`` None: chosen by the planner, of ``mesh_axes`` axes at most; ``devices``: the
    cluster's in the mesh's order, where a mesh of devices was given, None: as `cost.logical_meshes.logical_mesh` lays
    them. ``method`` is one of METHODS, ``solver`` of `intra_op.solvers.CHOICES`; ``time_limit_s`` ends the whole search
    (None: nothing does); ``forbid`` lists collective kinds; ``batch_axis`` forces the batch dimension onto a mesh axis;
    ``degrees`` of parallelism; ``recompute`` says when values of the forward pass may be computed again: where nothing
    that fits was found without (None), also where that only makes the plan faster (True), never (False). ``layers`` as
    in `autopar.parallelize`: how many, "names", or None; ``stages``: what was fixed of a pipeline's, None for a plan of
    one mesh."""

    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    mesh_axes: int = 2
    devices: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    num_microbatches: int = 1
    method: str = "auto"
    forbid: tuple[str, ...] = ()
    batch_axis: str | None = None
    degrees: Degrees = field(default_factory=Degrees)
    pins: tuple[Pin, ...] = ()
    solver: str = "auto"
    time_limit_s: float | None = None
    recompute: bool | None = None
    layers: int | str | None = None
    stages: PipelineOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """``count`` values that a device holds when it holds most, ``bytes`` of them in all: their kind (``activations``),
    and what they are: a path of arguments, the operator that makes them with its source line, or words."""

    kind: str
    what: str
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPrediction:
    """One worker (a mesh) in the simulated step: seconds in which its devices run something (collectives inside the
    mesh included), the most bytes that one of them holds, and the limit for that. ``live``: all that it holds then, the
    largest first."""

    num_devices: int
    busy_s: float
    peak_bytes: float
    limit_bytes: float
    live: tuple[Live, ...] = ()

    @property
    def held(self) -> tuple[tuple[str, float], ...]:
        """(kind, bytes) of what it holds then, the most first."""
        total: dict[str, float] = {}
        for row in self.live:
            total[row.kind] = total.get(row.kind, 0.0) + row.bytes
        return tuple(sorted(total.items(), key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrediction:
    """Seconds in which something crosses from worker ``source`` to worker ``target``."""

    source: int
    target: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """A step, as it is predicted. ``step_s``, ``compute_s`` and ``communication_s`` are seconds: of one program a
    device's, which follow one another; of a pipeline, by simulation, those of the busiest worker and of the busiest
    channel between two workers. ``peak_memory_bytes`` are the most that any device holds. ``argument_bytes`` (held of
    arguments), ``flops`` and ``hidden_s`` (collectives that run beside compute, and are no part of ``communication_s``)
    are a device's, of one program only."""

    step_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: float
    argument_bytes: int | None
    flops: float | None
    workers: tuple[WorkerPrediction, ...]
    links: tuple[LinkPrediction, ...] = ()
    hidden_s: float | None = None

    @property
    def bubble(self) -> float:
        """The part of the time of all devices that have a stage in which they run nothing."""
        devices = sum(w.num_devices for w in self.workers)
        busy = sum(w.num_devices * w.busy_s for w in self.workers)
        return 1 - busy / (devices * self.step_s) if devices and self.step_s else 0.0

    def bubble_of(self, worker: int) -> float:
        """The part of the step in which one worker's devices run nothing."""
        return 1 - self.workers[worker].busy_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A plan that was not chosen, under the same cost model: what it is, seconds a step, the most bytes on a device
    (None: not known) and whether these fit."""

    name: str
    step_s: float
    peak_bytes: float | None = None
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A search that ended before its end, for the reason ``why``: no plan of ``what`` takes less than ``bound_s``
    seconds a step (docs/decisions/033)."""

    why: str
    bound_s: float
    what: str

    def gap(self, step_s: float) -> float:
        """The part of ``step_s`` seconds that another plan may save at most."""
        return max(0.0, 1 - self.bound_s / step_s) if step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the plan came about; not part of its digest. ``seconds`` are (phase, wall seconds); ``considered`` the plans
    that it was chosen from; ``ended``: of a search that a time limit or Ctrl-C ended; None: it was complete."""

    autopar_version: str
    jax_version: str
    seconds: tuple[tuple[str, float], ...]
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    ended: Ended | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProgram:
    """A step that runs as one program on one mesh. ``checkpoints`` says whether what the step's own `jax.checkpoint`
    names is computed again, or kept."""

    sharding: ShardingPlan
    checkpoints: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan: ``body`` says how the step runs, as one program or as a pipeline of stages. ``fingerprint`` is the
    step's, of a pipeline that of the step in layers; ``step`` what it was planned from, left out (None) where the plan
    is sent to who traces the step."""

    schema_version: int
    name: str
    fingerprint: str
    cluster: ClusterSpec
    config: PlanConfig
    inputs: tuple[ArgPlan, ...]
    outputs: tuple[ArgPlan, ...]
    body: OneProgram | Pipelined
    predictions: Predictions
    provenance: Provenance
    step: PlannedStep | None = None

    @property
    def meshes(self) -> tuple[LogicalMesh, ...]:
        """The logical mesh of each stage."""
        match self.body:
            case OneProgram(sharding=sharding):
                return (sharding.mesh,)
            case Pipelined(plan=plan):
                return tuple(stage.mesh for stage in plan.stages)

    @property
    def sharding(self) -> ShardingPlan:
        """How the only program is sharded. Raises TypeError for a pipeline, whose layers are sharded each by itself."""
        if isinstance(self.body, OneProgram):
            return self.body.sharding
        raise TypeError(f"the plan of {self.name} is a pipeline's")

    @property
    def pipelined(self) -> Pipelined:
        """Stages, layers and what crosses. Raises TypeError for a plan of one program."""
        if isinstance(self.body, Pipelined):
            return self.body
        raise TypeError(f"the plan of {self.name} is of one program, without stages")

    def verify(self) -> None:
        """Raises VerifyError or ClusterError where the cluster or a mesh is malformed, a mesh uses devices that the
        cluster does not have, a spec names an axis twice or one that its mesh does not have, or is not of its value's
        rank, an index is out of range, stages, layers and cuts contradict each other (`Pipelined.verify`), the
        step that it was planned from is malformed or another than arguments, results and body are of, or predictions
        are not of these workers, negative, or above their limit."""
        self.cluster.verify()
        for number, mesh in enumerate(self.meshes):
            mesh.verify()
            if not all(0 <= d < self.cluster.num_devices for d in mesh.device_ids):
                where = "the mesh" if len(self.meshes) == 1 else f"stage {number}"
                raise VerifyError(f"{where} uses devices that cluster {self.cluster.name} does not have")
        for where, mesh, value_type, spec in self._specs():
            verify_spec(spec, mesh, where)
            if len(spec.dims) != len(value_type.shape):
                raise VerifyError(f"{where}: sharding {spec} does not have the rank of {value_type}")
        match self.body:
            case OneProgram(sharding=sharding):
                sharding.verify()
            case Pipelined() as pipelined:
                pipelined.verify()
                count = pipelined.plan.schedule.num_microbatches
                if count != self.config.num_microbatches:
                    raise VerifyError(
                        f"the schedule has {count} microbatches; asked for: {self.config.num_microbatches}"
                    )
        if self.step is not None:
            self._verify_step(self.step)
        self._verify_predictions()

    def _verify_step(self, step: PlannedStep) -> None:
        step.verify()
        if step.graph.fingerprint != self.fingerprint:
            raise VerifyError("the graph is of another step than the plan: their fingerprints differ")
        sides = (
            ("arguments", self.inputs, step.arguments),
            ("results", self.outputs, step.results),
        )
        for what, have, told in sides:
            if [(a.path, a.type) for a in have] != list(told):
                raise VerifyError(f"the plan's {what} are not those of its graph")
        new, donated = step.new_values, step.graph.donated
        for i, a in enumerate(self.inputs):
            if (a.becomes, a.donated_to) != (new.get(i, -1), new[i] if i in donated else -1):
                raise VerifyError(f"argument {a.path}: its new value, or who takes its buffer, is not as in the graph")
        match self.body, step.graph:
            case OneProgram(sharding=sharding), Graph() as graph:
                verify_shardings(sharding, graph)
            case Pipelined(layers=layers), LayeredGraph() as graph:
                verify_layers(layers, graph)
            case _:
                raise VerifyError("the plan's graph is in layers and its body is not, or the other way round")

    def _specs(self) -> Iterator[tuple[str, LogicalMesh, TensorType, ShardingSpec]]:
        meshes = self.meshes
        for what, arguments in (("argument", self.inputs), ("result", self.outputs)):
            for argument in arguments:
                where = f"{what} {argument.path}"
                if argument.role not in ROLES:
                    raise VerifyError(f"{where} is {argument.role!r}, which is none of {', '.join(ROLES)}")
                for does, result in (("donated to", argument.donated_to), ("becomes", argument.becomes)):
                    if not -1 <= result < len(self.outputs):
                        raise VerifyError(f"{where}: {does} result {result}, which does not exist")
                for place in argument.places:
                    on = f"{where}{place.rows}" + (f" on stage {place.stage}" if len(meshes) > 1 else "")
                    if not 0 <= place.stage < len(meshes):
                        raise VerifyError(f"{where} is on stage {place.stage}, which does not exist")
                    yield on, meshes[place.stage], place.type_of(argument.type), place.spec
                for place in argument.fed:
                    if argument.fed_type is None or not 0 <= place.stage < len(meshes):
                        raise VerifyError(f"{where} is fed to stage {place.stage}, or in no type")
                    yield f"{where}, fed", meshes[place.stage], argument.fed_type, place.spec
        if isinstance(self.body, Pipelined):
            for cut in self.body.plan.cuts:
                for value in cut.values:
                    where = f"{value.name}, from stage {cut.source} to stage {cut.target}"
                    yield where, meshes[cut.source], value.type, value.src_spec
                    yield where, meshes[cut.target], value.type, value.dst_spec

    def _verify_predictions(self) -> None:
        p = self.predictions
        meshes = self.body.worker_meshes() if isinstance(self.body, Pipelined) else self.meshes
        if len(p.workers) != len(meshes):
            raise VerifyError(f"predictions of {len(p.workers)} workers, the plan has {len(meshes)}")
        for number, (worker, mesh) in enumerate(zip(p.workers, meshes, strict=True)):
            if worker.num_devices != mesh.num_devices:
                raise VerifyError(f"worker {number} is predicted with {worker.num_devices} devices, its mesh is {mesh}")
            if not 0 <= worker.busy_s <= p.step_s * (1 + 1e-9):
                raise VerifyError(f"worker {number} is busy for {worker.busy_s} s of a step of {p.step_s} s")
            if not 0 <= worker.peak_bytes <= worker.limit_bytes:
                raise VerifyError(f"worker {number} holds {worker.peak_bytes} bytes of {worker.limit_bytes}")
        for link in p.links:
            if not (0 <= link.source < len(p.workers) and 0 <= link.target < len(p.workers)) or not link.busy_s >= 0:
                raise VerifyError(f"no link from worker {link.source} to worker {link.target} for {link.busy_s} s")
