"""The options of `autopar.parallelize`, checked, as the PlanConfig and the plan that they stand for."""

from __future__ import annotations

import os
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.frontend.user_rules import registered_rules
from autopar.intra_op.solvers import CHOICES as SOLVER_CHOICES
from autopar.ir.errors import AutoparWarning, LoweringError, OptionError
from autopar.ir.graph import Graph
from autopar.ir.plan import METHODS, Pin, Plan, PlanConfig
from autopar.ir.presets import mesh_shape_from_text
from autopar.ir.strategy import CollectiveKind
from autopar.primitives import unknown_operators
from autopar.step.step_plan import StepPlan, load_plan

ON_UNSUPPORTED = ("replicate", "error")
"""What becomes of operators that nobody has described."""


def given_plan(plan: StepPlan | Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan behind the option ``plan``: one at hand, or a file. Raises PlanFormatError for a damaged file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    return (plan if isinstance(plan, StepPlan) else load_plan(plan)).data


def plan_config(options: Mapping[str, Any]) -> PlanConfig:
    """`parallelize`'s options as what planning sees of them. Raises OptionError for a value that is none of them,
    ClusterError for a mesh's text that is no shape."""
    mesh, forbid = options["mesh"], options["forbid"]
    names: tuple[str, ...] | None = None
    if isinstance(mesh, Mesh):
        names = tuple(map(str, mesh.axis_names))
        shape: tuple[int, ...] | None = tuple(mesh.devices.shape)
    elif isinstance(mesh, str):
        shape = mesh_shape_from_text(mesh)
    else:
        shape = None if mesh is None else (mesh,) if isinstance(mesh, int) else tuple(int(n) for n in mesh)
    forbid = (forbid,) if isinstance(forbid, str) else tuple(forbid)
    for kind in forbid:
        _check_choice("forbid", kind, typing.get_args(CollectiveKind))
    _check_choice("method", options["method"], METHODS)
    _check_choice("solver", options["solver"], SOLVER_CHOICES)
    _check_choice("on_unsupported", options["on_unsupported"], ON_UNSUPPORTED)
    for name in ("memory_bytes", "time_limit_s"):
        if options[name] is not None and not options[name] > 0:
            raise OptionError(f"{name} must be above 0, got {options[name]}")
    if not isinstance(options["recompute"], bool | None):
        raise OptionError(f"recompute: {options['recompute']!r} is not one of None, True, False")
    return PlanConfig(
        mesh_shape=shape,
        axis_names=names,
        memory_bytes=options["memory_bytes"],
        num_microbatches=options["num_microbatches"],
        method=options["method"],
        forbid=forbid,
        batch_axis=options["batch_axis"],
        pins=tuple(_pin(target, spec) for target, spec in (options["constraints"] or {}).items()),
        solver=options["solver"],
        time_limit_s=options["time_limit_s"],
        recompute=options["recompute"],
    )


def check_supported(graphs: Iterable[Graph], on_unsupported: str, name: str) -> None:
    """Warns of operators of the step ``name`` that nobody has described, which run whole on every device, or with
    ``on_unsupported="error"`` raises LoweringError. Raises OptionError for another value."""
    _check_choice("on_unsupported", on_unsupported, ON_UNSUPPORTED)
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


def _check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(f"{option}: {value!r} is not one of {', '.join(choices)}")


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
