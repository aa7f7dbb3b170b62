"""What every range of layers costs on one mesh: layouts of single layers put together.

In: for every layer of a step a list of layouts (`ir.pipeline.Layout`), what resharding between two codes of a type
takes on this mesh, and prices on memory. Out: for every range and price the cheapest choice of one layout per layer.

With w_k(c) what layout c of layer k costs in a step, memory at its price included, and r_pk(a, c) what is resharded
between layers p < k (activations, cotangents, shared parameters) where p takes layout a and k takes c:

    minimise  Σ_k w_k(c_k)  +  Σ_(p,k) r_pk(c_p, c_k)       over c_i … c_(j−1)

Neighbours make a chain, for which dynamic programming over j, for all i at once, is exact. Couplings that skip layers
are counted in full along each chain's own past, so that the cost of a range is always that of its choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import TensorType
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.pipeline import Beside, Layout, StageCost

Costs = Callable[[TensorType], NDArray[np.float64]]
"""Type → float64[codes, codes]: seconds to reshard it from one code to another on the mesh."""
Bytes = Callable[[TensorType], NDArray[np.float64]]
"""Type → float64[codes]: bytes on a device."""
WireKind: TypeAlias = Literal["forward", "backward", "gradient", "maker keeps", "reader keeps", "argument"]
Wire: TypeAlias = tuple[WireKind, TensorType, int, int]
"""What two layers share: (what, its type, the number of the port or input at the first, at the second)."""
Wires: TypeAlias = tuple[tuple[tuple[int, tuple[Wire, ...]], ...], ...]
"""Layer k → (earlier layer p, what the two share), of equal layers the same object."""

FIELDS = tuple(field.name for field in fields(StageCost) if field.name != "transients")
"""Of a StageCost, in the order of the last axis of all arrays here. Transients by phase follow from the choice
(`Ranges.stage_cost`): only of the few ranges that are built are they wanted."""
_TRANSIENT = FIELDS.index("transient_bytes")
_FORWARD, _INPUT, _WEIGHT = (FIELDS.index(f"{name}_s") for name in ("forward", "input_grad", "weight_grad"))
_SYNC, _UPDATE = FIELDS.index("grad_sync_s"), FIELDS.index("update_s")
_STATE, _ACTIVATION = FIELDS.index("state_bytes"), FIELDS.index("activation_bytes")


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds a byte of state, and of activations of one microbatch."""

    state_s: float
    activation_s: float


@dataclass(frozen=True)
class Ranges:
    """``number`` int64[start, stop] of layers start … stop − 1, one of ranges of as many layers of a row of equal ones;
    -1 where stop ≤ start. ``cost`` float64[price, number, field]: the `FIELDS` of a StageCost. ``last`` int16[price,
    number]: the layout of the range's last layer; ``before`` int16[price, number, layout]: that of the layer before,
    where the last has the layout. ``layers[layer][layout]``: what that takes by itself, one tuple of equal layers."""

    prices: tuple[Price, ...]
    number: NDArray[np.int64]
    cost: NDArray[np.float64]
    last: NDArray[np.int16]
    before: NDArray[np.int16]
    layers: tuple[tuple[StageCost, ...], ...]
    _chains: dict[tuple[int, int, int, int], _Chain] = field(
        default_factory=dict[tuple[int, int, int, int], "_Chain"], compare=False, repr=False
    )
    """(price, start, last layer, its layout) → what leads there."""
    _alike: dict[tuple[int, int, int], _Chain] = field(
        default_factory=dict[tuple[int, int, int], "_Chain"], compare=False, repr=False
    )
    """(number of what is before, id of what is known of the layer, layout) → the chain."""

    def at(self, start: int, stop: int) -> NDArray[np.float64]:
        """float64[price, field]: what layers ``start`` to ``stop`` cost."""
        return self.cost[:, self.number[start, stop]]

    def picked(self, price: int, start: int, stop: int) -> list[int]:
        """The layout of each layer of a range, at price number ``price``."""
        out = [int(self.last[price, self.number[start, stop]])]
        for k in range(stop - 1, start, -1):
            out.append(int(self.before[price, self.number[start, k + 1], out[-1]]))
        return out[::-1]

    def same(self, price: int, start: int, stop: int) -> int:
        """A number that ranges of as many equal layers with the same layouts share, and no others."""
        return self._chain(price, start, stop).number

    def stage_cost(self, price: int, start: int, stop: int) -> StageCost:
        """The cost of layers ``start`` to ``stop`` at price number ``price``; of transients, see `Beside`."""
        figures = dict(zip(FIELDS, self.at(start, stop)[price].tolist(), strict=True))
        return StageCost(**figures, transients=self._chain(price, start, stop).beside.most)

    def _chain(self, price: int, start: int, stop: int) -> _Chain:
        """The layers of a range in their layouts, put together from what is known of its beginnings."""
        todo: list[tuple[int, int]] = []
        layer, layout = stop - 1, int(self.last[price, self.number[start, stop]])
        while (found := self._chains.get((price, start, layer, layout))) is None:
            todo.append((layer, layout))
            if layer == start:
                break
            layer, layout = layer - 1, int(self.before[price, self.number[start, layer + 1], layout])
        for layer, layout in reversed(todo):
            cost = self.layers[layer][layout]
            key = (-1 if found is None else found.number, id(self.layers[layer]), layout)
            if key not in self._alike:
                self._alike[key] = _Chain(
                    len(self._alike), Beside.of(cost) if found is None else found.beside.then(cost)
                )
            found = self._chains[price, start, layer, layout] = self._alike[key]
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class _Chain:
    """Layers in certain layouts, and what they need beside each other."""

    number: int
    beside: Beside


