"""A pipeline: stages on meshes, what crosses between them, and the order in which every mesh works.

A *stage* is a range of layers that one mesh runs. Several stages may share a mesh (interleaved schedules): then a
mesh's stages are numbered p apart, p being the number of meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Literal, TypeAlias

from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import VerifyError
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec

TaskPhase: TypeAlias = Literal["forward", "backward", "input_grad", "weight_grad"]
"""``backward`` is input and weight gradients in one; schedules that split it have both of the others instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One stage's work for one microbatch."""

    stage: int
    microbatch: int
    phase: TaskPhase

    def __str__(self) -> str:
        letter = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}[self.phase]
        return f"{letter}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of tasks on every mesh. ``mesh_of_stage[s]`` runs stage s. ``in_flight[s]`` is the most microbatches
    whose activations stage s holds at a time: from their forward task to the end of their last task there, which
    `inter_op.check_schedule` proves."""

    name: str
    num_microbatches: int
    mesh_of_stage: tuple[int, ...]
    tasks: tuple[tuple[Task, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, each of those that share a mesh counted."""
        return len(self.mesh_of_stage)

    def verify(self) -> None:
        """Raises VerifyError where a task's stage does not run on the mesh that has it, or lengths disagree. Order and
        completeness are `inter_op.check_schedule`'s."""
        if len(self.in_flight) != self.num_stages:
            raise VerifyError(f"{self.name}: in_flight has {len(self.in_flight)} entries for {self.num_stages} stages")
        if any(not 0 <= mesh < len(self.tasks) for mesh in self.mesh_of_stage):
            raise VerifyError(f"{self.name}: stages on meshes {self.mesh_of_stage}, of {len(self.tasks)}")
        for mesh, tasks in enumerate(self.tasks):
            for task in tasks:
                if not 0 <= task.stage < self.num_stages or self.mesh_of_stage[task.stage] != mesh:
                    raise VerifyError(f"{self.name}: mesh {mesh} runs {task}")
                if not 0 <= task.microbatch < self.num_microbatches:
                    raise VerifyError(f"{self.name}: {task} is of no microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transients:
    """Bytes that a device holds for a moment while a task of each phase runs, ``update_bytes`` while gradients are
    reduced or the update runs: beside all that outlives the task or was there before it, messages included.
    ``fused_bytes``: while a forward and a backward task run as one (`Stage.fused`), beside all activations of a
    microbatch, of which ``received_bytes`` are the message then; ``fused_input_grad_bytes``: a forward task and that of
    the input gradient, beside the weight context that these give."""

    forward_bytes: float
    backward_bytes: float
    input_grad_bytes: float
    weight_grad_bytes: float
    fused_bytes: float
    fused_input_grad_bytes: float
    received_bytes: float
    update_bytes: float

    def of(self, phase: TaskPhase) -> float:
        """Bytes that a device holds for a moment while a task of that phase runs."""
        match phase:
            case "forward":
                return self.forward_bytes
            case "backward":
                return self.backward_bytes
            case "input_grad":
                return self.input_grad_bytes
            case "weight_grad":
                return self.weight_grad_bytes

    def verify(self) -> None:
        """Raises VerifyError for a negative or infinite figure, and where half of a backward pass needs more than all
        of it."""
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise VerifyError(f"transients: {name} is {getattr(self, name)}")
        if max(self.input_grad_bytes, self.weight_grad_bytes) > self.backward_bytes:
            raise VerifyError(f"transients: half of a backward pass needs more than all of it: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage takes, seconds and bytes per device.

    Per microbatch: ``forward_s``, ``input_grad_s`` and ``weight_grad_s`` (together one backward task, what is
    recomputed in the former), ``activation_bytes`` (held from its forward to its backward task),
    ``weight_context_bytes`` (held from its input gradient to its weight gradient, where they are split; of these
    ``weight_kept_bytes`` are among its activations). Per step: ``grad_sync_s`` (gradients reduced over the mesh),
    ``update_s``. Always held: ``state_bytes`` (arguments, gradient sums). On top, while a task or the update runs:
    ``transients``; with what its task receives and sends, ``transient_bytes`` at most, of which the search of stages
    makes its estimate (with a microbatch's activations there beside what the update needs). Of what the update needs,
    ``results_bytes`` are new values in no argument's place, which stay until the step is done.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    grad_sync_s: float
    update_s: float
    state_bytes: float
    activation_bytes: float
    weight_context_bytes: float
    weight_kept_bytes: float
    results_bytes: float
    transient_bytes: float
    transients: Transients

    @property
    def kept_bytes(self) -> float:
        """Bytes of a microbatch's activations that its weight gradient reads as well: held until then where the
        backward pass is split."""
        return min(self.weight_kept_bytes, self.weight_context_bytes, self.activation_bytes)

    @property
    def backward_s(self) -> float:
        """Seconds of one backward task that is not split."""
        return self.input_grad_s + self.weight_grad_s

    def verify(self) -> None:
        """Raises VerifyError for a negative or infinite figure, and where a task needs more than the most that tasks
        need."""
        for name in self.__slots__:
            if name != "transients" and not 0 <= getattr(self, name) < float("inf"):
                raise VerifyError(f"stage cost: {name} is {getattr(self, name)}")
        self.transients.verify()
        if self.results_bytes > self.transients.update_bytes:
            raise VerifyError(f"stage cost: the update needs {self.transients.update_bytes} bytes, its results more")
        most = max(self.transients.forward_bytes, self.transients.backward_bytes)
        if most > self.transient_bytes:
            raise VerifyError(f"stage cost: a task needs {most} bytes beside, of {self.transient_bytes} at most")


@dataclass(frozen=True, slots=True)
class Beside:
    """What layers need that run one after the other: ``most``, of each phase the largest figure, and what is received
    the first one's; of the update, whose results stay, what the others leave as well. Where a forward task and that of
    the input gradient run as one, a layer's activations are there when a later layer runs, and its weight context is
    not yet: ``held_bytes`` after the last. ``results_bytes``: of all layers."""

    most: Transients
    held_bytes: float
    results_bytes: float

    @classmethod
    def of(cls, layer: StageCost) -> Beside:
        """What one layer needs."""
        return cls(layer.transients, layer.activation_bytes - layer.weight_context_bytes, layer.results_bytes)

    def then(self, layer: StageCost) -> Beside:
        """With another layer behind."""
        one, two = self.most, layer.transients
        most = Transients(
            forward_bytes=max(one.forward_bytes, two.forward_bytes),
            backward_bytes=max(one.backward_bytes, two.backward_bytes),
            input_grad_bytes=max(one.input_grad_bytes, two.input_grad_bytes),
            weight_grad_bytes=max(one.weight_grad_bytes, two.weight_grad_bytes),
            fused_bytes=max(one.fused_bytes, two.fused_bytes),
            fused_input_grad_bytes=max(
                one.fused_input_grad_bytes, two.fused_input_grad_bytes, self.held_bytes + two.fused_input_grad_bytes
            ),
            received_bytes=one.received_bytes,
            update_bytes=max(one.update_bytes + layer.results_bytes, self.results_bytes + two.update_bytes),
        )
        held = self.held_bytes + layer.activation_bytes - layer.weight_context_bytes
        return Beside(most, held, self.results_bytes + layer.results_bytes)


def fullest(layers: Sequence[StageCost]) -> Transients:
    """What layers need that run one after the other (`Beside`)."""
    return reduce(Beside.then, layers[1:], Beside.of(layers[0])).most


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to shard a layer on a mesh: what it costs; the codes (numbers of shardings of a type on that mesh) of
    what it receives, sends and reads as arguments, in the order of its graph's ports and inputs. ``kept`` and
    ``sends_kept`` are the bytes on a device that it keeps, from a microbatch's forward to its backward task, of what it
    receives and sends forwards, as that lies between the layers: a neighbour that keeps it too holds the same.
    ``choice`` is the state of every cluster of its sharding problem, from which its operators' shardings follow;
    layouts that differ in it alone are worth the same."""

    remat: str
    cost: StageCost
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    inputs: tuple[int, ...]
    kept: tuple[float, ...]
    sends_kept: tuple[float, ...]
    choice: tuple[int, ...] = field(default=(), compare=False, repr=False)


CutPhase: TypeAlias = Literal["forward", "backward", "gradient", "update"]
"""When a value crosses: after a forward task (activations), after a backward or input_grad task (cotangents), once
after a stage's last backward task (parts of the gradient of what several stages train), once after the update (new
values of what several stages read)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutValue:
    """One value that crosses: value ``value`` of the step, its name for people, its type and how both sides hold it;
    ``landed`` is what is brought over where the target gathers it from there, else ``dst_spec``."""

    value: int
    name: str
    type: TensorType
    src_spec: ShardingSpec
    dst_spec: ShardingSpec
    landed: ShardingSpec | None = None

    @property
    def lands(self) -> ShardingSpec:
        """How it is on the target's mesh when it has been brought over."""
        return self.landed or self.dst_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """For which part of a cut's time the busiest NIC of host ``host`` sends, and receives."""

    host: int
    sends: float
    receives: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """All that crosses from stage ``source`` to stage ``target`` in one phase, as one resharding: for each microbatch
    ``forward``, ``backward``) or once a step. ``time_s`` is that resharding's, alone on its links, ``bound_s`` the
    lower bound of any; ``receive_bytes`` are the buffers on a device of the target. ``strategy`` is the one whose
    transfers bring it over (`resharding.planning`): with the cluster and both meshes they follow from it; "" between
    stages of the same devices. ``hosts``: what it uses of their NICs. ``gather_s`` of its time
    are the target's, which gathers what has landed split further than it is wanted."""

    source: int
    target: int
    phase: CutPhase
    values: tuple[CutValue, ...]
    time_s: float
    bound_s: float
    receive_bytes: float
    strategy: str = "auto"
    hosts: tuple[HostUse, ...] = ()
    gather_s: float = 0.0

    def verify(self) -> None:
        """Raises VerifyError where a stage sends to itself, a forward cut leads to an earlier stage, a backward cut to
        a later one, or times are out of order."""
        if self.source == self.target:
            raise VerifyError(f"a cut from stage {self.source} to itself")
        if self.phase in ("forward", "backward") and (self.source < self.target) != (self.phase == "forward"):
            raise VerifyError(f"a {self.phase} cut from stage {self.source} to stage {self.target}")
        if not 0 <= self.gather_s <= self.time_s:
            raise VerifyError(f"cut {self.source} -> {self.target} gathers for {self.gather_s} s of {self.time_s}")
        if any(not 0 <= part <= 1 for use in self.hosts for part in (use.sends, use.receives)):
            raise VerifyError(
                f"cut {self.source} -> {self.target} uses hosts {self.hosts}: parts of its time, at most 1"
            )
        if not 0 <= self.bound_s <= self.time_s * (1 + 1e-6):
            raise VerifyError(f"cut {self.source} -> {self.target}: {self.time_s} s, bound {self.bound_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``start`` to ``stop`` on ``mesh``; ``remat[k]`` is what layer start + k keeps (`ir.layers.REMAT`).
    ``fused``: of each microbatch its forward and its backward task (or that of the input gradient) are one executable.
    """

    start: int
    stop: int
    mesh: LogicalMesh
    remat: tuple[str, ...]
    cost: StageCost
    fused: bool = False

    @property
    def layers(self) -> range:
        """Its layers' numbers."""
        return range(self.start, self.stop)


def home_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Layer → number of the stage that it is in."""
    return tuple(s for s, stage in enumerate(stages) for _ in stage.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Stages in order of their layers, what crosses between them, and the schedule."""

    stages: tuple[Stage, ...]
    cuts: tuple[Cut, ...]
    schedule: Schedule

    @property
    def home(self) -> tuple[int, ...]:
        """Layer → number of the stage that it is in."""
        return home_of(self.stages)

    def can_fuse(self, stage: int) -> bool:
        """True where a stage can be `Stage.fused`: it has no activations to send, and each of its forward tasks is
        followed by the same microbatch's next one."""
        if any(c.source == stage and c.phase == "forward" for c in self.cuts):
            return False
        tasks = self.schedule.tasks[self.schedule.mesh_of_stage[stage]]
        after = [(task, later) for task, later in zip_longest(tasks, tasks[1:])
                 if task.stage == stage and task.phase == "forward"]  # fmt: skip
        return bool(after) and all(
            later is not None
            and later.phase in ("backward", "input_grad")
            and (later.stage, later.microbatch) == (stage, task.microbatch)
            for task, later in after
        )

    def verify(self) -> None:
        """Raises VerifyError where stages do not cover the layers in order, share devices without sharing a mesh, or
        do not fit the schedule."""
        if len(self.stages) != self.schedule.num_stages:
            raise VerifyError(f"{len(self.stages)} stages, the schedule has {self.schedule.num_stages}")
        self.schedule.verify()
        at = 0
        owner: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            if stage.start != at or stage.stop <= stage.start or len(stage.remat) != stage.stop - stage.start:
                raise VerifyError(f"stage {number} has layers {stage.start} to {stage.stop}; expected {at} to …")
            at = stage.stop
            stage.mesh.verify()
            stage.cost.verify()
            mesh = self.schedule.mesh_of_stage[number]
            for device in stage.mesh.device_ids:
                if owner.setdefault(device, mesh) != mesh:
                    raise VerifyError(f"device {device} is on meshes {owner[device]} and {mesh}")
            if stage.fused and not self.can_fuse(number):
                raise VerifyError(
                    f"stage {number} is fused, but sends activations or does not run each backward task right after "
                    f"its forward task"
                )
        for cut in self.cuts:
            cut.verify()
            if not (0 <= cut.source < len(self.stages) and 0 <= cut.target < len(self.stages)):
                raise VerifyError(f"a cut from stage {cut.source} to stage {cut.target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarExchange:
    """Scalars that every stage's update needs of all gradients, such as their global norm: ``compute_s[s]`` for stage
    s's own part, ``reduce_s`` to add them up over all meshes, ``device_bytes`` of scalars."""

    compute_s: tuple[float, ...]
    reduce_s: float
    device_bytes: float
