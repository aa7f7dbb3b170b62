"""How long does planning a pipeline take for every model of the suites, and how good is the plan? Needs no device.

    python -m benchmarks.suite [--only PATTERN] [--large] [--mesh-axes 3] [--save FILE.json]

Rows are those of `benchmarks.suite_models`: Alpa's suites on p3.16xlarge hosts (V100, 16 GB; fewer than 8 devices: as
many of one host), the Llamas and the ViT on dgx-h100 hosts. Each is traced, cut into layers and planned in a process of
its own with nothing cached. ``plan s`` is the wall time of `pipeline_search` without tracing, which stands beside it,
``again s`` that of planning the same once more, from its cache; ``RSS`` the most that the process and its workers hold.
Times of steps and memory are the plan's prediction, by the simulator.

Below a row stands what Alpa found for it (`benchmarks.alpa_solutions`), by the same cost model and simulator. Pinned is
what is published: how many layers, where stages begin, the submesh and logical mesh of each, on which stages the batch
was bound to the first mesh axis, 1F1B, the model's own rematerialisation (every block keeps its operands alone). The
rest is completed by our planner, to its advantage: where layers are cut, how operators are sharded otherwise. Where
that needs more memory than a device has by our model, it is evaluated without a limit, and marked.

    TFLOP/s of a device  =  3 · m · F / (devices · step s)

with m microbatches and F the FLOPs of all matrix products and convolutions of one microbatch's forward pass (a
multiply-add counts two; of causal attention the whole square), the backward pass as two forward ones, nothing for what
is recomputed.

``--mesh-axes 3`` plans ours once more with meshes of three axes, in a row below, with how many times as long it took.
``--large`` adds GPT-39B for 1024 H100. The last table is the one measured step time that is published, with the stages
and meshes that it was measured with, the batch on the axis that it was bound to, no example split (batch and positions
were one dimension of Alpa's products), and in its own number formats (`benchmarks.alpa_gpt`). Exit status 1 where a bar
is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.alpa_solutions import MEASURED, SOLUTIONS
from benchmarks.child import ChildError, ask, peak_rss_bytes
from benchmarks.pins import pins_of, pins_of_measured

STOP_AFTER_S = 900.0
RSS_BAR_BYTES = 2e9
PLANNING_BAR_S = 30.0
PLANNING_BARS_S = {"gpt-39B": 20.0}
"""Rows that have another bar than `PLANNING_BAR_S`."""
LARGE_BAR_S = 60.0
CACHED_BAR_S = 1.0
LARGE = {"row": "gpt-39B", "cluster": "dgx-h100:128", "batch": 4096, "num_microbatches": 64}
"""GPT-39B on 1024 devices; 64 examples of 1024 tokens a microbatch, as many as the Llamas' rows have."""
SLOWER_BAR = 1.001
"""Ours over Alpa's, at most (the last digit: layers are cut in other places)."""
TIME_BAR = 0.3
MEMORY_BAR = 0.1
"""How far the measured point may be off."""
ALPA_FAMILIES = ("gpt", "moe", "wide_resnet", "u_transformer")
THREE_AXES_BAR = 1.5
"""Planning with meshes of three axes over planning with those of two."""
HOST_DEVICES = 8
LIFTED_BYTES = 1 << 50
"""The memory of a device where a solution is evaluated that does not fit."""


