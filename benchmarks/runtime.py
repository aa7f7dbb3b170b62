"""What does running a pipeline cost beside its arithmetic?

    python -m benchmarks.runtime [--steps N] [--stages 4] [--devices-per-stage 1] [--microbatches 12 32] [--ray]

A chain of tiny matrix products, in stages on virtual CPU devices; what crosses is some hundred bytes. With 12
microbatches a worker has 62 instructions, 26 of them tasks; with 32 it has 162, 66 of them tasks. Shown are medians of
whole steps, from the call until all results are there, and of the workers' instructions alone, without placing
arguments and wrapping results. The bar, of the runtimes' issue, is on 4 workers of one device and at most 64
instructions each: ≤ 3 ms. Exit status 1 where it is missed.

With ``--ray`` each worker is a process of a Ray that is started here. Shown are whole steps, the driver's and Ray's
part included; the bar is 10 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

BAR_S = 3e-3
RAY_BAR_S = 10e-3
INSTRUCTIONS = 64
"""Of a worker, at most, for the bar to hold."""
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
    print(f"{'Ray: ' * chosen.ray}{chosen.stages} workers x {chosen.devices_per_stage} devices; worker 0: "
          f"{kinds.total()} instructions, {dict(kinds)}")  # fmt: skip
    held_to_bar = chosen.devices_per_stage == 1 and kinds.total() <= INSTRUCTIONS
    if chosen.ray:
        with autopar.init() as cluster:
            whole = timed_steps(step.with_options(cluster=cluster, plan=plan), state, x, chosen.steps)
        found_s = statistics.median(whole)
        print(f"  whole step {1e3 * found_s:.2f} ms (least {1e3 * min(whole):.2f}, most {1e3 * max(whole):.2f})")
        return not held_to_bar or found_s <= RAY_BAR_S
    executor = step.compiled()
    inside: list[float] = []
    workers = executor._played

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = workers(*args)
        jax.block_until_ready(out)
        inside.append(time.perf_counter() - start)
        return out

    executor._played = timed
    whole = timed_steps(step, state, x, chosen.steps)
    found_s = statistics.median(inside[WARM_UP_STEPS:])
    print(f"  workers' instructions {1e3 * found_s:.2f} ms (least {1e3 * min(inside):.2f}), whole step "
          f"{1e3 * statistics.median(whole):.2f} ms (least {1e3 * min(whole):.2f})")  # fmt: skip
    return not held_to_bar or found_s <= BAR_S


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
