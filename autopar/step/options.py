"""The options of `autopar.parallelize` (`ir.options`) as users give them, JAX's values among them: `asked`.

What they mean for planning is told by `step.asked`, which takes plain values.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.user_rules import registered_rules
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import AutoparWarning, LoweringError, OptionError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.progress import Progress
from autopar.ir.sharding import Pin
from autopar.primitives import unknown_operators
from autopar.runtime.on_ray.ray_cluster import Cluster
from autopar.step.asked import Asked, NamedMesh, Shape, of_options
from autopar.step.step_plan import StepPlan, load_plan


class Options(TypedDict, total=False):
    """Types of `ir.options.OPTIONS`; what they mean is told by `autopar.parallelize`."""

    cluster: ClusterSpec | Cluster | str | None
    mesh: Shape | Mesh | Sequence[Shape] | None
    mesh_axes: int
    memory_bytes: int | None
    num_microbatches: int | Literal["auto"]
    constraints: Mapping[str, Any] | None
    forbid: Sequence[str] | str
    method: str
    zero: int | None
    tensor: int | None
    sequence: int | None
    experts: int | None
    batch_axis: str | int | Sequence[Any] | None
    whole_examples: bool
    recompute: bool | str | Sequence[str] | None
    stages: int | tuple[int, int | None] | None
    stage_starts: Sequence[int] | None
    layers: int | str | None
    submeshes: Sequence[Sequence[int] | str] | None
    virtual_stages: int | None
    schedule: str | Sequence[str] | None
    uniform_stages: bool
    resharding: str
    time_limit_s: float | None
    solver: str
    workers: int | None
    cache: str | os.PathLike[str] | None
    donate_argnums: int | Sequence[int]
    static_argnums: int | Sequence[int]
    batch_argnums: Any
    on_unsupported: str
    plan: StepPlan | Plan | str | os.PathLike[str] | None
    compiler_options: Mapping[str, Any] | None
    deadline_s: float | None
    progress: Callable[[Progress], None] | None


def given_plan(plan: StepPlan | Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan behind the option ``plan``: one at hand, or a file. Raises PlanFormatError for a damaged file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    return (plan if isinstance(plan, StepPlan) else load_plan(plan)).data


def asked(options: Mapping[str, Any]) -> Asked:
    """All options (`settled`) as what planning sees of them. Raises as `of_options`, and OptionError for a constraint
    that is no PartitionSpec."""
    mesh = options["mesh"]
    if isinstance(mesh, Mesh):
        mesh = NamedMesh(shape=tuple(mesh.devices.shape), names=tuple(map(str, mesh.axis_names)))
    return of_options({**options, "mesh": mesh, "constraints": _pins(options) or None})


def check_supported(graphs: Iterable[Graph], on_unsupported: str, name: str) -> None:
    """Warns of operators of the step ``name`` that nobody has described, which run whole on every device, or with
    ``on_unsupported="error"`` raises LoweringError."""
    rules = registered_rules()
    found = {(n.primitive, n.source): n for graph in graphs for n in unknown_operators(graph, rules)}
    if not found:
        return
    several = ", ".join(map(str, list(found.values())[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    text = (
        f"{name}: autopar does not know how to split {several}. Decorate the function that calls it with "
        "@autopar.sharding_rule(name, '… -> …'), or give the primitive or ffi target a rule by its name"
    )
    if on_unsupported == "error":
        raise LoweringError(f"{text}; with on_unsupported='replicate' it runs whole on every device")
    warnings.warn(f"{text}. Without, it runs whole on every device", AutoparWarning, stacklevel=2)


def _pins(options: Mapping[str, Any]) -> tuple[Pin, ...]:
    return tuple(_pin(target, spec) for target, spec in (options["constraints"] or {}).items())


def _pin(target: str, spec: Any) -> Pin:
    entries = spec.spec if isinstance(spec, NamedSharding) else spec
    if not isinstance(entries, (PartitionSpec, tuple, list)):
        raise OptionError(f"constraints[{target!r}] is {spec!r}; give a jax.sharding.PartitionSpec")
    dims: list[tuple[str, ...] | None] = []
    for entry in entries:
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        else:
            dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    return Pin(target=target, dims=tuple(dims))
