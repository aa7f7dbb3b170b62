"""The reductions in order, until none applies."""

from __future__ import annotations

import time

from autopar.intra_op.reduce import edges, memory, nodes
from autopar.intra_op.reduce.core import Core


def reduce(core: Core, deadline: float = float("inf")) -> None:
    """Reduces a core until nothing changes, or time is up: what is left is exact at any time."""
    memory.drop_times(core)
    while True:
        _settle(core, deadline)
        if core.infeasible or time.perf_counter() > deadline:
            return
        changed = memory.drop_too_large(core)
        if not core.infeasible:
            changed |= memory.drop_times(core)
        if core.infeasible or not changed:
            return


def _settle(core: Core, deadline: float) -> None:
    """Edges first, since contractions are cheap and shrink the most; then nodes, those with few neighbours first."""
    while (core.dirty_nodes or core.dirty_edges) and not core.infeasible:
        while core.dirty_edges:
            batch = sorted(core.dirty_edges)
            core.dirty_edges.clear()
            for u, v in batch:
                if v in core.edges[u]:
                    tidy(core, u, v)
                    if core.infeasible:
                        return
            if time.perf_counter() > deadline:
                return
        waiting = sorted(core.dirty_nodes & core.alive, key=lambda v: (len(core.edges[v]), len(core.costs[v]), v))
        core.dirty_nodes.clear()
        for v in waiting:
            if v in core.alive:
                simplify(core, v)
                if core.infeasible:
                    return
            if time.perf_counter() > deadline:
                return


def tidy(core: Core, u: int, v: int) -> None:
    """One edge in its simplest form."""
    edges.drop_unused(core, u, v)
    while edges.make_arc_consistent(core, u, v):
        if core.infeasible:
            return
        edges.drop_unused(core, u, v)
    edges.move_minima(core, u, v)
    if core.edges[u][v].usages:
        memory.merge_edge_usages(core, u, v)
    edges.group(core, u, v)
    if not edges.drop_constant(core, u, v):
        edges.contract(core, u, v)


def simplify(core: Core, v: int) -> None:
    """One node: gone if it can be, else with as few strategies as can be."""
    if nodes.absorb(core, v):
        return
    memory.merge_usages(core, v)
    if nodes.eliminate(core, v):
        return
    nodes.drop_dominated(core, v)