def cluster_name(family: str, devices: int) -> str:
    """The preset that a row is planned for."""
    hosts = max(1, devices // HOST_DEVICES)
    return f"{'p3.16xlarge' if family in ALPA_FAMILIES else 'dgx-h100'}:{hosts}"


def cluster_of(name: str, devices: int) -> Any:
    """The first ``devices`` of a preset: whole hosts, or a part of one."""
    from autopar.ir.presets import cluster_from_text

    cluster = cluster_from_text(name)
    (group,) = cluster.groups
    if devices < group.devices_per_host:
        group = dataclasses.replace(group, devices_per_host=devices)
        cluster = dataclasses.replace(cluster, name=f"{name}, {devices} devices", groups=(group,))
    return cluster


# --- figures of a plan -------------------------------------------------------------------------------------------


def contraction_flops(graph: Any) -> float:
    """FLOPs of a graph's matrix products and convolutions: loops multiplied out, of a conditional the dearest branch,
    kernels by the model of `autopar.cost.roofline`."""
    from autopar.cost.roofline import flops
    from autopar.primitives import record_of

    total = 0.0
    for node in graph.nodes:
        bodies = [contraction_flops(body) for body in node.bodies]
        if node.primitive == "scan":
            total += node.params["length"] * sum(bodies)
        elif node.primitive == "cond":
            total += max(bodies)
        elif bodies:
            total += sum(bodies)
        elif (traits := record_of(node.primitive).traits).contraction or traits.opaque:
            total += flops(node)
    return total


def model_flops(graph: Any) -> float:
    """3 · m · F of a `LayeredGraph`, see the module's docstring."""
    of_kind = [contraction_flops(kind.forward) for kind in graph.kinds]
    return 3.0 * graph.num_microbatches * sum(of_kind[layer.kind] for layer in graph.layers)


def plan_line(plan: Any) -> str:
    """A `PipelinePlan` in a line: the schedule, then stages in order; equal neighbours together."""
    runs: list[tuple[str, int]] = []
    for stage in plan.stages:
        shape = "x".join(map(str, stage.mesh.shape))
        remat = "+".join(f"{count} {name}" for name, count in sorted(Counter(stage.remat).items()))
        text = f"{stage.stop - stage.start} layers on {shape} ({remat})"
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    stages = ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs)
    return f"{plan.schedule.name}, {plan.schedule.num_microbatches} microbatches: {stages}"


def memory_of(stage: Any) -> dict[str, float]:
    """What a `Stage` holds on a device, in bytes: all the time, per microbatch in flight, and for a moment at most."""
    cost = stage.cost
    return {
        "state (parameters, gradients, optimizer)": cost.state_bytes,
        "activations of a microbatch": cost.activation_bytes,
        "transients": cost.transient_bytes,
    }


