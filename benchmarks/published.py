"""How well are published training runs predicted? Plans each run's own layout, and compares.

    python -m benchmarks.published [--runs FILE] [--only TEXT ...] [--jobs N] [--out FILE.jsonl]
    python -m benchmarks.published --trials [--runs FILE] ...

Rows are those of ``../shared/data/published_runs`` (`published_rows`); each is planned with its layout forced
(`published_plans`) in a process that goes on to the next. Equal cases are planned once. Compared are the predicted
seconds of a step with the measured ones, as ln(predicted / measured), over dense runs in 16 bits of quality A or B that
split no sequence; these by hardware and by kind of layout; mixtures of experts, float8 and split sequences apart; and
in groups of runs that differ in their layouts alone, pairs that differ by more than 5 % and are ordered right.
``--trials``: of layouts on A100 of 80 GB, whether what ran out of memory is predicted to (`published_trials`).

``--out`` writes a line of JSON a row: the row, and all that its plan tells (`published_facts`). Exit status 1 where a
bar is missed. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from autopar.ir.errors import AutoparError
from benchmarks.published_compared import Compared, Found, ordered, summary_of
from benchmarks.published_facts import facts
from benchmarks.published_plans import Planner, traced_as
from benchmarks.published_rows import Case, RowError, Run, read_runs, read_trials
from benchmarks.published_trials import report

DATA = Path("../shared/data/published_runs")
STOP_S = 240
"""Of planning one row."""
MEDIAN_BAR, P90_BAR, KIND_BAR, PAIRS_BAR = 0.12, 0.30, 0.20, 0.90
KIND_ROWS = 8
"""Rows from which on a kind of device has a bar."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=None, help="rows, where not those of ../shared/data")
    parser.add_argument("--only", nargs="+", default=None, metavar="TEXT", help="rows whose id holds one of these")
    parser.add_argument("--trials", action="store_true", help="layouts that ran, or ran out of memory")
    parser.add_argument("--jobs", type=int, default=2, help="processes that plan")
    parser.add_argument("--out", type=Path, default=None, help="a line of JSON for each row")
    options = parser.parse_args(argv)
    path = options.runs or DATA / ("layout_trials.csv" if options.trials else "runs.csv")
    runs = [
        run
        for run in (read_trials if options.trials else read_runs)(path)
        if options.only is None or any(word in run.id for word in options.only)
    ]
    out = options.out.open("w") if options.out else None
    try:
        compared = [*_compared(runs, options.jobs, out)]
    finally:
        if out is not None:
            out.close()
    console = Console(width=150)
    return report(compared, console) if options.trials else _runs(compared, console)


# --- planning --------------------------------------------------------------------------------------------------------


def _compared(runs: Sequence[Run], jobs: int, out: TextIO | None) -> Iterator[Compared]:
    """All runs, as their plans come; written to ``out``."""
    cases: dict[Case, list[Run]] = {}
    for run in runs:
        if run.case is None:
            yield Compared(run=run, found=Found(why=run.why))
        else:
            cases.setdefault(run.case, []).append(run)
    for done, (case, found) in enumerate(_planned(list(cases), jobs), 1):
        for run in cases[case]:
            compared = Compared(run=run, found=found)
            if out is not None:
                head = {"run": asdict(run), "ln_ratio": compared.error, "seconds": found.seconds, "why": found.why}
                out.write(f'{json.dumps(head)[:-1]}, "plan": {found.facts}}}\n')
                out.flush()
            _tell(f"{done}/{len(cases)} {run.id} {_figures(compared)} in {found.seconds:.1f} s {found.why}")
            yield compared


