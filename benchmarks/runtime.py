"""What does running a pipeline cost beside its arithmetic?

    python -m benchmarks.runtime [--steps N] [--stages 4] [--devices-per-stage 1] [--microbatches 12 32] [--ray]

A chain of tiny matrix products, in stages on virtual CPU devices; what crosses is some hundred bytes. With 12
microbatches a worker has 62 instructions, 26 of them tasks; with 32 it has 162, 66 of them tasks. Shown are medians of
whole steps, from the call until all results are there, and of the workers' instructions alone, without placing
arguments and wrapping results; and the *floor* of the latter: the same executions, copies and placements one after the
other, without anything that finds out what is next, measured in turn with them. The bar is 1.10 of the floor. Beside it
stands the floor of the same pipeline with no tasks fused (`ir.pipeline.Stage.fused`).

With ``--ray`` each worker is a process of a Ray that is started here. Shown are whole steps, the driver's and Ray's
part included; their floor is that of this process's instructions and as many calls of Ray that do nothing; the bar is
1.5 times their sum. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from autopar.ir.program import FusedPhase, Run
from autopar.ir.serde import to_json

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
    import autopar

    step, state, x = tiny(chosen.stages, chosen.devices_per_stage, microbatches)
    plan = step.plan(state, x)
    kinds = Counter(type(i).__name__ for i in plan.program.workers[0])
    print(f"{chosen.stages} workers x {chosen.devices_per_stage} devices; worker 0: "
          f"{kinds.total()} instructions, {dict(kinds)}")  # fmt: skip
    fused = [i for worker in plan.program.workers for i in worker if isinstance(i, Run)]
    fused = [i for i in fused if plan.program.executables[i.executable].phase in get_args(FusedPhase)]
    found_s, least_s, floor, whole = played(step, state, x, chosen.steps)
    print(f"  workers' instructions {1e3 * found_s:.2f} ms (least {1e3 * least_s:.2f}), floor {1e3 * floor:.2f}: "
          f"{found_s / floor:.3f}, bar {BAR}; whole step {1e3 * whole:.2f} ms")  # fmt: skip
    print(f"  {2 * len(fused)} tasks are fused; apart the floor is "
          f"{1e3 * played(apart(step, state, x), state, x, chosen.steps)[2]:.2f} ms")  # fmt: skip
    if not chosen.ray:
        return found_s <= BAR * floor
    with autopar.init() as cluster:
        far = step.with_options(cluster=cluster, plan=plan)
        far_s = timed_steps(far, state, x, chosen.steps)
        gang = far.compiled().gang
        calls: list[float] = []
        for _ in range(chosen.steps):
            start = time.perf_counter()
            gang.ask("coordinator", [()] * chosen.stages, 60.0)
            calls.append(time.perf_counter() - start)
    found_s, call_s = statistics.median(far_s), statistics.median(calls)
    print(
        f"  Ray: whole step {1e3 * found_s:.2f} ms ({1e3 * min(far_s):.2f} to {1e3 * max(far_s):.2f}), calls that do "
        f"nothing {1e3 * call_s:.2f}: {found_s / (floor + call_s):.3f} of both floors, bar {RAY_BAR}"
    )
    return found_s <= RAY_BAR * (floor + call_s)


def played(step: Any, state: Any, x: Any, steps: int) -> tuple[float, float, float, float]:
    """Median and least seconds of a step's instructions, the median of their floor, and that of whole steps."""
    import jax

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
    whole = timed_steps(step, state, x, steps)
    executor._played = workers
    median = statistics.median
    return median(inside[WARM_UP_STEPS:]), min(inside), median(floors), median(whole)


def apart(step: Any, *args: Any) -> Any:
    """The step with no tasks fused."""
    data = step.plan(*args).data
    body = data.pipelined
    stages = tuple(replace(stage, fused=False) for stage in body.plan.stages)
    data = replace(data, body=replace(body, plan=replace(body.plan, stages=stages)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "apart.json"
        path.write_text(to_json(data))
        out = step.with_options(plan=path)
        out.plan(*args)
        return out


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
