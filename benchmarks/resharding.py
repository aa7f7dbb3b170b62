"""How near to the lower bound does resharding come, and how long does its planning take? Needs no device.

    python -m benchmarks.resharding [--cases FILE.json] [--random N] [--seed S]

Without ``--cases``: the cases of the literature's two tables, and our own. Each is scaled to 64 MB at the busiest host
(by its network's bandwidth, so that the bound is that of 64 MB at 25 Gb/s; 50 µs a chunk). Columns are multiples of the
lower bound. For the strategies of the prior art: one transfer at a time on a host, as they are planned for, and in
brackets, where it differs, all in flight. ``planned``: what `plan_resharding` chooses, all in flight. ``chunks``: its
emitted chunks, simulated. Planning's bars are of CPU time, whatever else the machine does. ``--random`` adds random
cases in one table. A case of a file is

    {"shape": [3, 5], "dtype": "int32", "src": {"mesh": [2, 4], "spec": [[0], []]}, "dst": {"mesh": [3, 4], "spec": …}}

with hosts in a mesh's first dimension (or its first ``host_dims``), and for each dimension the mesh axes that split it;
also ``name``, ``copies`` (equal tensors together), ``back`` (as many the other way), ``rails`` (a NIC per device). Exit
status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import scipy.optimize  # noqa: F401 - which planning imports when it first needs it  # pyright: ignore
from rich.console import Console
from rich.table import Table

from autopar.ir.errors import AutoparError, ReshardingError
from autopar.ir.resharding import ReshardingPlan
from autopar.resharding.chunks import MIN_CHUNK_BYTES, Chunking
from autopar.resharding.groups import groups_of
from autopar.resharding.planning import plan_resharding
from autopar.resharding.streams import concurrent_s
from autopar.resharding.tiles import work_of
from autopar.resharding.transfer_strategies import STRATEGIES
from benchmarks.resharding_cases import CASES, NIC, OWN_CASES, Case, problem_of, random_cases, read_cases
from benchmarks.resharding_simulation import chunked_s, serial_s

HOST_BYTES = 64e6
"""Cases are scaled so that the bound is that of so many bytes through one NIC."""
FLUID_BAR = 1.02
CHUNKS_BAR = 1.05
RANDOM_MEAN_BAR = 1.005
RANDOM_WORST_BAR = 1.05
PLANNING_BARS_S = ((64, 0.05), (1024, 1.0), (4096, 5.0))
"""(unit tasks, seconds): planning so many may take so long."""
PRIOR = {"send_recv": "SR", "scatter_all_gather": "SR+AG", "broadcast": "BC first", "broadcast_greedy": "BC greedy"}
PRIOR_UNITS = 1024
"""Prior art is compared up to so many unit tasks."""


class Row(NamedTuple):
    """One case: the bound of the case as it is; multiples of it (see the module's docstring); planning in wall and CPU
    seconds."""

    units: int
    bound_s: float
    prior: dict[str, tuple[float, float]]
    strategy: str
    planned: float
    chunks: float
    planning_s: float
    cpu_s: float
    transfers: int
    instructions: int


def busiest(plan: ReshardingPlan) -> int:
    """Of how many transfers a device sends, relays or receives pieces, at most."""
    ends = Counter(d for t in plan.transfers for d in (t.sender, *t.receivers))
    return max(ends.values(), default=0)


def measure(case: Case, *, prior: bool = True) -> Row:
    """Plans and simulates one case. Raises AutoparError for a bad one."""
    problem = problem_of(case)
    work = work_of(*problem)
    true_s = plan_resharding(*problem, strategy="split_broadcast").bound_s
    if true_s == 0:
        return Row(work.num_units, 0.0, {}, "nothing", 1.0, 1.0, 0.0, 0.0, 0, 0)
    scale = true_s / (HOST_BYTES / NIC.bytes_per_s)
    problem = problem_of(case, scale)
    chunking = Chunking(min_chunk_bytes=MIN_CHUNK_BYTES * scale)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    plan = plan_resharding(*problem, chunking=chunking)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    found: dict[str, tuple[float, float]] = {}
    work = work_of(*problem)
    if prior and work.num_units <= PRIOR_UNITS:
        groups = groups_of(work)
        for name in PRIOR:
            streams, staged = (planned := STRATEGIES[name](work, groups)).streams, planned.staged
            serial = serial_s(work, streams, staged=staged)
            found[name] = (serial / plan.bound_s, concurrent_s(work, streams, staged=staged) / plan.bound_s)
    return Row(
        units=work.num_units,
        bound_s=true_s,
        prior=found,
        strategy=plan.strategy,
        planned=plan.ratio,
        chunks=chunked_s(plan, problem.network) / plan.bound_s,
        planning_s=wall_s,
        cpu_s=cpu_s,
        transfers=len(plan.transfers),
        instructions=busiest(plan),
    )


def misses(case: Case, row: Row) -> list[str]:
    """What a case misses, in words."""
    out: list[str] = []
    if row.planned > FLUID_BAR:
        out.append(f"{case.name}: {row.planned:.4f} times the bound, bar {FLUID_BAR}")
    if row.chunks > CHUNKS_BAR:
        out.append(f"{case.name}: chunks take {row.chunks:.4f} times the bound, bar {CHUNKS_BAR}")
    limit_s = next((limit for units, limit in PLANNING_BARS_S if row.units <= units), None)
    if limit_s is not None and row.cpu_s > limit_s:
        out.append(
            f"{case.name}: planning {row.units} unit tasks took {1e3 * row.cpu_s:.0f} ms of CPU "
            f"({1e3 * row.planning_s:.0f} ms in all), bar {1e3 * limit_s:.0f} ms"
        )
    return out


def run_table(console: Console, title: str, cases: Sequence[Case]) -> list[str]:
    """Measures every case, prints the table, returns what was missed."""
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    columns = (
        "units",
        "bound ms",
        *PRIOR.values(),
        "planned",
        "chunks",
        "transfers",
        "instr./dev.",
        "plan ms",
        "CPU ms",
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    missed: list[str] = []
    for case in cases:
        try:
            row = measure(case)
        except AutoparError as error:
            missed.append(f"{case.name}: {error}")
            table.add_row(case.name, "refused")
            continue
        missed += misses(case, row)
        table.add_row(
            case.name,
            str(row.units),
            f"{1e3 * row.bound_s:.3f}",
            *(_pair(*row.prior[name]) if name in row.prior else "" for name in PRIOR),
            f"{row.planned:.4f}" + ("" if row.strategy == "split_broadcast" else f" {row.strategy}"),
            f"{row.chunks:.4f}",
            str(row.transfers),
            str(row.instructions),
            f"{1e3 * row.planning_s:.1f}",
            f"{1e3 * row.cpu_s:.1f}",
        )
    console.print(table)
    return missed


def _pair(serial: float, concurrent: float) -> str:
    text, other = (f"{ratio:.3f}".rstrip("0").rstrip(".") for ratio in (serial, concurrent))
    return text if text == other else f"{text} \\[{other}]"


def run_random(console: Console, count: int, seed: int) -> list[str]:
    """Measures random cases, prints one table of means and worsts, returns what was missed."""
    rows: list[tuple[Case, Row]] = []
    with console.status(f"{count} random cases"):
        rows = [(case, measure(case)) for case in random_cases(count, seed)]
    series = {
        **{f"{text}, serial": [row.prior[n][0] for _, row in rows if n in row.prior] for n, text in PRIOR.items()},
        **{f"{text}, in flight": [row.prior[n][1] for _, row in rows if n in row.prior] for n, text in PRIOR.items()},
        "planned": [row.planned for _, row in rows],
        "planned, chunks": [row.chunks for _, row in rows],
        "planning ms": [1e3 * row.planning_s for _, row in rows],
    }
    table = Table(title=f"{count} random cases (1–6 → 1–6 hosts, ranks 1–4, ragged; seed {seed})")
    for name in ("", "mean", "worst"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in series.items():
        table.add_row(name, f"{sum(values) / max(1, len(values)):.4f}", f"{max(values, default=0.0):.4f}")
    console.print(table)
    missed: list[str] = []
    mean = sum(series["planned"]) / count
    if mean > RANDOM_MEAN_BAR:
        missed.append(f"random cases: mean {mean:.4f}, bar {RANDOM_MEAN_BAR}")
    for case, row in rows:
        if row.planned > RANDOM_WORST_BAR:
            missed.append(
                f"{case.name} (seed {seed}): {row.planned:.4f} times the bound, bar {RANDOM_WORST_BAR}: {case}"
            )
        if row.chunks > CHUNKS_BAR:
            missed.append(f"{case.name} (seed {seed}): chunks take {row.chunks:.4f} times, bar {CHUNKS_BAR}: {case}")
    worst = max(rows, key=lambda item: item[1].chunks)
    console.print(f"most for chunks: {worst[0].name}, {worst[1].chunks:.4f}: {worst[0]}")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", metavar="FILE.json", type=Path, help="cases of a file instead of the tables'")
    parser.add_argument("--random", metavar="N", type=int, default=0, help="also N random cases")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the random cases")
    flags = parser.parse_args(argv)
    if flags.random < 0:
        parser.error("--random needs a number from 0 on")
    console = Console(width=None if sys.stdout.isatty() else 200)
    missed: list[str] = []
    if flags.cases is not None:
        try:
            cases = read_cases(flags.cases)
        except ReshardingError as error:
            parser.error(str(error))
        missed += run_table(console, str(flags.cases), cases)
    else:
        missed += run_table(console, "Cases of the literature, multiples of the lower bound", CASES)
        missed += run_table(console, "Traffic both ways, rails, many unit tasks", OWN_CASES)
    if flags.random:
        missed += run_random(console, flags.random, flags.seed)
    for line in missed:
        console.print(f"missed: {line}", markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
