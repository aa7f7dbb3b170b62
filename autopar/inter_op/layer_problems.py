"""The sharding problems of a step's layers, each posed once: what solved a layer's layouts also spells them out.

In: a step's layers as stages (`Parts`), what is forbidden and asked for. Out, for a distinct layer, what it keeps for
its backward pass, and a mesh: its `MeshProblem`, the same one each time it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.inter_op.graph_builder import Alike
from autopar.inter_op.layer_pins import Pinned, on_mesh, pins_of_layers
from autopar.inter_op.ranges import Wires, wires_between
from autopar.inter_op.stage_graph import stage_graph
from autopar.intra_op.mesh_problem import Asked, MeshProblem
from autopar.intra_op.precision import rounded
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import pose_stage
from autopar.ir.cluster import DeviceSpec, LogicalMesh, MeshAxis
from autopar.ir.graph import Graph, TensorType
from autopar.ir.layer_text import indices_text
from autopar.ir.layers import REMAT, LayeredGraph, StageGraph
from autopar.ir.sharding import Pin

MeshKind = tuple[tuple[MeshAxis, ...], DeviceSpec]
"""What costs on a mesh follow from: any devices that have it are as good."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A step's layers as stages of their own: ``layers[k]`` is layer k's under the first choice of ``remats``. Equal
    ones have one number, ``number[k]``; ``example[number]`` is the first layer that has it, ``graphs[remat][number]``
    what it is under each choice,
    ``pinned[number]`` what the user fixed in it."""

    layered: LayeredGraph
    remats: tuple[str, ...]
    layers: tuple[StageGraph, ...]
    graphs: dict[str, tuple[StageGraph, ...]]
    number: tuple[int, ...]
    example: tuple[int, ...]
    pinned: tuple[tuple[Pinned, ...], ...]

    def apart(self, k: int, remat: str) -> StageGraph:
        """Layer ``k`` as a stage of its own under a choice of ``remats``: its number's, with the layer's own inputs and
        what crosses to and from it."""
        n, mine = self.number[k], self.layers[k]
        theirs, out = self.graphs[self.remats[0]][n], self.graphs[remat][n]
        if out.start == k:
            return out
        receives, sends = (
            {(there.phase, there.value): here.value for there, here in zip(before, after, strict=True)}
            for before, after in ((theirs.receives, mine.receives), (theirs.sends, mine.sends))
        )
        return replace(
            out,
            start=k,
            stop=k + 1,
            graph=replace(out.graph, arg_paths=mine.graph.arg_paths),
            inputs=mine.inputs,
            input_values=mine.input_values,
            receives=tuple(replace(port, value=receives[port.phase, port.value]) for port in out.receives),
            sends=tuple(replace(port, value=sends[port.phase, port.value]) for port in out.sends),
            origins=mine.origins,
            body_origins=tuple((k, q) if layer >= 0 else (layer, q) for layer, q in out.body_origins),
        )

    @cached_property
    def wires(self) -> Wires:
        """What layers share."""
        return wires_between(self.layered, self.layers)

    def to_solve(self) -> Parts:
        """What distinct layers are solved from alone, for another process: without what the whole step's layers, passes
        and update compute, of which a deep step has hundreds of times as much."""
        layered, nothing = self.layered, Graph(values=(), nodes=(), inputs=(), outputs=())
        bare = replace(layered, kinds=(), update=nothing, update_layers=(), before=None)
        return replace(self, layered=bare, layers=tuple(replace(part, graph=nothing) for part in self.layers))


def parts_of(layered: LayeredGraph, remats: Sequence[str] = REMAT, pins: Sequence[Pin] = ()) -> Parts:
    """Every layer as a stage of its own, equal ones found; ``remats``: what a layer may keep (`ir.layers.REMAT`), of a
    step without a backward pass "none" alone. Raises ShardingError as `pins_of_layers`."""
    remats = tuple(remats) if layered.loss >= 0 else ("none",)
    alike = Alike()
    first = tuple(stage_graph(layered, k, k + 1, remats[:1], alike) for k in range(len(layered.layers)))
    pinned = pins_of_layers(layered, first, pins)
    seen: dict[object, int] = {}
    number = tuple(
        seen.setdefault((part.graph.fingerprint, layered.layers[k].kind, _alike(pinned[k])), len(seen))
        for k, part in enumerate(first)
    )
    example = tuple(number.index(n) for n in range(len(seen)))
    graphs = {r: tuple(stage_graph(layered, k, k + 1, [r]) for k in example) for r in remats[1:]}
    graphs[remats[0]] = tuple(first[k] for k in example)
    return Parts(
        layered=layered, remats=remats, layers=first, graphs=graphs, number=number, example=example,
        pinned=tuple(pinned[k] for k in example),
    )  # fmt: skip


def distinct_layers(parts: Parts) -> tuple[str, ...]:
    """Which layers are one problem, in a line, and why equal ones are not (`told_apart`)."""
    count, numbers = len(parts.layered.layers), range(len(parts.example))
    alike = (indices_text([k for k in range(count) if parts.number[k] == n]) for n in numbers)
    if len(numbers) == count:
        return (f"{count} layers, no two alike", *told_apart(parts))
    return (f"{count} layers, {len(numbers)} distinct: {'; '.join(alike)}", *told_apart(parts))


def told_apart(parts: Parts) -> tuple[str, ...]:
    """A line on every number of `Parts` whose layers compute what those of an earlier number do, and why they are
    problems of their own."""
    out: list[str] = []
    first: dict[int, int] = {}
    for n, k in enumerate(parts.example):
        m = first.setdefault(parts.layered.layers[k].kind, n)
        if m != n:
            layers = [j for j, number in enumerate(parts.number) if number == n]
            what = f"layer{'s' if len(layers) > 1 else ''} {indices_text(layers)}"
            out.append(f"{what}: planned apart from layer {parts.example[m]}, which {_difference(parts, n, m)}")
    return tuple(out)


def _difference(parts: Parts, m: int, n: int) -> str:
    """What tells the layers of number ``n`` from those of number ``m``."""
    if _alike(parts.pinned[m]) != _alike(parts.pinned[n]):
        return "is pinned otherwise"
    one, other = (parts.layers[parts.example[number]] for number in (m, n))
    for what, ports in (("takes", "receives"), ("gives", "sends")):
        mine, theirs = (Counter(port.phase for port in getattr(part, ports)) for part in (other, one))
        if mine != theirs:
            return f"{what} other values of other layers: {_counts(mine, theirs)}"
    for what in ("primitive", "result_types"):
        mine, theirs = (Counter(getattr(n, what) for n in part.graph.nodes[part.loop + 1 :]) for part in (other, one))
        if mine != theirs:
            return f"has another update: {_counts(mine, theirs)}"
    return "has what it trains in another order, or an update with other parameters"


def _counts(mine: Counter[Any], theirs: Counter[Any]) -> str:
    changed = {name: mine[name] - theirs[name] for name in mine | theirs if mine[name] != theirs[name]}
    return ", ".join(
        f"{abs(count)} {_named(what)} {'more' if count > 0 else 'fewer'}" for what, count in changed.items()
    )


def _named(what: str | tuple[TensorType, ...]) -> str:
    return what if isinstance(what, str) else "of " + ", ".join(map(str, what))


def _alike(pinned: Sequence[Pinned]) -> object:
    """What of a layer's pins says how it is solved."""
    return tuple((one.at, one.path if one.at < 0 else "", one.pin.dims) for one in pinned)


