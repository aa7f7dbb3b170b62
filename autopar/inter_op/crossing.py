"""What crosses between stages as transfers between devices: the one list that is priced, checked and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.inter_op.update_rounds import Crossing
from autopar.ir.cluster import ClusterSpec
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import Cut, PipelinePlan
from autopar.ir.resharding import CrossValue, ReshardingPlan, network_of, place
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import plan_resharding


def cut_resharding(plan: PipelinePlan, cut: Cut, cluster: ClusterSpec) -> ReshardingPlan:
    """The transfers of a cut between stages of different devices of ``cluster``. Raises ReshardingError as
    `plan_resharding`."""
    return plan_resharding(
        [CrossValue(type=v.type, src=0, src_spec=v.src_spec, dst=1, dst_spec=v.lands) for v in cut.values],
        [place(plan.stages[s].mesh, cluster) for s in (cut.source, cut.target)],
        network_of(cluster),
        strategy=cut.strategy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What worker ``target`` gets in the exchange after round ``after`` of the update: parts (value, source stage),
    each whole on all devices of its stage's mesh, on the mesh of stage ``at``. ``own`` are those that it has itself,
    ``coming`` those of other workers, in the order of ``resharding``'s values."""

    after: int
    target: int
    at: int
    own: tuple[tuple[int, int], ...]
    coming: tuple[tuple[int, int], ...]
    resharding: ReshardingPlan | None


def exchanged(
    plan: PipelinePlan, crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType], cluster: ClusterSpec
) -> tuple[Exchanged, ...]:
    """All that workers get in exchanges.

    Args:
        types: of parts, by value and source stage.
    """
    home = plan.schedule.mesh_of_stage
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    where: dict[tuple[int, int], int] = {}
    for c in crossings:
        for target in dict.fromkeys(home[t] for t in c.targets):
            where.setdefault((c.after, target), next(t for t in (*c.sources, *c.targets) if home[t] == target))
            wanted.setdefault((c.after, target), []).extend((c.value, source) for source in c.sources)
    out: list[Exchanged] = []
    for (after, target), parts in sorted(wanted.items()):
        at = where[after, target]
        own = tuple(part for part in parts if home[part[1]] == target)
        coming = tuple(part for part in parts if home[part[1]] != target)
        workers = [*dict.fromkeys(home[source] for _, source in coming), target]
        meshes = [place(plan.stages[home.index(w)].mesh, cluster) for w in workers]
        values: list[CrossValue] = []
        for value, source in coming:
            t = types[value, source]
            whole = ShardingSpec(dims=((),) * len(t.shape))
            src = workers.index(home[source])
            values.append(CrossValue(type=t, src=src, src_spec=whole, dst=len(workers) - 1, dst_spec=whole))
        resharding = plan_resharding(values, meshes, network_of(cluster)) if values else None
        out.append(Exchanged(after=after, target=target, at=at, own=own, coming=coming, resharding=resharding))
    return tuple(out)
