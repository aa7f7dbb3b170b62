"""How the operators of one graph are sharded over one mesh: what was decided, and what it costs.

`ShardingPlan` mirrors the Graph: one `RegionPlan` for the step and one for each body of scan, while, cond and remat
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from autopar.ir.cluster import LogicalMesh, MeshAxis
from autopar.ir.errors import VerifyError
from autopar.ir.graph import Phase, TensorType
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import Collective, ReshardStep, SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrategy:
    """How one operator runs: mesh axes per factor, and the specs its operands must have and its results get.
    ``combine`` lists (kind, axes) of the all-reduces that belong to the operator (max, min)."""

    factor_axes: tuple[tuple[str, tuple[str, ...]], ...]
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    combine: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """One graph's decisions. ``nodes[p]`` indexes the plan's strategy table for the node at position p
    (-1: a node with bodies, whose decisions are in ``bodies``). ``inputs`` are the specs values enter with,
    ``outputs`` those they must leave with. ``rebased`` are (value, spec) of loop results that are resharded before
    anyone reads them; ``copies`` (value, spec) of values resharded once for all readers that do not want them as they
    are, in order. ``bodies[k]`` is (position, one RegionPlan per body)."""

    inputs: tuple[ShardingSpec, ...]
    outputs: tuple[ShardingSpec, ...]
    nodes: tuple[int, ...]
    rebased: tuple[tuple[int, ShardingSpec], ...]
    copies: tuple[tuple[int, ShardingSpec], ...]
    bodies: tuple[tuple[int, tuple["RegionPlan", ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The single-axis steps from one spec to another, for values of one type."""

    type: TensorType
    src: ShardingSpec
    dst: ShardingSpec
    steps: tuple[ReshardStep, ...]


Work: TypeAlias = Literal["products", "attention", "kernels", "memory"]
"""What an operator's time goes to: matrix products and convolutions, fused attention, other kernels of their own, or
reading and writing memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Equal operators, for people: ``count`` of them run as row ``strategy`` of the table; ``time_s`` and
    ``flops`` are a device's, all of them in a step, without collectives."""

    phase: Phase
    primitive: str
    source: str
    strategy: int
    count: int
    work: Work
    time_s: float
    flops: float


SPLITS = ("examples", "positions", "experts", "features", "nothing")
"""What a mesh axis may split of an operator: the batch, the positions of an example, weights of experts that are one
each, any other dimension of a product or of attention; or none, and all devices along it compute the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """What mesh axis ``axis`` splits: (one of SPLITS, FLOPs of the products and of attention that it splits so, of a
    step, before anything is split)."""

    axis: str
    flops: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedNode:
    """An operator that every device runs whole: why, how often, and what it costs a device."""

    primitive: str
    source: str
    why: str
    count: int
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """What a prediction takes for granted of ``count`` operators, because the step does not say it: ``assumed`` in
    words (``8 trips``), and why it is not known."""

    primitive: str
    source: str
    assumed: str
    why: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """``value`` is computed again for the nodes at positions ``consumers``, which would otherwise read the kept one;
    without consumers, only for other recomputed values that are made from it. ``path`` leads to its graph: positions of
    nodes whose first body is meant, from the step inwards. ``what`` names the operator that makes it, with its source
    line. Per device and step: ``saved_bytes`` are not held between its last reader before and its second making, which
    takes ``cost_s``."""

    path: tuple[int, ...] = ()
    value: int
    consumers: tuple[int, ...]
    what: str = ""
    saved_bytes: float = 0.0
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """Decisions, chains and collectives of one graph on one mesh; times in seconds, memory per device. ``root``'s
    positions are those of the graph with ``recompute`` carried out (`intra_op.remat.rewrite.rewritten`)."""

    mesh: LogicalMesh
    strategies: tuple[NodeStrategy, ...]
    root: RegionPlan
    chains: tuple[Chain, ...]
    collectives: tuple[Collective, ...]
    recompute: tuple[Recompute, ...]
    replicated: tuple[ReplicatedNode, ...]
    operators: tuple[OperatorRow, ...]
    assumptions: tuple[Assumption, ...]
    objective_s: float
    peak_memory_bytes: int
    report: SolverReport
    uses: tuple[AxisUse, ...]

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """Axes of the mesh."""
        return self.mesh.axes

    def verify(self) -> None:
        """Raises VerifyError where a spec names an axis twice or one that the mesh does not have, or a node a strategy
        or a body that there is not."""
        for i, strategy in enumerate(self.strategies):
            for spec in strategy.operands + strategy.results:
                verify_spec(spec, self.mesh, f"strategy {i}")
        verify_uses(self.uses, self.axes)
        self._verify_region(self.root, "step")

    def _verify_region(self, region: RegionPlan, where: str) -> None:
        for spec in (*region.inputs, *region.outputs, *(s for _, s in region.rebased + region.copies)):
            verify_spec(spec, self.mesh, where)
        if region.nodes and not (min(region.nodes) >= -1 and max(region.nodes) < len(self.strategies)):
            raise VerifyError(f"{where}: a node names a strategy that is not in the table")
        for position, bodies in region.bodies:
            if not 0 <= position < len(region.nodes):
                raise VerifyError(f"{where}: a body of node {position}, which does not exist")
            for body in bodies:
                self._verify_region(body, f"{where}.{position}")


def verify_uses(uses: Sequence[AxisUse], axes: Sequence[MeshAxis]) -> None:
    """Raises VerifyError where ``uses`` name an axis that there is not, what none splits, or FLOPs that are none."""
    names = {axis.name for axis in axes}
    for use in uses:
        if use.axis not in names:
            raise VerifyError(f"the work of axis {use.axis!r}, which the mesh does not have")
        for what, flops in use.flops:
            if what not in SPLITS or not flops >= 0:
                raise VerifyError(f"axis {use.axis!r} splits {what!r} in {flops} FLOPs")


def verify_spec(spec: ShardingSpec, mesh: LogicalMesh, where: str) -> None:
    """Raises VerifyError where ``spec`` names an axis twice or one that ``mesh`` does not have; ``where`` it stands."""
    if unknown := _unknown_axes(spec, mesh):
        raise VerifyError(f"{where}: sharding {spec} uses {min(unknown)!r}, not an axis of mesh {mesh}")


@lru_cache(maxsize=65536)
def _unknown_axes(spec: ShardingSpec, mesh: LogicalMesh) -> frozenset[str]:
    spec.verify()
    return frozenset({a for dim in spec.dims for a in dim} | set(spec.unreduced)) - set(mesh.axis_names)
