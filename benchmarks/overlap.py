"""What does it bring to broadcast between stages and to overlap that with compute? Needs no device.

    python -m benchmarks.overlap [--gigabits 10 25] [--only PATTERN] [--stages 2]

GPT-2.6B and U-Transformer-2B of the suites (`benchmarks.suite_models`) on two hosts with four V100 each (what AWS calls
p3.8xlarge), at 10 and 25 Gb/s between the hosts. One stage a host, or as many as ``--stages`` says, two mesh axes
inside: the setting of Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023), which reports
about 10 % more throughput for GPT and 50 % for the U-Transformer, against what Alpa did: local all-gather, and 1F1B
that waits for transfers.

Stages are planned once for each model and bandwidth, for eager 1F1B, so that all schedules fit; what changes from row
to row is how a value is brought over (`plan_resharding` under a forced strategy), whether workers wait for transfers
(``blocking``) and the schedule. Two layouts of what crosses: ``operator parallel``, as Alpa has it, each value split by
batch over the first axis and whole on the second, so that two devices of each host want the same bytes; and the
planner's own, which mostly splits values over all devices, so that no byte is sent twice and strategies differ little.
Stages take the same time in both. ``free`` is the step if transfers took no time: no gain can be much more than that. !
marks more memory than a device has.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.frontend.layering.layers import layered
from autopar.inter_op.pipeline_search import Pipeline, PipelineOptions, plan_pipeline
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.schedules import make_schedule
from autopar.inter_op.schedules.eager_1f1b import overlap_depth
from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from autopar.ir.pipeline import Cut, PipelinePlan
from autopar.ir.presets import cluster_from_text
from autopar.ir.resharding import CrossValue, Network, network_of, place
from autopar.ir.sharding import ShardingSpec
from autopar.resharding.planning import plan_resharding
from benchmarks.suite_models import SUITE

PUBLISHED_GAINS = {"gpt-2.6B": 0.10, "u-transformer-2B": 0.50}
HOSTS, DEVICES = 2, 4
LIFTED_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a plan. ``strategy``: of resharding; "" is for transfers that take no time."""

    name: str
    strategy: str
    schedule: str
    blocking: bool = False
    deep: bool = False
    """As many microbatches ahead as hide all transfers; else one a stage."""


