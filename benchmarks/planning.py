"""How long does planning take, and how much memory? Needs no device.

    python -m benchmarks.planning [--quick] [--cluster dgx-h100] [--repeat N]

GPT with d = 1024, 16 heads, sequence 1024, vocabulary 51200, batch 64, bfloat16 compute and Adam, on 8 devices of
a cluster preset. Each row is planned in a process of its own, from the function to the plan: tracing is included,
the imports of jax and autopar are not (they have a column). Peak RSS is that process's, imports included. The bars
are those of the project's first issue. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

RSS_BAR_BYTES = 1_000_000_000
DEPTH_RATIO_BAR = 1.5  # planning apart from tracing, 96 layers against 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. ``bar_s`` is the most that trace and planning together may take; None: no bar is set.
    ``memory_bytes`` per device; None: the preset's."""

    mesh: tuple[int, ...]
    layers: int = 24
    scan: bool = False
    bar_s: float | None = None
    memory_bytes: int | None = None

    def __str__(self) -> str:
        kind = "scan" if self.scan else "unrolled"
        return f"{self.layers} layers, {kind}, ({','.join(map(str, self.mesh))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the process of one row reported. ``phases`` are (name, seconds) from the plan's provenance; ``total_s``
    is the wall time of the call, ``trace_s`` its part called ``trace``."""

    import_s: float
    trace_s: float
    total_s: float
    peak_rss_bytes: int
    objective_s: float
    gap: float
    status: str
    digest: str
    phases: tuple[tuple[str, float], ...]

    @property
    def planning_s(self) -> float:
        """All but tracing."""
        return self.total_s - self.trace_s


# Without remat 24 layers leave about 50 GB of activations on each of 8 devices (counted with
# jax.ad_checkpoint.print_saved_residuals) and 96 four times that, more than any sharding fits into 80 GB: so four times
# the memory, and equal pressure, for the row that asks about depth.
DEEP_MEMORY_BYTES = 4 * 80_000_000_000
DEPTH_CASES = (Case(mesh=(2, 4), bar_s=10.0), Case(mesh=(2, 4), layers=96, memory_bytes=DEEP_MEMORY_BYTES))
CASES = (
    Case(mesh=(8,), bar_s=6.0),
    *DEPTH_CASES,
    Case(mesh=(2, 2, 2), bar_s=20.0),
    Case(mesh=(4, 2)),
    Case(mesh=(8, 1)),
    Case(mesh=(8,), scan=True),
    Case(mesh=(2, 4), scan=True),
    Case(mesh=(2, 2, 2), scan=True),
)
QUICK_CASES = (Case(mesh=(8,), layers=4), Case(mesh=(2, 4), layers=4), Case(mesh=(2, 4), layers=4, scan=True))


def plan_one(case: Case, cluster: str) -> Outcome:
    """Plans one case in this process, which should be a fresh one."""
    start_s = time.perf_counter()
    import jax._src.xla_bridge as xla_bridge  # no public way tells whether a backend was started

    from autopar import parallelize  # by name: autopar loads its parts when they are first asked for
    from benchmarks import models

    import_s = time.perf_counter() - start_s
    train_step, args = models.gpt(layers=case.layers, scan=case.scan)
    start_s = time.perf_counter()
    parallel = parallelize(
        train_step, mesh=case.mesh, cluster=cluster, memory_bytes=case.memory_bytes, donate_argnums=(0,)
    )
    plan = parallel.plan(*args)
    total_s = time.perf_counter() - start_s
    if xla_bridge.backends_are_initialized():
        raise AssertionError(f"planning {case} started a JAX backend")
    report = plan.sharding.report
    return Outcome(
        import_s=import_s,
        trace_s=dict(plan.provenance.seconds)["trace"],
        total_s=total_s,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        objective_s=plan.sharding.objective_s,
        gap=report.gap,
        status=report.status,
        digest=plan.digest,
        phases=plan.provenance.seconds,
    )


def run_case(case: Case, cluster: str) -> Outcome:
    """`plan_one` in a fresh process; raises CalledProcessError, its traceback on stderr, where that fails."""
    command = [sys.executable, "-m", "benchmarks.planning", "--cluster", cluster, "--one", json.dumps(asdict(case))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    values = json.loads(done.stdout.splitlines()[-1])
    return Outcome(**{**values, "phases": tuple((name, seconds) for name, seconds in values["phases"])})


def median_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """The one whose total time is the (lower) median."""
    middle = statistics.median_low([o.total_s for o in outcomes])
    return next(o for o in outcomes if o.total_s == middle)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``--one`` is the child's side of `run_case`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 layers, three rows, no bars")
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--repeat", type=int, default=1, help="processes per row; the median is shown")
    parser.add_argument("--phases", action="store_true", help="print every phase's seconds too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.one:
        values = json.loads(flags.one)
        print(json.dumps(asdict(plan_one(Case(**{**values, "mesh": tuple(values["mesh"])}), flags.cluster))))
        return 0

    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title=f"Planning a GPT train step for 8 devices of {flags.cluster}, no device used")
    table.add_column("step and mesh", no_wrap=True)
    for name in ("import s", "trace s", "planning s", "total s", "bar s", "peak MB", "objective ms", "gap %", "status"):
        table.add_column(name, justify="right")
    missed: list[str] = []
    by_case: dict[Case, Outcome] = {}
    for case in QUICK_CASES if flags.quick else CASES:
        with console.status(f"planning {case}"):
            outcomes = [run_case(case, flags.cluster) for _ in range(flags.repeat)]
        by_case[case] = got = median_outcome(outcomes)
        if len({o.digest for o in outcomes}) > 1 and all(o.status != "time_limit" for o in outcomes):
            missed.append(f"{case}: the same input gave different plans")
        if case.bar_s is not None and got.total_s > case.bar_s:
            missed.append(f"{case}: {got.total_s:.1f} s, bar {case.bar_s:.0f} s")
        if got.peak_rss_bytes > RSS_BAR_BYTES:
            missed.append(f"{case}: peak RSS {got.peak_rss_bytes / 1e6:.0f} MB, bar {RSS_BAR_BYTES / 1e6:.0f} MB")
        table.add_row(*_row(case, got))
        if flags.phases:
            console.print(f"{case}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in got.phases))
    console.print(table)

    if not flags.quick:
        shallow, deep = (by_case[case].planning_s for case in DEPTH_CASES)
        ratio = deep / shallow
        console.print(f"planning apart from tracing, 96 layers / 24 layers: {ratio:.2f}  (bar {DEPTH_RATIO_BAR})")
        if ratio > DEPTH_RATIO_BAR:
            missed.append(f"depth ratio {ratio:.2f}, bar {DEPTH_RATIO_BAR}")
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


def _row(case: Case, got: Outcome) -> list[Any]:
    return [
        str(case),
        f"{got.import_s:.1f}",
        f"{got.trace_s:.2f}",
        f"{got.planning_s:.2f}",
        f"{got.total_s:.2f}",
        "" if case.bar_s is None else f"≤ {case.bar_s:.0f}",
        f"{got.peak_rss_bytes / 1e6:.0f}",
        f"{got.objective_s * 1e3:.3f}",
        f"{got.gap * 100:.2f}",
        got.status,
    ]


if __name__ == "__main__":
    raise SystemExit(main())
