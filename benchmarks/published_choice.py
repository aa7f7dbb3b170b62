"""What autopar chooses for models and clusters of published runs, beside the layouts that were published.

    python -m benchmarks.published_choice [--runs FILE] [--count 30] [--only TEXT ...]

Of the dense rows in 16 bits of quality A or B one of each model and cluster is taken, spread over kinds of hardware.
Its published layout is priced as `benchmarks.published` does, then autopar plans the same step for the same cluster
with nothing forced but the memory that there is. The published layout is one of the plans that are searched: what is
chosen may not be slower by more than `SLOWER`, unless that layout does not fit; nor may it use more than `MOST` of the
peak FLOP/s for the model's. Exit status 1 where one is, or there is no plan. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child import ChildError, ask
from benchmarks.published import DATA, is_core
from benchmarks.published_rows import Run, read_runs

SLOWER, MOST = 0.001, 0.75
STOP_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA / "runs.csv", help="rows, where not those of ../shared/data")
    parser.add_argument("--count", type=int, default=30, help="how many models and clusters")
    parser.add_argument("--only", nargs="+", default=None, metavar="TEXT", help="rows whose id holds one of these")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        given = json.load(sys.stdin)
        print(json.dumps(_planned(next(run for run in read_runs(Path(given["runs"])) if run.id == given["id"]))))
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"
    runs = chosen(read_runs(options.runs), options.count, options.only)
    heads = ("row", "devices", "measured s", "published", "s", "GB", "chosen", "s", "GB", "of peak", "chosen/published")
    table = Table(*heads)
    missed = 0
    for run in runs:
        try:
            got = ask("benchmarks.published_choice", {"runs": str(options.runs), "id": run.id}, STOP_S).values
        except ChildError as error:
            table.add_row(run.id, "", "", str(error)[:200])
            missed += 1
            continue
        published, own = got["published"], got["chosen"]
        fits = published["peak_bytes"] <= got["limit_bytes"]
        ratio = own["step_s"] / published["step_s"]
        bad = (fits and ratio > 1 + SLOWER) or own["utilisation"] > MOST
        missed += bad
        cells = [run.id, str(got["devices"]), f"{run.step_s or 0:.3g}"]
        for each in (published, own):
            cells += [each["layout"], f"{each['step_s']:.3g}", f"{each['peak_bytes'] / 1e9:.0f}"]
        said = ("" if fits else ", does not fit") + (" missed" if bad else "")
        cells += [f"{own['utilisation']:.0%}", f"{ratio:.3f}{said}"]
        table.add_row(*cells)
        print(" | ".join(cells), f"{got['seconds']:.0f} s", file=sys.stderr, flush=True)
    Console(width=230).print(table)
    print(
        f"{len(runs) - missed} of {len(runs)} no slower than the published layout, and at most {MOST:.0%} of the peak"
    )
    return int(missed > 0)


def chosen(runs: Sequence[Run], count: int, only: Sequence[str] | None) -> list[Run]:
    """Of each model and cluster the fastest run; of each kind of hardware as many as of any other, while there are."""
    best: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        if run.case is None or not is_core(run) or not run.step_s:
            continue
        if only is not None and not any(word in run.id for word in only):
            continue
        key = run.case.model, run.hardware, run.case.devices
        if key not in best or run.step_s < (best[key].step_s or 0.0):
            best[key] = run
    by_kind: dict[str, list[Run]] = {}
    for run in best.values():
        by_kind.setdefault(run.hardware, []).append(run)
    turns = [(turn, kind, run) for kind, mine in sorted(by_kind.items()) for turn, run in enumerate(_apart(mine))]
    return [run for _, _, run in sorted(turns, key=lambda x: x[:2])[:count]]


def _apart(runs: Sequence[Run]) -> list[Run]:
    """Sources in turn, in the order of the rows."""
    by_source: dict[str, list[Run]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(run)
    turns = [(turn, i, run) for i, mine in enumerate(by_source.values()) for turn, run in enumerate(mine)]
    return [run for _, _, run in sorted(turns, key=lambda x: x[:2])]


def _planned(run: Run) -> dict[str, Any]:
    import autopar
    from benchmarks.published_clusters import cluster_of
    from benchmarks.published_models import step_of
    from benchmarks.published_plans import Planner

    case = run.case
    assert case is not None
    started_s = time.perf_counter()
    published = Planner().plan(case)
    cluster = cluster_of(case)
    step, args = step_of(case)
    own = autopar.parallelize(step, cluster=cluster, donate_argnums=0, num_microbatches="auto").plan(*args).data
    limit = min(group.device.memory_bytes for group in cluster.groups)
    return {
        "published": _told(published), "chosen": _told(own), "devices": case.devices,
        "limit_bytes": limit, "seconds": time.perf_counter() - started_s,
    }  # fmt: skip


def _told(plan: Any) -> dict[str, Any]:
    from autopar.ir.spending import spending

    shapes = dict.fromkeys("x".join(map(str, mesh.shape)) for mesh in plan.meshes)
    p = plan.predictions
    return {
        "step_s": p.step_s, "peak_bytes": p.peak_memory_bytes, "utilisation": spending(plan).utilisation or 0.0,
        "layout": f"{len(plan.meshes)} on {', '.join(shapes)}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