def session_cpu_s() -> float:
    """CPU seconds of this session's processes, those that they waited for included; of this one where there is no
    /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == os.getsid(0):
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else time.process_time()


# --- one planning run, in a process of its own -------------------------------------------------------------------


def trace(request: Mapping[str, Any]) -> Any:
    """The `LayeredGraph` of a request."""
    from autopar.frontend.layering.layers import layered
    from benchmarks.suite_models import SUITE, gpt_as_measured

    row = SUITE[request["row"]]
    batch, m = request.get("batch", row.global_batch), request.get("num_microbatches", row.num_microbatches)
    if request.get("as_measured"):
        step, args = gpt_as_measured(row.name, batch)
        return layered(step, args, num_microbatches=m, donate_argnums=(0,), layers=request.get("layers")).graph
    step, args = row.build(batch)
    return layered(step, args, num_microbatches=m, donate_argnums=(0,), layers=request.get("layers")).graph


def plan_one(request: Mapping[str, Any]) -> dict[str, Any]:
    """Plans one request in this process, which should be a fresh one."""
    start_s = time.perf_counter()
    from autopar.inter_op.pipeline_search import PipelineOptions, plan_pipeline
    from autopar.ir.errors import InfeasibleError
    from benchmarks import suite_models

    del suite_models
    imported_s = time.perf_counter()
    graph = trace(request)
    cluster = cluster_of(request["cluster"], request["devices"])
    pins = {
        name: tuple(tuple(x) if isinstance(x, list) else x for x in value)
        if isinstance(value, (list, tuple))
        else value
        for name, value in request.get("pins", {}).items()
    }
    traced_s, cpu_s = time.perf_counter(), session_cpu_s()
    lifted = ""
    folder = TemporaryDirectory()
    try:
        pipeline = plan_pipeline(graph, cluster, PipelineOptions(**pins), cache=folder.name)
    except InfeasibleError as error:
        if "pins" not in request:
            raise
        lifted = str(error)
        pipeline = plan_pipeline(graph, cluster, PipelineOptions(**pins, memory_bytes=LIFTED_BYTES))
    done_s, done_cpu_s = time.perf_counter(), session_cpu_s()
    cached_s = None
    if not lifted:
        again = plan_pipeline(graph, cluster, PipelineOptions(**pins), cache=folder.name)
        cached_s = time.perf_counter() - done_s
        if again.plan != pipeline.plan:
            raise AssertionError("another plan from the cache")
    folder.cleanup()
    flops = model_flops(graph)
    return {
        "import_s": imported_s - start_s,
        "trace_s": traced_s - imported_s,
        "planning_s": done_s - traced_s,
        "cached_s": cached_s,
        "cpu_s": done_cpu_s - cpu_s,
        "phases": pipeline.seconds,
        "rss_bytes": peak_rss_bytes(),
        "layers": len(graph.layers),
        "kinds": len(graph.kinds),
        "step_s": pipeline.step_s,
        "model_flops": flops,
        "flops_per_s": flops / (cluster.num_devices * pipeline.step_s),
        "peak_bytes": max(worker.peak_bytes for worker in pipeline.timeline.workers),
        "memory_bytes": min(group.device.memory_bytes for group in cluster.groups),
        "bubble": max(pipeline.timeline.bubble(w) for w in range(len(pipeline.timeline.workers))),
        "lifted": lifted,
        "plan": plan_line(pipeline.plan),
        "stages": [memory_of(stage) for stage in pipeline.plan.stages],
        "simulated": pipeline.simulated,
    }


def measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """`plan_one` in a child. ``error`` stands alone where it failed."""
    try:
        answer = ask("benchmarks.suite", request, STOP_AFTER_S)
    except ChildError as error:
        return {"error": str(error)}
    values = dict(answer.values)
    if "rss_bytes" in values:
        values["rss_bytes"] = max(values["rss_bytes"], answer.together_bytes)
    return values


def child() -> int:
    """The child's side."""
    from autopar.ir.errors import AutoparError

    request = json.load(sys.stdin)
    try:
        answer = plan_one(request)
    except AutoparError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
    return 0


# --- tables ------------------------------------------------------------------------------------------------------


def request_of(name: str) -> dict[str, Any]:
    """What is asked of our planner for a row."""
    from benchmarks.suite_models import SUITE

    row = SUITE[name]
    return {"row": name, "cluster": cluster_name(row.family, row.gpus), "devices": row.gpus}


def published_request(name: str) -> dict[str, Any] | None:
    """What evaluates Alpa's solution for a row, where there is one."""
    if name not in SOLUTIONS:
        return None
    solution = SOLUTIONS[name]
    return {**request_of(name), "layers": solution.num_layers, "pins": pins_of(solution)}


def measured_request() -> dict[str, Any]:
    """What predicts the measured point."""
    layers = 8
    return {
        "row": MEASURED.row,
        "as_measured": True,
        "cluster": f"{MEASURED.cluster}:1",
        "devices": HOST_DEVICES,
        "batch": MEASURED.global_batch,
        "num_microbatches": MEASURED.num_microbatches,
        "layers": layers,
        "pins": pins_of_measured(MEASURED, layers),
    }


