"""Does a memory limit that data parallel exceeds lead to ZeRO by itself, and does the compiled program keep it?

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m benchmarks.zero [model …] [--mesh 2x4] [--limit 0.5]

Limits are parts of data parallel's own peak. For each: the plan's predicted and the compiled program's peak per device
(arguments + outputs − aliased + temporaries, from ``memory_analysis()``), planning seconds, the part of all parameters
and of the optimizer's state that a device holds, and the bytes that are all-reduced as a part of all parameters'
bytes: 1 where every gradient is made whole, as data parallel does; what is reduce-scattered, or is a shard from the
start, does not count. ``least`` is what every plan needs, provably or by the planner's count; the
smallest peak of all plans seen, ZeRO-3's among them, is reachable. Exit status 1 where a limit at or above that is
refused, or a compiled program exceeds its limit.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from tests.clusters import cluster
from tests.models import build, plain
from tests.models.base import Model

LIMITS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2)
MESHES = ((8,), (2, 4))
MODELS = ("mlp8", "gpt", "gpt_scan")
CLUSTER = cluster(8, flops_per_s=1e11, memory_bytes_per_s=1e12, latency_s=1e-5, bytes_per_s=1e10)
"""Links so slow that without a limit data parallel is the best plan: what is sharded is sharded for memory."""
PARAMS = "['params']"
FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""The programs are not run; code generation leaves buffers as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan; bytes per device. ``peak_bytes`` 0 where none was found."""

    seconds: float
    limit_bytes: int | None = None
    peak_bytes: int = 0
    compiled_bytes: int = 0
    step_s: float = 0.0
    params_part: float = 0.0
    state_part: float = 0.0
    all_reduced_part: float = 0.0
    refusal: str = ""

    @property
    def exceeds(self) -> bool:
        """True where the compiled program needs more than its limit."""
        return self.limit_bytes is not None and self.compiled_bytes > self.limit_bytes


def mlp8(width: int = 128, batch: int = 64) -> Model:
    """Eight dense layers of equal width with Adam: parameters and state outweigh activations."""
    return plain.mlp("float32", batch=batch, sizes=(width,) * 9)


def measure(model: Model, mesh: tuple[int, ...], limit_bytes: int | None = None, method: str = "auto") -> Row:
    """Plans one model under a limit or by a method, and compiles what comes out."""
    options: dict[str, Any] = {"cluster": CLUSTER, "mesh": mesh, "memory_bytes": limit_bytes, "method": method}
    step = autopar.parallelize(model.step, **options, **{"num_microbatches": 1, **model.kwargs})
    start_s = time.perf_counter()
    try:
        plan = step.plan(*model.args)
    except (InfeasibleError, SolverTimeoutError) as refusal:
        return Row(seconds=time.perf_counter() - start_s, limit_bytes=limit_bytes, refusal=str(refusal))
    seconds = time.perf_counter() - start_s
    analysis = step.lower(*model.args).compile(FAST_COMPILE).memory_analysis()
    all_reduced = sum(
        c.operand_bytes * c.count * (c.trips or 1) for c in plan.sharding.collectives if c.kind == "all-reduce"
    )
    return Row(
        seconds=seconds,
        limit_bytes=limit_bytes,
        peak_bytes=plan.predictions.peak_memory_bytes,
        compiled_bytes=analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes,
        step_s=plan.predictions.step_s,
        params_part=held(plan, PARAMS),
        state_part=held(plan, "['opt']"),
        all_reduced_part=all_reduced / sum(arg.type.size_bytes for arg in plan.data.inputs if PARAMS in arg.path),
    )


def held(plan: Any, name: str) -> float:
    """The part of the bytes of all arguments with ``name`` in their path that one device holds."""
    sizes = {axis.name: axis.size for axis in plan.sharding.mesh.axes}
    whole = local = 0.0
    for arg in plan.data.inputs:
        if name in arg.path:
            parts = 1
            for axis in (a for dim in arg.spec.dims for a in dim):
                parts *= sizes[axis]
            whole += arg.type.size_bytes
            local += arg.type.size_bytes / parts
    return local / whole if whole else 0.0


def least_bytes(refusals: Sequence[str]) -> int:
    """The largest peak that a refusal proves to be needed; 0 where none does."""
    found = [re.search(r"memory_bytes=(\d+) .* every plan needs at least", text) for text in refusals]
    return max((int(m.group(1)) + 1 for m in found if m), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per model and mesh; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="mlp8, or names in tests.models")
    parser.add_argument("--mesh", action="append", help="such as 2x4; may repeat (default: 8, 2x4)")
    parser.add_argument("--limit", action="append", type=float, help="part of data parallel's peak; may repeat")
    options = parser.parse_args(argv)
    meshes = [tuple(map(int, m.split("x"))) for m in options.mesh] if options.mesh else MESHES
    console = Console(width=None if sys.stdout.isatty() else 140)
    missed: list[str] = []
    for name in options.models:
        model = mlp8() if name == "mlp8" else build(name, "float32", large=True)
        for mesh in meshes:
            missed += _table(console, name, model, mesh, options.limit or LIMITS)
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


def _table(console: Console, name: str, model: Model, mesh: tuple[int, ...], limits: Sequence[float]) -> list[str]:
    """Measures and prints one model on one mesh; returns the bars missed."""
    title = f"{name} on {'x'.join(map(str, mesh))}"
    rows: dict[str, Row] = {}
    for method in ("data_parallel", "zero2", "zero3"):
        with console.status(f"{title}: {method}"):
            rows[method] = measure(model, mesh, method=method)
    peak = rows["data_parallel"].peak_bytes
    for part in limits:
        with console.status(f"{title}: limit {part}"):
            rows[f"limit {part:g}"] = measure(model, mesh, limit_bytes=int(part * peak))
    table = Table(title=title)
    table.add_column("plan", no_wrap=True)
    columns = (
        "limit kB",
        "fits",
        "predicted kB",
        "compiled kB",
        "step µs",
        "planning s",
        "params",
        "state",
        "all-reduced",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for label, row in rows.items():
        table.add_row(label, *_cells(row))
    console.print(table)
    reachable = min(row.peak_bytes for row in rows.values() if row.peak_bytes)
    least = least_bytes([row.refusal for row in rows.values()])
    proven = f"; at least {least / 1e3:.0f} kB are proven to be needed" if least else ""
    console.print(f"smallest peak seen {reachable / 1e3:.0f} kB, {reachable / peak:.2f} of data parallel's{proven}\n")
    missed = [
        f"{title}, {label}: refused, but {reachable} bytes are known to do"
        for label, row in rows.items()
        if row.refusal and row.limit_bytes is not None and row.limit_bytes >= reachable
    ]
    return missed + [
        f"{title}, {label}: compiled to {row.compiled_bytes} bytes, limit {row.limit_bytes}"
        for label, row in rows.items()
        if row.exceeds
    ]


def _cells(row: Row) -> list[str]:
    limit = "" if row.limit_bytes is None else f"{row.limit_bytes / 1e3:.0f}"
    if row.refusal:
        return [limit, "no", "", "", "", f"{row.seconds:.1f}"]
    return [
        limit,
        "" if row.limit_bytes is None else "over" if row.exceeds else "yes",
        f"{row.peak_bytes / 1e3:.0f}",
        f"{row.compiled_bytes / 1e3:.0f}",
        f"{row.step_s * 1e6:.0f}",
        f"{row.seconds:.1f}",
        f"{row.params_part:.2f}",
        f"{row.state_part:.2f}",
        f"{row.all_reduced_part:.2f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
