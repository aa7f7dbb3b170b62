"""What is left of a problem as a cost function network, for toulbar2.

An exact weighted-CSP solver by branch and bound on soft arc consistency (Hurley et al., "Multi-language evaluation of
exact solvers in graphical model discrete optimization", Constraints 2016; https://toulbar2.github.io); PyPI's
pytoulbar2. Memory constraints are its knapsack constraints. Its costs are integers: others are rounded down to a grid
of 2⁻⁴⁰ of what a choice may cost. Bytes must be whole: `can_state`.

It keeps its state in globals and takes its time limit from a signal: call it in the main thread, and in a process of
its own where others may want it too.
"""

from __future__ import annotations

import importlib.util
import math
import time
from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core
from autopar.intra_op.reduce.ledger import Ledger
from autopar.intra_op.solvers.exact import Outcome, Solve, first_rows, peaks
from autopar.intra_op.solvers.highs import with_highs


def can_state(ledger: Ledger) -> bool:
    """True where usages are of nodes only, in whole bytes: rounded ones would prove what is not so."""
    return not ledger.has_edges and bool((ledger.bytes == np.floor(ledger.bytes)).all())


def solve_toulbar(core: Core, ledger: Ledger, times: list[int], deadline: float, cutoff: float = np.inf) -> Outcome:
    """The best choice that costs less than ``cutoff`` and fits at all times, memory rows from ``times`` on. For what
    `can_state` allows."""
    times, bound = list(times), -np.inf
    low, high = _range(core)
    if cutoff <= low:
        return Outcome(choice=None, bound=cutoff, proven=True)
    while True:
        left = deadline - time.perf_counter()
        if left <= 0.05:
            return Outcome(choice=None, bound=bound, proven=False)
        found = _run(core, ledger, times, left, min(cutoff, 2 * high + 1))
        bound = max(bound, found.bound)
        if found.choice is None:
            return Outcome(choice=None, bound=cutoff if found.proven else bound, proven=found.proven)
        live = ledger.live(found.choice)
        more = peaks(live - ledger.limit, set(times), 10)
        if not more and ledger.cost(found.choice) >= cutoff:  # costs were rounded down
            return Outcome(choice=None, bound=cutoff if found.proven else bound, proven=found.proven)
        if not more:
            return Outcome(choice=found.choice, bound=bound, proven=found.proven)
        if not found.proven:
            return Outcome(choice=None, bound=bound, proven=False)
        times += more


def _run(core: Core, ledger: Ledger, times: list[int], seconds: float, cutoff: float) -> Outcome:
    import pytoulbar2
    from pytoulbar2 import pytb2

    place = {v: k for k, v in enumerate(ledger.nodes)}
    unit = _unit(core, cutoff)
    most = math.ceil(cutoff / unit)
    network = pytoulbar2.CFN(most)
    for k, v in enumerate(ledger.nodes):
        network.AddVariable(f"x{k}", range(len(core.costs[v])))
        network.AddFunction([k], np.floor(core.costs[v] / unit).astype(np.int64).tolist())
    for v, w in ledger.edges:
        e = core.edges[v][w]
        whole = np.floor(e.matrix / unit)
        whole = np.where(whole < most, whole, most).astype(np.int64)
        network.AddFunction([place[v], place[w]], whole[e.rows][:, e.cols].ravel().tolist())
    for t in times:
        held: dict[int, Any] = {}
        for k in ledger.at_time(t).tolist():
            size = ledger.bytes_of(k)
            owner = int(ledger.owner[k])
            held[owner] = held[owner] + size if owner in held else size
        words = [str(-math.floor(ledger.limit - ledger.fixed[t]))]
        for size in held.values():
            some = np.flatnonzero(size).tolist()
            words += [str(len(some)), *(f"{s} {-int(size[s])}" for s in some)]
        network.CFN.wcsp.postKnapsackConstraint(list(held), " ".join(words), kp=True)
    pytb2.option.limited = False
    result = network.Solve(timeLimit=max(1, math.ceil(seconds)))
    timed_out = bool(pytb2.option.limited)  # `Solve` itself does not tell (seen with 1.4)
    bound = float(network.GetDDualBound()) * unit
    choice = None if result is None else np.array(result[0], np.int64)
    return Outcome(choice=choice, bound=bound, proven=not timed_out)


def _finite(core: Core) -> list[Any]:
    """The costs of every node, and of every edge that are allowed."""
    costs = [core.costs[v] for v in core.alive]
    return costs + [e.matrix[np.isfinite(e.matrix)] for u in core.alive for v, e in core.edges[u].items() if u < v]


def _range(core: Core) -> tuple[float, float]:
    """No choice costs less, none that is allowed more."""
    costs = _finite(core)
    return sum(float(c.min()) for c in costs), sum(float(c.max()) for c in costs)


def _unit(core: Core, cutoff: float) -> float:
    """What one of toulbar2's units costs: 1 where all costs are whole numbers."""
    if all((c == np.floor(c)).all() for c in _finite(core)):
        return 1.0
    return 2.0 ** (math.floor(math.log2(cutoff)) - 40)


def exact_solver() -> Solve:
    """toulbar2 where it is installed and can state the problem, else HiGHS."""
    if importlib.util.find_spec("pytoulbar2") is None:
        return with_highs

    def best(core: Core, ledger: Ledger, deadline: float, cutoff: float) -> Outcome:
        if not can_state(ledger):
            return with_highs(core, ledger, deadline, cutoff)
        return solve_toulbar(core, ledger, first_rows(ledger), deadline, cutoff)

    return best
