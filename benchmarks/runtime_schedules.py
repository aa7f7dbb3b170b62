"""Does a pipeline take as long as its simulated schedule?

    python -m benchmarks.runtime_schedules [compute] [sleep] [--steps 5] [--schedule 1f1b] [--trace t.json]

    compute    2 stages of one device and one thread, 16 microbatches through 8 products of 256 x 768 x 768 with tanh
    sleep      4 stages of one device, 16 microbatches, tasks that sleep for 20 ms

Tasks and transfers are measured one by one (`Step.trace`, each with a core to itself: XLA's CPU compiler
splits products over all cores that there are, whatever its flags say), and the plan's program is simulated with their
medians. Steps that are not traced, on a core a stage as far as there are so many, are held against that, from the call
until all results are there. The bar, of the runtimes' issue: the median within 1.10 times; exit status 1 where it is
missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

BAR = 1.10
SLEEP_S = 0.02
MICROBATCHES = 16
ROWS, WIDTH, PRODUCTS = 256, 768, 8


def main() -> int:
    """Prints a line a case; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=["compute", "sleep"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--trace", help="the last case's, with one step that is traced as it is")
    chosen = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    missed = [case for case in chosen.cases if not measure(case, chosen)]
    return int(bool(missed))


def measure(case: str, chosen: Any) -> bool:
    """One case; True where it is within the bar."""
    import jax

    import autopar
    from autopar.inter_op.program.simulate import simulate
    from benchmarks.models import chain_step

    stages = 2 if case == "compute" else 4
    args = chain(PRODUCTS, WIDTH, ROWS) if case == "compute" else chain(stages, 8, 1)
    step = autopar.parallelize(
        chain_step, cluster="cpu:4", num_microbatches=MICROBATCHES, stages=stages, submeshes=[(1, 1)],
        schedule=chosen.schedule, layers=stages, donate_argnums=0, workers=1,
    )  # fmt: skip
    step.plan(*args)
    executor = step.compiled()
    if case == "sleep":
        sleepy(executor)
    state, value = step(*args)
    cores = sorted(os.sched_getaffinity(0))
    on_cores(cores[:1])
    with step.trace(memory=False, alone=True) as traced:
        for _ in range(2):
            state, value = step(state, *args[1:])
    on_cores(cores[:stages])
    program = with_seconds(executor.program, traced.steps)
    simulated_s = simulate(program).makespan_s
    took: list[float] = []
    for _ in range(chosen.steps):
        jax.block_until_ready((state, value))
        start_s = time.perf_counter()
        state, value = step(state, *args[1:])
        jax.block_until_ready((state, value))
        took.append(time.perf_counter() - start_s)
    if chosen.trace is not None:
        with step.trace(chosen.trace, memory=False):
            state, value = step(state, *args[1:])
    median_s = statistics.median(took)
    tasks = {f"{e.phase} {e.stage}": f"{1e3 * e.time_s:.1f}" for e in program.executables if e.time_s}
    print(f"{case}, {chosen.schedule}, {stages} stages, {MICROBATCHES} microbatches, ms a task: {tasks}")
    print(f"  simulated {1e3 * simulated_s:.1f} ms, steps {1e3 * median_s:.1f} ms (least {1e3 * min(took):.1f}), "
          f"{median_s / simulated_s:.3f} times as long")  # fmt: skip
    return median_s <= BAR * simulated_s


def on_cores(cores: Sequence[int]) -> None:
    """All threads of this process that have not ended meanwhile."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def with_seconds(program: Any, steps: Sequence[Any]) -> Any:
    """The program with the median time of its tasks and transfers; what is in no trace runs nothing, and takes none."""
    from autopar.ir.program import Run

    executable_of = {
        program.executables[i.executable].label(i.microbatch): i.executable
        for worker in program.workers
        for i in worker
        if isinstance(i, Run)
    }
    tasks: dict[int, list[float]] = {}
    transfers: dict[int, list[float]] = {}
    for step in steps:
        for event in (event for worker in step.workers for event in worker.events):
            if event.what in executable_of:
                tasks.setdefault(executable_of[event.what], []).append(event.stop_s - event.start_s)
        for event in (event for link in step.links for event in link.events):
            cut = int(event.what.removeprefix("cut ").partition(".")[0])
            transfers.setdefault(cut, []).append(event.stop_s - event.start_s)
    return replace(
        program,
        executables=tuple(
            replace(e, time_s=statistics.median(tasks.get(i, [0.0])), forward_s=0.0)
            for i, e in enumerate(program.executables)
        ),
        transfers=tuple(replace(t, time_s=statistics.median(transfers[t.cut])) for t in program.transfers),
    )


def chain(products: int, width: int, rows: int) -> tuple[Any, Any]:
    """Arguments of `chain_step`, ``rows`` a microbatch."""
    import numpy as np

    random = np.random.default_rng(0)
    params = [random.normal(size=(width, width)).astype(np.float32) * width**-0.5 for _ in range(products)]
    return params, random.normal(size=(rows * MICROBATCHES, width)).astype(np.float32)


def sleepy(executor: Any) -> None:
    """From now on forward and backward tasks sleep before they run (two that are fused twice as long), in the thread
    that dispatches them, as those do that call the host."""

    def slow(run: Any, seconds: float) -> Any:
        def nap(*xs: Any) -> Any:
            time.sleep(seconds)
            return run(*xs)

        nap.memory_analysis = run.memory_analysis  # type: ignore[attr-defined]
        return nap

    executor.waits = True
    for stage in executor.stages:
        for name in ("forward", "backward", "input_grad", "weight_grad", "forward_backward", "forward_input_grad"):
            if name in stage.compiled:
                tasks = 2 if name.startswith("forward_") else 1
                stage.compiled[name] = replace(
                    stage.compiled[name], run=slow(stage.compiled[name].run, tasks * SLEEP_S)
                )


if __name__ == "__main__":
    sys.exit(main())
