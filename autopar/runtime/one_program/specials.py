"""Which operator of a planned step made the first NaN (or infinity)?

In: a planned call and its arguments. Out: words that name the operator and its source line. The step runs again with
every value kept; the first operator whose result holds what no operand of it holds is named. Of a loop it is the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.jax_compat import ClosedJaxpr
from autopar.runtime.one_program.lower import lower_probed
from autopar.runtime.one_program.recompute import recomputed
from autopar.runtime.partition_specs import named_shardings


def first_special(
    graph: Graph, jaxpr: ClosedJaxpr, plan: ShardingPlan, mesh: Mesh, user_rules: Mapping[str, str],
    inputs: Sequence[Any], infinities: bool = False,
) -> str:  # fmt: skip
    """Where the first NaN (or with ``infinities`` the first infinity) of a step comes from.

    Args:
        inputs: the step's flat arguments, closed-over constants first.
    """
    run_graph, _ = recomputed(graph, jaxpr, plan.recompute)
    probed = lower_probed(graph, jaxpr, plan, mesh, user_rules)
    what = "infinite" if infinities else "NaN"
    with jax.debug_nans(False), jax.debug_infs(False):
        placed = jax.device_put(list(inputs), named_shardings(plan.root.inputs, mesh))
        _, seen = jax.jit(probed)(*placed)
        bad = {v for v, x in zip(run_graph.inputs, inputs, strict=True) if _holds(x, infinities)}
        for position, node in enumerate(run_graph.nodes):
            made = {v for v, x in zip(node.results, seen.get(position, ()), strict=False) if _holds(x, infinities)}
            operands = [o for o in node.operands if isinstance(o, int)]
            if made and not bad.intersection(operands):
                return f"the first {what} is made by {node}, of operands that are not"
            bad |= made
    paths = [p for p, v in zip(run_graph.arg_paths, run_graph.inputs, strict=True) if v in bad]
    return f"{', '.join(paths[:3])} {'is' if len(paths) == 1 else 'are'} {what} already" if paths else ""


def _holds(x: Any, infinities: bool) -> bool:
    dtype = getattr(x, "dtype", np.result_type(x) if np.isscalar(x) else None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, np.inexact):
        return False
    return bool((jnp.isinf if infinities else jnp.isnan)(jnp.asarray(x)).any())
