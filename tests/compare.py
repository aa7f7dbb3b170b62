"""What acceptance tests compare: values to a tolerance, and a plan's collectives to a compiled program's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.cost.roofline import flops
from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, Node
from autopar.verify.hlo_collectives import HloCollective, Key, parse_collectives, tally

FUSED: dict[str, Any] = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 12) else {}
"""Compiler options by which a program rounds as it does without those of `tests.conftest`."""
OPTIMISED: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    **FUSED,
}
"""Compiler options by which it is what it is without them."""


def assert_close(got: Any, want: Any, tolerance: float, *, least_norm: float = 0.0) -> None:
    """Each leaf to ``tolerance`` of its own max-norm (or of ``least_norm`` where that is more); integers and keys
    exactly."""
    got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
    want_leaves, want_tree = jax.tree_util.tree_flatten_with_path(want)
    assert got_tree == want_tree
    bad: list[str] = []
    for (path, g), (_, w) in zip(got_leaves, want_leaves, strict=True):
        if jax.dtypes.issubdtype(w.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype, (jax.tree_util.keystr(path), g.dtype, w.dtype)
        if jax.dtypes.issubdtype(w.dtype, np.inexact):
            norm = max(least_norm, float(np.abs(w).astype(float).max(initial=0.0)))
            error = float(np.abs(g - w).astype(float).max(initial=0.0))
            if not error <= tolerance * norm:
                bad.append(f"{jax.tree_util.keystr(path)}: error {error:.3g} of max-norm {norm:.3g}")
        elif not np.array_equal(g, w):
            bad.append(f"{jax.tree_util.keystr(path)}: integers differ")
    assert not bad, "\n".join(bad)


def plan_tally(plan: Any) -> tuple[Counter[Key], Counter[Key]]:
    """As `hlo_collectives.tally`, of a plan's own list."""
    sizes = dict(zip(plan.sharding.mesh.axis_names, plan.sharding.mesh.shape, strict=True))
    known: Counter[Key] = Counter()
    unknown: Counter[Key] = Counter()
    for row in plan.sharding.collectives:
        axes = tuple(sorted(a for a in row.axes if sizes[a] > 1))
        if not axes or not row.operand_bytes:
            continue
        key = (row.kind, axes, row.operand_bytes * _widening(row.dtype))
        if row.trips_assumed:
            unknown[key] += row.count
        elif row.trips * row.count:
            known[key] += row.trips * row.count
    return known, unknown


def _widening(dtype: str) -> int:
    """XLA's CPU compiler moves bfloat16 as float32 and 8-bit floats as float16, in every collective."""
    return 2 if dtype == "bfloat16" or dtype.startswith("float8") else 1


def hlo_tally(plan: Any, rows: tuple[HloCollective, ...]) -> tuple[Counter[Key], Counter[Key]]:
    return tally(rows, plan.sharding.mesh.shape, plan.sharding.mesh.axis_names)


def assert_same_collectives(plan: Any, text: str) -> None:
    """The plan's collectives are the program's: kind, axes, operand bytes per device, executions."""
    problems: list[str] = []
    for what, want, got in zip(
        ("", "in loops of unknown length "), plan_tally(plan), hlo_tally(plan, parse_collectives(text)), strict=True
    ):
        for key in sorted(want.keys() | got.keys()):
            if want[key] != got[key]:
                problems.append(f"{what}{key}: plan {want[key]}, compiled {got[key]}")
    assert not problems, "\n".join(problems)


def graph_of(step: Callable[..., Any], *args: Any) -> Graph:
    """The step's operators, gradients spelled out."""
    return trace(step, *args, expand=lambda eqn: expand_marker(eqn) if eqn.primitive is grad_p else None).graph


def _total(graph: Graph, of: Callable[[Node], float]) -> float:
    total = 0.0
    for node in graph.nodes:
        if node.bodies:
            trips = node.params.get("length", 1) if node.primitive == "scan" else 1
            total += trips * sum(_total(body, of) for body in node.bodies)
        else:
            total += of(node)
    return total


def total_flops(graph: Graph) -> float:
    """FLOPs of a whole step on one device: scans multiplied out, other loops once, every branch."""
    return _total(graph, flops)


def total_bytes(graph: Graph) -> float:
    """Bytes of all operators' operands and results, counted as `total_flops` counts."""
    return _total(graph, lambda n: float(sum(t.size_bytes for t in (*n.operand_types, *n.result_types))))