def misses(name: str, bar_s: float, ours: Mapping[str, Any], published: Mapping[str, Any] | None) -> list[str]:
    """What a row misses, in words."""
    if "error" in ours:
        return [f"{name}: {ours['error']}"]
    out: list[str] = []
    if ours["planning_s"] > bar_s:
        out.append(f"{name}: planned in {ours['planning_s']:.1f} s ({ours['cpu_s']:.1f} s of CPU), bar {bar_s:.0f} s")
    if ours["cached_s"] > CACHED_BAR_S:
        out.append(f"{name}: planned again in {ours['cached_s']:.2f} s, bar {CACHED_BAR_S:.0f} s")
    if ours["rss_bytes"] > RSS_BAR_BYTES:
        out.append(f"{name}: {ours['rss_bytes'] / 1e6:.0f} MB, bar {RSS_BAR_BYTES / 1e6:.0f} MB")
    if ours["peak_bytes"] > ours["memory_bytes"]:
        out.append(f"{name}: {ours['peak_bytes'] / 1e9:.1f} GB on a device of {ours['memory_bytes'] / 1e9:.0f} GB")
    if published is not None and "error" in published:
        out.append(f"{name}: Alpa's solution cannot be evaluated: {published['error']}")
    elif published is not None and ours["step_s"] > SLOWER_BAR * published["step_s"]:
        out.append(
            f"{name}: {ours['step_s']:.4g} s a step, Alpa's solution {published['step_s']:.4g} s"
            + (", which does not fit" if published["lifted"] else "")
        )
    return out


def _cells(name: str, devices: int, got: Mapping[str, Any], against: float | None) -> list[str]:
    if "error" in got:
        return [name, str(devices), *[""] * 9, f"failed: {got['error'][:80]}"]
    ratio = "" if against is None else f"{got['step_s'] / against:.3f}"
    return [
        name,
        str(devices),
        f"{got['trace_s']:.1f}",
        f"{got['planning_s']:.1f}",
        f"{got['cpu_s']:.1f}",
        "" if got["cached_s"] is None else f"{got['cached_s']:.2f}",
        f"{got['rss_bytes'] / 1e6:.0f}",
        f"{got['step_s']:.4g}",
        ratio,
        f"{got['flops_per_s'] / 1e12:.1f}",
        f"{got['peak_bytes'] / 1e9:.1f}" + ("!" if got["peak_bytes"] > got["memory_bytes"] else ""),
        got["plan"],
    ]


