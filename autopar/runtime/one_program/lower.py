"""A planned step as a whole → one function on local shapes, traced: `lower`, and with what every operator gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, use_abstract_mesh

from autopar.garbage import collection_paused
from autopar.ir.errors import AutoparError, LoweringError
from autopar.ir.graph import Graph
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import ShardingPlan
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    abstract_mesh,
    bodies_of,
    compiles,
    jaxpr_as_fun,
    open_constants,
    source_line,
)
from autopar.runtime.one_program.lowering import Lowering, cannot_run, like
from autopar.runtime.one_program.recompute import recomputed
from autopar.runtime.one_program.reductions import total
from autopar.runtime.partition_specs import partition_spec


@dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """A planned step on local shapes, traced, for any devices of ``platform``: call it under jit with the step's global
    arrays (closed-over constants first), laid out as planned, for the list of its results."""

    jaxpr: ClosedJaxpr
    platform: str

    def __call__(self, *inputs: Any) -> list[Any]:
        with use_abstract_mesh(_NO_MESH):  # whatever mesh the user has set: the plan's is its own
            return jaxpr_as_fun(self.jaxpr)(*inputs)


_NO_MESH = abstract_mesh((), ())


@collection_paused()
def lower(
    graph: Graph, jaxpr: ClosedJaxpr, plan: ShardingPlan, platform: str, user_rules: Mapping[str, str],
    out_avals: Sequence[Any],
) -> LoweredStep:  # fmt: skip
    """The planned step, traced on local shapes. Needs no device.

    Args:
        out_avals: the step's own types of its results, weak ones among them.

    Raises:
        RuleError: a user's kernel does not give on shards what its sharding rule says.
        LoweringError: an operator cannot run on its shards, or not on the platform; names it, its source line and what
            to try.
    """
    run_graph, run = recomputed(graph, jaxpr, plan.recompute)
    lowering = Lowering(plan, user_rules, platform)

    def local(*inputs: Any) -> list[Any]:
        outs = lowering.run(run_graph, run.jaxpr, plan.root, inputs)
        return [like(o, a) for o, a in zip(outs, out_avals, strict=True)]

    def whole(*inputs: Any) -> list[Any]:
        outs = jaxpr_as_fun(ClosedJaxpr(open_constants(jaxpr.jaxpr), []))(*inputs)
        return [like(o, a) for o, a in zip(outs, out_avals, strict=True)]

    mesh = abstract_mesh(plan.mesh.shape, plan.mesh.axis_names)
    mapped = _mapped(local, plan, mesh, [partition_spec(s) for s in plan.root.outputs])
    avals = [v.aval for v in (*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    if _reads_nothing(graph):
        mapped = whole
    try:
        with use_abstract_mesh(_NO_MESH):
            closed = jax.make_jaxpr(mapped)(*shapes)
    except AutoparError:
        raise
    except Exception as error:
        raise cannot_run("the step", error) from error
    check_compiles(closed.jaxpr, platform)
    return LoweredStep(jaxpr=closed, platform=platform)


def _reads_nothing(graph: Graph) -> bool:
    """True where all that is read of the inputs has no elements: XLA cannot compile a shard_map of such."""
    read = [graph.values[v] for v in graph.inputs if v in graph.last_use]
    return bool(read) and all(not t.size for t in read)


def check_compiles(jaxpr: Jaxpr, platform: str) -> None:
    """Raises LoweringError where JAX cannot compile an operator of ``jaxpr``, bodies included, for ``platform``."""
    for eqn in jaxpr.eqns:
        if not compiles(eqn, platform):
            raise LoweringError(
                f"{eqn.primitive.name} ({source_line(eqn)}) does not run on {platform}: JAX compiles it for other "
                "devices only. Write it with other operators there; autopar chooses among the branches of "
                "jax.lax.platform_dependent by the cluster's devices"
            )
        if eqn.primitive.name != "pallas_call" and eqn.params.get("branches_platforms") is None:
            for body in bodies_of(eqn):
                check_compiles(body, platform)


def lower_probed(
    graph: Graph, jaxpr: ClosedJaxpr, plan: ShardingPlan, mesh: Mesh, user_rules: Mapping[str, str]
) -> Callable[..., tuple[list[Any], dict[int, list[Any]]]]:
    """As `lower`, for the devices of ``mesh``, and returns beside the step's results those of every node that runs, by
    position, whole on every device: shards gathered, partial sums added up. Positions are those of the graph with
    ``plan.recompute`` carried out."""
    graph, jaxpr = recomputed(graph, jaxpr, plan.recompute)
    platform = mesh.devices.flat[0].platform

    def local(*inputs: Any) -> tuple[list[Any], dict[int, list[Any]]]:
        seen: dict[int, list[Any]] = {}

        def probe(position: int, results: Sequence[tuple[ShardingSpec, Any]]) -> None:
            seen[position] = [_whole(spec, x) for spec, x in results]

        lowering = Lowering(plan, user_rules, platform, probe)
        return _arrays(lowering.run(graph, jaxpr.jaxpr, plan.root, inputs)), seen

    return _mapped(local, plan, mesh, ([partition_spec(s) for s in plan.root.outputs], PartitionSpec()))


def _mapped(
    local: Callable[..., Any], plan: ShardingPlan, mesh: Mesh | AbstractMesh, out_specs: Any
) -> Callable[..., Any]:
    ins = tuple(partition_spec(s) for s in plan.root.inputs)
    return jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out_specs, check_vma=False)


def _arrays(outs: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(o) if not hasattr(o, "dtype") else o for o in outs]


def _whole(spec: ShardingSpec, x: Any) -> Any:
    if spec.is_replicated:
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # no collective moves keys
        return jax.random.wrap_key_data(_whole(spec, jax.random.key_data(x)), impl=jax.random.key_impl(x))
    x = total(x, spec.unreduced) if spec.unreduced else x
    for d, axes in enumerate(spec.dims):
        for axis in reversed(axes):
            x = lax.all_gather(x, axis, axis=d, tiled=True)
    return x
