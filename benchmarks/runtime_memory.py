"""What do devices hold while a pipeline runs, beside what its plan says?

    python -m benchmarks.runtime_memory [model …] [--stages 2] [--devices-per-stage 2] [--microbatches 8]
        [--schedule 1f1b] [--tasks]

The models are those of `tests.models` at sizes where values outweigh a compiler's fixed costs. One step is traced on
virtual CPU devices (`Step.trace`): live arrays before every task, and what its executable needs beside
them. Shown are each worker's peak bytes a device, the plan's and the real ones, with ``--tasks`` both at every task.
Then all results are deleted, and nothing may be left. The bar, of the runtimes' issue: within 10 %; exit status 1 where
it is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from bisect import bisect_right
from typing import Any

MODELS = ("mlp", "gpt", "gpt_scan", "gpt_tied")
BAR = 0.10


def main() -> int:
    """Prints the tables; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--devices-per-stage", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tasks", action="store_true", help="every task's bytes")
    chosen = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(chosen.stages * chosen.devices_per_stage)
    missed = [name for name in chosen.models if not measure(name, chosen)]
    return int(bool(missed))


def measure(name: str, chosen: Any) -> bool:
    """One model; True where it is within the bar."""
    import jax

    import autopar
    from autopar.runtime.tracing import held_bytes
    from tests.clusters import SLOW_8
    from tests.models import build

    model = build(name, "float32", large=True)
    step = autopar.parallelize(
        model.step, cluster=SLOW_8, num_microbatches=chosen.microbatches, stages=chosen.stages,
        submeshes=[(1, chosen.devices_per_stage)], schedule=chosen.schedule, layers=chosen.layers, workers=1,
        donate_argnums=0,
    )  # fmt: skip
    plan = step.plan(*model.args)
    args = jax.device_get(model.args)
    del model
    state, out = step(*args)
    with step.trace() as traced:
        state, out = step(state, *args[1:])
    jax.block_until_ready((state, out))
    [real] = traced.steps
    good = True
    print(f"{name}, {plan.stages.schedule.name}, {chosen.stages} stages of {chosen.devices_per_stage} devices, "
          f"{chosen.microbatches} microbatches")  # fmt: skip
    for w, (mine, its) in enumerate(zip(real.workers, traced.simulated.workers, strict=True)):
        ratio = mine.peak_bytes / its.peak_bytes
        good &= abs(ratio - 1) <= BAR
        print(f"  worker {w}: plan {its.peak_bytes / 2**20:8.3f} MiB, real {mine.peak_bytes / 2**20:8.3f} MiB, "
              f"real/plan {ratio:.3f}")  # fmt: skip
        if chosen.tasks:
            show_tasks(mine, its)
    held = held_bytes(jax.devices())
    del state, out, real, traced
    left = held_bytes(jax.devices())
    print(f"  held after the step {max(held)} bytes a device at most; after deleting what it gave {left}")
    return good and not any(left)


def show_tasks(mine: Any, its: Any) -> None:
    """Bytes of both at each task."""
    planned = {e.what: e.start_s for e in its.events}
    times = [t for t, _ in its.memory]
    at = 0
    for event in mine.events:
        if event.what == "begin":
            continue
        during, after = mine.memory[at][1], mine.memory[at + 1][1]
        at += 2
        known = planned.get(event.what, planned.get("F" + event.what[2:]))  # of fused tasks the first
        its_bytes = float("nan") if known is None else its.memory[bisect_right(times, known) - 1][1]
        print(f"    {event.what:12} plan {its_bytes / 2**20:8.3f}, real {during / 2**20:8.3f}, "
              f"then {after / 2**20:8.3f}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
