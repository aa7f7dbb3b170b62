"""Reductions of the memory constraint; all exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.intra_op.reduce.core import Core, Usages


def merge_usages(core: Core, v: int) -> bool:
    """Node v's usages become disjoint intervals; what all strategies hold becomes fixed, and what is zero goes."""
    spans, held = core.memory[v]
    if not len(spans):
        return False
    if len(spans) > 1:
        bounds = np.unique(spans)
        delta = np.zeros((len(bounds), held.shape[1]))
        np.add.at(delta, np.searchsorted(bounds, spans[:, 0]), held)
        np.subtract.at(delta, np.searchsorted(bounds, spans[:, 1]), held)
        held = np.cumsum(delta, axis=0)[:-1]
        new = np.concatenate([[True], (held[1:] != held[:-1]).any(axis=1)])
        starts = bounds[:-1][new]
        spans = np.stack([starts, np.append(starts[1:], bounds[-1])], axis=1)
        held = held[new]
    least = held.min(axis=1)
    for (start, stop), b in zip(spans[least != 0], least[least != 0], strict=True):
        core.fixed[start:stop] += b
    held = held - least[:, None]
    wanted = (spans[:, 0] < spans[:, 1]) & held.any(axis=1)
    changed = len(core.memory[v].spans) != int(wanted.sum()) or bool(least.any())
    core.memory[v] = Usages(spans[wanted], held[wanted])
    return changed


def merge_edge_usages(core: Core, u: int, v: int) -> bool:
    """The same for an edge: a usage that all pairs hold becomes fixed."""
    e = core.edges[u][v]
    if not e.usages:
        return False
    kept = []
    for held, spans in e.usages:
        least = float(held.min())
        for start, stop in spans if least else ():
            core.fixed[start:stop] += least
        spans = spans[spans[:, 0] < spans[:, 1]]
        if len(spans) and (held > least).any():
            kept.append((held - least, spans))
    if len(kept) == len(e.usages) and all(a[0] is b[0] for a, b in zip(kept, e.usages, strict=True)):
        return False
    changed = len(kept) != len(e.usages)
    core.put(u, v, e._replace(usages=tuple(kept)))
    return changed


def make_positive(core: Core) -> None:
    """Usages below zero, which make room, become fixed ones below zero and others above."""
    for v in core.alive:
        if len(core.memory[v].spans) and core.memory[v].bytes.min() < 0:
            merge_usages(core, v)
        for w, e in list(core.edges[v].items()):
            if v < w and any(held.min() < 0 for held, _ in e.usages):
                merge_edge_usages(core, v, w)


def drop_times(core: Core) -> bool:
    """Times go at which nothing can exceed the limit, and those at which no more can be live than at a neighbouring
    time: only maximal cliques of the interval graph count."""
    horizon = len(core.fixed)
    if not horizon:
        return False
    most = core.fixed + _profile(core, horizon)
    keep = most > core.limit
    joined = _all_spans(core)
    spans = np.concatenate(joined) if joined else np.zeros((0, 2), np.int64)
    starts = np.cumsum(np.bincount(spans[:, 0], minlength=horizon + 1))
    stops = np.cumsum(np.bincount(spans[:, 1], minlength=horizon + 1))
    last = -1
    for t in np.flatnonzero(keep).tolist():
        if last >= 0 and stops[t] == stops[last] and core.fixed[last] <= core.fixed[t]:
            keep[last] = False  # what is live at the last time is live now, and more
        elif last >= 0 and starts[t] == starts[last] and core.fixed[t] <= core.fixed[last]:
            keep[t] = False
            continue
        last = t
    if keep.all():
        return False
    _renumber(core, keep)
    return True


def _all_spans(core: Core) -> list[Any]:
    out = [core.memory[v].spans for v in core.alive if len(core.memory[v].spans)]
    out += [s for u in core.alive for v, e in core.edges[u].items() if u < v for _, s in e.usages]
    return out


def _profile(core: Core, horizon: int) -> Any:
    """float64[times]: the most that can be live beside what is fixed."""
    delta = np.zeros(horizon + 1)
    for v in core.alive:
        spans, held = core.memory[v]
        if len(spans):
            most = held.max(axis=1)
            np.add.at(delta, spans[:, 0], most)
            np.subtract.at(delta, spans[:, 1], most)
        for w, e in core.edges[v].items():
            for held, spans in e.usages if v < w else ():
                np.add.at(delta, spans[:, 0], held.max())
                np.subtract.at(delta, spans[:, 1], held.max())
    return np.cumsum(delta)[:horizon]


def _renumber(core: Core, keep: Any) -> None:
    at = np.concatenate([[0], np.cumsum(keep)])
    core.fixed = core.fixed[keep]
    for v in core.alive:
        spans, held = core.memory[v]
        if len(spans):
            spans = at[spans]
            some = spans[:, 0] < spans[:, 1]
            core.memory[v] = Usages(spans[some], held[some])
            core.dirty_nodes.add(v)
        for w, e in list(core.edges[v].items()):
            if v < w and e.usages:
                core.put(v, w, e._replace(usages=tuple((held, at[spans]) for held, spans in e.usages)))
                core.dirty_edges.add((v, w))


def drop_too_large(core: Core) -> bool:
    """A strategy goes that exceeds the limit beside what all choices hold."""
    if not len(core.fixed):
        return False
    if core.fixed.max() > core.limit:
        core.infeasible = True
        return False
    changed = False
    for v in sorted(core.alive):
        spans, held = core.memory[v]
        if len(spans):
            room = np.array([core.limit - core.fixed[a:b].max() if b > a else np.inf for a, b in spans])
            fits = (held <= room[:, None]).all(axis=0)
            if not fits.all():
                core.keep(v, fits)
                changed = True
                if core.infeasible:
                    return True
    return changed
