"""What does running a pipeline cost beside its arithmetic?

    python -m benchmarks.runtime [--steps N] [--stages 4] [--devices-per-stage 1] [--microbatches 12 32] [--ray]

A chain of tiny matrix products, in stages on virtual CPU devices; what crosses is some hundred bytes. With 12
microbatches a worker has 62 instructions, 26 of them tasks; with 32 it has 162, 66 of them tasks. Shown are medians of
whole steps, from the call until all results are there, and of the workers' instructions alone, without placing
arguments and wrapping results; and the *floor* of the latter: the same executions, copies and placements one after the
other, without anything that finds out what is next, measured in turn with them. The bar is 1.10 of the floor.

With ``--ray`` each worker is a process of a Ray that is started here. Shown are whole steps, the driver's and Ray's
part included; their floor is that of this process's instructions and as many calls of Ray that do nothing; the bar is
1.5 times their sum. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

BAR, RAY_BAR = 1.10, 1.5
"""Of the floor."""
WARM_UP_STEPS = 5
WIDTH = 8


def main() -> int:
    """Prints the tables; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--devices-per-stage", type=int, default=1)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[12, 32])
    parser.add_argument("--ray", action="store_true")
    chosen = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(chosen.stages * chosen.devices_per_stage)
    missed = [n for n in chosen.microbatches if not measure(chosen, n)]
    return int(bool(missed))


def measure(chosen: Any, microbatches: int) -> bool:
    """One length; True where the bar is met, or is for others."""
    import jax

    import autopar

    step, state, x = tiny(chosen.stages, chosen.devices_per_stage, microbatches)
    plan = step.plan(state, x)
    kinds = Counter(type(i).__name__ for i in plan.program.workers[0])
    print(f"{chosen.stages} workers x {chosen.devices_per_stage} devices; worker 0: "
          f"{kinds.total()} instructions, {dict(kinds)}")  # fmt: skip
    executor = step.compiled()
    inside: list[float] = []
    floors: list[float] = []
    workers = executor._played

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = workers(*args)
        jax.block_until_ready(out)
        inside.append(time.perf_counter() - start)
        if len(inside) > WARM_UP_STEPS:
            floors.append(floor_s(executor, state, x))
        return out

    executor._played = timed
    whole = timed_steps(step, state, x, chosen.steps)
    executor._played = workers
    found_s, floor = statistics.median(inside[WARM_UP_STEPS:]), statistics.median(floors)
    print(f"  workers' instructions {1e3 * found_s:.2f} ms (least {1e3 * min(inside):.2f}), floor {1e3 * floor:.2f}: "
          f"{found_s / floor:.3f}, bar {BAR}; whole step {1e3 * statistics.median(whole):.2f} ms")  # fmt: skip
    if not chosen.ray:
        return found_s <= BAR * floor
    with autopar.init() as cluster:
        far = step.with_options(cluster=cluster, plan=plan)
        whole = timed_steps(far, state, x, chosen.steps)
        gang = far.compiled().gang
        calls: list[float] = []
        for _ in range(chosen.steps):
            start = time.perf_counter()
            gang.ask("coordinator", [()] * chosen.stages, 60.0)
            calls.append(time.perf_counter() - start)
    found_s, call_s = statistics.median(whole), statistics.median(calls)
    print(
        f"  Ray: whole step {1e3 * found_s:.2f} ms ({1e3 * min(whole):.2f} to {1e3 * max(whole):.2f}), calls that do "
        f"nothing {1e3 * call_s:.2f}: {found_s / (floor + call_s):.3f} of both floors, bar {RAY_BAR}"
    )
    return found_s <= RAY_BAR * (floor + call_s)


def floor_s(executor: Any, state: Any, x: Any) -> float:
    """Seconds of what a step calls, with its arguments at hand."""
    import jax
    import jax.numpy as jnp

    calls: list[tuple[Any, list[Any]]] = []
    lines = executor._tape._lines

    def begun() -> Any:
        begin = executor.part.begin(dict(enumerate([*executor.layered.consts, *state, x])))
        for executables, feeds in zip(executor.executables, executor._feeds(begin), strict=True):
            executables.start(feeds)
        return begin

    def noted(run: Any) -> Any:
        def call(*given: Any) -> Any:
            kept = [jnp.copy(a) for a in given]  # some are donated
            jax.block_until_ready(kept)
            calls.append((run, kept))
            return run(*given)

        return call

    executor._tape._lines = [(at, noted(run), *rest) for at, run, *rest in lines]
    try:
        jax.block_until_ready(executor._tape.play(begun().initial))
    finally:
        executor._tape._lines = lines
    begun()
    made: list[Any] = []
    start = time.perf_counter()
    for run, given in calls:
        made.append(run(*given))
    jax.block_until_ready(made)
    taken_s = time.perf_counter() - start
    executor._ended()
    return taken_s


def timed_steps(step: Any, state: Any, x: Any, steps: int) -> list[float]:
    """Seconds of each step, from its call until its results are there; warm-up left out."""
    whole: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        state, value = step(state, x)
        for leaf in (*state, value):
            leaf.block_until_ready()
        whole.append(time.perf_counter() - start)
    return whole[WARM_UP_STEPS:]


def tiny(stages: int, devices: int, microbatches: int) -> tuple[Any, Any, Any]:
    """The step, its state and its batch."""
    import numpy as np

    import autopar
    from benchmarks.models import chain_step

    params = [np.eye(WIDTH, dtype=np.float32)] * stages
    x = np.ones((microbatches, WIDTH), np.float32)
    step = autopar.parallelize(
        chain_step, cluster=f"cpu:{stages * devices}", donate_argnums=0, num_microbatches=microbatches, stages=stages,
        layers=stages, schedule="1f1b", submeshes=[(1, devices)], workers=1,
    )  # fmt: skip
    return step, params, x


if __name__ == "__main__":
    sys.exit(main())
