"""The first call of a small Llama in two stages on 8 CPU devices: what a user waits for, and is told meanwhile.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m benchmarks.first_call

Plans, makes the state and runs two steps; prints seconds of each and what was announced. Exit code 1 where all takes
longer than `MOST_S`, or a wait of `LONG_S` had no announcement within it.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.llama import llama

MOST_S = 60.0
LONG_S = 10.0
"""Seconds without a word that are too long (chosen: two of the command line's lines)."""


def main() -> int:
    """Measures, prints, and returns the exit code."""
    function, args = llama(layers=4, hidden=256, heads=8, groups=4, inner=512, vocab=1024, seq=128, batch=8)
    told: list[tuple[float, str]] = []
    started_s = time.perf_counter()

    def tell(what: str) -> None:
        told.append((time.perf_counter() - started_s, what))

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    log = logging.getLogger("autopar")
    log.addHandler(Lines())
    log.setLevel(logging.INFO)
    step = autopar.parallelize(
        function, stages=2, donate_argnums=0, progress=lambda now: tell(str(now)), cluster="cpu:8"
    )

    def zeros(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    state, *rest = args
    ends: list[tuple[str, float]] = []
    step.plan(*args)
    ends.append(("plan", time.perf_counter() - started_s))
    values = step.init(lambda: zeros(state))
    ends.append(("init", time.perf_counter() - started_s))
    for number in range(2):
        out = jax.block_until_ready(step(values, *map(zeros, rest)))
        values = out[0]
        ends.append((f"step {number}", time.perf_counter() - started_s))
    for when_s, what in told:
        print(f"{when_s:6.2f} s  {what}")
    print(", ".join(f"{name} at {when_s:.1f} s" for name, when_s in ends))
    times = [0.0, *(when_s for when_s, _ in told), ends[-1][1]]
    silent_s = max(b - a for a, b in itertools.pairwise(times))
    print(f"longest silence {silent_s:.1f} s (at most {LONG_S:g}), in all {ends[-1][1]:.1f} s (at most {MOST_S:g})")
    return int(ends[-1][1] > MOST_S or silent_s > LONG_S)


if __name__ == "__main__":
    sys.exit(main())
