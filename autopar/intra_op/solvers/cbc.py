r"""The sharding ILP, written through PuLP.

    minimise    sum_v sum_i  c_v[i] s_v[i]  +  sum_(u,v) sum_(g,h)  C_uv[g,h] e_uv[g,h]
    (1)  sum_i s_v[i] = 1                                   for every node v              `_one_hot`
    (2)  sum_h e_uv[g,h] = sum_{i in group g} s_u[i],
         sum_g e_uv[g,h] = sum_{j in group h} s_v[j]        for every edge and group      `_edge_rows`
    (3)  fixed[t] + sum_v m_v[i](t) s_v[i]
                  + sum_(u,v) m_uv[g,h](t) e_uv[g,h]  <=  limit   for times t             `_memory_row`
    s binary, e >= 0 continuous

(1), (2): Alpa (OSDI 2022, section 4.2) in transportation form, which is tight and needs no integer e
(Koster, van Hoesel, Kolen, "The partial constraint satisfaction problem", 1998). Strategies that an edge cannot tell
apart share its columns. (3) is written for the times that a solution violates, not for all.

This is the formulation to read, and how CBC is reached. `solvers.highs` states the same in arrays: decision 012 has
what PuLP's model building costs.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pulp

from autopar.intra_op.reduce.core import Core, Edge
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.solvers.exact import THREADS, ExactSolver, Outcome, first_rows, peaks


def with_cbc(core: Core, ledger: Ledger, deadline: float, cutoff: float, room: float, gap: float) -> Outcome:
    """Solves what is alive of ``core`` as `ExactSolver.solve` says, to the relative gap ``gap``; ``room`` is not
    used."""
    times, bound = first_rows(ledger), -np.inf
    while (left := deadline - time.perf_counter()) > 0.05:
        choice, low, proven = _run(core, ledger, times, left, gap)
        bound = max(bound, low)
        if choice is None:
            return Outcome(choice=None, bound=max(bound, cutoff) if proven else bound, proven=proven)
        live = ledger.live(choice)
        more = peaks(live - ledger.limit * (1 + 1e-9), set(times), 10) if len(live) else []
        if not more and ledger.cost(choice) >= cutoff:
            return Outcome(choice=None, bound=cutoff if proven else bound, proven=proven)
        if not more:
            return Outcome(choice=choice, bound=bound, proven=proven)
        if not proven:
            break
        times += more
    return Outcome(choice=None, bound=bound, proven=False)


def _run(core: Core, ledger: Ledger, times: list[int], seconds: float, gap: float) -> tuple[Any, float, bool]:
    """(choice or None, lower bound, whether solved to the end)."""
    nodes = ledger.nodes
    scale = max(sum(float(np.median(core.costs[v])) for v in nodes), 1e-12)
    model = pulp.LpProblem("sharding", pulp.LpMinimize)
    s = {v: _binary(model, v, len(core.costs[v])) for v in nodes}
    objective = [(x, core.costs[v][i] / scale) for v in nodes for i, x in enumerate(s[v]) if core.costs[v][i] != 0]
    for v in nodes:
        _one_hot(model, s[v])
    e: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
    for u, v in ledger.edges:
        edge = core.edges[u][v]
        e[u, v] = _edge_rows(model, u, v, s[u], s[v], edge)
        objective += [(x, edge.matrix[pair] / scale) for pair, x in e[u, v].items() if edge.matrix[pair] != 0]
    for t in times:
        _memory_row(model, core, ledger, t, s, e)
    model.setObjective(pulp.LpAffineExpression(objective))
    started = time.perf_counter()
    model.solve(_cbc(msg=False, timeLimit=seconds, gapRel=gap, threads=THREADS))
    timed_out = time.perf_counter() - started >= 0.98 * seconds
    if model.status == pulp.LpStatusInfeasible:
        return None, np.inf, True
    proven = model.status == pulp.LpStatusOptimal and model.sol_status == pulp.LpSolutionOptimal and not timed_out
    choice = []
    for v in nodes:
        values = np.array([x.varValue or 0.0 for x in s[v]])
        if values.max() < 0.5:
            return None, -np.inf, False
        choice.append(int(np.argmax(values)))
    low = -np.inf
    if proven:
        found = pulp.value(model.objective)
        assert isinstance(found, float | int)
        low = float(found) * (1 - gap) * scale
    return np.array(choice, np.int64), low, proven


def _binary(model: Any, v: int, size: int) -> list[Any]:
    return [model.add_variable(f"s{v}_{i}", cat="Binary") for i in range(size)]


def _one_hot(model: Any, s: list[Any]) -> None:
    """Constraint (1)."""
    model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression([(x, 1.0) for x in s]), 0, rhs=1))


def _edge_rows(model: Any, u: int, v: int, s_u: list[Any], s_v: list[Any], edge: Edge) -> dict[tuple[int, int], Any]:
    """Constraints (2); returns the e of each pair of groups that is allowed."""
    by_row: list[list[tuple[Any, float]]] = [[] for _ in range(edge.matrix.shape[0])]
    by_col: list[list[tuple[Any, float]]] = [[] for _ in range(edge.matrix.shape[1])]
    for x, g in zip(s_u, edge.rows.tolist(), strict=True):
        by_row[g].append((x, -1.0))
    for x, h in zip(s_v, edge.cols.tolist(), strict=True):
        by_col[h].append((x, -1.0))
    out: dict[tuple[int, int], Any] = {}
    for g, h in zip(*(at.tolist() for at in np.nonzero(np.isfinite(edge.matrix))), strict=True):
        out[g, h] = e = model.add_variable(f"e{u}_{v}_{g}_{h}", lowBound=0)
        by_row[g].append((e, 1.0))
        by_col[h].append((e, 1.0))
    for terms in (*by_row, *by_col):
        model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), 0, rhs=0))
    return out


def _memory_row(model: Any, core: Core, ledger: Ledger, t: int, s: dict[int, list[Any]], e: Any) -> None:
    """Constraint (3) at one time, in units of the room that there is."""
    room = ledger.limit - float(ledger.fixed[t])
    unit = max(abs(room), 1.0)
    terms: dict[Any, float] = {}
    for k in ledger.at_time(t).tolist():
        size = ledger.bytes_of(k) / unit
        held = np.flatnonzero(size).tolist()
        if k < ledger.node_terms:
            variables = {i: s[ledger.nodes[ledger.owner[k]]][i] for i in held}
        else:
            u, v = ledger.edges[ledger.edge_owner[k - ledger.node_terms]]
            width = core.edges[u][v].matrix.shape[1]
            variables = {i: e[u, v][p] for i in held if (p := divmod(i, width)) in e[u, v]}
        for i, x in variables.items():
            terms[x] = terms.get(x, 0.0) + float(size[i])
    model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), -1, rhs=room / unit))


def _cbc(**options: Any) -> Any:
    """CBC: the one that is installed (``pulp[cbc]``, or on the PATH), else PuLP's own copy, which PuLP 4 drops."""
    found = pulp.COIN_CMD(**options)
    if found.available():
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**options)


CBC = ExactSolver(name="cbc", available=lambda: bool(_cbc(msg=False).available()), solve=with_cbc)
