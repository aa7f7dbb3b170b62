"""The sharding problem of a Graph on one mesh of devices: the one form that a whole step and a stage have.

    minimise    Σ_v c_v[x_v] + Σ_(u,v) C_uv[x_u, x_v]        over one state x_v per cluster v of operators     `problem`
    subject to  fixed[t] + Σ usage_t(x) ≤ limit   for all times t, an estimate of live(x, t)                   `limited`

where live(x, t), the bytes that are live at time t, is counted in full for the choices that are looked at (`counted`).

In: a graph, a mesh, and what is asked of the shardings (`Asked`). Out: choices x (`solve`), and what each is predicted
to cost (`Candidate`). What the problem is made of is built when it is first asked for: planning nodes (`flatten`),
their strategies (`strategy_graph.build`), when values are live (`liveness`), the solver's view (`build_problem`). What
was decided is kept, so that nothing is solved or built twice: a choice that was costed is spelled out from the same
`Decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.intra_op.batch_bound import ExampleDims, find_examples
from autopar.intra_op.decisions import Decisions, decide, totals
from autopar.intra_op.degrees import bound_by, check_met, degree_states, expert_dims, microbatch_loop
from autopar.intra_op.flatten import Flat, flatten
from autopar.intra_op.fusion import FUSIONS, Fused, Fusion, fused
from autopar.intra_op.liveness import Liveness, liveness
from autopar.intra_op.peak import live_bytes
from autopar.intra_op.pins import Pins, pinner
from autopar.intra_op.precision import as_read
from autopar.intra_op.problem import build_problem
from autopar.intra_op.search import PLAN, Effort
from autopar.intra_op.seeds import restrict, restriction, seeds_for
from autopar.intra_op.solve import GAP, solve
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategy_graph import StrategyGraph, all_shown, build
from autopar.intra_op.traffic import traffic
from autopar.ir.degrees import Degrees
from autopar.ir.errors import ShardingError
from autopar.ir.graph import Graph
from autopar.ir.plan import METHODS
from autopar.ir.sharding_plan import Recompute
from autopar.ir.strategy import Problem, Solution, SolverReport

Masks = Mapping[int, NDArray[np.bool]]
"""Cluster → bool[states], the states that are allowed; all of a cluster that is not there."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of the shardings, beside the graph and the mesh.

    ``user_rules``: primitive or ffi target → text of its sharding rule. ``method``: one of `ir.plan.METHODS`.
    ``batch``: graph input → its batch dimension, for baselines and forced methods. ``batch_axis``: the mesh axis that
    these are split over; None: the solver's choice. ``degrees`` of parallelism, of a whole step in
    ``num_microbatches``. ``fold_above``: the most planning nodes that are not folded into classes; None:
    `fold.UNFOLDED_NODES`.
    """

    user_rules: Mapping[str, str] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    method: str = "auto"
    batch_axis: str | None = None
    batch: Mapping[int, int] = field(default_factory=dict)
    degrees: Degrees = field(default_factory=Degrees)
    num_microbatches: int = 1
    fold_above: int | None = None


class Candidate:
    """A choice of states with what it is predicted to cost when all is counted: chains shared, buffers included.

    ``compute_s``, ``communication_s`` (what shows of it; ``hidden_s`` runs beside compute), their sum ``step_s``, and
    ``flops`` are of a step on a device. ``live_bytes`` is
    float64[times], bytes on a device, and ``peak`` its greatest, at time ``worst``.
    """

    def __init__(self, posed: MeshProblem, choice: Sequence[int]) -> None:
        self.posed = posed
        self.choice = tuple(choice)
        self.out = posed.decided(self.choice)
        found = totals(self.out)
        self.compute_s, self.communication_s, self.flops = found.compute_s, found.exposed_s, found.flops
        self.hidden_s = found.hidden_s
        self.step_s = self.compute_s + self.communication_s
        self.live_bytes = live_bytes(self.out, posed.live)
        self.peak = int(self.live_bytes.max(initial=0.0))
        self.worst = int(np.argmax(self.live_bytes)) if len(self.live_bytes) else 0


class MeshProblem:
    """The problem of ``source``, in which ``recompute`` is carried out, on ``mesh``.

    Choices, here and in what `solve` takes and gives, number all states of each cluster, whatever is asked for.
    """

    def __init__(
        self,
        source: Graph,
        mesh: Mesh,
        asked: Asked,
        recompute: tuple[Recompute, ...] = (),
        *,
        loop: int = -1,
        turn: Callable[[Flat], int] | None = None,
    ) -> None:
        """
        Args:
            loop: position of the scan whose turns are programs of their own: a stage's microbatches; −1: none.
            turn: planning nodes → the first of those that are another program (`liveness`): a stage's backward pass.

        Raises:
            ShardingError: a pin or a method that cannot be, when what it restricts is first asked for.
        """
        self.source, self.mesh, self.asked, self.recompute = source, mesh, asked, recompute
        self._loop, self._turn = loop, turn
        outputs = {("out", j): dims for j, dims in asked.pins.outputs.items()}
        read = as_read(source, mesh.logical.device.platform)
        self.flat = flatten(read, {**asked.pins.inputs, **outputs}, tasks=loop)
        self.baselines: list[tuple[str, Candidate]] = []
        """Where the solver starts, by method."""
        self._decided: dict[tuple[int, ...], Decisions] = {}
        self._counted: dict[tuple[int, ...], Candidate] = {}

    def again(self, source: Graph, recompute: tuple[Recompute, ...]) -> MeshProblem:
        """The same problem of a graph in which ``recompute`` is carried out, without baselines."""
        return MeshProblem(source, self.mesh, self.asked, recompute, loop=self._loop, turn=self._turn)

    # --- what it is made of ----------------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> StrategyGraph:
        """The strategies of all operators, classes and clusters of them, and what is between."""
        asked = self.asked
        pins = pinner(asked.pins, self.mesh.logical)
        return build(self.flat, self.mesh, asked.user_rules, pins, asked.fold_above, traffic(self.kernels))

    @cached_property
    def live(self) -> Liveness:
        """When values are live, whatever is chosen."""
        return liveness(self.flat, self._boundary, self.kernels if self.fusion.joins else None)

    @cached_property
    def kernels(self) -> Fused:
        """What the compiler makes one kernel of."""
        written = None if self.fusion.joins else self.live.written.tolist()
        return fused(self.flat, self.fusion, self._boundary, written)

    @property
    def fusion(self) -> Fusion:
        """How the compiler of the mesh's devices fuses."""
        return FUSIONS[self.mesh.logical.device.platform]

    @cached_property
    def _boundary(self) -> int | None:
        return None if self._turn is None else self._turn(self.flat)

    @cached_property
    def problem(self) -> Problem:
        """The solver's view, without a limit and with all states."""
        return build_problem(self.graph, self.live, None)

    @property
    def all_shown(self) -> Problem:
        """`problem` if no collective ran beside compute."""
        return build_problem(all_shown(self.graph), self.live, None)

    def limited(self, limit_bytes: float) -> Problem:
        """The same with usages and a limit, in bytes per device. Usages are an estimate: what fits is decided by
        counting (`counted`)."""
        return build_problem(self.graph, self.live, limit_bytes)

    @cached_property
    def masks(self) -> Masks:
        """What a forced method, a forced batch axis and degrees allow.

        Raises ShardingError for an unknown method, where the mesh has no such axis or it does not divide the batch,
        where the method splits the batch otherwise, and for a degree by which nothing is split.
        """
        asked, graph = self.asked, self.graph
        if asked.method not in METHODS:
            raise ShardingError(f"unknown method {asked.method!r}: known are {', '.join(METHODS)}")
        if asked.degrees:
            return self._by_degrees()
        masks = {} if asked.method == "auto" else restriction(graph, asked.method, asked.batch)
        if asked.batch_axis is None:
            return masks
        mesh = self.mesh
        if asked.batch_axis not in mesh.logical.axis_names:
            raise ShardingError(
                f"batch_axis={asked.batch_axis!r}: the mesh has axes {', '.join(mesh.logical.axis_names)}"
            )
        if asked.batch_axis not in mesh.names:
            return masks  # of size 1
        axis = mesh.names.index(asked.batch_axis)
        for position, dim in asked.batch.items():
            this = graph.classes[graph.class_of[self.flat.args[position]]]
            codes = mesh.space(self.flat.result_types[self.flat.args[position]][0]).codes
            mask = np.array([codes[c][axis] == dim for c in this.signature.results[0][this.follow]], bool)
            if not mask.any():
                raise ShardingError(
                    f"{self.source.arg_paths[position]}: batch dimension {dim} does not divide "
                    f"over batch_axis {asked.batch_axis!r} (size {mesh.sizes[axis]})"
                )
            masks[this.cluster] = masks.get(this.cluster, True) & mask
            if not masks[this.cluster].any():
                raise ShardingError(
                    f"method={asked.method!r} does not split {self.source.arg_paths[position]} over "
                    f"batch_axis={asked.batch_axis!r}: leave one of them out"
                )
        return masks

    def _by_degrees(self) -> Masks:
        asked, graph = self.asked, self.graph
        bound = bound_by(asked.degrees, self.mesh.names, None if asked.batch_axis is None else (asked.batch_axis,))
        known = expert_dims(graph) if asked.degrees.experts is not None else []
        for position, dim in asked.batch.items():
            n = self.flat.args[position]
            known.append((graph.class_of[n], ExampleDims.of_batch(self.flat.result_types[n][0], dim)))
        loop = microbatch_loop(self.source, asked.num_microbatches)
        met = degree_states(graph, asked.degrees, find_examples(graph, known), bound, loop)
        check_met(asked.degrees, met.by)
        return met.allowed

    # --- what was decided ------------------------------------------------------------------------------------------

    def start(self, method: str, choice: Sequence[int]) -> Candidate:
        """Counts a choice in full and adds it to the baselines, as that of ``method`` ("": of none)."""
        baseline = Candidate(self, [int(s) for s in choice])
        self.baselines.append((method, baseline))
        return baseline

    def start_all(self, deadline: float) -> None:
        """Adds the baselines of all methods (`seeds`), unless something is forced; until ``deadline``, of
        time.perf_counter."""
        if not self.masks:
            for method, seed in seeds_for(self.graph, self.problem, self.asked.batch, deadline):
                self.start(method, seed)

    @property
    def seeds(self) -> list[tuple[int, ...]]:
        """The baselines' choices, a state per cluster."""
        return [c.choice for _, c in self.baselines]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All that was counted so far, baselines that the solver did not ask for last."""
        return tuple(dict.fromkeys((*self._counted.values(), *(c for _, c in self.baselines))))

    def decided(self, choice: tuple[int, ...]) -> Decisions:
        """Strategies and collectives under a choice; cached."""
        if choice not in self._decided:
            self._decided[choice] = decide(self.graph, choice)
        return self._decided[choice]

    def counted(self, choice: tuple[int, ...]) -> Candidate:
        """What a choice costs when all is counted; cached."""
        if choice not in self._counted:
            same = (c for _, c in self.baselines if c.choice == choice)
            self._counted[choice] = next(same, None) or Candidate(self, choice)
        return self._counted[choice]

    def proven(self, report: SolverReport, best: Candidate) -> SolverReport:
        """What is proven of a plan under every choice of strategies, of ``report`` on the problem's.

        The problem's bound is that where all operators choose for themselves and its solution costs what it is counted
        to, as shared reshardings do not. Else each operator's least compute bounds the step.
        """
        step_s, bound_s = best.step_s, report.bound_s
        if self._follows or step_s < report.objective_s * (1 - 1e-9):
            classes = (c for c in self.graph.classes if c.copy_of is None)
            bound_s = math.fsum(max(1, len(c.members)) * c.trips * float(np.min(c.compute_s)) for c in classes)
        bound_s = min(bound_s, step_s)
        proven = step_s - bound_s <= GAP * step_s
        status = "feasible" if report.status == "optimal" and not proven else report.status
        return replace(report, status=status, objective_s=step_s, bound_s=bound_s, problem_gap=report.gap)

    @cached_property
    def _follows(self) -> bool:
        """True where an operator's strategy is another's."""
        return len({c.cluster for c in self.graph.classes}) < len(self.graph.classes)

    def solve(
        self,
        problem: Problem,
        time_limit_s: float,
        solver: str = "auto",
        free: Solution | None = None,
        *,
        masks: Masks | None = None,
        gap: float = GAP,
        effort: Effort = PLAN,
    ) -> Solution:
        """Solves ``problem``: this one's own, a `limited` one, or one with other costs. Starts from the baselines.

        Args:
            solver: as in `solve.solve`, which says what else is raised.
            free: the solution without the limit, for a limited problem.
            masks: the states that are allowed; default `masks`.
            gap: relative, at which a choice counts as optimal.
            effort: how far the search goes.

        Raises:
            ShardingError: as `masks`.
        """
        view, keep = restrict(problem, self.masks if masks is None else masks)

        def inside(choice: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(np.searchsorted(k, s)) for s, k in zip(choice, keep, strict=True))

        def whole(choice: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(k[s]) for s, k in zip(choice, keep, strict=True))

        seeds = [inside(s) for s in self.seeds]
        start = None if free is None else replace(free, choice=inside(free.choice))
        found = solve(
            view,
            seeds,
            time_limit_s,
            solver,
            start,
            lambda choice: self.counted(whole(choice)).live_bytes,
            gap=gap,
            effort=effort,
        )
        return replace(found, choice=whole(found.choice))