@dataclass(slots=True)
class _Coupling:
    """What two layers of one range take beside their own: float64[layouts of the first, of the second] seconds per
    microbatch, forwards and backwards, and per step; bytes of activations that both count, ``shared``. ``saved``
    float64[layouts of the second]: bytes of state that both count."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    once: NDArray[np.float64]
    shared: NDArray[np.float64]
    saved: NDArray[np.float64]

    def add_to(self, figures: NDArray[np.float64], first: Any) -> None:
        """Adds it to ``figures`` float64[…, layouts of the second, `FIELDS`], where the first has the layouts ``first``
        (indices […])."""
        figures[..., _FORWARD] += self.forward[first]
        figures[..., _INPUT] += self.backward[first]
        figures[..., _SYNC] += self.once[first]
        figures[..., _ACTIVATION] -= self.shared[first]
        figures[..., _STATE] -= self.saved


def ranges(
    wires: Wires,
    num_microbatches: int,
    layouts: Sequence[Sequence[Layout]],
    prices: Sequence[Price],
    reshard_s: Costs,
    size_bytes: Bytes,
) -> Ranges:
    """The cheapest layouts of every range of layers.

    Args:
        wires: what layers share (`wires_between`).
        layouts: what layer k may choose from; nothing: no range has it.
        size_bytes: bytes on a device by code, of the arguments that several layers read.
    """
    couplings = _couplings(wires, layouts, reshard_s, size_bytes)
    count, width = len(layouts), max(len(found) for found in layouts)
    weights = np.zeros((len(prices), len(FIELDS)))
    weights[:, [_FORWARD, _INPUT, _WEIGHT]] = num_microbatches
    weights[:, [_SYNC, _UPDATE]] = 1.0
    weights[:, _STATE], weights[:, _ACTIVATION] = [p.state_s for p in prices], [p.activation_s for p in prices]
    number = np.full((count, count + 1), -1)
    cost: list[NDArray[np.float64]] = []
    ends: list[NDArray[np.int16]] = []
    behind: list[NDArray[np.int16]] = []
    """Of the ranges that are looked at up to each layer, [price, range, …]"""
    seen = 0
    alone = {id(found): tuple(c.cost for c in found) for found in layouts}
    figures = {key: np.array([[getattr(c, f) for f in FIELDS] for c in x]) for key, x in alone.items()}
    own = [figures[id(found)].reshape(-1, len(FIELDS)) for found in layouts]
    priced = {key: (x.reshape(-1, len(FIELDS)) @ weights.T).T for key, x in figures.items()}
    """[price, layout]: what one costs by itself"""
    chains: dict[tuple[int, int, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    """(id of what two neighbours share, their layouts) → [layout of the first, of the second, field], and priced"""
    every = np.arange(len(prices))[:, None, None]
    best = np.full((len(prices), count, width), np.inf)
    """[price, layers before the last, layout of the last]: of ranges that end with k"""
    sums = np.zeros((len(prices), count, width, len(FIELDS)))
    skips = any(p < k - 1 for k, found in enumerate(couplings) for p, _ in found)
    past = np.zeros((len(prices), count, width, count if skips else 0), np.int16)
    """[price, start, …]: the layouts on the way to each of ``best``, where couplings that skip layers ask for them."""
    first = 0
    """The first of the equal layers that end with k; ranges that start behind it are those of a layer before."""
    for k in range(count):
        here, alone_cost = len(layouts[k]), priced[id(layouts[k])]
        if not k or skips or layouts[k] is not layouts[k - 1]:
            first = k
        elif k - first > 1 and _next_to(couplings, k) is not _next_to(couplings, k - 1):
            first = k - 1
        n = min(k, first + 1)  # starts that are looked at, k itself apart
        starts = np.arange(n)[None, :]
        number[:n, k + 1], number[n:k, k + 1], number[k, k + 1] = seen + starts, number[n - 1 : k - 1, k], seen + n
        seen += n + 1
        came = np.full((len(prices), n + 1, width), -1, np.int16)
        if n and not (here and layouts[k - 1]):  # a layer that cannot be on the mesh
            best[:, k - n + 1 : k + 1] = np.inf
        elif n:
            last, rows, columns = len(layouts[k - 1]), starts[..., None], np.arange(here)
            led, led_sums = (x[:, k - n : k][:, ::-1] for x in (best, sums))  # [price, start, …] up to k - 1
            skipping = [(p, coupling) for p, coupling in couplings[k] if p < k - 1]
            neighbours = _next_to(couplings, k)
            if (id(neighbours), last, here) not in chains:
                chained = np.zeros((last, here, len(FIELDS)))
                if neighbours is not None:
                    neighbours.add_to(chained, slice(None))
                chains[id(neighbours), last, here] = chained, (chained @ weights.T).transpose(2, 0, 1)[:, None]
            chained, chained_cost = chains[id(neighbours), last, here]
            total = led[:, :, :last, None] + chained_cost
            beyond = np.zeros((len(prices), n, last, here, len(FIELDS))) if skipping else None
            for p, coupling in skipping:  # of ranges that begin after layer p, nothing
                assert beyond is not None
                coupling.add_to(beyond[:, : p + 1], past[:, : p + 1, :last, p])
            if beyond is not None:
                total += np.einsum("psabf,pf->psab", beyond, weights)
            at = total.argmin(axis=2)
            before = led_sums[every, rows, at]
            fresh = before + chained[at, columns] + own[k]
            if beyond is not None:
                fresh += beyond[every, rows, at, columns]
            fresh[..., _TRANSIENT] = np.maximum(before[..., _TRANSIENT], own[k][:, _TRANSIENT])
            new = np.take_along_axis(total, at[:, :, None], axis=2)[:, :, 0] + alone_cost[:, None]
            best[:, k - n + 1 : k + 1] = np.inf
            best[:, k - n + 1 : k + 1, :here], sums[:, k - n + 1 : k + 1, :here] = new[:, ::-1], fresh[:, ::-1]
            came[:, :n, :here] = at
            if skips:
                old, past = past, np.zeros_like(past)
                past[:, :k, :here] = old[every, rows, at]
        if skips:
            past[:, : k + 1, :here, k] = np.arange(here)
        best[:, 0], best[:, 0, :here], sums[:, 0, :here] = np.inf, alone_cost, own[k]
        looked = np.append(starts, k)[None, :]
        ended = best[:, k - looked[0]]
        cheapest = ended.argmin(axis=2)
        found = np.maximum(sums[every[..., 0], k - looked, cheapest], 0.0)
        cost.append(np.where(np.isfinite(ended.min(axis=2))[..., None], found, np.inf))
        ends.append(cheapest.astype(np.int16))
        behind.append(came)
    return Ranges(
        prices=tuple(prices), number=number, cost=np.concatenate(cost, axis=1), last=np.concatenate(ends, axis=1),
        before=np.concatenate(behind, axis=1), layers=tuple(alone[id(found)] for found in layouts),
    )  # fmt: skip


def _next_to(couplings: Sequence[Sequence[tuple[int, _Coupling]]], k: int) -> _Coupling | None:
    """What layer k shares with the one before it."""
    return next((coupling for p, coupling in couplings[k] if p == k - 1), None)


def wires_between(layered: LayeredGraph, parts: Sequence[StageGraph]) -> Wires:
    """What the layers of a step share; ``parts``: layer k as a stage of its own, of any rematerialisation: ports do not
    depend on it."""
    sends = [{(port.value, port.phase): i for i, port in enumerate(part.sends)} for part in parts]
    wires: dict[tuple[int, int], list[Wire]] = {}
    readers: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    holders: dict[int, list[tuple[int, int]]] = {}
    """Value → the layer that makes it and those that read it, with the numbers of their ports."""
    for k, part in enumerate(parts):
        for i, port in enumerate(part.sends):
            if port.phase == "forward":
                holders.setdefault(port.value, []).append((k, i))
        for i, port in enumerate(part.receives):
            if port.phase == "forward":
                holders.setdefault(port.value, []).append((k, i))
            if port.phase == "forward" and port.value not in layered.makers:
                continue  # examples of the batch, which every stage is given as it wants them
            if port.phase == "forward":
                p = layered.makers[port.value]
                wires.setdefault((p, k), []).append(("forward", port.type, sends[p][port.value, "forward"], i))
            elif port.phase in ("backward", "gradient"):
                what: WireKind = "backward" if port.phase == "backward" else "gradient"
                for user in layered.users[port.value]:
                    if user > k and (port.value, port.phase) in sends[user]:
                        there = sends[user][port.value, port.phase]
                        wires.setdefault((k, user), []).append((what, port.type, i, there))
        for i, where in enumerate(part.inputs):
            readers.setdefault(where, []).append((k, i))
    for value, held in holders.items():
        for (p, i), (k, j) in itertools.pairwise(held):
            what = "maker keeps" if layered.makers.get(value) == p else "reader keeps"
            wires.setdefault((p, k), []).append((what, parts[k].receives[j].type, i, j))
    for found in readers.values():
        graph = parts[found[0][0]].graph
        for (p, i), (k, j) in itertools.pairwise(found):
            wires.setdefault((p, k), []).append(("argument", graph.values[graph.inputs[found[0][1]]], i, j))
    same: dict[tuple[Wire, ...], tuple[Wire, ...]] = {}
    out: list[list[tuple[int, tuple[Wire, ...]]]] = [[] for _ in parts]
    for (p, k), shared in sorted(wires.items(), key=lambda item: item[0]):
        out[k].append((p, same.setdefault(tuple(shared), tuple(shared))))
    return tuple(map(tuple, out))


def _couplings(
    wires: Wires, layouts: Sequence[Sequence[Layout]], reshard_s: Costs, size_bytes: Bytes
) -> list[list[tuple[int, _Coupling]]]:
    """Layer k → (earlier layer p, what the two share), one of equal layers."""
    made: dict[tuple[int, int, int], _Coupling] = {}
    out: list[list[tuple[int, _Coupling]]] = [[] for _ in layouts]
    for k, found in enumerate(wires):
        for p, shared in found:
            if not (layouts[p] and layouts[k]):
                continue
            key = (id(layouts[p]), id(layouts[k]), id(shared))
            if key not in made:
                made[key] = _coupling(shared, layouts[p], layouts[k], reshard_s, size_bytes)
            out[k].append((p, made[key]))
    return out


def _coupling(
    wires: Sequence[Wire],
    first: Sequence[Layout],
    second: Sequence[Layout],
    reshard_s: Costs,
    size_bytes: Bytes,
) -> _Coupling:
    shape = (len(first), len(second))
    out = _Coupling(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(len(second)))
    for what, value_type, i, j in wires:
        costs = reshard_s(value_type)
        if what == "forward":
            have, want = np.array([a.sends[i] for a in first]), np.array([c.receives[j] for c in second])
            out.forward += costs[have[:, None], want[None, :]]
        elif what in ("backward", "gradient"):
            want, have = np.array([a.receives[i] for a in first]), np.array([c.sends[j] for c in second])
            total = out.backward if what == "backward" else out.once
            total += costs[have[None, :], want[:, None]]
        elif what in ("maker keeps", "reader keeps"):
            codes, kept = ("sends", "sends_kept") if what == "maker keeps" else ("receives", "kept")
            one, other = np.array([getattr(a, codes)[i] for a in first]), np.array([c.receives[j] for c in second])
            mine, its = np.array([getattr(a, kept)[i] for a in first]), np.array([c.kept[j] for c in second])
            out.shared += np.where(one[:, None] == other, np.minimum(mine[:, None], its), 0.0)
        else:
            one, other = np.array([a.inputs[i] for a in first]), np.array([c.inputs[j] for c in second])
            out.once += costs[one[:, None], other[None, :]]
            out.saved += size_bytes(value_type)[other]
    return out
