"""The plan: everything that was decided, predicted and recorded for one train step.

A Plan is plain data (see `serde`), made and read without jax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import ShardingPlan

SCHEMA_VERSION = 4
FORCED_METHODS = ("data_parallel", "zero2", "zero3", "tensor_parallel")
METHODS = ("auto", *FORCED_METHODS)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgPlan:
    """One flat argument or result: pytree path, type, where it lies. ``becomes`` is the output that is an argument's
    new value, and lies as it does unless pinned apart; ``donated_to`` the one that takes its buffer."""

    path: str
    type: TensorType
    places: tuple[Place, ...]
    becomes: int = -1
    donated_to: int = -1

    @property
    def spec(self) -> ShardingSpec:
        """How the only stage holds it."""
        (place,) = self.places
        return place.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A sharding that the user fixed: ``target`` is an argument path glob (``arg:…``) or the name of an
    intermediate (``name:…``); ``dims`` as in ShardingSpec, None for a dimension that is left to the planner."""

    target: str
    dims: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What was asked for. ``mesh_shape`` None: chosen by the planner. ``method`` is one of METHODS, ``solver`` of
    `intra_op.solvers.CHOICES`; ``forbid`` lists collective kinds; ``batch_axis`` forces the batch dimension onto a mesh
    axis; ``recompute`` says when values of the forward pass may be computed again: where nothing that fits was found
    without (None), also where that only makes the plan faster (True), never (False)."""

    mesh_shape: tuple[int, ...] | None = None
    axis_names: tuple[str, ...] | None = None
    memory_bytes: int | None = None
    num_microbatches: int = 1
    method: str = "auto"
    forbid: tuple[str, ...] = ()
    batch_axis: str | None = None
    pins: tuple[Pin, ...] = ()
    solver: str = "auto"
    time_limit_s: float = 60.0
    recompute: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Per device and step: seconds, bytes, FLOPs."""

    step_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: int
    argument_bytes: int
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the plan came about; not part of its digest. ``seconds`` are (phase, wall seconds);
    ``baselines`` are (name, objective seconds, peak bytes, fits) of the seed plans under the same cost model."""

    autopar_version: str
    jax_version: str
    seconds: tuple[tuple[str, float], ...]
    baselines: tuple[tuple[str, float, float, bool], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan. ``num_nodes`` and ``num_flops`` describe the step that was planned."""

    schema_version: int
    name: str
    fingerprint: str
    node_hashes: tuple[str, ...]
    cluster: ClusterSpec
    config: PlanConfig
    inputs: tuple[ArgPlan, ...]
    outputs: tuple[ArgPlan, ...]
    sharding: ShardingPlan
    predictions: Predictions
    provenance: Provenance
