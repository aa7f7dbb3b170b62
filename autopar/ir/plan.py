"""The plan: everything that was decided, predicted and recorded for one train step.

A Plan is plain data (see `serde`), made and read without jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import PlanMismatchError, VerifyError
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
    """How the devices of a stage hold a value, or rows of it.

    Attributes:
        stage: number of the stage; 0 of one program.
        spec: how it lies on the stage's mesh.
        start: the first row, of the value's first dimension.
        stop: the row after the last; 0: it is all of the value.
    """

    stage: int = 0
    spec: ShardingSpec
    start: int = 0
    stop: int = 0

    @property
    def rows(self) -> str:
        """What follows a path that stands for these rows (``[2:4]``); nothing for all of a value."""
        return f"[{self.start}:{self.stop}]" if self.stop else ""

    def type_of(self, value_type: TensorType) -> TensorType:
        """The type of the rows.

        Args:
            value_type: of the whole value.
        """
        if not self.stop:
            return value_type
        return replace(value_type, shape=(self.stop - self.start, *value_type.shape[1:]))


ROLES = ("batch", "weights", "optimizer state", "other")
"""What an argument is: examples; what the forward pass reads, and is not that; what only the update reads, and gives
anew; all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgPlan:
    """One flat argument or result.

    Attributes:
        path: in the call, ``args[0]['w']`` or ``out[1]``; ``const[0]`` is an array that the step closed over.
        type: shape and dtype.
        places: where it lies, one `Place` for each stage that holds it, or rows of it.
        role: what an argument is: ``batch``; ``weights``, which the forward pass reads; ``optimizer state``, which the
            update alone reads and gives anew; or ``other``. Of a result that of the argument whose new value it is.
        becomes: number of the result that is an argument's new value, and lies as it does unless pinned apart; -1: none
            is.
        donated_to: number of the result that takes its buffer; -1: none does.
        fed: of a batch that stages are given in microbatches: how each has one of them.
        fed_type: shape and dtype of one of them.
    """

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
        """How the only stage holds it. Raises ValueError where several hold it, or none."""
        (place,) = self.places
        return place.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What was asked for, by `autopar.parallelize`'s options.

    Attributes:
        mesh_shape: of the logical mesh; None: chosen by the planner.
        axis_names: of the mesh, where they were given.
        mesh_axes: axes of a mesh at most, where ``mesh_shape`` is None.
        devices: the cluster's in the mesh's order, where a mesh of devices was given; None: as
            `cost.logical_meshes.logical_mesh` lays them.
        memory_bytes: limit per device; None: what programs can have of its memory.
        num_microbatches: parts of the batch.
        method: one of METHODS.
        forbid: kinds of collectives that are not used.
        batch_axis: the mesh axis that the batch dimension is forced onto; None: chosen.
        degrees: of parallelism.
        pins: shardings that are fixed.
        solver: one of `intra_op.solvers.CHOICES`.
        time_limit_s: seconds after which the whole search ends; None: nothing ends it.
        recompute: when values of the forward pass may be computed again: where nothing that fits was found without
            (None), also where that only makes the plan faster (True), never (False).
        layers: how many, ``"names"``, or None, as in `autopar.parallelize`.
        stages: what was fixed of a pipeline's; None for a plan of one mesh.
    """

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
    """Values that a device holds when it holds most.

    Attributes:
        kind: ``activations``, say.
        what: a path of arguments, the operator that makes them with its source line, or words.
        count: how many.
        bytes: of all of them.
    """

    kind: str
    what: str
    count: int
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPrediction:
    """One worker (a mesh) in the simulated step.

    Attributes:
        num_devices: of its mesh.
        busy_s: seconds in which its devices run something, collectives inside the mesh included.
        peak_bytes: the most that one of its devices holds.
        limit_bytes: the most that it may hold.
        live: all that it holds then, the largest first.
    """

    num_devices: int
    busy_s: float
    peak_bytes: float
    limit_bytes: float
    live: tuple[Live, ...] = ()

    @property
    def held(self) -> tuple[tuple[str, float], ...]:
        """(kind, bytes) of what it holds at its peak, the most first."""
        total: dict[str, float] = {}
        for row in self.live:
            total[row.kind] = total.get(row.kind, 0.0) + row.bytes
        return tuple(sorted(total.items(), key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrediction:
    """What crosses from one worker to another.

    Attributes:
        source: number of the worker that sends.
        target: number of the worker that receives.
        busy_s: seconds in which something crosses.
    """

    source: int
    target: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """A step, as it is predicted.

    Attributes:
        step_s: seconds of a step.
        compute_s: seconds of compute: of one program a device's; of a pipeline, by simulation, those in which the
            busiest worker runs something.
        communication_s: seconds of communication: of one program a device's, one after the other with ``compute_s``; of
            a pipeline those of the busiest channel between two workers.
        peak_memory_bytes: the most that any device holds.
        argument_bytes: of arguments that a device holds; of one program only, else None.
        flops: a device's; of one program only, else None.
        workers: each worker; of one program the only one.
        links: each channel between two workers.
        hidden_s: a device's seconds of collectives that run beside compute, and are no part of ``communication_s``; of
            one program only, else None.
    """

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
        """The part (0 to 1) of the time of all devices that have a stage in which they run nothing."""
        devices = sum(w.num_devices for w in self.workers)
        busy = sum(w.num_devices * w.busy_s for w in self.workers)
        return 1 - busy / (devices * self.step_s) if devices and self.step_s else 0.0

    def bubble_of(self, worker: int) -> float:
        """The part (0 to 1) of the step in which one worker's devices run nothing.

        Args:
            worker: its number.
        """
        return 1 - self.workers[worker].busy_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A plan that was not chosen, under the same cost model.

    Attributes:
        name: what it is.
        step_s: predicted seconds of a step.
        peak_bytes: the most on a device; None: not known.
        fits: False where these are more than the limit.
    """

    name: str
    step_s: float
    peak_bytes: float | None = None
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A search that ended before its end (docs/decisions/033).

    Attributes:
        why: what ended it.
        bound_s: no plan of ``what`` takes fewer seconds a step.
        what: the plans that the bound is of.
    """

    why: str
    bound_s: float
    what: str

    def gap(self, step_s: float) -> float:
        """The part (0 to 1) of a step's time that another plan may save at most.

        Args:
            step_s: predicted seconds of a step.
        """
        return max(0.0, 1 - self.bound_s / step_s) if step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the plan came about; not part of its digest.

    Attributes:
        autopar_version: that made it.
        jax_version: that traced the step.
        seconds: (phase, wall seconds) of planning.
        considered: the plans that it was chosen from.
        notes: what was not looked for and why, what was taken for granted.
        ended: of a search that a time limit or Ctrl-C ended; None: it was complete.
    """

    autopar_version: str
    jax_version: str
    seconds: tuple[tuple[str, float], ...]
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    ended: Ended | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProgram:
    """A step that runs as one program on one mesh.

    Attributes:
        sharding: decisions, chains and collectives.
        checkpoints: True: what the step's own `jax.checkpoint` names is computed again; False: it is kept.
    """

    sharding: ShardingPlan
    checkpoints: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan, plain data.

    Attributes:
        schema_version: of its JSON.
        name: of the step.
        fingerprint: of the step's graph, of a pipeline that of the step in layers.
        cluster: what it is for.
        config: what was asked for.
        inputs: flat arguments, closed-over arrays first.
        outputs: flat results.
        body: how the step runs, as one program or as a pipeline of stages.
        predictions: seconds, bytes and FLOPs of a step.
        provenance: how it came about.
        step: what it was planned from; left out (None) where the plan is sent to who traces the step.
    """

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
        """The logical mesh of each stage; one where it is of one program."""
        match self.body:
            case OneProgram(sharding=sharding):
                return (sharding.mesh,)
            case Pipelined(plan=plan):
                return tuple(stage.mesh for stage in plan.stages)

    @property
    def sharding(self) -> ShardingPlan:
        """How the only program is sharded. Raises PlanMismatchError for a pipeline, whose layers are sharded each
        by itself."""
        if isinstance(self.body, OneProgram):
            return self.body.sharding
        raise PlanMismatchError(f"the plan of {self.name} is a pipeline's, whose layers are sharded each by itself")

    @property
    def pipelined(self) -> Pipelined:
        """Stages, layers and what crosses. Raises PlanMismatchError for a plan of one program."""
        if isinstance(self.body, Pipelined):
            return self.body
        raise PlanMismatchError(f"the plan of {self.name} is of one program, without stages")

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
