"""How much slower are plans of a search that was ended, than of one with twenty times as long? Needs no device.

    python -m benchmarks.anytime [--only NAME …]

Each row is planned twice in processes of their own, under ``time_limit_s`` T and 20 T, nothing else fixed: ``took`` is
the wall time of ``plan`` with tracing. Steps are the plans' predictions. The bar is of their ratio; a row whose search
ends with an error has none. Exit status 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child import ChildError, ask

BAR = 1.02
TIMES = 20
STOP_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model (``gpt``: 8 layers, ``llama``: 4 of an 8B's, else of `full_size`), a cluster, limits in seconds."""

    model: str
    cluster: str
    limits_s: tuple[float, ...]


CASES = (
    Case(model="gpt", cluster="dgx-h100", limits_s=(2, 5, 10)),
    Case(model="llama", cluster="dgx-h100:2", limits_s=(3, 5, 10)),
    Case(model="llama-8b", cluster="dgx-h100:8", limits_s=(10, 20)),
    Case(model="llama-70b", cluster="dgx-h100:8", limits_s=(15, 30)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="models")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(_planned(**json.load(sys.stdin))))
        return 0
    table, missed = Table("model", "cluster", "T", "took s", "step s", "of 20 T", "bar", "plan", "plan of 20 T"), False
    for case in CASES:
        if options.only is not None and case.model not in options.only:
            continue
        for limit_s in case.limits_s:
            short, long = (_asked(case, limit_s * times) for times in (1, TIMES))
            cells = [case.model, case.cluster, f"{limit_s:g}"]
            if isinstance(short, str) or isinstance(long, str):
                table.add_row(*cells, *["", "", "", ""], str(short)[:60], str(long)[:60])
                missed = True
                continue
            ratio = short["step_s"] / long["step_s"]
            missed |= ratio > BAR
            table.add_row(
                *cells, f"{short['took_s']:.1f}", f"{short['step_s']:.4g}", f"{ratio:.3f}", f"{BAR}", short["plan"],
                long["plan"],
            )  # fmt: skip
            Console(stderr=True).print(*cells, f"{ratio:.3f}", short, long)
    Console(width=200).print(table)
    return int(missed)


def _asked(case: Case, limit_s: float) -> dict[str, Any] | str:
    try:
        request = {"model": case.model, "cluster": case.cluster, "limit_s": limit_s}
        return ask("benchmarks.anytime", request, STOP_S).values
    except ChildError as error:
        return str(error)


def _planned(model: str, cluster: str, limit_s: float) -> dict[str, Any]:
    import autopar
    from benchmarks.full_size import step_of
    from benchmarks.models import gpt

    if model == "gpt":
        step, args = gpt(layers=8)
    elif model == "llama":
        step, args = step_of("llama-8b", batch=64, layers=4)
    else:
        step, args = step_of(model, batch=256)
    planned = autopar.parallelize(step, cluster=cluster, donate_argnums=0, time_limit_s=limit_s)
    started_s = time.perf_counter()
    plan = planned.plan(*args)
    shapes = ["x".join(map(str, mesh.shape)) for mesh in plan.data.meshes]
    count = plan.data.config.num_microbatches
    return {
        "took_s": time.perf_counter() - started_s, "step_s": plan.predictions.step_s,
        "plan": f"{count} microbatches on {', '.join(dict.fromkeys(shapes))}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
