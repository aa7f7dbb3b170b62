"""The plan: everything that was decided, predicted and recorded for one train step.

A Plan is plain data (see `serde`), made and read without jax.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import ShardingPlan

SCHEMA_VERSION = 3
NEWER = "newer"
"""Metadata of a field that older files of this version do not have: it is read as its default."""
FORCED_METHODS = ("data_parallel", "zero2", "zero3", "tensor_parallel")
METHODS = ("auto", *FORCED_METHODS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgPlan:
    """One flat argument or result: pytree path, type, spec. ``becomes`` is the output that is an argument's new value,
    of the same sharding unless pinned apart; ``donated_to`` the one that takes its buffer."""

    path: str
    type: TensorType
    spec: ShardingSpec
    donated_to: int = -1
    becomes: int = field(default=-1, metadata={NEWER: True})


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
