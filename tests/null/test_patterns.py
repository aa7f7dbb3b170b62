"""Counting by class and pattern equals a walk over every planning node, whatever is chosen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from autopar.cost.logical_meshes import logical_mesh
from autopar.intra_op.decisions import Decisions, decide, totals
from autopar.intra_op.extract import collectives
from autopar.intra_op.flatten import Flat, flatten
from autopar.intra_op.fold import ROUNDS, fold
from autopar.intra_op.liveness import Liveness, liveness
from autopar.intra_op.peak import live_bytes
from autopar.intra_op.places import Places
from autopar.intra_op.specs import Mesh
from autopar.intra_op.strategy_graph import StrategyGraph, build
from autopar.intra_op.usages import tensor_bytes
from autopar.ir.graph import Graph
from tests.clusters import SLOW_8
from tests.null.test_liveness import SCALAR, UNIT, WEIGHT_GRADIENT, Program

BLOCKS = 16


def _deep() -> Graph:
    """Equal blocks forwards, their gradients backwards, an update of donated weights by a shared scalar."""
    p = Program(UNIT, SCALAR, *[UNIT] * BLOCKS)
    x, rate, weights = 0, 1, range(2, 2 + BLOCKS)
    inputs: list[int] = []
    for w in weights:
        inputs.append(x)
        h = p.dot(x, w)
        x = p.op("add", p.op("tanh", h), x)
    g = p.op("mul", x, x)
    rate = p.op("broadcast_in_dim", rate, to=UNIT, shape=(16, 16), broadcast_dimensions=())
    new: list[int] = []
    for w, x in zip(reversed(weights), reversed(inputs), strict=True):
        dw = p.dot(x, g, **WEIGHT_GRADIENT)
        g = p.op("add", p.dot(g, w), g)
        new.append(p.op("sub", w, p.op("mul", rate, dw)))
    return p.graph(*reversed(new), donated=tuple((2 + i, i) for i in range(BLOCKS)))


def _scanned() -> Graph:
    """A loop whose body reads a constant twice, with a carry and a stacked input and result."""
    body = Program(UNIT, UNIT, UNIT)
    a = body.dot(1, 0)
    b = body.op("add", body.dot(a, 0), 2)
    p = Program(UNIT, UNIT)
    stack = p.op("broadcast_in_dim", p.dot(1, 0), to=_STACK, shape=(4, 16, 16), broadcast_dimensions=(1, 2))
    params = {"num_consts": 1, "num_carry": 1, "length": 4}
    carry, ys = p.ops("scan", 0, 1, stack, to=(UNIT, _STACK), bodies=(body.graph(b, a),), **params)
    return p.graph(p.dot(carry, 0), ys)


_STACK = type(UNIT)(shape=(4, 16, 16), dtype="float32")
GRAPHS = {"deep": _deep, "scanned": _scanned}


@pytest.mark.slow
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_patterns_count_what_a_walk_counts(name: str, folded: bool) -> None:
    flat = flatten(GRAPHS[name]())
    live = liveness(flat)
    graph = build(flat, Mesh(logical_mesh(SLOW_8, (2, 4))), fold_above=0 if folded else None)
    assert (len(graph.uses.patterns) < len(flat.maker) / 2) == (folded and name == "deep")
    rng = np.random.default_rng(0)
    some = False
    for _ in range(6):
        out = decide(graph, [int(rng.integers(len(costs))) for costs in graph.costs])
        rows, expected = _walk(graph, out, live)
        assert _rows(out) == rows
        np.testing.assert_array_equal(live_bytes(out, live), expected)
        some = some or bool(rows)
        compute_s = sum(_of(out, n).compute_s[_s(out, n)] * _trips(flat, n) for n in range(len(flat.kind)))
        assert totals(out).compute_s == pytest.approx(compute_s)
        assert totals(out).exposed_s + totals(out).hidden_s == pytest.approx(sum(c.time_s for c in collectives(out)))
    assert some


def _rows(out: Decisions) -> Counter[Any]:
    rows: Counter[Any] = Counter()
    for c in collectives(out):
        rows[c.kind, c.operand_bytes, c.where, c.trips] += c.count
    return rows


def _s(out: Decisions, n: int) -> int:
    return out.strategy[out.graph.class_of[n]]


def _of(out: Decisions, n: int) -> Any:
    return out.graph.classes[out.graph.class_of[n]].signature


def _trips(flat: Flat, n: int) -> int:
    return flat.regions[flat.region[n]].trips


def _walk(graph: StrategyGraph, out: Decisions, live: Liveness) -> tuple[Counter[Any], Any]:
    """Collectives by (kind, bytes, where, trips), and bytes over time, from one pass over all nodes."""
    flat, mesh, places = graph.flat, graph.mesh, Places(graph)
    counted: Counter[Any] = Counter()
    made: dict[Any, list[Any]] = {}  # (region, link, codes) → [bytes, copy bytes, first, readers, passing]
    moved: dict[Any, int] = {}
    direct: set[Any] = set()
    taken: dict[tuple[int, int], list[Any]] = {}
    for n, links in enumerate(flat.links):
        for i, link in enumerate(links):
            if link is None:
                continue
            t, region = flat.operand_types[n][i], flat.exec_region[flat.first_edge[n] + i]
            want, have = (
                int(_of(out, n).operands[i][_s(out, n)]),
                int(_of(out, link[0]).results[link[1]][_s(out, link[0])]),
            )
            if want == have:
                direct.add(link)
                continue
            copies = out.copies.get((graph.class_of[link[0]], link[1]), []) if region == flat.region[link[0]] else []
            path: tuple[int, ...] = (have,)
            for code in [*copies[: copies.index(want) if want in copies else None], want]:
                where = ("copy for " if code != want or want in copies else "") + places.text(n, link[0])
                before, space = made.get((region, link, path)), mesh.space(t)
                worst = 0.0
                for to, kind, _, src, dst in mesh.chain(t, path[-1], code):
                    at, path = path[-1], (*path, to)
                    if (region, link, path) not in made:
                        if kind in ("all-gather", "reduce-scatter", "all-to-all") and any(
                            np.prod(t.shape[:d]) > 1 for d in (src, dst) if d >= 0
                        ):
                            worst = max(worst, t.size_bytes / min(space.shards[at], space.shards[to]))
                        made[region, link, path] = [t.size_bytes / space.shards[to], 0.0, n, [], []]
                        if before is not None:
                            before[4].append(n)
                        else:
                            moved[link] = n
                        if kind not in ("slice", "mask"):
                            size = int(t.size_bytes / space.shards[at])
                            counted[kind, size, where, flat.regions[region].trips] += 1
                    before = made[region, link, path]
                assert before is not None
                before[1] = max(before[1], worst)
            taken[n, i] = made[region, link, path]
            taken[n, i][3].append(n)
    return counted, _bytes(graph, out, live, made, moved, direct, taken)


def _bytes(graph: StrategyGraph, out: Decisions, live: Liveness, made: Any, moved: Any, direct: Any, taken: Any) -> Any:
    flat, total = graph.flat, np.zeros(live.horizon)
    for n, types in enumerate(flat.result_types):
        for r in range(len(types)):
            if (span := live.interval(n, r)) is not None:
                start, stop = span
                if (n, r) in moved and flat.kind[n] not in ("arg", "carry"):
                    done = max(moved[n, r], start) + 1
                    stop = max(stop, done) if (n, r) in direct else done
                total[start:stop] += _of(out, n).usage[r][_s(out, n)]
    for (region, (source, _), _), (size, copy_bytes, first, readers, passing) in made.items():
        start = max(first, source)
        stop = max([max(u, source) + 1 for u in passing], default=start + 1)
        stop = max([stop, *(int(live.ends[u]) if u > source else source + 1 for u in readers)])
        home = flat.region[first]
        if home != region and home in flat.span and flat.kind[first] == "op":
            start, stop = min(start, flat.span[home][0]), max(stop, flat.span[home][1])
        total[start:stop] += size
        total[start : start + 1] += copy_bytes
    for n, spaces in live.workspaces.items():
        for t, weight, end in spaces:
            if (n, t) not in taken or len(taken[n, t][3]) > 1:
                total[n:end] += weight * tensor_bytes(graph, graph.class_of[n], t)[_s(out, n)]
    for arg, (new, first, readers) in live.loose.items():
        late = [n for n, i in readers if (n, i) not in taken]
        if late:
            total[first : max(new, *late) + 1] += _of(out, arg).usage[0][_s(out, arg)]
    return total


def test_folding_is_colour_refinement() -> None:
    flat = flatten(_deep())
    users: list[list[tuple[int, int, int]]] = [[] for _ in flat.kind]
    for n, links in enumerate(flat.links):
        for i, link in enumerate(links):
            if link is not None:
                users[link[0]].append((n, i, link[1]))
    colours: list[Any] = list(zip(flat.region, flat.key, (d % 2 for d in flat.depth), strict=True))
    for _ in range(ROUNDS):
        colours = [
            (
                colours[n],
                tuple(link and (colours[link[0]], link[1]) for link in flat.links[n]),
                frozenset((colours[u], i, r) for u, i, r in users[n]),
            )
            for n in range(len(flat.kind))
        ]
    numbers: dict[Any, int] = {}
    assert fold(flat, 0).tolist() == [numbers.setdefault(c, len(numbers)) for c in colours]
    assert len(numbers) < len(flat.kind)
