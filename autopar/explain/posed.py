"""A plan → the sharding problems that it was chosen in, posed again, each with the choice that the plan is: `posed`.

A plan says what each operator does, not which states the solver's clusters have. Those states are what is left where
every class of operators may only do as the plan says (`_as_planned`); where that leaves several, solving says which:
they cost alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.layer_layouts import Setting, bound_masks
from autopar.inter_op.layer_problems import LayerProblems, parts_of
from autopar.intra_op.mesh_problem import Asked, Candidate, Masks, MeshProblem
from autopar.intra_op.passes import passes
from autopar.intra_op.pins import on_mesh, resolve_pins
from autopar.intra_op.remat.rewrite import rewritten
from autopar.intra_op.stage_costs import StageProblem
from autopar.intra_op.strategies import Signature
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import OptionError, PlanFormatError
from autopar.ir.graph import Graph, Phase
from autopar.ir.layer_text import indices_text
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined, PipelineOptions
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import NodeStrategy, RegionPlan
from autopar.ir.strategy import SolverReport
from autopar.planner import pose

SOLVE_S = 20.0
"""Seconds that the solver has at most for one question (chosen)."""


Refused: TypeAlias = Literal["forbidden", "over the limit", "not found"]
"""Why no choice is known: it needs what may not be, it was proven to need more memory, or none was found, in time or
under the limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Posed:
    """One sharding problem of a plan.

    ``what`` it is of in words, "" where it is the whole step, else equal ``layers``.
    ``paths``: of its graph's inputs. ``allowed``: the states that were allowed, cluster → bool[states]; ``held``: of
    these only those that a question leaves. ``chosen``: the plan's choice, counted. ``limit_bytes`` on a device; None:
    the schedule decides.
    """

    what: str
    layers: tuple[int, ...]
    problem: MeshProblem
    paths: tuple[str, ...]
    allowed: Masks
    held: Masks
    chosen: Candidate
    limit_bytes: float | None

    @property
    def count(self) -> int:
        """How many times a step has it."""
        return len(self.layers) or 1

    @cached_property
    def passes(self) -> list[Phase]:
        """The pass of each planning node (`intra_op.passes`)."""
        return passes(self.problem.flat)

    def solved(self, more: Masks) -> Candidate | Refused:
        """The best choice with no other states than ``more`` allows as well, within the limit; or why there is none."""
        masks = _both(_both(self.allowed, self.held), more)
        if not all(mask.any() for mask in masks.values()):
            return "forbidden"
        found = self.problem.solve(self.problem.problem, SOLVE_S, masks=masks)
        if not found.report.fits:
            return _refused(found.report, "forbidden")
        best = self.problem.counted(found.choice)
        if self.limit_bytes is None or best.peak <= self.limit_bytes:
            return best
        found = self.problem.solve(self.problem.limited(self.limit_bytes), SOLVE_S, free=found, masks=masks)
        best = self.problem.counted(found.choice)
        return best if best.peak <= self.limit_bytes else _refused(found.report, "over the limit")


def _refused(report: SolverReport, why: Refused) -> Refused:
    return why if report.status == "infeasible" else "not found"


def _both(a: Masks, b: Masks) -> dict[int, NDArray[np.bool]]:
    return {**a, **{k: mask & a.get(k, True) for k, mask in b.items()}}


def posed(plan: Plan) -> tuple[Posed, ...]:
    """The problems of ``plan``: the step's, or those of its pipeline's distinct layers. Raises OptionError for a plan
    without a graph, PlanFormatError where the plan is not one of its problem's choices: another version made it."""
    step = plan.step
    if step is None:
        raise OptionError(f"the plan of {plan.name} has no graph: what else was possible cannot be told from it")
    match plan.body, step.graph:
        case OneProgram() as body, Graph() as graph:
            return (_of_program(plan, body, graph),)
        case Pipelined() as body, LayeredGraph() as layered:
            return tuple(_of_layers(plan, body, layered))
        case _:
            raise OptionError(f"the plan of {plan.name} has a graph of another kind than its body")


def _of_program(plan: Plan, body: OneProgram, graph: Graph) -> Posed:
    step, logical, sharding = plan.step, body.sharding.mesh, body.sharding
    assert step is not None
    of_metadata, _ = on_mesh(step.metadata, logical)
    pins = resolve_pins(graph, logical, (*of_metadata, *plan.config.pins))
    rules, batch = dict(step.user_rules), dict(step.batch_inputs)
    problem = pose(graph, logical, plan.config, user_rules=rules, batch_inputs=batch, pins=pins, baselines=False)
    if sharding.recompute:
        problem = problem.again(rewritten(graph, sharding.recompute), sharding.recompute)
    planned = _AsPlanned(problem, sharding.strategies).masks(sharding.root)
    chosen = _chosen(problem, planned, problem.masks)
    limit = float(plan.config.memory_bytes or logical.device.usable_bytes)
    return Posed(
        what="", layers=(), problem=problem, paths=graph.arg_paths, allowed=problem.masks, held={}, chosen=chosen,
        limit_bytes=limit,
    )  # fmt: skip


