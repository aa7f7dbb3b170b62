"""Ranges of layers from layouts of single ones: against all layouts of small chains, and against whole stages."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.layering import layered
from autopar.inter_op.layer_layouts import table_of
from autopar.inter_op.layer_problems import parts_of
from autopar.inter_op.ranges import FIELDS, Price, Ranges, ranges, wires_between
from autopar.inter_op.stage_graph import stage_graph
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import StageProblem, pose_stage
from autopar.ir.graph import Graph, TensorType
from autopar.ir.layers import LayeredGraph, Port, StageGraph
from autopar.ir.pipeline import Layout, Transients, fullest
from autopar.ir.presets import cluster_from_text
from benchmarks.models import gpt
from tests.null.pipelines import stage_cost

pytestmark = pytest.mark.xdist_group("ranges")  # one process makes what all tests of the file share

TYPE = TensorType(shape=(8, 8), dtype="float32")
EMPTY = Graph(values=(), nodes=(), inputs=(), outputs=())


class Chain:
    """Layers in a row, random layouts and costs of resharding; value k + 1 is made by layer k, and ``skips`` are
    (layer, later layer) that have one more value between them."""

    def __init__(self, rng: np.random.Generator, count: int, skips: tuple[tuple[int, int], ...] = ()) -> None:
        self.count, self.codes, self.m = count, 3, 4
        self.wires = [(k, k + 1) for k in range(count - 1)] + list(skips)
        self.reshard = rng.random((3, 3)) * 0.5
        np.fill_diagonal(self.reshard, 0.0)
        self.layouts: list[list[Layout]] = []
        for k in range(count):
            sends = sum(p == k for p, _ in self.wires) + sum(c == k for _, c in self.wires)
            self.layouts.append([self._layout(rng, sends) for _ in range(int(rng.integers(1, 4)))])

    def _layout(self, rng: np.random.Generator, ports: int) -> Layout:
        def codes() -> tuple[int, ...]:
            return tuple(int(c) for c in rng.integers(0, self.codes, ports))

        figures = dict(zip(FIELDS, map(float, rng.random(len(FIELDS))), strict=True))
        most = figures["activation_bytes"] / max(1, 2 * ports)

        def kept() -> tuple[float, ...]:
            return tuple(most * float(b) for b in rng.random(ports) * rng.integers(0, 2, ports))

        return Layout(
            remat="none", cost=stage_cost(transients(rng), **figures),
            receives=codes(), sends=codes(), inputs=(), kept=kept(),
            sends_kept=kept(),
        )  # fmt: skip

    def parts(self) -> list[StageGraph]:
        """Layer k's ports: what it sends and receives forwards, then backwards."""
        out = []
        for k in range(self.count):
            made = [v for v, (p, _) in enumerate(self.wires) if p == k]
            read = [v for v, (_, c) in enumerate(self.wires) if c == k]
            sends = [self._port(v, "forward") for v in made] + [self._port(v, "backward") for v in read]
            receives = [self._port(v, "forward") for v in read] + [self._port(v, "backward") for v in made]
            out.append(
                StageGraph(
                    origins=(),
                    body_origins=(),
                    start=k, stop=k + 1, graph=EMPTY, loop=0, boundary=0, inputs=(), input_values=(),
                    receives=tuple(receives), sends=tuple(sends),
                )
            )  # fmt: skip
        return out

    def _port(self, value: int, phase: Any) -> Port:
        return Port(value=value, phase=phase, node=0, stored=0, type=TYPE)

    def graph(self) -> Any:
        return SimpleNamespace(
            num_microbatches=self.m,
            makers={v: p for v, (p, _) in enumerate(self.wires)},
            users={v: (c,) for v, (_, c) in enumerate(self.wires)},
        )

    def ranges(self, prices: list[Price]) -> Ranges:
        graph = self.graph()
        wires, count = wires_between(graph, self.parts()), graph.num_microbatches
        return ranges(wires, count, self.layouts, prices, lambda _: self.reshard, lambda _: np.zeros(3))

    def cost(self, start: int, choice: list[int]) -> np.ndarray:
        """What a choice for layers ``start`` … costs."""
        parts = self.parts()
        picked = {start + i: self.layouts[start + i][c] for i, c in enumerate(choice)}
        total = np.zeros(len(FIELDS))
        for layout in picked.values():
            figures = np.array([getattr(layout.cost, f) for f in FIELDS])
            total[:-1] += figures[:-1]
            total[-1] = max(total[-1], figures[-1])
        for v, (p, c) in enumerate(self.wires):
            if p in picked and c in picked:
                there = [(q.value, q.phase) for q in parts[p].sends].index((v, "forward"))
                here = [(q.value, q.phase) for q in parts[c].receives].index((v, "forward"))
                total[0] += self.reshard[picked[p].sends[there], picked[c].receives[here]]
                there = [(q.value, q.phase) for q in parts[c].sends].index((v, "backward"))
                here = [(q.value, q.phase) for q in parts[p].receives].index((v, "backward"))
                total[1] += self.reshard[picked[c].sends[there], picked[p].receives[here]]
                made = [(q.value, q.phase) for q in parts[p].sends].index((v, "forward"))
                read = [(q.value, q.phase) for q in parts[c].receives].index((v, "forward"))
                if picked[p].sends[made] == picked[c].receives[read]:
                    total[FIELDS.index("activation_bytes")] -= min(picked[p].sends_kept[made], picked[c].kept[read])
        return total

    def priced(self, cost: np.ndarray, price: Price) -> float:
        weights = np.array([self.m] * 3 + [1, 1, price.state_s, price.activation_s, 0, 0, 0, 0])
        return float(cost @ weights)


