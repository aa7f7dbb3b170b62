"""A plan → the plan of the same step for another cluster, another limit, other options: `plan_again`.

What it takes is in the plan (`ir.planned_step.PlannedStep`), so that neither the step nor JAX need be there: this
runs where jax cannot be imported. Nothing is traced, so what decides about tracing stays as it was: the number of
microbatches, where layers are cut, what is static, donated or the batch; and one program stays one, stages stay
stages. With nothing changed the plan comes out again, with an equal digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.inter_op.pipeline_plan import pipeline_plan
from autopar.inter_op.pipeline_search import plan_pipeline
from autopar.intra_op.refusals import OverLimitError
from autopar.intra_op.remat.choose import Kept
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import OptionError
from autopar.ir.graph import Graph
from autopar.ir.layers import LayeredGraph
from autopar.ir.options import OPTIONS, is_given, settled
from autopar.ir.plan import OneProgram, Plan, PlanConfig
from autopar.ir.planned_step import PlannedStep
from autopar.ir.progress import Watch
from autopar.planner import best_plan
from autopar.step.asked import as_options, check_values, in_stages, one_program, pipeline_options
from autopar.step.ended import ended

_OF_TRACING = {
    "layers": "layers are cut when the step is traced",
    "donate_argnums": "what is donated is part of the graph",
    "static_argnums": "static arguments are part of the graph",
    "batch_argnums": "which arguments are the batch is part of the graph",
    "on_unsupported": "operators are looked at when the step is traced",
    "constraints": "constraints are PartitionSpecs, of JAX; those of the plan are kept",
    "plan": "it is the plan that is planned again",
    "compiler_options": "it is of running a plan, not of planning",
    "deadline_s": "it is of running a plan, not of planning",
}
"""Options that a plan alone cannot change → why."""


def plan_again(plan: Plan, options: Mapping[str, Any] | None = None) -> Plan:
    """The best plan of the step that ``plan`` is of, under what that was asked for but for ``options``.

    Args:
        plan: of one program or of stages; the new one is of the same kind.
        options: of `autopar.parallelize`, by name, ``cluster`` as a ClusterSpec. What is not given is as the plan was
            asked for.

    Raises:
        OptionError: an option that the plan alone cannot change, or what it cannot be with others; the plan lies where
            another has its parameters, or was saved without its graph.
        ClusterError, ShardingError, InfeasibleError, RuleError: as `planner.best_plan` and
            `pipeline_search.plan_pipeline`.
    """
    given = dict(options or {})
    settled(given)  # the names are options'
    cluster = given.pop("cluster", None) or plan.cluster
    assert isinstance(cluster, ClusterSpec)
    step = plan.step
    if step is None:
        raise OptionError(f"the plan of {plan.name} has no graph: it cannot be planned again without the step")
    if step.follows:
        raise OptionError(
            f"the plan of {plan.name} has its arguments where another plan has them, which its file does not say: "
            "plan from the step, by step.follow"
        )
    _refuse(plan, given)
    asked = {**as_options(plan.config), **given}
    check_values(asked)
    notes = [f"planned again from a plan for {plan.cluster.name}, without the step: {_not_compared(plan)}"]
    if cluster.platform != plan.cluster.platform:
        notes.append(
            f"the graph is as it was traced for {plan.cluster.platform}: where the step branches by platform, or says "
            "by jax.checkpoint what to compute again, plan from the step"
        )
    watch = Watch(asked["time_limit_s"], given.get("progress"))
    if isinstance(plan.body, OneProgram):
        made = _one_program(plan, step, plan.body, cluster, one_program(asked), tuple(notes), watch)
    else:
        config = in_stages(asked, "stages")
        made = _stages(plan, step, cluster, config, given.get("workers"), given.get("cache"), tuple(notes), watch)
    return ended(made, watch)


def _not_compared(plan: Plan) -> str:
    """What a plan from the step may be, and one from the plan cannot."""
    count = plan.config.num_microbatches
    other = "stages" if isinstance(plan.body, OneProgram) else "one program"
    return f"{other} and other numbers of microbatches than {count} were not compared"


def _refuse(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raises OptionError for what the plan alone cannot be planned with."""
    for name, why in _OF_TRACING.items():
        if name in given:
            raise OptionError(f"{name}: cannot be changed in a plan alone: {why}. Plan from the step")
    count = plan.config.num_microbatches
    if given.get("num_microbatches", count) != count:
        raise OptionError(
            f"num_microbatches: the plan holds the step as it was traced, in {count} microbatch"
            f"{'es' if count > 1 else ''}. Plan from the step"
        )
    whole = isinstance(plan.body, OneProgram)
    asked = {name: given.get(name, option.default) for name, option in OPTIONS.items()}
    stages = [name for name, option in OPTIONS.items() if option.asks_stages and is_given(name, asked)]
    if whole and stages and given[stages[0]] != 1:
        raise OptionError(
            f"{stages[0]}: is of stages, and the plan holds the step as one program, not in layers. Plan from the step"
        )
    for name in (name for name, option in OPTIONS.items() if whole and option.no_program and is_given(name, asked)):
        raise OptionError(f"{name}: the plan is of one program: {OPTIONS[name].no_program}")
    if not whole and given.get("stages") in (1, (1, 1)):
        raise OptionError(
            "stages: one program is planned from the whole step's graph, and the plan holds its layers. Plan from the "
            "step"
        )


def _one_program(
    plan: Plan, step: PlannedStep, body: OneProgram, cluster: ClusterSpec, config: PlanConfig, notes: tuple[str, ...],
    watch: Watch,
) -> Plan:  # fmt: skip
    assert isinstance(step.graph, Graph)

    def planned(graph: Graph, freely: bool) -> Plan:
        return best_plan(
            graph,
            cluster,
            config,
            name=plan.name,
            user_rules=dict(step.user_rules),
            batch_inputs=dict(step.batch_inputs),
            metadata=step.metadata,
            notes=step.notes,
            jax_version=plan.provenance.jax_version,
            kept=Kept(within=cluster.platform not in step.undoes_remat),
            freely=freely,
            watch=watch,
        )

    try:
        made = planned(step.graph, step.freely)
    except OverLimitError:
        made = planned(step.graph, False)
    assert isinstance(made.body, OneProgram) and made.step is not None
    made = replace(
        made,
        body=replace(made.body, checkpoints=body.checkpoints),
        step=replace(made.step, undoes_remat=step.undoes_remat),
        provenance=replace(made.provenance, notes=(*made.provenance.notes, *notes)),
    )
    made.verify()
    return made


def _stages(
    plan: Plan, step: PlannedStep, cluster: ClusterSpec, config: PlanConfig, workers: int | None,
    cache: str | os.PathLike[str] | None, notes: tuple[str, ...], watch: Watch,
) -> Plan:  # fmt: skip
    assert isinstance(step.graph, LayeredGraph)
    options, rules = pipeline_options(config, workers), dict(step.user_rules)
    found = plan_pipeline(step.graph, cluster, options, rules, None if cache is None else os.fspath(cache), watch)
    version = plan.provenance.jax_version
    return pipeline_plan(step, cluster, config, found, trace_s=0.0, jax_version=version, notes=notes)