PRIOR = Way(name="all-gather 1F1B, blocking", strategy="scatter_all_gather", schedule="1f1b", blocking=True)
EAGER = Way(name="broadcast eager-1F1B", strategy="broadcast_greedy", schedule="eager_1f1b")
FREE = Way(name="free: transfers in no time", strategy="", schedule="eager_1f1b")
WAYS = (
    Way(name="send/recv 1F1B, blocking", strategy="send_recv", schedule="1f1b", blocking=True),
    PRIOR,
    Way(name="broadcast 1F1B, blocking", strategy="broadcast_greedy", schedule="1f1b", blocking=True),
    Way(name="send/recv 1F1B", strategy="send_recv", schedule="1f1b"),
    Way(name="broadcast 1F1B", strategy="broadcast_greedy", schedule="1f1b"),
    EAGER,
    Way(name="split broadcast eager-1F1B, deep", strategy="split_broadcast", schedule="eager_1f1b", deep=True),
    FREE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated step: seconds; of the busiest cut, seconds of one microbatch's transfer each way together, and over
    the slowest stage's compute; memory."""

    step_s: float
    transfer_s: float
    ratio: float
    peak_bytes: float


def two_hosts(gigabits_per_s: float) -> ClusterSpec:
    """Two hosts of four V100 with one NIC each."""
    cluster = cluster_from_text(f"p3.16xlarge:{HOSTS}")
    (group,) = cluster.groups
    nic = LinkSpec(latency_s=group.nic.latency_s, bytes_per_s=gigabits_per_s * 1e9 / 8)
    group = replace(group, devices_per_host=DEVICES, nic=nic)
    return replace(cluster, name=f"2 hosts of 4 V100, {gigabits_per_s:g} Gb/s", groups=(group,))


def planned(graph: Any, cluster: ClusterSpec, stages: int, submesh: tuple[int, int] | None = None) -> Pipeline:
    """Stages of equal submeshes; planned without a limit on memory where nothing fits."""
    hosts, devices = submesh or (1, HOSTS * DEVICES // stages)
    options = PipelineOptions(
        stages=(stages, stages),
        submeshes=((hosts, devices),),
        logical_shapes=((2, devices // 2),) if devices >= 4 else None,
        schedules=("eager_1f1b",),
        remat=("none",),
    )
    try:
        return plan_pipeline(graph, cluster, options)
    except (InfeasibleError, SolverTimeoutError):
        return plan_pipeline(graph, cluster, replace(options, memory_bytes=LIFTED_BYTES))


def operator_parallel(cut: Cut, plan: PipelinePlan) -> Cut:
    """The cut with every value split over the first mesh axis alone, in its first dimension, where that divides."""
    first = plan.stages[cut.source].mesh.axes[0]
    values = tuple(
        v
        if not v.type.shape or v.type.shape[0] % first.size
        else replace(
            v,
            src_spec=ShardingSpec(dims=((first.name,), *[()] * (len(v.type.shape) - 1)), unreduced=()),
            dst_spec=ShardingSpec(dims=((first.name,), *[()] * (len(v.type.shape) - 1)), unreduced=()),
        )
        for v in cut.values
    )
    return replace(cut, values=values)


def crossing(cut: Cut) -> tuple[CrossValue, ...]:
    """What a cut brings over, from mesh 0 to mesh 1."""
    return tuple(CrossValue(type=v.type, src=0, src_spec=v.src_spec, dst=1, dst_spec=v.dst_spec) for v in cut.values)


def timed(cut: Cut, plan: PipelinePlan, cluster: ClusterSpec, network: Network, strategy: str) -> Cut:
    """The cut brought over by one strategy."""
    if not strategy:
        return replace(cut, time_s=0.0, bound_s=0.0, hosts=())
    meshes = (place(plan.stages[cut.source].mesh, cluster), place(plan.stages[cut.target].mesh, cluster))
    found = plan_resharding(crossing(cut), meshes, network, strategy=strategy)
    return replace(cut, time_s=found.time_s, bound_s=min(found.bound_s, found.time_s))


def run(plan: PipelinePlan, cluster: ClusterSpec, way: Way) -> Outcome:
    """Simulates a plan run in one way."""
    network = network_of(cluster)
    cuts = tuple(timed(cut, plan, cluster, network, way.strategy) for cut in plan.cuts)
    each = [cut for cut in cuts if cut.phase in ("forward", "backward")]
    pairs: dict[tuple[int, int], float] = {}
    for cut in each:
        key = (min(cut.source, cut.target), max(cut.source, cut.target))
        pairs[key] = pairs.get(key, 0.0) + cut.time_s
    transfer_s = max(pairs.values(), default=0.0)
    compute = [(stage.cost.forward_s, stage.cost.backward_s) for stage in plan.stages]
    slowest = max(f + b for f, b in compute)
    depth = {"depth": max(1, overlap_depth(*min(compute, key=sum), transfer_s / 2))} if way.deep else {}
    schedule = make_schedule(way.schedule, len(plan.stages), plan.schedule.num_microbatches, **depth)
    timeline = simulate(emit(replace(plan, cuts=cuts, schedule=schedule)), blocking=way.blocking)
    peak = max(worker.peak_bytes for worker in timeline.workers)
    return Outcome(step_s=timeline.makespan_s, transfer_s=transfer_s, ratio=transfer_s / slowest, peak_bytes=peak)


def explain(name: str, gain: float, outcomes: dict[str, Outcome]) -> str:
    """Whether a published gain is reached, and why not."""
    published = PUBLISHED_GAINS[name]
    prior, free = outcomes[PRIOR.name], outcomes[FREE.name]
    text = f"{name}: {EAGER.name} over {PRIOR.name}: {100 * gain:+.1f} %, published about {100 * published:.0f} %"
    if gain >= published:
        return f"{text}: reached"
    most = prior.step_s / free.step_s - 1
    why = (
        f"{text}: not reached. Transfers of a microbatch, both ways, take {100 * prior.ratio:.0f} % of what the "
        f"slowest stage computes, so that even transfers in no time would bring {100 * most:+.1f} %"
    )
    return f"{why}; eager-1F1B gets {100 * gain / most:.0f} % of that" if most > 0 else why


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[10.0, 25.0], help="between the hosts, per second")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="models of these names")
    parser.add_argument("--stages", type=int, default=2, choices=(2, 4), help="stages in all")
    flags = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 170)
    for name in PUBLISHED_GAINS:
        if not fnmatch.fnmatch(name, flags.only):
            continue
        row = SUITE[name]
        step, args = row.build(row.global_batch)
        graph = layered(step, args, num_microbatches=row.num_microbatches, donate_argnums=(0,)).graph
        for gigabits in flags.gigabits:
            cluster = two_hosts(gigabits)
            with console.status(f"planning {name}, {gigabits:g} Gb/s"):
                pipeline = planned(graph, cluster, flags.stages)
            memory_bytes = cluster.groups[0].device.memory_bytes
            for layout in ("operator parallel", "the planner's"):
                plan = pipeline.plan
                if layout == "operator parallel":
                    plan = replace(plan, cuts=tuple(operator_parallel(cut, plan) for cut in plan.cuts))
                outcomes = {way.name: run(plan, cluster, way) for way in WAYS}
                _print(
                    console,
                    f"{name}, {gigabits:g} Gb/s, {flags.stages} stages, layout: {layout}",
                    outcomes,
                    memory_bytes,
                )
                gain = outcomes[PRIOR.name].step_s / outcomes[EAGER.name].step_s - 1
                console.print(explain(name, gain, outcomes), highlight=False)
                console.print()
    return 0


def _print(console: Console, title: str, outcomes: dict[str, Outcome], memory_bytes: float) -> None:
    table = Table(title=title)
    table.add_column("way", no_wrap=True)
    for column in ("step s", "gain", "transfers ms", "of compute", "peak GB"):
        table.add_column(column, justify="right")
    for name, got in outcomes.items():
        table.add_row(
            name,
            f"{got.step_s:.4g}",
            f"{100 * (outcomes[PRIOR.name].step_s / got.step_s - 1):+.1f} %",
            f"{1e3 * got.transfer_s:.1f}",
            f"{100 * got.ratio:.1f} %",
            f"{got.peak_bytes / 1e9:.1f}" + ("!" if got.peak_bytes > memory_bytes else ""),
        )
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
