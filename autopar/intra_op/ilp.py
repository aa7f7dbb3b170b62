r"""The sharding ILP, written through PuLP.

    minimise    sum_v sum_i  c_v[i] s_v[i]  +  sum_(u,v) sum_(g,h)  C_uv[g,h] e_uv[g,h]
    (1)  sum_i s_v[i] = 1                                   for every node v              `_one_hot`
    (2)  sum_h e_uv[g,h] = sum_{i in group g} s_u[i],
         sum_g e_uv[g,h] = sum_{j in group h} s_v[j]        for every edge and group      `_edge_rows`
    (3)  fixed[t] + sum_v m_v[i](t) s_v[i]
                  + sum_(u,v) m_uv[g,h](t) e_uv[g,h]  <=  limit   for the times in `memory`   `_memory_row`
    s binary, e >= 0 continuous

(1), (2): Alpa (OSDI 2022, section 4.2) in transportation form, which is tight and needs no integer e
(Koster, van Hoesel, Kolen, "The partial constraint satisfaction problem", 1998). Strategies that an edge cannot tell
apart share its columns. (3) is written for the times that a solution violates, not for all.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pulp

from autopar.intra_op.simplify import Core
from autopar.intra_op.solvers.exact import THREADS


@dataclass(slots=True, kw_only=True)
class MemoryRow:
    """At one time: ``terms[v]`` bytes per strategy of node v and ``pairs[a, b]`` per pair of groups of an edge's, under
    ``room`` bytes."""

    time: int
    terms: dict[int, Any]
    room: float
    pairs: dict[tuple[int, int], Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class IlpResult:
    """``choice`` None where the solver gave none; ``bound`` in the costs' unit; ``status`` as in SolverReport."""

    choice: dict[int, int] | None
    status: str
    bound: float
    solver: str


def solve_ilp(
    core: Core,
    memory: list[MemoryRow],
    incumbent: dict[int, int] | None,
    time_limit_s: float,
    solver: str = "auto",
    gap: float = 1e-4,
) -> IlpResult:
    """Solves what is alive of ``core``. ``solver``: ``highs``, ``cbc``, or ``auto`` (HiGHS where installed)."""
    nodes = sorted(core.alive)
    scale = _scale(core, nodes)
    model = pulp.LpProblem("sharding", pulp.LpMinimize)
    s = {v: _binary(model, v, np.isfinite(core.costs[v])) for v in nodes}
    objective: list[tuple[Any, float]] = []
    constant = 0.0
    counted = {pair for row in memory for pair in row.pairs}
    e: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
    for v in nodes:
        _one_hot(model, s[v])
        objective += [(x, core.costs[v][i] / scale) for i, x in s[v].items() if core.costs[v][i] > 0]
    for u in nodes:
        for v, (rows, cols, matrix) in sorted(core.edges[u].items()):
            if u < v:
                if (u, v) not in counted and (same := _same(s[u], s[v], rows, cols, matrix / scale)) is not None:
                    constant += same
                    continue
                e[u, v] = _edge_rows(model, u, v, s[u], s[v], rows, cols, matrix)
                objective += [(x, matrix[pair] / scale) for pair, x in e[u, v].items() if matrix[pair] > 0]
    for row in memory:
        _memory_row(model, row, s, e)
    model.setObjective(pulp.LpAffineExpression(objective))
    result = _run(model, nodes, s, scale, incumbent, time_limit_s, solver, gap)
    return replace(result, bound=result.bound + constant * scale)


def _scale(core: Core, nodes: list[int]) -> float:
    finite = [float(np.min(c[np.isfinite(c)])) for v in nodes if np.isfinite(c := core.costs[v]).any()]
    return max(sum(finite), 1e-12) if finite else 1.0


def _binary(model: Any, v: int, allowed: Any) -> dict[int, Any]:
    return {int(i): model.add_variable(f"s{v}_{i}", cat="Binary") for i in np.flatnonzero(allowed)}


def _one_hot(model: Any, s: dict[int, Any]) -> None:
    """Constraint (1)."""
    model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression([(x, 1.0) for x in s.values()]), 0, rhs=1))


def _same(s_u: dict[int, Any], s_v: dict[int, Any], rows: Any, cols: Any, matrix: Any) -> float | None:
    """What an edge costs whatever is chosen; None where that differs."""
    matrix = matrix[np.ix_(sorted({int(rows[i]) for i in s_u}), sorted({int(cols[j]) for j in s_v}))]
    return float(matrix.flat[0]) if np.isfinite(matrix).all() and np.ptp(matrix) == 0 else None


