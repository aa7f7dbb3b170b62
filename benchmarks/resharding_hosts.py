"""Does resharding reach its bound over real links, and does it leave compute alone? Needs root; five hosts are made as
network namespaces with links of 1 Gbit/s.

    python -m benchmarks.resharding_hosts [--runs 5] [--pairs 20] [--megabytes 64] [--only broadcast cases overlap]

Every host is one process with as many devices as in the case; cases are scaled so that the busiest link carries 64 MB.
A time is that from the driver's message to the last worker's answer, tiles written and all acknowledged; the median of
the runs, after one that opens connections. After them the tiles of all devices are compared with what they should be.

``broadcast``: 64 MB from 1 to 4 hosts by chains (`split_broadcast`) against separate sends; they alternate.
``cases``: four of the literature's, against the lower bound. ``overlap``: a loop of arithmetic pinned to one core, the
transfer's processes on the others; alone and beside each other, in pairs. Exit status 1 where a bar is missed, 2 where
it cannot run here.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from autopar.runtime.resharding_interpreter import WINDOW
from rich.console import Console
from rich.table import Table

from autopar.ir.cluster import LinkSpec
from autopar.ir.errors import AutoparError
from autopar.ir.resharding import ReshardingPlan, tile_box
from autopar.resharding.chunks import Chunking
from autopar.resharding.planning import plan_resharding
from autopar.runtime.pieces import digest
from benchmarks.namespaces import NamespaceError, NetworkHost, network
from benchmarks.pipe_gang.gang import Gang, Host
from benchmarks.resharding_cases import Case, problem_of, side

LINK_BITS_PER_S = 1e9
LATENCY_S = 1e-3
"""To ask for a chunk (1 MB over loopback: 0.7 to 1.1 ms)."""
CHUNK_BYTES = 1e6
"""Chunks are no larger: a chunk is written to its tile when all of it has come, while the next ones come."""
MAX_CHUNKS = 128
"""Of a stream: each costs all processes together about 1 ms of CPU time, and two cores do all hosts' work."""
INTRA_HOST_BYTES_PER_S = 4e9
"""Copies inside a process (guessed)."""
DEADLINE_S = 60.0
FASTER_BAR = 3.5
"""Chains against separate sends, 1 to 4 hosts."""
BOUND_BAR = 1.25
KEPT_BAR = 0.9
"""What compute keeps of its speed, and the transfer of the link."""
BUSY_CORES = 0.2
"""From here on figures are said to be disturbed: all hosts' processes share this machine's cores."""
BROADCAST = Case(name="1 → 4 hosts", shape=(4096,), src=side((1, 1), "R"), dst=side((4, 1), "R"))
CASES = (
    Case(name="c2", shape=(1024, 1024), src=side((2, 4), "RR"), dst=side((2, 4), "S0R")),
    Case(name="c5", shape=(1024, 1024), src=side((2, 4), "S1R"), dst=side((2, 4), "S0R")),
    Case(name="c6", shape=(3072, 1024), src=side((2, 4), "S0R"), dst=side((3, 4), "S0R")),
    Case(name="R(2h) → S⁰(3h)", shape=(3840, 1024), src=side((2, 4), "RR"), dst=side((3, 4), "S0R")),
)
"""The literature's, their last dimension to be scaled."""
SINGLE = Case(name="1 → 1 host", shape=(4096,), src=side((1, 1), "R"), dst=side((1, 1), "R"))
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