def _of_layers(plan: Plan, body: Pipelined, layered: LayeredGraph) -> Iterator[Posed]:
    step, config = plan.step, plan.config
    assert step is not None
    kept = tuple(dict.fromkeys(sharding.remat for sharding in body.shardings))
    parts = parts_of(layered, kept, config.pins)
    problems = LayerProblems(parts, config.forbid, Asked(user_rules=dict(step.user_rules)))
    bound: dict[LogicalMesh, list[dict[tuple[int, int], Masks]]] = {}
    for number, sharding in enumerate(body.shardings):
        layers = [k for k, layer in enumerate(body.layers) if layer.sharding == number]
        k, kind = layers[0], kept.index(sharding.remat)
        logical, n = body.plan.stages[body.plan.home[k]].mesh, parts.number[k]
        if logical not in bound:
            bound[logical] = list(_bound(plan, problems, kept, logical))
        stage = StageProblem(parts.graphs[sharding.remat][n], problems.posed(n, sharding.remat, logical))
        planned = _AsPlanned(stage.posed, sharding.strategies).masks(sharding.root)
        ways = [way.get((n, kind), {}) for way in bound[logical]]
        allowed = next((way for way in ways if all(m.any() for m in _both(way, planned).values())), ways[0])
        chosen = _chosen(stage.posed, planned, allowed)
        yield Posed(
            what=f"layer{'s' if len(layers) > 1 else ''} {indices_text(layers)}", layers=tuple(layers),
            problem=stage.posed, paths=parts.layers[k].graph.arg_paths, allowed=allowed, held=_ports(stage, chosen),
            chosen=chosen, limit_bytes=None,
        )  # fmt: skip


def _bound(plan: Plan, problems: LayerProblems, kept: Sequence[str], logical: LogicalMesh) -> Iterator[Any]:
    """What was allowed of layers on a mesh: for each way to split the batch that was looked at, (number, which of
    ``kept``) → masks."""
    config, parts = plan.config, problems.parts
    options = config.stages or PipelineOptions()
    for axes in options.batch_axes or (None,):
        setting = Setting(degrees=config.degrees, batch_axes=axes, whole_examples=options.whole_examples)
        if not setting.binds:
            yield {}
            continue
        stages = [
            [StageProblem(parts.graphs[r][n], problems.posed(n, r, logical), r) for r in kept]
            for n in range(len(parts.example))
        ]
        yield bound_masks(parts, stages, config.degrees, setting.bound(logical))


def _ports(stage: StageProblem, chosen: Candidate) -> Masks:
    """What a layer takes from others and gives them, as it is planned."""
    flat, graph = stage.flat, stage.graph
    held: dict[int, NDArray[np.bool]] = {}
    for n, kind in enumerate(flat.kind):
        if kind in ("recv", "send"):
            c = graph.class_of[n]
            this = graph.classes[c]
            codes = (this.signature.results if kind == "recv" else this.signature.operands)[0][this.follow]
            mask = codes == codes[chosen.choice[this.cluster]]
            held[this.cluster] = mask & held.get(this.cluster, True)
    return held


# --- the plan's choice ---------------------------------------------------------------------------------------------


def _chosen(problem: MeshProblem, planned: Masks, allowed: Masks) -> Candidate:
    """The choice that a plan is; ``planned``: the states in which operators do as it says."""
    masks = _both(allowed, planned)
    found = None
    if all(mask.any() for mask in masks.values()):
        found = problem.solve(problem.problem, SOLVE_S, masks=masks)
    if found is None or not found.report.fits:
        raise PlanFormatError("the plan shards its operators in no way that this autopar knows: plan again")
    return problem.counted(found.choice)


