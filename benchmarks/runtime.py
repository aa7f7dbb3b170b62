"""What does running a pipeline cost beside its arithmetic?

    python -m benchmarks.runtime [--steps N] [--stages 4] [--devices-per-stage 1] [--microbatches 32] [--ray]

A chain of tiny matrix products, in stages on virtual CPU devices: each worker runs 2 tasks a microbatch, and what
crosses is some hundred bytes. Shown are medians of whole steps, from the call until all results are there, and of the
parts of one: what goes in, the workers' instructions, what comes out. The bar, of the runtimes' issue, is on
the workers' instructions for 4 workers of 64 tasks with one device each: ≤ 3 ms. Exit status 1 where it is missed.

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
WARM_UP_STEPS = 5
WIDTH = 8


def main() -> int:
    """Prints the table; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--devices-per-stage", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--ray", action="store_true")
    chosen = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(chosen.stages * chosen.devices_per_stage)

    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, grads = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [np.eye(WIDTH, dtype=np.float32)] * chosen.stages
    x = np.ones((chosen.microbatches, WIDTH), np.float32)
    plan = autopar.plan_pipeline(
        step, (params, x), cluster=f"cpu:{chosen.stages * chosen.devices_per_stage}", donate_argnums=0,
        num_microbatches=chosen.microbatches, num_stages=chosen.stages, layers=chosen.stages, schedules="1f1b",
        submeshes=[(1, chosen.devices_per_stage)], workers=1,
    )  # fmt: skip
    if chosen.ray:
        with autopar.init() as cluster:
            whole = timed_steps(plan.compile(cluster=cluster), params, x, chosen.steps)
        found_s = statistics.median(whole)
        tasks = Counter(type(i).__name__ for i in plan.program.workers[0])
        print(f"Ray: {chosen.stages} workers x {chosen.devices_per_stage} devices; worker 0: {dict(tasks)}")
        print(f"whole step {1e3 * found_s:.2f} ms (least {1e3 * min(whole):.2f}, most {1e3 * max(whole):.2f})")
        return int(chosen.devices_per_stage == 1 and found_s > RAY_BAR_S)
    compiled = plan.compile()
    runtime = compiled._runtime
    inside: list[float] = []
    workers = runtime._workers

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        out = workers(*args)
        jax.block_until_ready(out)
        inside.append(time.perf_counter() - start)
        return out

    runtime._workers = timed
    whole = timed_steps(compiled, params, x, chosen.steps)
    kinds = Counter(type(i).__name__ for i in runtime.program.workers[0])
    found_s = statistics.median(inside[WARM_UP_STEPS:])
    print(f"{chosen.stages} workers x {chosen.devices_per_stage} devices; worker 0: {dict(kinds)}")
    print(f"workers' instructions {1e3 * found_s:.2f} ms (least {1e3 * min(inside):.2f}), whole step "
          f"{1e3 * statistics.median(whole):.2f} ms (least {1e3 * min(whole):.2f})")  # fmt: skip
    return int(chosen.devices_per_stage == 1 and found_s > BAR_S)


def timed_steps(compiled: Any, state: Any, x: Any, steps: int) -> list[float]:
    """Seconds of each step, from its call until its results are there; warm-up left out."""
    whole: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        state, value = compiled(state, x)
        for leaf in (*state, value):
            leaf.block_until_ready()
        whole.append(time.perf_counter() - start)
    return whole[WARM_UP_STEPS:]


if __name__ == "__main__":
    sys.exit(main())
