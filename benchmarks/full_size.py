"""How long does planning take at the size that people train, and how much memory? Needs no device.

    python -m benchmarks.full_size [--only NAME …] [--mesh-axes 3]

Each row is planned in a process of its own: `wall` is the call of ``plan``, `trace` its part that traces and cuts the
step into layers, peak memory that of all its processes together. Models are of bfloat16 products, float32 parameters
and AdamW behind a clip by the global norm. The bars are of planning apart from tracing, and of memory. Exit status 1
where a bar is missed, or a row has no plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child import ChildError, ask, peak_rss_bytes

STOP_S = 600.0
LLAMA: dict[str, dict[str, int]] = {
    "llama-8b": {},
    "llama-70b": {"layers": 80, "hidden": 8192, "heads": 64, "groups": 8, "inner": 28672},
    "llama-405b": {"layers": 126, "hidden": 16384, "heads": 128, "groups": 8, "inner": 53248},
}
OTHERS = {
    "mixtral-8x22b": "MIXTRAL", "deepseek-v3": "DEEPSEEK_V3", "qwen3-30b": "QWEN3_30B", "gpt-1t": "MEGATRON_1T",
    "gpt-1t-gspmd": "GSPMD_1T",
}  # fmt: skip
"""Names in `benchmarks.mixture`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. ``batch``: sequences of a step; bars as above."""

    model: str
    cluster: str
    batch: int
    microbatches: int
    bar_s: float
    bar_gb: float
    layers: int | None = None
    scan: bool = False
    clip: bool = True
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """For ``--only``."""
        model = self.model + (f"-{self.layers}" if self.layers is not None else "")
        return f"{model}{'-scan' if self.scan else ''}{'' if self.clip else '-no-clip'}@{self.cluster}"


CASES = (
    Case(model="llama-8b", cluster="dgx-h100", batch=64, microbatches=8, bar_s=10, bar_gb=1),
    Case(model="llama-8b", cluster="dgx-h100:8", batch=256, microbatches=8, bar_s=10, bar_gb=1),
    Case(model="llama-8b", cluster="dgx-h100:8", batch=256, microbatches=8, bar_s=10, bar_gb=1, scan=True),
    Case(model="llama-70b", cluster="dgx-h100:8", batch=256, microbatches=16, bar_s=20, bar_gb=2),
    Case(model="llama-70b", cluster="dgx-h100:8", batch=256, microbatches=16, bar_s=20, bar_gb=2, clip=False),
    Case(model="llama-70b", cluster="dgx-h100:8", batch=256, microbatches=16, bar_s=20, bar_gb=2, scan=True),
    Case(model="llama-70b", cluster="v5p-128", batch=256, microbatches=16, bar_s=20, bar_gb=2),
    Case(model="llama-70b", cluster="dgx-h100:64", batch=512, microbatches=16, bar_s=20, bar_gb=2),
    Case(model="llama-405b", cluster="dgx-h100:256", batch=2048, microbatches=64, bar_s=45, bar_gb=3),
    Case(model="llama-405b", cluster="v5p-2048", batch=2048, microbatches=64, bar_s=45, bar_gb=3),
    Case(model="mixtral-8x22b", cluster="dgx-h100:16", batch=1024, microbatches=16, bar_s=60, bar_gb=3),
    Case(model="deepseek-v3", cluster="dgx-h100:128", batch=4096, microbatches=64, bar_s=60, bar_gb=3),
    Case(model="qwen3-30b", cluster="dgx-h100:8", batch=512, microbatches=16, bar_s=60, bar_gb=3),
    Case(model="gpt-1t", cluster="dgx-a100:384", batch=3072, microbatches=64, bar_s=60, bar_gb=3),
    Case(model="gpt-1t", cluster="v4-4096", batch=2048, microbatches=64, bar_s=60, bar_gb=3),
    Case(model="gpt-1t-gspmd", cluster="v4-4096", batch=2048, microbatches=64, bar_s=60, bar_gb=3),
    *(Case(model="llama-70b", cluster=f"dgx-h100:{n}", batch=64 * n, microbatches=16, bar_s=60, bar_gb=3)
      for n in (32, 128, 512)),
    *(Case(model="llama-70b", layers=n, cluster="dgx-h100:8", batch=256, microbatches=16, bar_s=60, bar_gb=2)
      for n in (20, 40, 160)),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="rows whose names hold one of these")
    parser.add_argument("--mesh-axes", type=int, default=2, help="axes of a mesh at most")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(_planned(Case(**json.load(sys.stdin)))))
        return 0
    table = Table("row", "wall s", "trace s", "planning s", "bar s", "peak GB", "bar GB", "step s", "plan")
    missed = False
    for case in CASES:
        if options.only is not None and not any(word in case.name for word in options.only):
            continue
        try:
            mine = replace(case, options={**case.options, "mesh_axes": options.mesh_axes})
            answer = ask("benchmarks.full_size", _request(mine), STOP_S)
        except ChildError as error:
            table.add_row(case.name, str(error))
            missed = True
            continue
        got = answer.values
        peak_gb = max(answer.together_bytes, got["peak_bytes"]) / 1e9
        planning_s = got["wall_s"] - got["trace_s"]
        missed |= planning_s > case.bar_s or peak_gb > case.bar_gb
        figures = (got["wall_s"], got["trace_s"], planning_s, case.bar_s, peak_gb, case.bar_gb, got["step_s"])
        table.add_row(case.name, *(f"{x:.3g}" for x in figures), got["plan"])
        Console(stderr=True).print(case.name, *(f"{x:.3g}" for x in figures), got["plan"], got["phases"])
    Console(width=200).print(table)
    return int(missed)


def _request(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__slots__}


def step_of(model: str, batch: int, layers: int | None = None, *, scan: bool = False, clip: bool = True) -> Any:
    """(train step, its arguments) of a model of the rows, with other ``layers`` than its own if these are given."""
    import optax

    from benchmarks import mixture
    from benchmarks.llama import llama

    known: dict[str, Any] = LLAMA[model] if model in LLAMA else getattr(mixture, OTHERS[model])
    sizes = known | ({} if layers is None else {"layers": layers}) | ({"scan": True} if scan else {})
    adamw = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw) if clip else adamw
    make = llama if model in LLAMA else mixture.mixture
    return make(**sizes, batch=batch, optimizer=optimizer)


def _planned(case: Case) -> dict[str, Any]:
    import autopar

    step, args = step_of(case.model, case.batch, case.layers, scan=case.scan, clip=case.clip)
    planned = autopar.parallelize(
        step, cluster=case.cluster, num_microbatches=case.microbatches, donate_argnums=0, **case.options
    )
    started_s = time.perf_counter()
    plan = planned.plan(*args)
    wall_s = time.perf_counter() - started_s
    phases = dict(plan.data.provenance.seconds)
    shapes = ["x".join(map(str, mesh.shape)) for mesh in plan.data.meshes]
    return {
        "wall_s": wall_s, "trace_s": phases["trace"], "peak_bytes": peak_rss_bytes(), "step_s": plan.predictions.step_s,
        "plan": f"{len(shapes)} stages on {', '.join(dict.fromkeys(shapes))}", "phases": phases,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
