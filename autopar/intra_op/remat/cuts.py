"""Parametric minimum cuts: for each price of memory the cheapest split of the forward pass into kept and recomputed.

With K the kept and R the recomputed forward nodes, at a price λ of pressure-weighted bytes,

    minimise   λ Σ_{v ∈ K} bytes_v · gap_v   +   Σ_{v ∈ R} seconds_v
    such that  saved ⊆ K ∪ R,   and   v ∈ R  ⇒  what v reads ∈ K ∪ R .

Two binary variables per forward node, x_v (available late) and y_v ≤ x_v (recomputed), make this a minimum cut (Picard
1976): the arc x_v → y_v costs λ bytes gap (available and not recomputed), y_v → sink costs the seconds, y_v → x_u is
infinite for what v reads, source → x_v is infinite for what is saved. As λ grows R grows, from what compilers do by
themselves (cheap operators that are never materialised) to everything between *boundaries*: values that cross a place
where little is passed on, which are always kept, or the whole step would be recomputed at once and nothing be saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from autopar.intra_op.remat.forward import ForwardNode

PROMINENCE = 1.5
"""A place passes on little where this many times as much crosses on either side (guessed)."""
PRICES = 10
"""How many prices are tried."""
_INFINITE = 2**31 - 1


def boundaries(found: dict[int, ForwardNode]) -> set[int]:
    """Nodes that are kept because they cross a place where little is passed on."""
    order = list(found)
    index = {n: i for i, n in enumerate(order)}
    last = [0] * len(order)
    for i in reversed(range(len(order))):
        for w in found[order[i]].readers:
            j = index[w]
            last[i] = max(last[i], j if found[w].stands or not last[j] else last[j])
    crossing = np.zeros(len(order) + 1)
    for i, n in enumerate(order):
        if found[n].stands and last[i] > i:
            size = found[n].kept_bytes
            crossing[i] += size
            crossing[last[i]] -= size
    places = _valleys(np.cumsum(crossing)[: len(order)])
    kept: set[int] = set()
    for i, n in enumerate(order):
        if found[n].stands and any(i <= p < last[i] for p in places):
            kept.add(n)
    return kept


def _valleys(height: Any) -> list[int]:
    """Positions of the minima between which ``height`` rises to `PROMINENCE` times their own."""
    places: list[int] = []
    low, high, at, falling = np.inf, 0.0, 0, True
    for i, h in enumerate(height):
        if falling:
            if h <= low:
                low, at = h, i
            elif h >= PROMINENCE * low:
                if low > 0:
                    places.append(at)
                falling, high = False, h
        elif h > high:
            high = h
        elif h <= high / PROMINENCE:
            falling, low, at = True, h, i
    return places


def cuts(found: dict[int, ForwardNode], kept: set[int]) -> list[set[int]]:
    """Sets R of planning nodes, each within the next: first what costs nothing, then for growing prices. ``kept`` are
    never in R. Empty where nothing can be traded."""
    price = np.array([
        this.kept_bytes * this.gap if this.stands or not this.repeatable else np.inf for this in found.values()
    ])  # fmt: skip
    cost = np.array([this.cost_s if this.repeatable and n not in kept else np.inf for n, this in found.items()], float)
    cost[~np.isfinite(price) & np.isfinite(cost)] *= 1e-3  # what is never materialised is computed in its readers
    both = np.isfinite(price) & np.isfinite(cost) & (price > 0)
    if not both.any():
        return []
    ratio = cost[both] / price[both]
    grid = np.geomspace(0.3 * ratio.min(), 30 * ratio.max(), PRICES)
    out: list[set[int]] = []
    before: set[int] = set()
    for factor in (0.0, *grid):
        priced = price.copy()
        priced[np.isfinite(price)] *= factor
        chosen = before | cut(found, priced, cost)
        if not out or chosen != before:
            out.append(chosen)
        before = chosen
    return out


def cut(found: dict[int, ForwardNode], price: Any, cost: Any) -> set[int]:
    """R of the minimum cut; ``price`` and ``cost`` are float64[nodes], inf for what must not be kept, or not be
    recomputed. Vertices: x_i = i, y_i = n + i, source = 2n, sink = 2n + 1."""
    order = list(found)
    n, index = len(order), {v: i for i, v in enumerate(order)}
    finite = float(price[np.isfinite(price)].sum() + cost[np.isfinite(cost)].sum())
    scale = 1.5e9 / max(finite, 1e-30)

    def whole(values: Any) -> Any:
        return np.where(np.isfinite(values), np.minimum(np.nan_to_num(values, posinf=0.0) * scale, 2e9), _INFINITE)

    rows = [np.arange(n), n + np.arange(n)]
    cols = [n + np.arange(n), np.full(n, 2 * n + 1)]
    sizes = [whole(price), whole(cost)]
    reads = np.array([(n + index[v], index[u]) for v in order for u in found[v].reads], np.int64).reshape(-1, 2)
    saved = np.array([i for i, v in enumerate(order) if found[v].saved], np.int64)
    rows += [reads[:, 0], np.full(len(saved), 2 * n)]
    cols += [reads[:, 1], saved]
    sizes += [np.full(len(reads), _INFINITE), np.full(len(saved), _INFINITE)]
    capacity = csr_matrix(
        (np.concatenate(sizes).astype(np.int32), (np.concatenate(rows), np.concatenate(cols))), (2 * n + 2, 2 * n + 2)
    )
    flow = maximum_flow(capacity, 2 * n, 2 * n + 1).flow
    left = capacity - flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, 2 * n, return_predecessors=False).tolist())
    return {v for i, v in enumerate(order) if n + i in reached}
