"""What a memory limit costs: plans under parts of the peak that the best plan without a limit has.

    python -m benchmarks.limits [MODEL …] [--part 0.8 0.6 0.4] [--cluster dgx-h100] [--mesh 8] [--compiler cuda|tpu]

A row is a plan of one microbatch: its peak as a part of that peak, its step over that plan's step (both as predicted),
the values that it computes again, and how long planning took. ``--compiler`` compiles each plan ahead of time, on no
device (the extras ``verify-cuda`` and ``verify-tpu``): what is predicted, over what the compiled program has.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.cost.logical_meshes import mesh_shape_from_text
from autopar.ir.errors import AutoparError
from benchmarks.fidelity import CLUSTERS, MODELS

PARTS = (0.8, 0.6, 0.4)


def row(sharded: Any, args: Any, part: float, free: Any, compiled: bool) -> list[str]:
    """The plan under ``part`` of the peak of ``free``, the predictions of the plan without a limit."""
    under = sharded.with_options(memory_bytes=int(part * free.peak_memory_bytes))
    started = time.perf_counter()
    try:
        plan = under.plan(*args)
    except AutoparError as error:
        return [f"{part:g}", type(error).__name__, "", "", f"{time.perf_counter() - started:.1f}", ""]
    taken, p = time.perf_counter() - started, plan.predictions
    held = ""
    if compiled:
        figures = {figure.name.strip(): figure for figure in autopar.verify_step(under, *args).figures}
        off = {name: figures[name].planned / figures[name].compiled - 1 for name in ("peak memory", "step")}
        held = f"peak {off['peak memory']:+.1%}, step {off['step']:+.1%}"
    return [
        f"{part:g}", f"{p.peak_memory_bytes / free.peak_memory_bytes:.3f}", f"{p.step_s / free.step_s:.3f}",
        str(len(plan.sharding.recompute)), f"{taken:.1f}", held,
    ]  # fmt: skip


def main() -> None:
    """Prints a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--part", nargs="+", type=float, default=PARTS)
    parser.add_argument("--cluster", help="default: dgx-h100, or what the compiler is for")
    parser.add_argument("--mesh", type=mesh_shape_from_text, default=(8,))
    parser.add_argument("--compiler", choices=tuple(CLUSTERS))
    options = parser.parse_args()
    cluster = options.cluster or CLUSTERS[options.compiler or "cuda"]
    console = Console()
    for name in options.models or MODELS:
        step, args = MODELS[name]()
        sharded = autopar.parallelize(step, cluster=cluster, mesh=options.mesh, num_microbatches=1, donate_argnums=0)
        free = sharded.plan(*args).predictions
        table = Table("part", "peak", "step", "recomputed", "planned in s", "predicted over compiled", title=name)
        for part in options.part:
            table.add_row(*row(sharded, args, part, free, options.compiler is not None))
        console.print(table)


if __name__ == "__main__":
    main()