@pytest.mark.parametrize("seed", range(4))
def test_equal_layers_are_what_they_are_apart(seed: int) -> None:
    """Two runs of layers with one list of layouts each, other layers around them: as with lists of their own."""
    prices = [Price(0.0, 0.0), Price(0.3, 0.2)]
    chain = Chain(np.random.default_rng(seed), 12)
    for k in (*range(3, 8), *range(9, 11)):
        chain.layouts[k] = chain.layouts[2 if k < 8 else 8]
    together = chain.ranges(prices)
    chain.layouts = [list(each) for each in chain.layouts]
    apart = chain.ranges(prices)
    assert len(together.cost[0]) < len(apart.cost[0]) == 12 * 13 / 2
    for price, (start, stop) in itertools.product(range(2), itertools.combinations(range(13), 2)):
        assert np.array_equal(together.at(start, stop), apart.at(start, stop))
        assert together.picked(price, start, stop) == apart.picked(price, start, stop)
        assert together.stage_cost(price, start, stop) == apart.stage_cost(price, start, stop)
    for one, other in itertools.combinations(range(2, 6), 2):  # ranges of equal layers
        alike = together.picked(1, one, one + 3) == together.picked(1, other, other + 3)
        assert alike == (together.same(1, one, one + 3) == together.same(1, other, other + 3))


@pytest.mark.parametrize("skips", [(), ((0, 3),)])
def test_a_layer_without_layouts_is_in_no_range(skips: tuple[tuple[int, int], ...]) -> None:
    """All other ranges cost what they do without it."""
    prices = [Price(0.0, 0.0), Price(0.3, 0.2)]
    chain = Chain(np.random.default_rng(5), 6, skips)
    whole = chain.ranges(prices)
    chain.layouts[2] = []
    found = chain.ranges(prices)
    for start, stop in itertools.combinations(range(7), 2):
        if start <= 2 < stop:
            assert np.isinf(found.at(start, stop)).all()
        else:
            assert np.array_equal(found.at(start, stop), whole.at(start, stop))
            for price in range(2):
                assert found.picked(price, start, stop) == whole.picked(price, start, stop)


@pytest.mark.parametrize("seed", range(20))
def test_chains_take_the_cheapest_layouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = Chain(rng, int(rng.integers(2, 5)))
    prices = [Price(0.0, 0.0), Price(2.0, 5.0)]
    found = chain.ranges(prices)
    for number, price in enumerate(prices):
        for start, stop in itertools.combinations(range(chain.count + 1), 2):
            every = itertools.product(*(range(len(chain.layouts[k])) for k in range(start, stop)))
            best = min(chain.priced(chain.cost(start, list(c)), price) for c in every)
            assert chain.priced(found.at(start, stop)[number], price) == pytest.approx(best)
            _counted(chain, found, number, start, stop)


def transients(rng: np.random.Generator) -> Transients:
    return Transients(**dict(zip(Transients.__slots__, map(float, rng.random(8)), strict=True)))


def test_a_range_needs_beside_what_its_neediest_layer_does() -> None:
    """In each phase another layer may be that."""
    chain = Chain(np.random.default_rng(5), 4)
    found = chain.ranges([Price(0.0, 0.0), Price(2.0, 5.0)])
    for number in range(2):
        for start, stop in itertools.combinations(range(chain.count + 1), 2):
            chosen = found.picked(number, start, stop)
            picked = [chain.layouts[start + i][c] for i, c in enumerate(chosen)]
            cost = found.stage_cost(number, start, stop)
            assert cost.transient_bytes == max(x.cost.transient_bytes for x in picked)
            assert cost.transients == fullest([x.cost for x in picked])
            for name in ("forward_bytes", "backward_bytes", "input_grad_bytes", "weight_grad_bytes"):
                most = max(getattr(x.cost.transients, name) for x in picked)
                assert getattr(cost.transients, name) == most
            stays = sum(x.cost.results_bytes for x in picked)
            most = max(x.cost.transients.update_bytes - x.cost.results_bytes for x in picked)
            assert cost.transients.update_bytes == pytest.approx(stays + most)


def _counted(chain: Chain, found: Ranges, number: int, start: int, stop: int) -> None:
    choice = found.picked(number, start, stop)
    assert found.at(start, stop)[number] == pytest.approx(chain.cost(start, choice))