def plan_of(case: Case, host_bytes: float, strategy: str = "auto") -> ReshardingPlan:
    """The plan of ``case``, scaled to ``host_bytes`` at the busiest link."""
    link = LinkSpec(latency_s=LATENCY_S, bytes_per_s=LINK_BITS_PER_S / 8)
    inside = LinkSpec(latency_s=LATENCY_S / 10, bytes_per_s=INTRA_HOST_BYTES_PER_S)

    def planned(case: Case) -> ReshardingPlan:
        values, meshes, links = problem_of(case)
        hosts = replace(links, hosts=tuple(replace(h, nic=link, intra_host=inside) for h in links.hosts))
        chunking = Chunking(in_flight=WINDOW, max_chunks=MAX_CHUNKS)
        plan = plan_resharding(values, meshes, hosts, strategy=strategy, chunking=chunking)
        if 4 * max(t.chunk_elements for t in plan.transfers) > CHUNK_BYTES:
            chunking = replace(chunking, chunk_bytes=CHUNK_BYTES)
            plan = plan_resharding(values, meshes, hosts, strategy=strategy, chunking=chunking)
        return plan

    *outer, _ = case.shape
    step = 4 * math.prod(outer)  # what one more in the last dimension adds, in bytes
    whole = planned(replace(case, shape=(*outer, 64))).bound_s * link.bytes_per_s / (64 * step)
    return planned(replace(case, shape=(*outer, round(host_bytes / (whole * step)))))


@contextmanager
def gang_for(plan: ReshardingPlan, hosts: Sequence[NetworkHost], prefix: tuple[str, ...] = ()) -> Iterator[Gang]:
    """A gang with the plan's devices, one worker for each host, its source tiles in place."""
    devices: dict[int, list[int]] = {}
    for mesh in plan.meshes:
        for device, host in zip(mesh.mesh.device_ids, mesh.hosts, strict=True):
            devices.setdefault(host, []).append(device)
    workers = [
        Host(devices=tuple(ids), address=hosts[h].address, prefix=(*hosts[h].prefix, *prefix))
        for h, ids in sorted(devices.items())
    ]
    with Gang(workers) as gang:
        give(gang, plan)
        yield gang


def give(gang: Gang, plan: ReshardingPlan) -> None:
    """Loads a plan and its source tiles; equal tiles of a host are shipped once."""
    gang.load(plan)
    tiles: dict[tuple[int, int], Any] = {}
    for v, value in enumerate(plan.values):
        whole, cut = contents(plan, v), dict[Any, Any]()
        for i, d in enumerate(plan.meshes[value.src].mesh.device_ids):
            box = tile_box(value.type, value.src_spec, plan.meshes[value.src].mesh, i)
            if box not in cut:
                cut[box] = np.array(whole[tuple(slice(*s) for s in box)])
            tiles[v, d] = cut[box]
    gang.put(tiles)


def contents(plan: ReshardingPlan, value: int) -> np.ndarray[Any, Any]:
    """What a value holds: the same numbers each time."""
    shape = plan.values[value].type.shape
    return np.random.default_rng(value).integers(-(2**31), 2**31, shape, np.int32)


def check(gang: Gang, plan: ReshardingPlan) -> None:
    """Raises AssertionError unless every device's tile is what it should be."""
    got = gang.digests()
    for v, value in enumerate(plan.values):
        whole, known = contents(plan, v), dict[Any, str]()
        for i, d in enumerate(plan.meshes[value.dst].mesh.device_ids):
            box = tile_box(value.type, value.dst_spec, plan.meshes[value.dst].mesh, i)
            if box not in known:
                known[box] = digest(whole[tuple(slice(*s) for s in box)])
            if got[v, d] != known[box]:
                raise AssertionError(f"value {v}, device {d}: another tile than expected arrived")


def run_broadcast(hosts: Sequence[NetworkHost], host_bytes: float, runs: int) -> tuple[Measured, Measured]:
    """Chains and separate sends, in turn."""
    plans = [plan_of(BROADCAST, host_bytes, name) for name in ("split_broadcast", "send_recv")]
    times: tuple[list[float], list[float]] = ([], [])
    with gang_for(plans[0], hosts) as gang:
        for i in range(runs + 1):
            for plan, found in zip(plans, times, strict=True):
                gang.load(plan)
                found.append(gang.run(deadline_s=DEADLINE_S))
                if i == runs:
                    check(gang, plan)
    chain, sends = (Measured(plan, tuple(found[1:])) for plan, found in zip(plans, times, strict=True))
    return chain, sends


