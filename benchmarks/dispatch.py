"""What does a call of a parallelized step cost beside `jax.jit`?

    python -m benchmarks.dispatch [--calls N] [--devices 8] [--method data_parallel]

Two steps so short that the call itself shows: an MLP, and a GPT whose state has some 160 leaves. Each is called in
three ways, in turn: the parallelized function; `jax.jit` of the user's own step with the plan's shardings on arguments
and results; and the compiled program of `lower(...)` itself, which tells the call from the program. Every call gets
its batch as NumPy arrays and is timed until all its results are there; shown are medians. The bar, of the project's
first issue, is on the first two: autopar ≤ 1.05 · jit + 50 µs. Exit status 1 where it is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import autopar
from benchmarks import models

RATIO_BAR = 1.05
EXTRA_BAR_S = 50e-6
WARM_UP_CALLS = 20
STEPS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "MLP": models.mlp,
    "GPT, 4 layers": models.small_gpt,
}


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of PartitionSpecs as one of NamedShardings."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def median_times(ways: dict[str, Callable[..., Any]], states: dict[str, Any], batch: Any, calls: int) -> dict[str, Any]:
    """Way → (seconds until the call returns, seconds until its results are there), medians over ``calls`` rounds.

    A round calls every way once, starting with another one each time; each way has a state of its own, and the
    state that a call returns is donated to the next."""
    names = list(ways)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_number in range(WARM_UP_CALLS + calls):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            state = states.pop(name)
            start_s = time.perf_counter()
            state, loss = ways[name](state, batch)
            returned_s = time.perf_counter()
            jax.block_until_ready((state, loss))
            ready_s = time.perf_counter()
            states[name] = state
            if round_number >= WARM_UP_CALLS:
                times[name].append((returned_s - start_s, ready_s - start_s))
    return {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in times.items()}


def measure(step: Callable[..., Any], shapes: tuple[Any, ...], *, devices: int, method: str, calls: int) -> Any:
    """`median_times` of the three ways to call ``step``."""
    parallel = autopar.parallelize(step, mesh=(devices,), method=method, donate_argnums=(0,))
    state, batch = models.random_arguments(shapes)
    plan = parallel.plan(*shapes)
    axes = plan.sharding.mesh
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(axes.shape), axes.axis_names)
    placed, results = shardings(plan.in_specs, mesh), shardings(plan.out_specs, mesh)
    ways = {
        "autopar": parallel,
        "jit": jax.jit(step, in_shardings=placed, out_shardings=results, donate_argnums=(0,)),
        "compiled": parallel.lower(*shapes).compile(),
    }
    states = {name: jax.device_put(state, placed[0]) for name in ways}
    return median_times(ways, states, batch, calls)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--method", default="data_parallel")
    flags = parser.parse_args(argv)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", flags.devices)

    table = Table(title=f"One call, {flags.devices} {jax.default_backend()} devices, {flags.method}; medians, µs")
    table.add_column("step", no_wrap=True)
    for name in ("leaves", "autopar", "jit", "compiled", "autopar − jit", "autopar / jit", "returns after", "jit's"):
        table.add_column(name, justify="right")
    missed: list[str] = []
    for name, build in STEPS.items():
        step, shapes = build()
        times = measure(step, shapes, devices=flags.devices, method=flags.method, calls=flags.calls)
        (ours_returned_s, ours_s), (jit_returned_s, jit_s) = times["autopar"], times["jit"]
        micro = [f"{s * 1e6:.0f}" for s in (ours_s, jit_s, times["compiled"][1], ours_s - jit_s)]
        returned = [f"{s * 1e6:.0f}" for s in (ours_returned_s, jit_returned_s)]
        table.add_row(name, str(len(jax.tree.leaves(shapes))), *micro, f"{ours_s / jit_s:.3f}", *returned)
        bar_s = RATIO_BAR * jit_s + EXTRA_BAR_S
        if ours_s > bar_s:
            missed.append(f"{name}: {ours_s * 1e6:.0f} µs, bar {bar_s * 1e6:.0f} µs")
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