@pytest.mark.parametrize("seed", range(20))
def test_what_skips_layers_is_counted_in_full(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = Chain(rng, 5, skips=((0, 2), (1, 4), (0, 4)))
    found = chain.ranges([Price(0.0, 0.0)])
    for start, stop in itertools.combinations(range(chain.count + 1), 2):
        _counted(chain, found, 0, start, stop)


@pytest.mark.parametrize("seed", range(5))
def test_what_two_layers_train_is_held_once_and_its_gradient_is_brought_over(seed: int) -> None:
    """A weight that two layers read: the second takes it from the first, gives its part of the gradient back, once a
    step, and what both would hold is held once."""
    rng = np.random.default_rng(seed)
    reshard, size_bytes = rng.random((3, 3)), rng.random(3) * 0.1
    weight = Port(value=0, phase="gradient", node=0, stored=0, type=TYPE)
    reads = Graph(values=(TYPE,), nodes=(), inputs=(0,), outputs=())

    def part(k: int, receives: tuple[Port, ...], sends: tuple[Port, ...]) -> StageGraph:
        return StageGraph(
            origins=(),
            body_origins=(),
            start=k, stop=k + 1, graph=reads, loop=0, boundary=0, inputs=((4, 0, 0),), input_values=(0,),
            receives=receives, sends=sends,
        )  # fmt: skip

    def layout(ports: int, sends: int) -> Layout:
        figures = dict(zip(FIELDS, map(float, rng.random(len(FIELDS))), strict=True))
        code = lambda count: tuple(int(c) for c in rng.integers(0, 3, count))
        return Layout(
            remat="none", cost=stage_cost(transients(rng), **figures),
            receives=code(ports), sends=code(sends), inputs=code(1),
            kept=(0.0,) * ports, sends_kept=(0.0,) * sends,
        )  # fmt: skip

    first, second = [layout(1, 0) for _ in range(3)], [layout(0, 1) for _ in range(3)]
    graph: Any = SimpleNamespace(num_microbatches=4, makers={}, users={0: (0, 1)})
    price = Price(2.0, 0.0)
    parts = [part(0, (weight,), ()), part(1, (), (weight,))]
    wires = wires_between(graph, parts)
    found = ranges(wires, graph.num_microbatches, [first, second], [price], lambda _: reshard, lambda _: size_bytes)
    weights = np.array([4] * 3 + [1, 1, 2.0, 0, 0, 0, 0, 0])
    best = np.inf
    for a, c in itertools.product(first, second):
        total = sum(np.array([getattr(x.cost, f) for f in FIELDS]) for x in (a, c))
        total[FIELDS.index("grad_sync_s")] += reshard[c.sends[0], a.receives[0]] + reshard[a.inputs[0], c.inputs[0]]
        total[FIELDS.index("state_bytes")] -= size_bytes[c.inputs[0]]
        best = min(best, float(total @ weights))
    assert found.at(0, 2)[0] @ weights == pytest.approx(best)


def test_empty_ranges_have_no_cost() -> None:
    chain = Chain(np.random.default_rng(0), 3)
    found = chain.ranges([Price(0.0, 0.0)])
    for start in range(3):
        assert (found.number[start, : start + 1] == -1).all()
        assert np.isfinite(found.cost[0, found.number[start, start + 1 :]]).all()


@pytest.fixture(scope="module")
def small() -> LayeredGraph:
    step, args = gpt(layers=3, hidden=256, heads=4, seq=128, vocab=1024, batch=32)
    return layered(step, args, num_microbatches=2, donate_argnums=(0,)).graph


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_ranges_cost_what_whole_stages_do(small: LayeredGraph, shape: tuple[int, ...]) -> None:
    """The full problem of a stage, solved as one, is at most 1 % from what its layers add up to."""
    logical = logical_mesh(cluster_from_text("cpu:4"), shape)
    mesh = Mesh(logical)
    table = table_of(parts_of(small, ("none",)), logical)
    weights = np.array([small.num_microbatches] * 3 + [1, 1, 0, 0, 0, 0, 0, 0])
    for start, stop in ((0, 2), (1, 3), (1, 4), (0, len(small.layers))):
        part = stage_graph(small, start, stop, ["none"] * (stop - start))
        whole = StageProblem(part, pose_stage(part, mesh)).solve()
        figures = np.array([getattr(whole.cost, f) for f in FIELDS])
        ratio = table.ranges.at(start, stop)[0] @ weights / (figures @ weights)
        assert 0.98 <= ratio <= 1.01


@pytest.mark.slow
def test_dearer_memory_is_used_less(small: LayeredGraph) -> None:
    """Along rising prices state never grows, and time never falls."""
    table = table_of(parts_of(small, ("none", "full")), logical_mesh(cluster_from_text("cpu:4"), (4,)))
    n = len(small.layers)
    cost, prices = table.ranges.at(0, n), table.ranges.prices
    held = cost[:, FIELDS.index("state_bytes")] + cost[:, FIELDS.index("activation_bytes")]
    seconds = cost[:, :3].sum(1) * small.num_microbatches + cost[:, 3:5].sum(1)
    dearest = max(range(len(prices)), key=lambda k: prices[k].state_s)
    assert held[dearest] <= held[0]
    assert seconds[0] == pytest.approx(seconds.min())
