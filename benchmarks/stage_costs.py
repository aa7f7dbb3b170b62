"""Are the costs of ranges of layers, put together from single layers, those of the whole range solved as one problem?

    python -m benchmarks.stage_costs [--model gpt-2.6B] [--cells 100] [--seed 0]

Random cells of the table (range, mesh, price on memory); each is solved again by the full ILP of its whole range, node
by node, with what each layer keeps as the cell has it. What is compared is what both minimise: seconds a step, memory
at its price. Bar: within 1 %.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table as Rows

from autopar.inter_op.layer_layouts import table_of
from autopar.inter_op.layer_problems import parts_of
from autopar.inter_op.ranges import FIELDS
from autopar.inter_op.stage_graph import stage_graph
from autopar.inter_op.submesh import logical_shapes, mesh_of, submeshes
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import Solving, StageProblem, pose_stage
from autopar.ir.presets import cluster_from_text
from benchmarks.suite import trace
from benchmarks.suite_models import SUITE

BAR = 0.01
MOST_LAYERS = 12
"""Ranges are that long at most: the full problem of more takes minutes."""


def main() -> int:
    """Prints the cells that differ most; returns 1 where one misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-2.6B", choices=tuple(SUITE))
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    row = SUITE[options.model]
    graph = trace({"row": options.model})
    parts = parts_of(graph)
    cluster = cluster_from_text(f"p3.16xlarge:{max(1, min(row.gpus, 16) // 8)}")
    wanted = [(s, shape) for s in submeshes(cluster) for shape in logical_shapes(cluster, s)]
    meshes = [mesh_of(cluster, s, shape, range(s.size)) for s, shape in wanted]
    tables = [table_of(parts, mesh) for mesh in meshes]
    rng = np.random.default_rng(options.seed)
    m = graph.num_microbatches
    found: list[tuple[float, str, float, float]] = []
    for _ in range(options.cells):
        table = tables[int(rng.integers(len(tables)))]
        start = int(rng.integers(len(graph.layers)))
        stop = int(rng.integers(start + 1, min(len(graph.layers), start + MOST_LAYERS) + 1))
        number = int(rng.integers(len(table.ranges.prices)))
        price = table.ranges.prices[number]
        weights = np.array([m] * 3 + [1, 1, price.state_s, price.activation_s, 0, 0, 0])
        picked = table.ranges.picked(number, start, stop)
        remat = [table.layouts[start + i][c].remat for i, c in enumerate(picked)]
        part = stage_graph(graph, start, stop, remat)
        problem = StageProblem(part, pose_stage(part, Mesh(table.mesh)), solving=Solving(time_limit_s=60.0))
        began = time.perf_counter()
        whole = problem.solve(price.state_s, price.activation_s)
        seconds = time.perf_counter() - began
        cell = float(table.ranges.at(start, stop)[number] @ weights)
        full = float(np.array([getattr(whole.cost, field) for field in FIELDS]) @ weights)
        text = f"layers {start} to {stop} on {table.mesh}, price {number}"
        found.append((cell / full - 1, text, full, seconds))
    rows = Rows(title=f"{options.model}: cells against the full problem of their range")
    for name in ("cell", "full problem s", "cell %", "solved in s"):
        rows.add_column(name, justify="left" if name == "cell" else "right")
    for off, text, full, seconds in sorted(found, key=lambda f: -abs(f[0]))[:20]:
        rows.add_row(text, f"{full:.4f}", f"{100 * off:+.2f}", f"{seconds:.2f}")
    console = Console(width=140)
    console.print(rows)
    size = [abs(off) for off, *_ in found]
    missed = sum(s > BAR for s in size)
    console.print(
        f"{len(found)} cells: mean {100 * statistics.mean(size):.2f} %, worst {100 * max(size):.2f} %, "
        f"{missed} past {100 * BAR:.0f} %"
    )
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