class _AsPlanned:
    """The states in which a problem's operators do as a plan says."""

    def __init__(self, problem: MeshProblem, strategies: Sequence[NodeStrategy]) -> None:
        self.graph, self.flat, self.mesh, self.strategies = problem.graph, problem.flat, problem.mesh, strategies
        self.out: dict[int, NDArray[np.bool]] = {}
        self.known: dict[tuple[int, int], Any] = {}
        """(signature, row of the table) → bool[strategies]."""
        self.made: dict[tuple[int, int], int] = {}
        """(class, result) → the code in which it is made."""

    def masks(self, root: RegionPlan) -> Masks:
        """Cluster → bool[states]."""
        self._region(0, root)
        return self.out

    def _keep(self, c: int, mask: Any) -> None:
        """Class c has only strategies of ``mask``."""
        this = self.graph.classes[c]
        states = mask[this.follow]
        self.out[this.cluster] = states & self.out.get(this.cluster, True)

    def _region(self, region: int, plan: RegionPlan) -> None:
        flat, graph = self.flat, self.flat.regions[region].graph
        bodies = dict(plan.bodies)
        for position, (n, row) in enumerate(zip(flat.at[region], plan.nodes, strict=True)):
            if n < 0:
                for child, body in zip(flat.children[region, position], bodies[position], strict=True):
                    self._region(child, body)
            elif row >= 0:
                self._operator(n, row)
        for v, spec in zip(graph.inputs, plan.inputs, strict=True):
            self._given(flat.env[region][v], spec)
        ends = flat.outs if region == 0 else flat.ends[region]
        for (n, i), spec in zip(ends, plan.outputs, strict=bool(ends)):
            c = self.graph.class_of[n]
            signature = self.graph.classes[c].signature
            self._keep(c, signature.operands[i] == self.mesh.code_of(signature.operand_types[i], spec))
        self._loops(region, dict(plan.rebased))
        self._copies(region, dict(plan.copies))

    def _loops(self, region: int, rebased: dict[int, ShardingSpec]) -> None:
        """What comes out of loops is as it was carried, unless the plan says otherwise."""
        flat, graph = self.flat, self.flat.regions[region].graph
        for name, value in enumerate(flat.env[region]):
            n = flat.maker[value] if value >= 0 else -1
            if n < 0 or flat.kind[n] != "loop_out" or flat.region[n] != region:
                continue
            carry = (self.graph.class_of[flat.maker[flat.source[flat.first_edge[n]]]], 0)
            code = self.mesh.code_of(graph.values[name], rebased[name]) if name in rebased else self.made.get(carry)
            c = self.graph.class_of[n]
            if code is not None:
                self.made[c, 0] = code
                self._keep(c, self.graph.classes[c].signature.results[0] == code)

    def _copies(self, region: int, copies: dict[int, ShardingSpec]) -> None:
        """Copies that the plan does not list are made as what they are copies of."""
        flat, graph = self.flat, self.flat.regions[region].graph
        copied = {this.copy_of: c for c, this in enumerate(self.graph.classes) if this.copy_of is not None}
        for name, value in enumerate(flat.env[region]) if copied else ():
            n = flat.maker[value] if value >= 0 else -1
            link = (self.graph.class_of[n], value - flat.first_value[n]) if n >= 0 else (-1, -1)
            if link in copied and flat.region[n] == region:
                code = self.mesh.code_of(graph.values[name], copies[name]) if name in copies else self.made.get(link)
                if code is not None:
                    self._keep(copied[link], self.graph.classes[copied[link]].signature.results[0] == code)

    def _operator(self, n: int, row: int) -> None:
        c = self.graph.class_of[n]
        signature = self.graph.classes[c].signature
        key = (id(signature), row)
        if key not in self.known:
            self.known[key] = self._as(signature, self.strategies[row])
        self._keep(c, self.known[key])
        for r, (value_type, spec) in enumerate(zip(signature.result_types, self.strategies[row].results, strict=True)):
            self.made[c, r] = self.mesh.code_of(value_type, spec)

    def _as(self, signature: Signature, strategy: NodeStrategy) -> Any:
        """bool[strategies]: those with these factors, operands and results."""
        mask = np.ones(signature.size, bool)
        sides = [(signature.operand_types, signature.operands, strategy.operands)]
        sides.append((signature.result_types, signature.results, strategy.results))
        for types, every, specs in sides:
            for value_type, codes, spec in zip(types, every, specs, strict=True):
                if codes is not None:
                    mask &= codes == self.mesh.code_of(value_type, spec)
        if signature.rule is None:
            return mask
        factors = {axis: factor for factor, axes in strategy.factor_axes for axis in axes}
        for a, axis in enumerate(self.mesh.names):
            wanted = factors.get(axis, "")
            names = np.array([name == wanted or (not wanted and name.startswith("+")) for name in signature.names])
            mask &= names[signature.options[:, a]]
        return mask

    def _given(self, value: int, spec: ShardingSpec) -> None:
        """The value enters a graph as ``spec`` says."""
        if value < 0:
            return
        n = self.flat.maker[value]
        c, r = self.graph.class_of[n], value - self.flat.first_value[n]
        signature = self.graph.classes[c].signature
        self.made[c, r] = self.mesh.code_of(signature.result_types[r], spec)
        self._keep(c, signature.results[r] == self.made[c, r])
