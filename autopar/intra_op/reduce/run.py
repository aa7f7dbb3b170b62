"""The reductions in order, until none applies."""

from __future__ import annotations

import time

import numpy as np

from autopar.intra_op.reduce import edges, memory_rows, nodes
from autopar.intra_op.reduce.core import Core


def reduce(core: Core, deadline: float = float("inf")) -> None:
    """Reduces a core until nothing changes, or ``deadline`` (of time.perf_counter) has passed: what is left is exact at
    any time."""
    if core.infeasible:
        return
    memory_rows.make_positive(core)
    memory_rows.drop_times(core)
    while True:
        _settle(core, deadline)
        if core.infeasible or time.perf_counter() > deadline:
            return
        changed = memory_rows.drop_too_large(core)
        if not core.infeasible:
            changed |= memory_rows.drop_times(core)
        if core.infeasible or not changed:
            return


def lighten(core: Core) -> None:
    """Only what is cheap beside one pass of messages: forbidden strategies, nodes of one strategy or one neighbour.
    Afterwards every strategy has an allowed pair on every edge."""
    if core.infeasible:
        return
    memory_rows.make_positive(core)
    memory_rows.drop_times(core)
    while (core.dirty_edges or core.dirty_nodes) and not core.infeasible:
        batch = sorted(core.dirty_edges)
        core.dirty_edges.clear()
        for u, v in batch:
            if v in core.edges[u] and not core.infeasible:
                _make_consistent(core, u, v)
        waiting = sorted(core.dirty_nodes & core.alive)
        core.dirty_nodes.clear()
        for v in waiting:
            if v in core.alive and not core.infeasible and not nodes.absorb(core, v) and len(core.edges[v]) < 2:
                nodes.eliminate(core, v)


def _make_consistent(core: Core, u: int, v: int) -> None:
    edges.drop_unused(core, u, v)
    while not core.infeasible and edges.make_arc_consistent(core, u, v):
        edges.drop_unused(core, u, v)


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
    """All reductions of one edge, which may go with that."""
    _make_consistent(core, u, v)
    if core.infeasible:
        return
    edges.move_minima(core, u, v)
    if core.edges[u][v].usages:
        memory_rows.merge_edge_usages(core, u, v)
    edges.group(core, u, v)
    if not edges.drop_constant(core, u, v):
        edges.contract(core, u, v)


def simplify(core: Core, v: int) -> None:
    """One node: gone if it can be, else with as few strategies as can be."""
    if nodes.absorb(core, v):
        return
    memory_rows.merge_usages(core, v)
    if nodes.eliminate(core, v):
        return
    with np.errstate(invalid="ignore"):  # a strategy that all of a neighbour's forbid is about to go
        nodes.drop_dominated(core, v)
