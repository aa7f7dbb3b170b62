"""How the operators of layers are sharded inside their stages: what a runtime needs beside a pipeline's cuts.

A stage runs its layers' graphs one after the other, each with the shardings that it was solved with and that its cost
is of; between two layers of a stage a value is resharded as between stages, only on one mesh. So shardings are kept
once for all layers that run alike (`LayerSharding`), however many stages have such layers.

The graph of a layer is `inter_op.stage_graph` of that layer alone: its loop over microbatches, which receives and sends
values through ports, and its part of the update. `LayerWiring` says what crosses its ports; equal (value, phase) of two
layers are the two ends of one thing, on one stage (a *join*, `joins`) or on two (in a `Cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.ir.cluster import MeshAxis
from autopar.ir.errors import VerifyError
from autopar.ir.layers import PortPhase
from autopar.ir.pipeline import StageCost
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import (
    Assumption,
    AxisUse,
    Chain,
    NodeStrategy,
    OperatorRow,
    RegionPlan,
    ReplicatedNode,
    verify_uses,
)
from autopar.ir.strategy import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """How a layer runs on a mesh.

    Attributes:
        axes: of the logical mesh; stages on other devices may share it.
        remat: what the layer keeps of its forward pass (`ir.layers.REMAT`).
        cost: what it takes as a stage of its own.
        receives, sends: specs at its ports, in the order of its graph's; ``inputs``: those of what it reads of the
            step's arguments, gives back and holds.
        strategies, root, chains, collectives: as `ir.sharding_plan.ShardingPlan` has them, for the layer's graph; a
            collective's ``trips`` count microbatches.
        operators: what ``root`` says, for people; ``uses``: what each mesh axis splits of that.
    """

    axes: tuple[MeshAxis, ...]
    remat: str
    cost: StageCost
    receives: tuple[ShardingSpec, ...]
    sends: tuple[ShardingSpec, ...]
    strategies: tuple[NodeStrategy, ...]
    root: RegionPlan
    chains: tuple[Chain, ...]
    collectives: tuple[Collective, ...]
    operators: tuple[OperatorRow, ...]
    uses: tuple[AxisUse, ...]
    replicated: tuple[ReplicatedNode, ...] = ()
    assumptions: tuple[Assumption, ...] = ()

    @property
    def inputs(self) -> tuple[ShardingSpec, ...]:
        """Specs of the graph's inputs, in order."""
        return self.root.inputs

    def verify(self) -> None:
        """Raises VerifyError where a spec names an axis twice or one that there is not, a node has a strategy that
        there is not, a chain's specs are not of its type's rank, or a figure of the cost is no figure."""
        self.cost.verify()
        verify_uses(self.uses, self.axes)
        for spec in self._specs():
            _verify_spec(spec, self.axes)
        for chain in self.chains:
            _verify_chain(chain, self.axes)
        for region in _regions(self.root):
            for p, row in enumerate(region.nodes):
                if not -1 <= row < len(self.strategies) or (row < 0) != (p in dict(region.bodies)):
                    raise VerifyError(f"node {p} has strategy {row} of {len(self.strategies)}")
        for each in self.operators:
            if not 0 <= each.strategy < len(self.strategies) or each.count < 1:
                raise VerifyError(f"{each.count} x {each.primitive} with strategy {each.strategy}")

    def _specs(self) -> Iterator[ShardingSpec]:
        yield from self.receives
        yield from self.sends
        for strategy in self.strategies:
            yield from strategy.operands
            yield from strategy.results
        for region in _regions(self.root):
            yield from region.inputs
            yield from region.outputs
            yield from (spec for _, spec in (*region.rebased, *region.copies))


def _regions(region: RegionPlan) -> Iterator[RegionPlan]:
    yield region
    for _, bodies in region.bodies:
        for body in bodies:
            yield from _regions(body)


def _verify_spec(spec: ShardingSpec, axes: Sequence[MeshAxis]) -> None:
    spec.verify()
    names = {a.name for a in axes}
    unknown = ({a for dim in spec.dims for a in dim} | set(spec.unreduced)) - names
    if unknown:
        raise VerifyError(f"sharding {spec} uses {min(unknown)!r}; the axes are {', '.join(sorted(names))}")


def _verify_chain(chain: Chain, axes: Sequence[MeshAxis]) -> None:
    for spec in (chain.src, chain.dst):
        _verify_spec(spec, axes)
        if len(spec.dims) != len(chain.type.shape):
            raise VerifyError(f"a chain of {chain.type} leads through {spec}, which has another rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWiring:
    """What one layer reads and gives: ``receives`` and ``sends`` are (value, phase) of its ports, as `ir.layers.Port`
    has them; ``inputs`` (value, argument, first row, last row + 1) of what it reads of the step's arguments: value −1
    where only its update does, rows 0, 0 for all of it."""

    receives: tuple[tuple[int, PortPhase], ...]
    sends: tuple[tuple[int, PortPhase], ...]
    inputs: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinChains:
    """The steps of what is resharded between layers of one stage, on a mesh with ``axes``."""

    axes: tuple[MeshAxis, ...]
    chains: tuple[Chain, ...]

    def verify(self) -> None:
        """Raises VerifyError where a spec names an axis twice, one that there is not, or is of another rank."""
        for chain in self.chains:
            _verify_chain(chain, self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShardings:
    """The shardings of all layers of a plan: ``of[k]`` is the number of layer k's among ``distinct``, ``wiring[k]``
    what it reads and gives, ``chains`` what is resharded between layers of one stage, ``between[s]`` the collectives
    of that in stage s."""

    wiring: tuple[LayerWiring, ...]
    of: tuple[int, ...]
    distinct: tuple[LayerSharding, ...]
    chains: tuple[JoinChains, ...]
    between: tuple[tuple[Collective, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Two ends of one thing: layer ``source``'s send port ``at`` → layer ``target``'s receive port ``to``. For phase
    ``argument`` they are inputs, of the same argument (``value`` −1)."""

    phase: PortPhase | Literal["argument"]
    value: int
    source: int
    at: int
    target: int
    to: int


def joins(layers: Sequence[LayerWiring]) -> tuple[Join, ...]:
    """All joins of a step's layers.

    A forward value comes from its maker; cotangents and parts of gradients from all later layers that read the value;
    values of the update from the layers that make them. What no layer sends (examples of the batch, what is computed
    before the layers) is given to each that reads it. An argument that several layers read comes from the reader
    before."""
    senders: dict[tuple[int, PortPhase], list[tuple[int, int]]] = {}
    for k, layer in enumerate(layers):
        for i, port in enumerate(layer.sends):
            senders.setdefault(port, []).append((k, i))
    out: list[Join] = []
    for k, layer in enumerate(layers):
        for j, (value, phase) in enumerate(layer.receives):
            for source, i in senders.get((value, phase), ()):
                if source != k:
                    out.append(Join(phase=phase, value=value, source=source, at=i, target=k, to=j))
    last: dict[tuple[int, ...], tuple[int, int]] = {}
    for k, layer in enumerate(layers):
        for j, (_, *rows) in enumerate(layer.inputs):
            where = tuple(rows)
            if where in last:
                source, i = last[where]
                out.append(Join(phase="argument", value=-1, source=source, at=i, target=k, to=j))
            last[where] = (k, j)
    return tuple(out)
