"""Does what crosses between meshes take what its plan says, over real links? Needs root; hosts are made as network
namespaces with links of 1 Gbit/s.

    python -m benchmarks.resharding_hosts [--runs 5] [--megabytes 64] [--only broadcast cases pipelines overlap]
    python -m benchmarks.resharding_hosts --cases FILE

Every host of a mesh is one process with as many devices as in the case; they bring values over as workers of a pipeline
do (`benchmarks.host_workers`). A time is that from the driver's message until all values have been made on their
devices; the median of the runs, after one that opens connections. After them the values are compared with what they
should be.

``broadcast``: 64 MB from 1 to 4 hosts, as planned and by send/recv. ``cases``: those of `benchmarks.resharding`, or of
a file in its format, scaled so that the busiest link carries 64 MB; a dimension that is split is made to divide, and
cases with several NICs a host are left out. ``pipelines``: GPT-2.6B and U-Transformer-2B of the suites on four hosts of
four devices, one stage each, as they are planned for 10 Gb/s between hosts; tasks are waits, transfers are real, both
scaled alike: measured against simulated steps, and what broadcast and overlap bring over send/recv without overlap.
``overlap``: a loop of arithmetic pinned to one core beside a transfer, alone and beside each other, in pairs.

Exit status 1 where a bar is missed, 2 where it cannot run here.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from autopar.inter_op.program.emit import RECEIVE_AHEAD, emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.schedules import make_schedule
from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.errors import AutoparError
from autopar.ir.pipeline import Cut, HostUse, PipelinePlan, StageCost, Transients
from autopar.ir.program import Program, Run
from autopar.ir.resharding import ReshardingPlan, network_of, place
from autopar.resharding.planning import plan_resharding, reshard_cost
from benchmarks import overlap
from benchmarks.host_workers import Done, HostError, Workers, places_of, workers
from benchmarks.namespaces import NamespaceError, NetworkHost, network
from benchmarks.resharding_cases import CASES, Case, problem_of, read_cases, side
from benchmarks.suite_models import SUITE

LINK = LinkSpec(latency_s=5e-4, bytes_per_s=1e9 / 8)
"""Of hosts; latency: of a frame from process to process, all on two cores (measured: 0.2 to 0.6 ms)."""
INSIDE = LinkSpec(latency_s=1e-4, bytes_per_s=4e9)
"""Inside a process (guessed)."""
CUT_BAR, WORST_BAR = 1.15, 1.3
"""Measured over planned: single cases and the median of all; the worst of all."""
SEND_RECV_BAR = 1 / 3
STEP_BAR = 1.10
"""Measured over simulated steps; what overlap hides may be off by as much."""
KEPT_BAR = 0.9
"""What compute keeps of its speed, and the transfer of the link."""
BUSY_CORES = 0.2
"""From here on figures are said to be disturbed: all hosts' processes share this machine's cores."""
MOST_HOSTS = 9
BROADCAST = Case(name="1 → 4 hosts", shape=(4096,), src=side((1, 1), "R"), dst=side((4, 1), "R"))
SINGLE = Case(name="1 → 1 host", shape=(4096,), src=side((1, 1), "R"), dst=side((1, 1), "R"))
MODELS = {"gpt-2.6B": 20.0, "u-transformer-2B": 25.0}
"""Pipelines, and the part of their bytes and of ten times their seconds that is run."""
SKIPS = ("u-transformer-2B",)
"""Whose workers would wait for each other for ever if transfers ran beside no task at all."""
MICROBATCHES = 12
LOOP_NUMBERS, LOOP_ROUNDS = 4096, 50
"""Float64 numbers of the compute loop (they stay in the core's cache), and passes between two counts."""


class Measured(NamedTuple):
    """Seconds of each run of a plan."""

    plan: ReshardingPlan
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median."""
        return statistics.median(self.times_s)

    @property
    def ratio(self) -> float:
        """Of what was planned."""
        return self.median_s / self.plan.time_s


def plan_of(case: Case, host_bytes: float, strategy: str = "auto") -> ReshardingPlan:
    """The plan of ``case``, its last dimension scaled to ``host_bytes`` at the busiest link, all made to divide."""

    def planned(case: Case) -> ReshardingPlan:
        values, meshes, links = problem_of(case)
        hosts = replace(links, hosts=tuple(replace(h, nic=LINK, intra_host=INSIDE) for h in links.hosts))
        return plan_resharding(values, meshes, hosts, strategy=strategy)

    parts = [
        math.lcm(*(math.prod(s.mesh[a] for a in s.spec[d]) for s in (case.src, case.dst)))
        for d in range(len(case.shape))
    ]
    outer = [-(-n // p) * p for n, p in zip(case.shape, parts, strict=True)][:-1]
    probe = planned(replace(case, shape=(*outer, 64 * parts[-1])))
    scale = host_bytes / (probe.bound_s * LINK.bytes_per_s)
    return planned(replace(case, shape=(*outer, max(1, round(64 * scale)) * parts[-1])))


def run_plan(plan: ReshardingPlan, hosts: Sequence[NetworkHost], runs: int) -> Measured:
    """Brings a plan's values over ``runs`` times, after once. Raises AssertionError where others arrive."""
    with workers(places_of(plan.meshes, hosts)) as gang:
        gang.all("load", plan)
        times = [crossed_s(gang) for _ in range(runs + 1)]
        assert all(gang.all("check")), "other values arrived than were sent"
    return Measured(plan, tuple(times[1:]))


def crossed_s(gang: Workers, method: str = "cross") -> float:
    """Seconds of one run."""
    start = time.monotonic()
    return max(gang.all(method)) - start


# --- pipelines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a pipeline; ``blocking``: no transfer runs beside a task, or of a model with skips over stages
    beside one of the worker that takes it: it begins when it is waited for."""

    name: str
    schedule: str
    strategy: str = "auto"
    blocking: bool = False


PRIOR = Way(name="send/recv 1F1B, blocking", schedule="1f1b", strategy="send_recv", blocking=True)
BLOCKING = Way(name="broadcast 1F1B, blocking", schedule="1f1b", blocking=True)
EAGER = Way(name="broadcast eager-1F1B", schedule="eager_1f1b")
WAYS = (PRIOR, BLOCKING, Way(name="broadcast 1F1B", schedule="1f1b"), EAGER,
        Way(name="broadcast zero bubble", schedule="zb_h1"))  # fmt: skip


def four_hosts() -> ClusterSpec:
    """The hosts that are made here, of four devices."""
    cluster = overlap.two_hosts(10)
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, hosts=4, nic=LINK, intra_host=INSIDE),))


def pipeline_of(name: str) -> PipelinePlan:
    """A model's stages on four hosts with 10 Gb/s between them, what crosses in Alpa's layout."""
    row = SUITE[name]
    step, args = row.build(row.global_batch)
    graph = overlap.layered(step, args, num_microbatches=row.num_microbatches, donate_argnums=(0,)).graph
    cluster = overlap.two_hosts(10)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], hosts=4),))
    plan = overlap.planned(graph, cluster, 4, (1, 4)).plan
    return replace(plan, cuts=tuple(overlap.operator_parallel(cut, plan) for cut in plan.cuts))


def scaled(plan: PipelinePlan, factor: float, way: Way) -> PipelinePlan:
    """The pipeline with a part 1 / ``factor`` of its bytes, brought over at a tenth of the bandwidth that it was
    planned for, and of ten times its seconds."""
    cluster, slower = four_hosts(), 10 / factor
    stages = tuple(replace(stage, cost=_scaled_cost(stage.cost, slower), fused=False) for stage in plan.stages)
    cuts = tuple(_scaled_cut(cut, plan, cluster, factor, way.strategy) for cut in plan.cuts)
    return replace(
        plan, stages=stages, cuts=cuts, schedule=make_schedule(way.schedule, len(stages), MICROBATCHES)
    )  # fmt: skip


def _scaled_cost(cost: StageCost, by: float) -> StageCost:
    names = ("forward_s", "input_grad_s", "weight_grad_s", "grad_sync_s", "update_s")
    none = Transients(**dict.fromkeys(Transients.__slots__, 0.0))
    return replace(cost, transients=none, **{name: by * getattr(cost, name) for name in names})


def _scaled_cut(cut: Cut, plan: PipelinePlan, cluster: ClusterSpec, factor: float, strategy: str) -> Cut:
    values: list[Any] = []
    meshes = [plan.stages[s].mesh for s in (cut.source, cut.target)]
    for v in cut.values:
        parts = [
            math.lcm(*(
                math.prod(a.size for a in mesh.axes if a.name in spec.dims[d])
                for mesh, spec in zip(meshes, (v.src_spec, v.dst_spec), strict=True)
            ))
            for d in range(len(v.type.shape))
        ]  # fmt: skip
        d = max(range(len(parts)), key=lambda d: v.type.shape[d] / parts[d])
        size = max(1, round(v.type.shape[d] / factor / parts[d])) * parts[d]
        shape = (*v.type.shape[:d], size, *v.type.shape[d + 1 :])
        values.append(replace(v, type=replace(v.type, shape=shape)))
    cut = replace(cut, values=tuple(values), strategy=strategy)
    placed = tuple(place(mesh, cluster) for mesh in meshes)
    found = reshard_cost(overlap.crossing(cut), placed, network_of(cluster), strategy)
    hosts = tuple(HostUse(host=h, sends=s / found.time_s, receives=r / found.time_s) for h, s, r in found.nics)
    return replace(
        cut, time_s=found.time_s, bound_s=min(found.bound_s, found.time_s), strategy=found.strategy, hosts=hosts
    )


def in_turn(program: Program) -> list[list[Done]]:
    """Of each worker the runs and transfers of a step in which these do not overlap, in their order."""
    timeline = simulate(program, blocking=True)
    number = {(t.source, t.target, f"cut {t.cut}"): n for n, t in enumerate(program.transfers)}
    found: list[list[tuple[float, int, Done]]] = [[] for _ in program.workers]
    for w, instructions in enumerate(program.workers):
        runs = [program.executables[i.executable].time_s for i in instructions if isinstance(i, Run)]
        events = [e for e in timeline.workers[w].events if e.what[0] != "+"]
        found[w] += [(e.start_s, 0, (s, -1, 0)) for e, s in zip(events, runs, strict=True)]
    for order, link in enumerate(timeline.links, 1):
        for event in link.events:
            what, _, microbatch = event.what.partition(".")
            done = 0.0, number[link.source, link.target, what], int(microbatch) if microbatch else -1
            for w in (link.source, link.target):
                found[w].append((event.start_s, order, done))
    return [[done for *_, done in sorted(mine)] for mine in found]


class Step(NamedTuple):
    """Seconds of a pipeline's step."""

    simulated_s: float
    measured_s: float


def run_ways(name: str, plan: PipelinePlan, hosts: Sequence[NetworkHost], runs: int) -> dict[str, Step]:
    """All `WAYS`, the median of the runs of each."""
    out: dict[str, Step] = {}
    cluster = four_hosts()
    meshes = [place(stage.mesh, cluster) for stage in plan.stages]
    with workers(places_of(meshes, hosts)) as gang:
        for way in WAYS:
            small = scaled(plan, MODELS[name], way)
            ahead = 0 if way.blocking else RECEIVE_AHEAD
            program, blocking = emit(small, receive_ahead=ahead), way.blocking and name not in SKIPS
            simulated_s = simulate(program, blocking=blocking).makespan_s
            gang.all("pipeline", small, cluster, ahead, in_turn(program) if blocking else None)
            times = [crossed_s(gang, "step") for _ in range(runs + 1)]
            out[way.name] = Step(simulated_s, statistics.median(times[1:]))
    return out


def print_steps(console: Console, name: str, steps: dict[str, Step]) -> list[str]:
    """The table of a model; what is missed."""
    table = Table(title=f"{name}, four hosts, tasks as waits")
    for column in ("way", "simulated s", "measured s", "ratio", "gain"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    missed: list[str] = []
    for way in WAYS:
        step = steps[way.name]
        ratio, gain = step.measured_s / step.simulated_s, steps[PRIOR.name].measured_s / step.measured_s - 1
        table.add_row(
            way.name, f"{step.simulated_s:.3f}", f"{step.measured_s:.3f}", f"{ratio:.3f}", f"{100 * gain:+.1f} %"
        )
        if not way.blocking and ratio > STEP_BAR:
            missed.append(f"{name}, {way.name}: {ratio:.3f} of the simulated step, bar {STEP_BAR}")
    console.print(table)
    simulated_s, measured_s = (
        steps[BLOCKING.name][i] - steps[EAGER.name][i] for i in range(2)
    )  # fmt: skip
    console.print(f"overlap hides {measured_s:.3f} s, simulated {simulated_s:.3f} s", highlight=False)
    if not abs(measured_s / simulated_s - 1) <= STEP_BAR - 1:
        missed.append(f"{name}: overlap hides {measured_s:.3f} s, simulated {simulated_s:.3f} s")
    gain = steps[PRIOR.name].measured_s / steps[EAGER.name].measured_s - 1
    if gain < overlap.PUBLISHED_GAINS[name]:
        missed.append(f"{name}: {100 * gain:+.1f} %, published {100 * overlap.PUBLISHED_GAINS[name]:.0f} %")
    return missed


# --- compute beside a transfer ---------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """One pair: what compute keeps of its speed beside a transfer, and the transfer gets of the link beside compute."""

    compute: float
    link: float


def run_overlap(hosts: Sequence[NetworkHost], host_bytes: float, pairs: int) -> list[Overlap]:
    """Compute alone for as long as a transfer takes, then both, ``pairs`` times."""
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise NamespaceError("overlap needs two cores")
    plan = plan_of(SINGLE, host_bytes)
    prefix = ("taskset", "-c", ",".join(map(str, others)))
    out: list[Overlap] = []
    with workers(places_of(plan.meshes, hosts), prefix) as gang, _loop(core) as count:
        gang.all("load", plan)
        taken_s = crossed_s(gang)
        taken_s = crossed_s(gang)
        for _ in range(pairs):
            start, started = count(), time.perf_counter()
            time.sleep(taken_s)
            alone = (count() - start) / (time.perf_counter() - started)
            start, started = count(), time.perf_counter()
            taken_s = crossed_s(gang)
            beside = (count() - start) / (time.perf_counter() - started)
            out.append(Overlap(beside / alone, plan.bound_s / taken_s))
        assert all(gang.all("check"))
    return out


@contextmanager
def _loop(core: int) -> Iterator[Any]:
    """A process that computes on ``core``; yields a function that tells how far it is."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        command = [sys.executable, "-m", "benchmarks.resharding_hosts", "--loop", file.name, str(core)]
        child = subprocess.Popen(command, cwd=Path(__file__).parent.parent, start_new_session=True)
        try:
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:

                def count() -> int:
                    return int.from_bytes(memory[:8], sys.byteorder)

                while not count():
                    if child.poll() is not None:
                        raise RuntimeError(f"the compute loop ended with exit status {child.returncode}")
                    time.sleep(0.05)
                yield count
        finally:
            child.kill()
            child.wait()


def compute(file: str, core: int) -> None:
    """Computes until its parent is gone, and counts."""
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    with open(file, "r+b") as opened:
        count = np.frombuffer(mmap.mmap(opened.fileno(), mmap.PAGESIZE), np.int64, 1)
        x = np.ones(LOOP_NUMBERS)
        while os.getppid() == parent:
            for _ in range(LOOP_ROUNDS):
                np.multiply(x, 0.999, out=x)
                np.add(x, 0.001, out=x)
            count[0] += 1


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores other programs use, over ``seconds``."""

    def idle_s() -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()  # cpu user nice system idle iowait …
        return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")

    idle, started = idle_s(), time.perf_counter()
    time.sleep(seconds)
    return max(0.0, (os.cpu_count() or 1) - (idle_s() - idle) / (time.perf_counter() - started))


def print_runs(console: Console, rows: Sequence[tuple[str, Measured, str]]) -> None:
    """The table of broadcast and cases: (name, what was measured, more)."""
    table = Table(title=f"Hosts as network namespaces, {8e-9 * LINK.bytes_per_s:g} Gbit/s each")
    for name in ("case", "strategy", ""):
        table.add_column(name, no_wrap=True)
    for name in ("transfers", "chunks", "bound s", "planned s", "median s", "of planned", "least to most s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, measured, note in rows:
        plan, times = measured
        table.add_row(
            name, plan.strategy, note, str(len(plan.transfers)), str(max(t.chunks for t in plan.transfers)),
            f"{plan.bound_s:.3f}", f"{plan.time_s:.3f}", f"{measured.median_s:.3f}", f"{measured.ratio:.3f}",
            f"{min(times):.3f} – {max(times):.3f}",
        )  # fmt: skip
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parts = ("broadcast", "cases", "pipelines", "overlap")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--cases", type=Path, help="run the cases of this file")
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.loop:
        compute(given.loop[0], int(given.loop[1]))
        return 0
    console, host_bytes = Console(width=150), 1e6 * given.megabytes
    missed: list[str] = []
    try:
        cases = CASES if given.cases is None else read_cases(given.cases)
        cases = tuple(c for c in cases if not c.rails and c.src.hosts + c.dst.hosts <= MOST_HOSTS)
        only = given.only if given.cases is None else ("cases",)
        count = max([5, *(c.src.hosts + c.dst.hosts for c in cases)]) if "cases" in only else 5
        with network(count, 8 * LINK.bytes_per_s) as hosts:
            if (busy := busy_cores()) > BUSY_CORES:
                console.print(f"other programs use {busy:.1f} of {os.cpu_count()} cores: times will be longer and vary")
            if "broadcast" in only:
                missed += _broadcast(console, hosts, host_bytes, given.runs)
            if "cases" in only:
                missed += _cases(console, cases, hosts, host_bytes, given.runs)
            for name in given.models if "pipelines" in only else ():
                missed += print_steps(console, name, run_ways(name, pipeline_of(name), hosts, given.runs))
            if "overlap" in only:
                overlaps = run_overlap(hosts, host_bytes, given.pairs)
                for name, kept in (
                    ("compute beside a transfer keeps", statistics.median(o.compute for o in overlaps)),
                    ("a transfer beside compute gets of the link", statistics.median(o.link for o in overlaps)),
                ):
                    text = f"{name} {100 * kept:.1f} %, bar {100 * KEPT_BAR:g} %"
                    console.print(text, highlight=False)
                    missed += [text] if kept < KEPT_BAR else []
    except (NamespaceError, HostError, AutoparError) as fault:
        console.print(str(fault), markup=False, highlight=False)
        return 2
    for text in missed:
        console.print(f"MISSED {text}", markup=False, highlight=False)
    return int(bool(missed))


def _broadcast(console: Console, hosts: Sequence[NetworkHost], host_bytes: float, runs: int) -> list[str]:
    sends, chain = (run_plan(plan_of(BROADCAST, host_bytes, name), hosts, runs) for name in ("send_recv", "auto"))
    part = chain.median_s / sends.median_s
    note = f"{part:.3f} of send/recv"
    print_runs(console, [(BROADCAST.name, sends, ""), (BROADCAST.name, chain, note)])
    missed = [f"{BROADCAST.name}: {note}, bar {SEND_RECV_BAR:.3f}"] if part > SEND_RECV_BAR else []
    return missed + _over(BROADCAST.name, chain, CUT_BAR)


def _cases(
    console: Console, cases: Sequence[Case], hosts: Sequence[NetworkHost], host_bytes: float, runs: int
) -> list[str]:
    rows = [(case.name, run_plan(plan_of(case, host_bytes), hosts, runs), "") for case in cases]
    print_runs(console, rows)
    median = statistics.median(measured.ratio for _, measured, _ in rows)
    console.print(f"median {median:.3f} of planned, bar {CUT_BAR}; worst bar {WORST_BAR}", highlight=False)
    missed = [f"the median: {median:.3f} of planned, bar {CUT_BAR}"] if median > CUT_BAR else []
    return missed + [text for name, measured, _ in rows for text in _over(name, measured, WORST_BAR)]


def _over(name: str, measured: Measured, bar: float) -> list[str]:
    return [f"{name}: {measured.ratio:.3f} of planned, bar {bar}"] if measured.ratio > bar else []


if __name__ == "__main__":
    sys.exit(main())
