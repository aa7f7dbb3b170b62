"""Predicted against compiled peak memory per device, for every test model on three meshes of 8 host devices.

Out: a table on stdout, its worst rows last. Compiled peak = arguments + outputs − aliased + temporaries, from
``memory_analysis()``. Float32; the models are those of `tests.models` at sizes where values outweigh a compiler's
fixed costs. Run: ``JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m benchmarks.memory [model …] [--mesh 2x4]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import autopar
from tests.models import MODELS, build

MESHES = ((8,), (2, 4), (2, 2, 2))
MOST_OVER, MOST_UNDER = 1.25, 0.90
MEASURED = tuple(name for name in MODELS if name != "gpt_remat")
"""jax 0.10's CPU compiler undoes rematerialisation outside loops, so an unrolled one tells nothing there."""
FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""The programs are not run; code generation leaves buffers as they are."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one mesh; bytes per device."""

    model: str
    mesh: tuple[int, ...]
    predicted_bytes: int
    compiled_bytes: int

    @property
    def ratio(self) -> float:
        """Predicted over compiled."""
        return self.predicted_bytes / self.compiled_bytes

    @property
    def within(self) -> bool:
        """At most 25 % over and 10 % under."""
        return MOST_UNDER <= self.ratio <= MOST_OVER

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        mib = 2**20
        return (
            f"{self.model:24} {mesh:6} {self.predicted_bytes / mib:12.3f} {self.compiled_bytes / mib:12.3f} "
            f"{self.ratio:8.3f}{'' if self.within else '  out of bounds'}"
        )


HEADER = f"{'model':24} {'mesh':6} {'predicted MiB':>12} {'compiled MiB':>12} {'ratio':>8}"


def measure(name: str, mesh: tuple[int, ...]) -> Row:
    """Plans and compiles one model."""
    model = build(name, "float32", large=True)
    step = autopar.parallelize(model.step, mesh=mesh, **model.kwargs)
    analysis = step.lower(*model.args).compile(FAST_COMPILE).memory_analysis()
    compiled = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    predicted = step.plan(*model.args).predictions.peak_memory_bytes
    return Row(model=name, mesh=mesh, predicted_bytes=predicted, compiled_bytes=compiled)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where a row is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MEASURED), help="names in tests.models (default: all)")
    parser.add_argument("--mesh", action="append", help="such as 2x4; may repeat (default: 8, 2x4, 2x2x2)")
    options = parser.parse_args(argv)
    meshes = [tuple(map(int, m.split("x"))) for m in options.mesh] if options.mesh else MESHES
    print(HEADER, flush=True)
    rows: list[Row] = []
    for name in options.models:
        for mesh in meshes:
            rows.append(measure(name, mesh))
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: row.ratio)
    print(f"\nmost under  {rows[0]}\nmost over   {rows[-1]}")
    return 0 if all(row.within for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
