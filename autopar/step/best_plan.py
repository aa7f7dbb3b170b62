"""A traced step → its fastest plan over the mesh that was asked for, or over all that fit the cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.frontend.partitioning_metadata import metadata_pins
from autopar.frontend.trace import Traced
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.intra_op.pins import resolve_pins
from autopar.intra_op.remat.choose import UNDONE, Kept
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import AutoparError, InfeasibleError, OptionError, SolverTimeoutError
from autopar.ir.plan import Plan, PlanConfig
from autopar.ir.presets import logical_mesh
from autopar.jax_compat import jax_version, remat_is_undone
from autopar.planner import candidate_shapes, plan_graph

log = logging.getLogger("autopar")


def best_plan(
    traced: Traced, cluster: ClusterSpec, config: PlanConfig, name: str, arguments: Any,
    batch_dims: Sequence[int | None], trace_s: float,
) -> Plan:  # fmt: skip
    """The fastest plan. Where recomputation is a last resort, it is tried on several meshes only after none has a plan
    without.

    Args:
        name: of the step.
        arguments: pytree of its arguments, which may carry partitioning metadata.
        batch_dims: of each flat argument, its batch dimension or None.
        trace_s: seconds that tracing took, for the plan's record.

    Raises:
        InfeasibleError, SolverTimeoutError: no mesh has a plan that fits.
        OptionError: ``batch_axis`` is no axis of the mesh.
    """
    shapes = [config.mesh_shape] if config.mesh_shape is not None else candidate_shapes(cluster)
    passes: list[bool | None] = [config.recompute]
    if config.recompute is None and len(shapes) > 1:
        passes = [False] if undoes_remat(cluster) else [False, None]
    consts = len(traced.jaxpr.consts)
    graph = with_flops(traced.graph)
    batch_inputs = {consts + i: dim for i, dim in enumerate(batch_dims) if dim is not None}

    def plan_on(shape: tuple[int, ...], recompute: bool | None) -> Plan:
        """The plan over one mesh, its configuration as it was asked for."""
        logical: LogicalMesh = logical_mesh(cluster, shape, config.axis_names)
        if config.batch_axis is not None and config.batch_axis not in logical.axis_names:
            raise OptionError(f"batch_axis {config.batch_axis!r} is no axis of the mesh {logical}")
        log.info("solving for mesh %s", logical)
        from_metadata, unknown = metadata_pins(arguments, traced.graph.arg_paths[consts:], logical)
        notes = traced.notes
        notes += (f"partitioning metadata names no axis of the mesh: {', '.join(unknown)}",) if unknown else ()
        pins = resolve_pins(traced.graph, logical, (*from_metadata, *config.pins))
        if apart := [graph.arg_paths[i] for i, _ in pins.apart(graph)]:
            shown = ", ".join(apart[:4]) + (f" and {len(apart) - 4} more" if len(apart) > 4 else "")
            notes += (f"state: pinned apart from its new value, which is moved back unpredicted: {shown}",)
        if config.recompute and undoes_remat(cluster):
            notes += (f"nothing is recomputed: {UNDONE}",)
        plan = plan_graph(
            graph,
            cluster,
            logical,
            replace(config, recompute=recompute),
            name=name,
            user_rules=registered_rules(),
            batch_inputs=batch_inputs,
            pins=pins,
            notes=notes,
            node_hashes=tuple(n.digest for n in traced.graph.nodes),
            trace_s=trace_s,
            jax_version=jax_version(),
            kept=Kept(within=not undoes_remat(cluster)),
        )
        return replace(plan, config=config)

    plans: list[Plan] = []
    failed: list[AutoparError] = []
    for recompute in passes:
        for shape in shapes:
            try:
                plans.append(plan_on(shape, recompute))
            except (InfeasibleError, SolverTimeoutError) as error:  # another shape may fit
                failed.append(error)
        if plans:
            return min(plans, key=lambda p: p.predictions.step_s)
    raise failed[-len(shapes)]


def undoes_remat(cluster: ClusterSpec) -> bool:
    """True where the cluster's compiler, as far as this process knows it, merges what is computed twice."""
    return remat_is_undone() and cluster.groups[0].device.name == "cpu"
