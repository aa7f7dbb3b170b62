"""A plan of a search that a time limit or Ctrl-C ended → that plan, which says so, and how far from the best it may be.

The gap is proven under the cost model that the plan was found by (docs/decisions/033): `ended`. Runs where jax cannot
be imported.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.inter_op.work_bound import least_work_s
from autopar.ir.graph import Graph
from autopar.ir.layers import LayeredGraph
from autopar.ir.plan import Ended, OneProgram, Plan
from autopar.ir.progress import Watch


def ended(plan: Plan, watch: Watch) -> Plan:
    """``plan`` as it is where ``watch`` cut nothing; else with a bound on every plan of its kind (`Ended`)."""
    if not watch.cut:
        return plan
    why = "Ctrl-C came" if watch.interrupted else f"the time limit of {plan.config.time_limit_s:g} s passed"
    assert plan.step is not None
    graph, rules = plan.step.graph, dict(plan.step.user_rules)
    match plan.body, graph:
        case OneProgram(sharding=sharding), Graph():
            bound_s, what = sharding.report.bound_s, f"the step as one program on mesh {sharding.mesh}"
        case _, LayeredGraph():
            assert plan.config.stages is not None
            bound_s = least_work_s(graph, plan.cluster, plan.config.stages, rules)
            what = f"the step in any stages, in {plan.config.num_microbatches} microbatches or more, by its work alone"
        case _:
            raise AssertionError("a plan of one kind with the graph of another")
    made = replace(plan.provenance, ended=Ended(why=why, bound_s=bound_s, what=what))
    return replace(plan, provenance=made)
