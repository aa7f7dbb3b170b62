"""How right are a plan's time and memory on an accelerator that is there, and does the planned step cost anything?

    python -m benchmarks.on_device --cluster measured.json [--only PATTERN] [--save FILE.json]

For one device: a step of the suites' models, planned for ``--cluster`` (what `autopar profile` has measured here), run
as planned and as plain `jax.jit` runs it. Each in a process of its own. ``step`` is the median of 10 after 3, state
donated; memory is the most that the allocator has given out. ``loss`` is how far the first step's lies from the plain
one's, as a part of it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROWS = {"gpt-350M": 8, "gpt-760M": 4, "moe-380M": 8, "wide-resnet-250M": 32, "vit-h-14": 32, "u-transformer-1B": 8}
"""Rows of `benchmarks.suite_models` → examples of a step (chosen: state and activations fit 80 GB)."""
REPEATS = 10


def main() -> int:
    """Runs the rows one after the other; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--row", nargs=2, metavar=("NAME", "WAY"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row is not None:
        print(json.dumps(measured(*chosen.row, chosen.cluster)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    table = Table(title="one device")
    for column in ("model", "planned ms", "step ms", "jit ms", "planned GB", "peak GB", "jit GB", "loss", "plan s"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in fnmatch.filter(ROWS, chosen.only):
        found = {way: _ask(name, way, chosen.cluster) for way in ("planned", "jit")}
        rows[name] = found
        if "error" in found["planned"] or "error" in found["jit"]:
            print(name, found, file=sys.stderr, flush=True)
            continue
        plan, jit = found["planned"], found["jit"]
        table.add_row(
            name, f"{1e3 * plan['predicted_s']:.1f}", f"{1e3 * plan['step_s']:.1f}", f"{1e3 * jit['step_s']:.1f}",
            f"{plan['predicted_bytes'] / 1e9:.2f}", f"{plan['peak_bytes'] / 1e9:.2f}", f"{jit['peak_bytes'] / 1e9:.2f}",
            f"{abs(plan['loss'] / jit['loss'] - 1):.1e}", f"{plan['planning_s']:.1f}",
        )  # fmt: skip
        if chosen.save is not None:
            chosen.save.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=140).print(table)
    return int(len(table.rows) < len(rows))


def _ask(name: str, way: str, cluster: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.on_device", "--cluster", cluster, "--row", name, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def measured(name: str, way: str, cluster: str) -> dict[str, Any]:
    """One row, run ``way``: "planned" or "jit"."""
    import jax

    import autopar
    from benchmarks.models import random_arguments
    from benchmarks.suite_models import SUITE

    fun, shapes = SUITE[name].build(ROWS[name])
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "batch": ROWS[name], "jax": jax.__version__}
    if way == "planned":
        planned = autopar.parallelize(fun, cluster=cluster, donate_argnums=0)
        started_s = time.perf_counter()
        plan = planned.plan(*shapes)
        found["planning_s"] = time.perf_counter() - started_s
        found["predicted_s"] = plan.predictions.step_s
        found["predicted_bytes"] = plan.predictions.peak_memory_bytes
        step: Any = planned
    else:
        step = jax.jit(fun, donate_argnums=0)
    state, *rest = jax.device_put(random_arguments(shapes), jax.devices()[0])
    started_s = time.perf_counter()
    state, metrics = step(state, *rest)
    found["loss"] = float(jax.tree.leaves(metrics)[0])
    found["first_s"] = time.perf_counter() - started_s
    times: list[float] = []
    for _ in range(3 + REPEATS):
        started_s = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, *rest))
        times.append(time.perf_counter() - started_s)
    found["step_s"] = statistics.median(times[3:])
    stats = jax.devices()[0].memory_stats() or {}
    found["peak_bytes"] = stats.get("peak_bytes_in_use", 0)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
