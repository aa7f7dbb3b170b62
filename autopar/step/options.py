"""The options of `autopar.parallelize` (`ir.options`) as users give them, JAX's values among them: `asked`.

What they mean for planning is told by `step.asked`, which takes plain values.
"""

from __future__ import annotations

import os
import reprlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.user_rules import registered_rules
from autopar.inter_op.check_schedule import check_schedule
from autopar.inter_op.program.check import check_program
from autopar.inter_op.program.emit import emit
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import (
    ClusterError,
    LoweringError,
    OptionError,
    PlanFormatError,
    ProgramError,
    ScheduleError,
    VerifyError,
)
from autopar.ir.graph import Graph
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import Plan
from autopar.ir.progress import Progress
from autopar.ir.sharding import Pin
from autopar.ir.warned import warn
from autopar.primitives import unknown_operators
from autopar.runtime.on_ray.ray_cluster import Cluster
from autopar.step.asked import Asked, NamedMesh, of_options
from autopar.step.step_plan import StepPlan, load_plan


class Options(TypedDict, total=False):
    """Types of the options of `autopar.parallelize`, for type checkers; what they mean is told there."""

    cluster: ClusterSpec | Cluster | str | None
    mesh: int | str | Sequence[int | str | Sequence[int]] | Mesh | None
    mesh_axes: int
    memory_bytes: float | None
    num_microbatches: int | Literal["auto"]
    constraints: Mapping[str, Any] | None
    forbid: Sequence[str] | str
    method: str
    zero: int | None
    tensor: int | None
    sequence: int | None
    experts: int | None
    batch_axis: str | int | Sequence[str | int | Sequence[str | int] | None] | None
    whole_examples: bool
    recompute: bool | str | Sequence[str] | None
    stages: int | tuple[int, int | None] | None
    stage_starts: Sequence[int] | None
    layers: int | str | None
    submeshes: str | Sequence[Sequence[int] | str] | None
    virtual_stages: int | None
    schedule: str | Sequence[str] | None
    uniform_stages: bool
    resharding: str
    time_limit_s: float | None
    solver: str
    workers: int | None
    cache: str | os.PathLike[str] | None
    donate_argnums: int | Sequence[int] | None
    static_argnums: int | Sequence[int] | None
    batch_argnums: Any
    on_unsupported: str
    plan: StepPlan | Plan | str | os.PathLike[str] | None
    compiler_options: Mapping[str, Any] | None
    deadline_s: float | None
    progress: Callable[[Progress], None] | None


def of_their_types(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options (`settled`), NumPy's integers as Python's. Raises OptionError for a value that is not of its option's
    type in `Options`; any collection is a sequence there, a list for a tuple too."""
    for name, hint in get_type_hints(Options).items():
        value = options[name]
        if not _is(value, hint):
            raise OptionError(
                f"{name}: got {reprlib.repr(value)}, of type {type(value).__name__}; expected "
                f"{Options.__annotations__[name].__forward_arg__}"
            )
    cache = options["cache"]
    if cache is not None and os.path.exists(cache) and not os.path.isdir(cache):
        raise OptionError(f"cache: {os.fspath(cache)} is no folder")
    whole = {name: int(v) for name, v in options.items() if isinstance(v, Integral) and not isinstance(v, bool)}
    return {**options, **whole}


def _is(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is types.UnionType or kind is Union:
        return any(_is(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_is(key, parts[0]) for key in value)
    if kind is Sequence or kind is tuple:
        several = isinstance(value, Collection) and getattr(value, "ndim", 1) > 0  # an array may be a number
        if not several or isinstance(value, str | bytes | Mapping):
            return False
        each = parts if kind is tuple else (parts[0],) * len(value)
        return len(value) == len(each) and all(map(_is, value, each))
    return isinstance(value, kind)


def given_plan(plan: StepPlan | Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan behind the option ``plan``: one at hand, or a file. Raises PlanFormatError for a damaged file, and for a
    plan that contradicts itself, or whose program cannot be run."""
    if plan is None:
        return None
    of_file = not isinstance(plan, Plan | StepPlan)
    found = load_plan(plan).data if of_file else plan.data if isinstance(plan, StepPlan) else plan
    try:
        if not of_file:  # one of a file is verified as it is read
            found.verify()
        if isinstance(found.body, Pipelined):
            check_schedule(found.body.plan.schedule)
            check_program(emit(found.body.plan, exchange=found.body.exchange))
    except (VerifyError, ClusterError, ScheduleError, ProgramError) as fault:
        where = os.fspath(plan) if of_file else "plan"
        raise PlanFormatError(f"{where}: contradicts itself: {fault}. Was it edited by hand? Plan again") from None
    return found


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
    warn(f"{text}. Without, it runs whole on every device")


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
