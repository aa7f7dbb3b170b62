"""Attention kernels in a Llama train step: planned, and compiled ahead of time for the hardware they are written for.

    python -m benchmarks.attention [NAME ...] [--plan-only]

Two layers (hidden 1024, 8 heads that share 4 of keys, head size 128, sequence 1024, batch 16, bfloat16 compute,
AdamW), unrolled and scanned, with 1 and 4 microbatches, for eight TPU v5e or eight H100. Columns: operators' FLOPs that
run whole on every device (bar: less than 1 %), seconds to trace and plan, what the compiler made of it, and the
collectives of the plan beside the compiled program's, as kind, times a step and bytes a device. Compiling needs the
extras ``verify-tpu`` and ``verify-cuda``. Exit status 1 where a plan misses the bar or a step does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import autopar
from autopar.ir.errors import CompilerError
from autopar.ir.presets import cluster_from_text
from autopar.verify.compilers import described
from autopar.verify.environment import compiler_of
from autopar.verify.hlo_collectives import parse_collectives
from benchmarks.llama import llama
from tests.attention import flash, gpu, splash, xla
from tests.compare import hlo_tally, plan_tally

SIZES = {"layers": 2, "hidden": 1024, "heads": 8, "groups": 4, "inner": 2816, "vocab": 8192, "seq": 1024, "batch": 16}
REPLICATED_BAR = 0.01
KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "tpu flash": ("v5e-8", flash),
    "tpu splash": ("v5e-8", partial(splash, interpret=False)),
    "tpu xla": ("v5e-8", xla),
    "gpu pallas": ("dgx-h100", partial(gpu, interpret=False)),
    "gpu xla": ("dgx-h100", xla),
    "gpu cudnn": ("dgx-h100", partial(xla, implementation="cudnn")),
}
"""Name → cluster, attention."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(KERNELS), metavar="NAME", help=", ".join(KERNELS))
    parser.add_argument("--plan-only", action="store_true")
    options = parser.parse_args()
    cudnn.cuda_versions = SimpleNamespace(cudnn_get_version=lambda: 91000)  # tracing asks: there need be none here
    table = Table(
        "attention", "layers", "microbatches", "replicated", "plan s", "compiled", "plan's collectives", "program's"
    )
    failed = False
    for name, scan, microbatches in itertools.product(options.names, (False, True), (1, 4)):
        row, good = _row(name, scan, microbatches, options.plan_only)
        failed |= not good
        table.add_row(name, "scanned" if scan else "unrolled", str(microbatches), *row)
        Console().print(name, scan, microbatches, *row, sep=" | ")
    Console(width=200).print(table)
    return int(failed)


def _row(name: str, scan: bool, microbatches: int, plan_only: bool) -> tuple[tuple[str, ...], bool]:
    """What the table shows of a case, and whether it is as it should be."""
    cluster, attention = KERNELS[name]
    step, args = llama(**SIZES, scan=scan, attention=attention)
    devices = None if plan_only else _devices(cluster)
    mesh = Mesh(np.reshape(devices, (2, 4)), ("x", "y")) if devices else (2, 4)
    parallel = autopar.parallelize(
        step, mesh=mesh, cluster=cluster, num_microbatches=microbatches, batch_argnums=1, donate_argnums=0
    )
    started_s = time.perf_counter()
    plan = parallel.plan(*args)
    plan_s = time.perf_counter() - started_s
    share = sum(r.flops for r in plan.sharding.replicated) / plan.predictions.flops
    row = (f"{share:.2%}", f"{plan_s:.1f}")
    good = share < REPLICATED_BAR
    wanted = _text(*plan_tally(plan))
    if devices is None:
        return (*row, "-" if plan_only else "no compiler", wanted, ""), good
    started_s = time.perf_counter()
    try:
        compiled = parallel.lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        return (*row, str(error)[:300], wanted, ""), False
    found = _text(*hlo_tally(plan, parse_collectives(compiled.as_text())))
    return (*row, f"{time.perf_counter() - started_s:.0f} s", wanted, found), good


def _devices(cluster: str) -> Any:
    """Eight described devices; None where their compiler is not installed."""
    spec = cluster_from_text(cluster)
    try:
        return described(compiler_of(spec), spec)
    except CompilerError:
        return None


def _text(known: Counter[Any], unknown: Counter[Any]) -> str:
    """Kind, times and bytes, over all axes; apart, those in loops whose length the program does not say."""
    lines: list[str] = []
    for where, tally in (("", known), (" in loops", unknown)):
        times: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for (kind, _, operand_bytes), count in tally.items():
            times[kind] += count
            moved[kind] += count * operand_bytes
        lines += [f"{k} {times[k]} × {moved[k] / times[k] / 1e6:.2f} MB{where}" for k in sorted(times)]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
