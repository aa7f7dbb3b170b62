"""What the sharding ILP chooses from, and the one interface of its solvers.

The problem (Alpa, OSDI 2022, section 4.2, generalised): choose one strategy s_v per node and minimise

    sum_v  cost[v][s_v]  +  sum_(u,v)  cost[u,v][s_u][s_v]

subject, at every time t, to

    fixed_bytes[t]  +  sum_{v live at t} usage[v][s_v]  +  sum_{(u,v) live at t} usage[u,v][s_u][s_v]  <=  limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from autopar.ir.cluster import MAY_LACK

if TYPE_CHECKING:  # numpy's types only: ir needs the standard library alone
    import numpy as np
    from numpy.typing import NDArray

CollectiveKind: TypeAlias = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
StepKind: TypeAlias = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "slice", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of the compiled step.

    ``operand_bytes`` is per device and execution (an all-gather's is its input shard); ``trips`` how
    often a step executes it (``trips_assumed``: inside a loop of unknown length, whose assumed trips it counts);
    ``count`` how many of this row the program text holds; ``time_s`` is that of all its executions. ``where`` names
    the operator that asked for it, with its source line: ``dot_general (model.py:88)``, ``copy for …`` the
    first of several, ``result, from …`` and the like where a value leaves the step or a loop; ``reduction`` is the
    operation of an all-reduce or reduce-scatter. ``beside``: True where it may run beside compute.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    operand_bytes: int
    dtype: str
    trips: int
    count: int
    time_s: float
    where: str
    reduction: str = ""
    trips_assumed: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One step of a resharding chain: over ``axes`` (of collectives several, in mesh order), from dimension ``src``
    (all-gather, all-to-all) and to dimension ``dst`` (reduce-scatter, all-to-all, slice); -1 where it has none."""

    kind: StepKind
    axes: tuple[str, ...]
    src: int = -1
    dst: int = -1


Usage: TypeAlias = "tuple[NDArray[np.float64], tuple[tuple[int, int], ...] | NDArray[np.int64]]"
"""(bytes of each choice, intervals (start, stop): pairs or int64[several, 2]): that many bytes are live at times
start..stop-1 of every interval (several where folding joined equal values)."""
SolveStatus: TypeAlias = Literal["optimal", "feasible", "time_limit", "infeasible", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemNode:
    """``costs_s`` float64[strategies]: seconds of each; usages' bytes have the same shape."""

    costs_s: NDArray[np.float64]
    usages: tuple[Usage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemEdge:
    """Choosing i at node a and j at node b (a < b) costs ``costs_s[rows[i], cols[j]]`` seconds, +inf where forbidden;
    rows and columns that are equal are stored once: ``rows`` int64[strategies of a], ``cols`` int64[strategies of b].
    Usages, their bytes in the shape of ``costs_s``: what a value holds because its two ends want it differently, or
    alike. What depends on a third choice as well is ``suspected``: it counts only where a full count of live bytes has
    shown it."""

    a: int
    b: int
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    costs_s: NDArray[np.float64]
    usages: tuple[Usage, ...] = ()
    suspected: tuple[Usage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a solver is given: ``fixed_bytes`` float64[times], live whatever is chosen; ``limit_bytes``: None for no
    limit."""

    nodes: tuple[ProblemNode, ...]
    edges: tuple[ProblemEdge, ...]
    fixed_bytes: NDArray[np.float64]
    limit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How a solution was found: objective and proven lower bound in seconds; gap relative to the objective. Of a plan
    they are those of the step under every choice of strategies, and ``problem_gap`` is that of the problem which was
    solved, whose operators follow each other in part (`intra_op.strategy_graph`). ``over_bytes`` says, where nothing
    fits, by how much the best attempt exceeds the limit."""

    solver: str
    status: SolveStatus
    objective_s: float
    bound_s: float
    seconds: float
    over_bytes: float = 0.0
    problem_gap: float = field(default=0.0, metadata={MAY_LACK: True})

    @property
    def fits(self) -> bool:
        """True where the choice is allowed, and within the limit."""
        return self.over_bytes <= 0 and math.isfinite(self.objective_s)

    @property
    def gap(self) -> float:
        """(objective − bound) / objective; 0 where both are 0."""
        return max(0.0, self.objective_s - self.bound_s) / self.objective_s if self.objective_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """``choice[v]`` is node v's strategy. ``phases_s``: (phase, wall seconds) of the search."""

    choice: tuple[int, ...]
    report: SolverReport
    phases_s: tuple[tuple[str, float], ...] = ()
