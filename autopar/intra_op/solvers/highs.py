r"""What is left of a problem as an integer program, in arrays, for HiGHS.

    minimise    sum_v sum_i  c_v[i] s_v[i]  +  sum_(u,v) sum_(g,h)  C_uv[g,h] e_uv[g,h]
    (1)  sum_i s_v[i] = 1                                   for every node v
    (2)  sum_h e_uv[g,h] = sum_{i in group g} s_u[i],
         sum_g e_uv[g,h] = sum_{j in group h} s_v[j]        for every edge and group
    (3)  fixed[t] + sum_v m_v[i](t) s_v[i] + sum_(u,v) m_uv[g,h](t) e_uv[g,h]  <=  limit      for some times t
    s binary, e >= 0 continuous

Memory rows (3) are added as solutions violate them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.solvers.exact import THREADS, ExactSolver, Outcome, first_rows, peaks

TOLERANCE = 1e-9
"""Of rows, relative to the room in memory; the least that HiGHS knows is 1e-10."""


PRESOLVE = "off"
"""Problems come reduced: presolve costs more than it saves (measured on own graphs: 4 s instead of 18, 4 instead of 7),
and HiGHS 1.15's has been seen to go on for ever, its time limit unheeded."""


class Program:
    """The integer program of a Core; nodes in the ledger's order."""

    def __init__(self, core: Core, ledger: Ledger) -> None:
        self.core, self.ledger = core, ledger
        nodes = ledger.nodes
        sizes = np.array([len(core.costs[v]) for v in nodes], np.int64)
        self.at = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        count = int(self.at[-1])
        rows = [np.repeat(np.arange(len(nodes)), sizes)]
        cols = [np.arange(count)]
        values = [np.ones(count)]
        rhs = len(nodes)
        costs = [np.concatenate([core.costs[v] for v in nodes])]
        self.edge_at: list[tuple[int, Any]] = []
        """Per edge: its first column, and int64[rows, cols] of columns from there, -1 where forbidden."""
        for (a, b), (v, w) in zip(ledger.ends, ledger.edges, strict=True):
            e = core.edges[v][w]
            finite = np.isfinite(e.matrix)
            g, h = np.nonzero(finite)
            number = np.full(e.matrix.shape, -1, np.int64)
            number[g, h] = np.arange(len(g))
            self.edge_at.append((count, number))
            mine = count + np.arange(len(g))
            rows += [rhs + g, rhs + e.rows, rhs + e.matrix.shape[0] + h, rhs + e.matrix.shape[0] + e.cols]
            cols += [mine, self.at[a] + np.arange(len(e.rows)), mine, self.at[b] + np.arange(len(e.cols))]
            values += [np.ones(len(g)), -np.ones(len(e.rows)), np.ones(len(g)), -np.ones(len(e.cols))]
            costs.append(e.matrix[g, h])
            count += len(g)
            rhs += sum(e.matrix.shape)
        self.costs = np.concatenate(costs)
        self.rows, self.cols, self.values = (np.concatenate(x) for x in (rows, cols, values))
        self.count, self.rhs = count, rhs

    def memory_row(self, t: int) -> tuple[Any, Any, float]:
        """(int64[n] columns, float64[n] bytes, bytes of room) of the memory constraint at time t."""
        ledger = self.ledger
        row = np.zeros(self.count)
        for k in ledger.at_time(t):
            size = ledger.bytes_of(k)
            if k < ledger.node_terms:
                start = self.at[ledger.owner[k]]
                row[start : start + len(size)] += size
            else:
                first, number = self.edge_at[ledger.edge_owner[k - ledger.node_terms]]
                allowed = number.ravel() >= 0
                row[first + number.ravel()[allowed]] += size[allowed]
        where = np.flatnonzero(row)
        return where, row[where], ledger.limit - float(ledger.fixed[t])

    def solve(self, times: list[int], deadline: float, cutoff: float = np.inf, room: float = 0.0) -> Outcome:
        """The best choice that costs less than ``cutoff`` and fits at all times, those of ``times`` stated from the
        start; one that costs up to ``room`` more counts as the best. Raises RuntimeError where HiGHS fails."""
        times, bound = list(times), -np.inf
        while True:
            left = deadline - time.perf_counter()
            if left <= 0.05:
                return Outcome(choice=None, bound=bound, proven=False)
            status, values, low = self._run(times, left, cutoff, room)
            bound = max(bound, low)
            if status == "none":
                return Outcome(choice=None, bound=max(bound, cutoff), proven=True)
            if values is None:
                return Outcome(choice=None, bound=bound, proven=False)
            choice = np.array(
                [np.argmax(values[a:b]) for a, b in zip(self.at[:-1], self.at[1:], strict=True)], np.int64
            )
            live = self.ledger.live(choice)
            more = peaks(live - self.ledger.limit, set(times), 10)
            if not more and self.ledger.over(choice) > 0:  # within the solver's tolerance, and no choice for us
                return Outcome(choice=None, bound=bound, proven=False)
            if not more and self.ledger.cost(choice) >= cutoff:  # within the solver's tolerance
                return Outcome(choice=None, bound=min(cutoff, bound), proven=status == "optimal")
            if not more:
                return Outcome(choice=choice, bound=bound, proven=status == "optimal")
            if status != "optimal":
                return Outcome(choice=None, bound=bound, proven=False)
            times += more

    def _run(self, times: list[int], seconds: float, cutoff: float, room: float) -> Any:
        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("time_limit", max(0.1, seconds))
        model.setOptionValue("mip_rel_gap", 0.0)
        model.setOptionValue("mip_feasibility_tolerance", TOLERANCE)
        model.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
        model.setOptionValue("threads", THREADS)
        model.setOptionValue("presolve", PRESOLVE)
        scale = (
            max(1.0, float(self.costs.max(initial=0.0))) / 1e4 if not np.isfinite(cutoff) else max(cutoff, 1e-30) / 1e4
        )
        model.setOptionValue("mip_abs_gap", room / scale)
        if np.isfinite(cutoff):
            model.setOptionValue("objective_bound", cutoff / scale)
        extra = [self.memory_row(t) for t in times]
        rows = [self.rows, *(np.full(len(c), self.rhs + k) for k, (c, _, _) in enumerate(extra))]
        cols = [self.cols, *(c for c, _, _ in extra)]
        values = [self.values, *(v / max(room, 1.0) for _, v, room in extra)]
        r, c, x = np.concatenate(rows), np.concatenate(cols), np.concatenate(values)
        order = np.lexsort((r, c))
        r, c, x = r[order], c[order], x[order]
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.count, self.rhs + len(extra)
        lp.col_cost_ = self.costs / scale
        lp.col_lower_ = np.zeros(self.count)
        binaries = int(self.at[-1])
        lp.col_upper_ = np.concatenate([np.ones(binaries), np.full(self.count - binaries, highspy.kHighsInf)])
        one = np.concatenate([np.ones(len(self.ledger.nodes)), np.zeros(self.rhs - len(self.ledger.nodes))])
        lp.row_lower_ = np.concatenate([one, np.full(len(extra), -highspy.kHighsInf)])
        lp.row_upper_ = np.concatenate([one, np.array([room / max(room, 1.0) for _, _, room in extra])])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(c, np.arange(self.count + 1)).astype(np.int32)
        lp.a_matrix_.index_ = r.astype(np.int32)
        lp.a_matrix_.value_ = x
        lp.integrality_ = [highspy.HighsVarType.kInteger] * binaries + [highspy.HighsVarType.kContinuous] * (
            self.count - binaries
        )
        model.passModel(lp)
        if model.run() == highspy.HighsStatus.kError:
            raise RuntimeError(f"HiGHS failed: {model.modelStatusToString(model.getModelStatus())}")
        info, status = model.getInfo(), model.getModelStatus()
        low = float(info.mip_dual_bound) * scale if np.isfinite(info.mip_dual_bound) else -np.inf
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
            return "none", None, low
        found = info.primal_solution_status == 2
        columns = np.array(model.getSolution().col_value)[:binaries] if found else None
        name = "optimal" if status == highspy.HighsModelStatus.kOptimal else "time"
        return name, columns, low


def with_highs(
    core: Core, ledger: Ledger, deadline: float, cutoff: float, times: Sequence[int] = (), room: float = 0.0
) -> Outcome:
    """HiGHS on the integer program: with the memory rows of ``times`` from the start, to an absolute gap ``room``;
    otherwise as `ExactSolver.solve`. Raises RuntimeError where HiGHS fails."""
    return Program(core, ledger).solve(sorted({*first_rows(ledger), *times}), deadline, cutoff, room)


HIGHS = ExactSolver(
    name="highs",
    available=lambda: True,  # autopar depends on highspy
    solve=lambda core, ledger, deadline, cutoff, room, gap: with_highs(core, ledger, deadline, cutoff, room=room),
)