def run_case(case: Case, hosts: Sequence[NetworkHost], host_bytes: float, runs: int) -> Measured:
    """One case."""
    plan = plan_of(case, host_bytes)
    with gang_for(plan, hosts) as gang:
        times = [gang.run(deadline_s=DEADLINE_S) for _ in range(runs + 1)]
        check(gang, plan)
    return Measured(plan, tuple(times[1:]))


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
    with gang_for(plan, hosts, prefix) as gang, _loop(core) as count:
        taken_s = gang.run(deadline_s=DEADLINE_S)
        taken_s = gang.run(deadline_s=DEADLINE_S)
        for _ in range(pairs):
            start, started = count(), time.perf_counter()
            time.sleep(taken_s)
            alone = (count() - start) / (time.perf_counter() - started)
            start, started = count(), time.perf_counter()
            taken_s = gang.run(deadline_s=DEADLINE_S)
            beside = (count() - start) / (time.perf_counter() - started)
            out.append(Overlap(beside / alone, plan.bound_s / taken_s))
        check(gang, plan)
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


def print_runs(console: Console, rows: Sequence[tuple[str, Measured, float, str]]) -> None:
    """The table of broadcast and cases: (name, what was measured, bar in multiples of the bound or 0, more)."""
    table = Table(title=f"Hosts as network namespaces, {LINK_BITS_PER_S / 1e9:g} Gbit/s each")
    for name in ("case", "plan", ""):
        table.add_column(name, no_wrap=True, min_width=0 if name else 28)
    for name in ("transfers", "chunks", "bound s", "median s", "of bound", "least to most s", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, (plan, times), bar, note in rows:
        median = statistics.median(times)
        table.add_row(
            name, plan.strategy, note, str(len(plan.transfers)), str(max(t.chunks for t in plan.transfers)),
            f"{plan.bound_s:.3f}", f"{median:.3f}", f"{median / plan.bound_s:.3f}",
            f"{min(times):.3f} – {max(times):.3f}", f"≤ {bar:g}" if bar else "",
        )  # fmt: skip
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parts = ("broadcast", "cases", "overlap")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.loop:
        compute(given.loop[0], int(given.loop[1]))
        return 0
    console, host_bytes = Console(width=150), 1e6 * given.megabytes
    rows: list[tuple[str, Measured, float, str]] = []
    missed: list[str] = []
    try:
        with network(5, LINK_BITS_PER_S) as hosts:
            if (busy := busy_cores()) > BUSY_CORES:
                console.print(f"other programs use {busy:.1f} of {os.cpu_count()} cores: times will be longer and vary")
            if "broadcast" in given.only:
                chain, sends = run_broadcast(hosts, host_bytes, given.runs)
                faster = sends.median_s / chain.median_s
                rows.append((BROADCAST.name, sends, 0.0, ""))
                rows.append((BROADCAST.name, chain, 0.0, f"{faster:.2f} times faster, bar {FASTER_BAR:g}"))
                if faster < FASTER_BAR:
                    missed.append(f"1 → 4 hosts: {faster:.2f} times faster than separate sends, bar {FASTER_BAR}")
            for case in CASES if "cases" in given.only else ():
                measured = run_case(case, hosts, host_bytes, given.runs)
                rows.append((case.name, measured, BOUND_BAR, ""))
                ratio = measured.median_s / measured.plan.bound_s
                if ratio > BOUND_BAR:
                    missed.append(f"{case.name}: {ratio:.3f} times the bound, bar {BOUND_BAR}")
            if rows:
                print_runs(console, rows)
            if "overlap" in given.only:
                overlaps = run_overlap(hosts, host_bytes, given.pairs)
                for name, kept in (
                    ("compute beside a transfer keeps", statistics.median(o.compute for o in overlaps)),
                    ("a transfer beside compute gets of the link", statistics.median(o.link for o in overlaps)),
                ):
                    text = f"{name} {100 * kept:.1f} %, bar {100 * KEPT_BAR:g} %"
                    console.print(f"{text} (median of {len(overlaps)} pairs)")
                    if kept < KEPT_BAR:
                        missed.append(text)
    except NamespaceError as error:
        console.print(f"cannot run here: {error}")
        return 2
    except (AutoparError, AssertionError) as error:
        console.print(f"failed: {error}")
        return 1
    for line in missed:
        console.print(f"missed: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