def _edge_rows(
    model: Any, u: int, v: int, s_u: dict[int, Any], s_v: dict[int, Any], rows: Any, cols: Any, matrix: Any
) -> dict[tuple[int, int], Any]:
    """Constraints (2); returns the e of each pair of groups that is allowed."""
    by_row: dict[int, list[tuple[Any, float]]] = {}
    by_col: dict[int, list[tuple[Any, float]]] = {}
    for i, x in s_u.items():
        by_row.setdefault(int(rows[i]), []).append((x, -1.0))
    for j, x in s_v.items():
        by_col.setdefault(int(cols[j]), []).append((x, -1.0))
    out: dict[tuple[int, int], Any] = {}
    for g in sorted(by_row):
        for h in sorted(by_col):
            if np.isfinite(matrix[g, h]):
                out[g, h] = e = model.add_variable(f"e{u}_{v}_{g}_{h}", lowBound=0)
                by_row[g].append((e, 1.0))
                by_col[h].append((e, 1.0))
    for terms in (*by_row.values(), *by_col.values()):
        model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), 0, rhs=0))
    return out


def _memory_row(model: Any, row: MemoryRow, s: dict[int, dict[int, Any]], e: Any) -> None:
    """Constraint (3) at one time, in units of the room that there is."""
    unit = max(abs(row.room), 1.0)
    terms = [(x, float(usage[i]) / unit) for v, usage in row.terms.items() for i, x in s[v].items() if usage[i] > 0]
    terms += [(x, float(size[at]) / unit) for uv, size in row.pairs.items() for at, x in e[uv].items() if size[at] > 0]
    model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), -1, rhs=row.room / unit))


def available_solver(wanted: str = "auto") -> str:
    """``highs`` or ``cbc``.

    Raises:
        ValueError: the wanted solver is not installed.
    """
    if wanted in ("auto", "highs") and pulp.HiGHS(msg=False).available():
        return "highs"
    if wanted in ("auto", "cbc") and _cbc(msg=False).available():
        return "cbc"
    raise ValueError(f"solver {wanted!r} is not installed; HiGHS comes with `pip install highspy`")


def _cbc(**options: Any) -> Any:
    """CBC: the one that is installed (``pulp[cbc]``, or on the PATH), else PuLP's own copy, which PuLP 4 drops."""
    found = pulp.COIN_CMD(**options)
    if found.available():
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**options)


def _run(
    model: Any,
    nodes: list[int],
    s: Any,
    scale: float,
    incumbent: dict[int, int] | None,
    time_limit_s: float,
    solver: str,
    gap: float,
) -> IlpResult:
    name = available_solver(solver)
    started = time.perf_counter()
    if name == "highs":
        backend = pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=gap, threads=THREADS)
    else:
        backend = _cbc(msg=False, timeLimit=time_limit_s, gapRel=gap, threads=THREADS, warmStart=incumbent is not None)
    if incumbent is not None:
        for v in nodes:
            for i, x in s[v].items():
                x.setInitialValue(1.0 if incumbent.get(v) == i else 0.0)
    model.solve(backend)
    timed_out = time.perf_counter() - started >= 0.98 * time_limit_s
    bound = 0.0
    if name == "highs":
        info = model.solverModel.getInfo()
        bound = float(info.mip_dual_bound) if np.isfinite(info.mip_dual_bound) else 0.0
    choice: dict[int, int] | None = {}
    for v in nodes:
        values = {i: x.varValue for i, x in s[v].items()}
        best = max(values, key=lambda i: (values[i] or 0.0, -i))
        if values[best] is None or values[best] < 0.5:
            choice = None
            break
        choice[v] = best
    if model.status == pulp.LpStatusInfeasible:
        return IlpResult(choice=None, status="infeasible", bound=np.inf, solver=name)
    if choice is None:
        return IlpResult(choice=None, status="time_limit", bound=bound * scale, solver=name)
    proven = model.status == pulp.LpStatusOptimal and model.sol_status == pulp.LpSolutionOptimal and not timed_out
    if proven and name == "cbc":
        bound = float(pulp.value(model.objective)) * (1 - gap)
    return IlpResult(choice=choice, status="optimal" if proven else "time_limit", bound=bound * scale, solver=name)
