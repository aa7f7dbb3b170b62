"""Recomputation chosen value by value against all or nothing, under memory limits. Needs no device.

    python -m benchmarks.remat [model …] [--mesh 8] [--cluster dgx-h100] [--limit 0.7 …] [--small] [--compile]

Limits lie between the step's arguments (0) and the peak of its best plan without a limit (1), whose step time is 1 too.
Plans are shown as step time @ predicted peak in GB. ``none``: the model as it is, keeping everything. ``all``:
`jax.checkpoint` around each block in the model, planned as written. ``chosen``: the model as it is, the planner
recomputing what it likes. ``-``: no plan found. ``--small --compile`` compiles each chosen plan for this process's CPU
devices (JAX_NUM_CPU_DEVICES=8, jax from 0.12 on): its peak is printed as a part of the limit, and in the row without a
limit of the prediction, which may be off by itself.
Exit status 1 where ``chosen`` is slower than the better of the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.cost.logical_meshes import mesh_shape_from_text
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from benchmarks.models import gpt, random_arguments
from benchmarks.vision import u_transformer, wide_resnet

LIMITS = (0.9, 0.7, 0.5, 0.35)
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "gpt": (gpt, {"layers": 12}, {"layers": 4, "hidden": 64, "heads": 8, "seq": 64, "vocab": 128, "batch": 16,
                                  "dtype": "float32"}),
    "u_transformer": (u_transformer, {}, {"channels": 16, "size": 16, "batch": 16}),
    "wide_resnet": (wide_resnet, {}, {"blocks": (2, 2, 2), "channels": 16, "size": 32, "batch": 16, "classes": 16}),
}  # fmt: skip
"""Name → (model, its sizes, its small sizes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One plan: seconds and bytes per device, as predicted; ``compiled_bytes`` 0 where it was not compiled."""

    step_s: float
    peak_bytes: int
    argument_bytes: int
    values: int
    planning_s: float
    compiled_bytes: int = 0


def outcome(model: Any, options: dict[str, Any], compiled: bool = False) -> Outcome | None:
    """The plan of (step, arguments) under ``options``; None where none is found."""
    step, args = model
    started = time.perf_counter()
    sharded = autopar.parallelize(step, donate_argnums=0, num_microbatches=1, **options)
    try:
        plan = sharded.plan(*args)
    except (InfeasibleError, SolverTimeoutError):
        return None
    p, taken = plan.predictions, time.perf_counter() - started
    held = 0
    if compiled:
        memory = sharded.lower(*random_arguments(args)).compile().memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        held += memory.temp_size_in_bytes
    return Outcome(
        step_s=p.step_s, peak_bytes=p.peak_memory_bytes, argument_bytes=p.argument_bytes,
        values=len(plan.sharding.recompute), planning_s=taken, compiled_bytes=held,
    )  # fmt: skip


def rows(name: str, options: dict[str, Any], limits: Sequence[float], small: bool, compiled: bool) -> list[list[str]]:
    """A model's part of the table; the last cell of a row is ``slower`` where ``chosen`` loses."""
    make, sizes, little = MODELS[name]
    sizes = little if small else sizes
    plain, checkpointed = make(**sizes), make(**sizes, remat=True)
    free = outcome(plain, options, compiled)
    assert free is not None
    whole = free.argument_bytes + 1.0 * (free.peak_bytes - free.argument_bytes)
    part = f"{free.compiled_bytes / whole:.2f}" if compiled else ""
    out = [[name, "none", f"{whole / 1e9:.3g}", "1", "", "1", "0", f"{free.planning_s:.1f}", part, ""]]
    for limit in limits:
        size = int(free.argument_bytes + limit * (free.peak_bytes - free.argument_bytes))
        limited = {**options, "memory_bytes": size}
        none = outcome(plain, {**limited, "recompute": False})
        everything = outcome(checkpointed, {**limited, "recompute": False})
        chosen = outcome(plain, {**limited, "recompute": True}, compiled)
        best = min((o.step_s for o in (none, everything) if o is not None), default=float("inf"))
        worse = best < float("inf") and (chosen is None or chosen.step_s > 1.001 * best)
        times = [
            "-" if o is None else f"{o.step_s / free.step_s:.3f} @ {o.peak_bytes / 1e9:.3g}"
            for o in (none, everything, chosen)
        ]
        part = f"{chosen.compiled_bytes / size:.2f}" if chosen is not None and compiled else ""
        seen = ["-", "-"] if chosen is None else [str(chosen.values), f"{chosen.planning_s:.1f}"]
        out.append([name, f"{limit:g}", f"{size / 1e9:.3g}", *times, *seen, part, "slower" if worse else ""])
    return out


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="model")
    parser.add_argument("--mesh", default="8")
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--limit", type=float, action="append")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(argv)
    options: dict[str, Any] = {"mesh": mesh_shape_from_text(given.mesh)}
    if not given.compile:
        options["cluster"] = given.cluster
    headings = ("model", "limit", "GB", "none", "all", "chosen", "values", "planning s", "compiled / limit", "")
    lost = False
    for name in given.models:
        table = Table(*headings, box=None)
        for row in rows(name, options, given.limit or LIMITS, given.small, given.compile):
            table.add_row(*row)
            lost = lost or bool(row[-1])
        Console(width=120).print(table)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
