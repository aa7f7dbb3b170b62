"""How much faster is a cluster of unequal hosts planned as it is than with every device taken for the slowest kind?

    python -m benchmarks.unequal

Llama-8B on one DGX A100 and one DGX H100, by simulation, beside two of each kind. Needs no device. Exit status 1 where
the gain is below `BAR`.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

import autopar
from benchmarks.llama import llama

BAR = 1.25
MIXED, SLOW, FAST = "dgx-a100:1+dgx-h100:1", "dgx-a100:2", "dgx-h100:2"


def main() -> int:
    """Prints the table; 1 where the bar is missed."""
    table = Table("cluster", "planning s", "step s", "stages: layers on mesh of devices, forward and backward ms")
    seconds: dict[str, float] = {}
    for cluster in (MIXED, SLOW, FAST):
        step, args = llama(batch=128)
        started_s = time.perf_counter()
        plan = autopar.parallelize(step, cluster=cluster, num_microbatches=32, donate_argnums=0).plan(*args)
        planning_s = time.perf_counter() - started_s
        seconds[cluster] = plan.predictions.step_s
        rows = [
            f"{s.stop - s.start} on {'x'.join(map(str, s.mesh.shape))} {s.mesh.device.name}, "
            f"{1e3 * s.cost.forward_s:.0f} and {1e3 * s.cost.backward_s:.0f}"
            for s in plan.stages.stages
        ]
        table.add_row(cluster, f"{planning_s:.1f}", f"{seconds[cluster]:.2f}", "\n".join(rows))
    Console(width=160).print(table)
    gain = seconds[SLOW] / seconds[MIXED]
    print(f"{gain:.2f} times as fast as with every device taken for the slower kind; bar {BAR}")
    return int(gain < BAR)


if __name__ == "__main__":
    sys.exit(main())