def _planned(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, Found]]:
    """Every case's plan; those that share a traced step are one task."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes that plan
    groups: dict[object, list[Case]] = {}
    for case in cases:
        groups.setdefault(traced_as(case), []).append(case)
    left = list(groups.values())
    while left:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # processes anew: caches of JAX grow
            tasks = {pool.submit(plan_cases, group): group for group in left[: _A_POOL * jobs]}
            try:
                for task in as_completed(tasks):
                    found = task.result()
                    left.remove(tasks[task])
                    yield from zip(tasks[task], found, strict=True)
            except BrokenProcessPool:  # the first of those that are left, of so many processes at most
                for case in left.pop(0):
                    yield case, Found(why="its process ended")


_A_POOL = 20
"""Tasks for each process of a pool."""


def plan_cases(cases: Sequence[Case]) -> list[Found]:
    """Plans cases in this process; what cannot be has a reason."""
    planner = Planner()
    return [_plan(planner, case) for case in cases]


def _plan(planner: Planner, case: Case) -> Found:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no plan within {STOP_S} s")

    started_s = time.perf_counter()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(STOP_S)
    try:
        plan = planner.plan(case)
        told = json.dumps(facts(plan))
    except (AutoparError, RowError, TimeoutError, ValueError, NotImplementedError) as error:
        return Found(why=f"{type(error).__name__}: {error}"[:500], seconds=time.perf_counter() - started_s)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    predicted = plan.predictions
    return Found(
        step_s=predicted.step_s, peak_bytes=predicted.peak_memory_bytes, seconds=time.perf_counter() - started_s,
        facts=told,
    )  # fmt: skip


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- step times ------------------------------------------------------------------------------------------------------


def _runs(compared: Sequence[Compared], console: Console) -> int:
    table = Table("row", "hardware", "kind", "layout", "predicted s", "measured s", "ln ratio", "peak GB", "assumed")
    for each in sorted(compared, key=lambda x: x.run.id):
        run = each.run
        family = run.case.family if run.case else "?"
        if each.found.why:
            table.add_row(run.id, run.hardware, run.kind, family, "-", "", "", "", each.found.why)
            continue
        figures = (each.found.step_s, run.step_s or math.nan, each.error, each.found.peak_bytes / 1e9)
        table.add_row(run.id, run.hardware, run.kind, family, *(f"{x:.3g}" for x in figures), "; ".join(run.assumed))
    console.print(table)
    good = [x for x in compared if not math.isnan(x.error)]
    core = [x for x in good if is_core(x.run)]
    summary = Table("rows", "number", "median |ln|", "p90 |ln|", "median ln", "bar", title="summaries")
    lines: list[tuple[str, Sequence[Compared], float]] = [("dense, 16 bits, A or B", core, MEDIAN_BAR)]
    kinds = sorted({x.run.hardware for x in core})
    lines += [(f"  {kind}", [x for x in core if x.run.hardware == kind], KIND_BAR) for kind in kinds]
    families = sorted({x.run.case.family for x in core if x.run.case})
    lines += [(f"  {name}", [x for x in core if x.run.case and x.run.case.family == name], 0) for name in families]
    lines += [(f"{kind}, apart", [x for x in good if x.run.kind == kind], 0) for kind in ("context", "moe", "fp8")]
    lines += [("quality C, apart", [x for x in good if x.run.kind == "dense" and x.run.quality == "C"], 0)]
    missed = 0
    for name, rows, bar in lines:
        middle, p90, signed = summary_of([x.error for x in rows])
        whole = bar == MEDIAN_BAR
        wanted = "" if not bar or (not whole and len(rows) < KIND_ROWS) else f"{bar:g}"
        bad = bool(wanted) and not (middle <= bar and (not whole or p90 <= P90_BAR) if whole else abs(signed) <= bar)
        missed += bad
        wanted = f"{MEDIAN_BAR:g}, {P90_BAR:g}" if whole else wanted
        mark = " missed" if bad else ""
        summary.add_row(name, str(len(rows)), f"{middle:.3f}", f"{p90:.3f}", f"{signed:+.3f}", wanted + mark)
    console.print(summary)
    right, pairs = ordered([x for x in good if is_core(x.run)])
    share = right / pairs if pairs else math.nan
    missed += share < PAIRS_BAR
    console.print(f"order: {right} of {pairs} pairs right ({share:.3f}; bar {PAIRS_BAR:g})")
    seconds = {x.run.case: x.found.seconds for x in compared if x.run.case}
    console.print(
        f"{len(good)} of {len(compared)} rows compared; {len(seconds)} plans in {math.fsum(seconds.values()):.0f} s of "
        f"processes, {math.fsum(seconds.values()) / max(1, len(seconds)):.1f} s each"
    )
    return int(missed > 0)


def is_core(run: Run) -> bool:
    """True of the runs that have bars."""
    return run.kind == "dense" and run.quality in ("A", "B")


def _figures(each: Compared) -> str:
    step, peak = each.found.step_s, each.found.peak_bytes / 1e9
    return f"{step:.3g} s of {each.run.step_s or math.nan:.3g} s, {each.error:+.3f}, {peak:.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