def _table() -> Table:
    table = Table(title="Pipelines for the suites, no device used; Alpa's solutions by our cost model below ours")
    table.add_column("row", no_wrap=True)
    columns = (
        "devices",
        "trace s",
        "plan s",
        "CPU s",
        "again s",
        "RSS MB",
        "step s",
        "ours/Alpa's",
        "TFLOP/s",
        "peak GB",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan")
    return table


def _point(console: Console, results: dict[str, Any]) -> list[str]:
    """The measured point: prediction beside measurement."""
    with console.status("the measured point"):
        got = results["measured point"] = measured(measured_request())
    if "error" in got:
        return [f"measured point: {got['error']}"]
    degrees = (MEASURED.data_parallel, MEASURED.operator_parallel, MEASURED.pipeline_parallel)
    table = Table(
        title=f"{MEASURED.row}, {MEASURED.cluster}, batch {MEASURED.global_batch}, "
        f"{MEASURED.num_microbatches} microbatches, (dp, op, pp) = {degrees}"
    )
    for column in ("", "predicted", "measured", "off by", "bar"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("s a step", got["step_s"], MEASURED.step_s, TIME_BAR),
        ("peak GiB", got["peak_bytes"] / 2**30, MEASURED.peak_bytes / 2**30, MEMORY_BAR),
    )
    out: list[str] = []
    for text, ours, theirs, bar in rows:
        off = ours / theirs - 1
        table.add_row(text, f"{ours:.3f}", f"{theirs:.3f}", f"{100 * off:+.1f} %", f"{100 * bar:.0f} %")
        if abs(off) > bar:
            out.append(f"measured point: {ours:.3f} {text}, measured {theirs:.3f}, bar {100 * bar:.0f} %")
    console.print(table)
    console.print(f"planned as {got['plan']}; the batch on the first mesh axis, in the formats of Alpa's benchmark")
    for number, parts in enumerate(got["stages"]):
        listed = ", ".join(f"{size / 2**30:.2f} {name}" for name, size in parts.items())
        console.print(f"stage {number}, GiB a device: {listed}")
    return out


def _save(results: dict[str, Any], path: Path | None) -> None:
    """Writes what there is so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``--one`` is the child's side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows of these names, as gpt-* (also: measured)")
    parser.add_argument("--large", action="store_true", help="also GPT-39B for 1024 H100")
    parser.add_argument("--mesh-axes", type=int, choices=(2, 3), default=2, help="3: ours once more, with these")
    parser.add_argument("--save", metavar="FILE.json", type=Path, help="all figures, after every row")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.one:
        return child()
    from benchmarks.suite_models import SUITE

    names = [name for name in SUITE if fnmatch.fnmatch(name, flags.only)]
    point = fnmatch.fnmatch("measured", flags.only)
    if not names and not point and not flags.large:
        parser.error(f"no row is named {flags.only}: there are {', '.join(SUITE)}, measured")
    console = Console(width=None if sys.stdout.isatty() else 200)
    table, missed = _table(), list[str]()
    results: dict[str, Any] = {}
    for name in names:
        with console.status(f"planning {name}"):
            ours = measured(request_of(name))
            asked = published_request(name)
            theirs = measured(asked) if asked is not None else None
        results[name] = {"ours": ours, "published": theirs}
        _save(results, flags.save)
        against = theirs["step_s"] if theirs is not None and "error" not in theirs else None
        last = theirs is None and flags.mesh_axes == 2
        table.add_row(*_cells(name, SUITE[name].gpus, ours, against), end_section=last)
        if flags.mesh_axes > 2:
            with console.status(f"planning {name} with three axes"):
                three = results[name]["three axes"] = measured({**request_of(name), "pins": {"mesh_axes": 3}})
            text = "  three axes"
            if "error" not in ours and "error" not in three:
                times = three["planning_s"] / ours["planning_s"]
                text += f", {times:.2f} of the time"
                if times > THREE_AXES_BAR:
                    missed.append(f"{name}: three axes take {times:.2f} times as long, bar {THREE_AXES_BAR}")
            table.add_row(*_cells(text, SUITE[name].gpus, three, ours.get("step_s")), end_section=theirs is None)
        if theirs is not None:
            table.add_row(*_cells("  Alpa's", SUITE[name].gpus, theirs, None), end_section=True)
        missed += misses(name, PLANNING_BARS_S.get(name, PLANNING_BAR_S), ours, theirs)
    if flags.large:
        request = {**LARGE, "devices": 1024}
        with console.status("planning for 1024 devices"):
            got = results["large"] = measured(request)
        table.add_row(*_cells(f"{LARGE['row']}, H100", 1024, got, None))
        missed += misses(f"{LARGE['row']} on 1024 H100", LARGE_BAR_S, got, None)
    if table.rows:
        console.print(table)
        console.print(
            "Alpa's: layers, stages, submeshes, logical meshes, the batch's axis, 1F1B and rematerialisation are "
            "pinned as published; other shardings and the places of layers are completed by our planner. ! = more than "
            "a device has. TFLOP/s: 3 · microbatches · forward FLOPs of matrix products and convolutions / (devices · "
            "step s)."
        )
    if point:
        missed += _point(console, results)
    _save(results, flags.save)
    shown = [results[name]["ours"] for name in names if "error" not in results[name]["ours"]]
    if shown:
        console.print(
            f"planning: longest {max(r['planning_s'] for r in shown):.1f} s (bars {PLANNING_BARS_S['gpt-39B']:.0f} s "
            f"for gpt-39B, {PLANNING_BAR_S:.0f} s for others), most memory "
            f"{max(r['rss_bytes'] for r in shown) / 1e6:.0f} MB (bar {RSS_BAR_BYTES / 1e6:.0f} MB)"
        )
    ratios = [
        r["ours"]["step_s"] / r["published"]["step_s"]
        for name in names
        if (r := results[name])["published"] and "step_s" in r["ours"] and "step_s" in r["published"]
    ]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        console.print(f"ours over Alpa's: geometric mean {mean:.3f}, worst {max(ratios):.3f} (bar {SLOWER_BAR})")
    for line in missed:
        console.print(f"missed: {line}", markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