class LayerProblems:
    """The sharding problems of ``parts`` on meshes, each posed once. ``forbid``: collectives not to use; ``asked``:
    what else the user fixed."""

    def __init__(self, parts: Parts, forbid: Sequence[str] = (), asked: Asked | None = None) -> None:
        self.parts, self.forbid, self.asked = parts, tuple(forbid), asked or Asked()
        self._meshes: dict[MeshKind, Mesh] = {}
        self._posed: dict[tuple[int, str, MeshKind], MeshProblem] = {}

    def mesh(self, logical: LogicalMesh) -> Mesh:
        """``logical`` as the problems see it: one for all meshes of equal axes and devices."""
        kind = (logical.axes, logical.device)
        if kind not in self._meshes:
            layers = (rounded(p.graph, logical.device.platform) for p in self.parts.graphs[self.parts.remats[0]])
            self._meshes[kind] = Mesh(logical, self.forbid, frozenset[tuple[int, ...]]().union(*layers))
        return self._meshes[kind]

    def posed(self, number: int, remat: str, logical: LogicalMesh) -> MeshProblem:
        """The problem on ``logical`` of the layers with this number (`Parts.number`), which keep ``remat``."""
        key = (number, remat, (logical.axes, logical.device))
        if key not in self._posed:
            asked = replace(self.asked, pins=on_mesh(self.parts.pinned[number], logical))
            self._posed[key] = pose_stage(self.parts.graphs[remat][number], self.mesh(logical), asked)
        return self._posed[key]
