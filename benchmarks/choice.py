"""Does the planner choose as well as it could, and as it did? Needs no device.

    python -m benchmarks.choice [--only PATTERN]
    python -m benchmarks.choice --again | --forced | --record [--only PATTERN]

Every model is planned with no more than a cluster, and with each recorded layout as options, under the same cost model:
exit status 1 where what is chosen is slower than the faster of these by more than `FORCED_BAR`, by the planner's own
prediction, or takes longer to plan, for each number of microbatches that was tried, than `TIME_BAR` times what both
recorded planners took.

``--record`` plans every model twice, as one program and in stages (``stages=(1, None)``), and writes what was found to
``benchmarks/recorded/`` (`benchmarks.records`). ``--again`` plans both again and compares: exit status 1 where a plan
is slower than the recorded one by more than `SLOWER_BAR`, or where nothing is found any more; planning times stand
beside the recorded ones. ``--forced`` plans with the recorded layouts as options, and asks whether these say enough to
find plans as fast.

Models are Alpa's suites (`benchmarks.suite_models`) on the devices that they are published for, and a few others.
Each is planned in processes of its own, one a planner, with nothing cached. All that is recorded took 13.5 minutes of
CPU time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import models, records
from benchmarks.child import ask, peak_rss_bytes
from benchmarks.layers import Step
from benchmarks.records import Crossing, Held, MeshOptions, OneMesh, Pipeline, PipelineOptions, Record, Refused, Took
from benchmarks.suite import cluster_name, cluster_of, session_cpu_s
from benchmarks.suite_models import SUITE

STOP_AFTER_S = 600.0
SLOWER_BAR = 1.001
"""Predicted seconds over the recorded ones, at most."""
FORCED_BAR = 1.005
"""The same where the recorded layout is forced: what options leave open is found again, not copied."""
TIME_BAR = 1.2
PLANNERS = ("one_mesh", "pipeline")
TRIES = 3
"""How often a plan that misses its bar is looked for where it was not proved optimal: what such a search finds depends
on how far it gets in its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batch, and the first ``devices`` of a cluster preset; ``build`` makes of a number of examples the
    step and its arguments' shapes."""

    cluster: str
    devices: int
    global_batch: int
    num_microbatches: int
    build: Callable[[int], Step]


def suite_case(name: str, cluster: str | None = None, devices: int | None = None) -> Case:
    """A row of the suites, on its own cluster or another."""
    row = SUITE[name]
    return Case(
        cluster=cluster or cluster_name(row.family, row.gpus),
        devices=devices or row.gpus,
        global_batch=row.global_batch,
        num_microbatches=row.num_microbatches,
        build=row.build,
    )


def mlp(batch: int) -> Step:
    """Two layers, 1024 wide."""
    return models.mlp(width=1024, batch=batch)


CASES: dict[str, Case] = {
    **{
        name: suite_case(name)
        for name, row in SUITE.items()
        if row.family in ("gpt", "moe", "wide_resnet") and name not in ("gpt-15B", "moe-27B")
    },
    "gpt-1.3B-a100": suite_case("gpt-1.3B", "dgx-a100", 8),
    "llama-3-8B-16": suite_case("llama-3-8B", "dgx-h100:2", 16),
    "vit-h-14": suite_case("vit-h-14"),
    "u-transformer-1B": suite_case("u-transformer-1B"),
    "mlp": Case(cluster="cpu:8", devices=8, global_batch=4096, num_microbatches=1, build=mlp),
}
"""Name → case."""


# --- one planning run, in a process of its own -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A child's answer. ``counts``: numbers of microbatches that plans were made for."""

    found: OneMesh | Pipeline | Refused
    counts: int = 1


def plan_one(name: str, planner: str, options: Mapping[str, Any]) -> Found:
    """Plans a case in this process, which should be a fresh one; ``planner`` is one of `PLANNERS`, or "chosen"."""
    from autopar import parallelize  # by name: autopar loads its parts when they are first asked for
    from autopar.ir.errors import InfeasibleError, SolverTimeoutError

    case = CASES[name]
    cluster = cluster_of(case.cluster, case.devices)
    step, args = case.build(case.global_batch)
    given = {"num_microbatches": case.num_microbatches, "cluster": cluster, "donate_argnums": 0, **options}
    started_s, cpu_s = time.perf_counter(), session_cpu_s()

    def took(phases: Mapping[str, float]) -> Took:
        trace_s = phases.get("trace", 0.0)
        return Took(
            trace_s=round(trace_s, 3),
            planning_s=round(time.perf_counter() - started_s - trace_s, 3),
            cpu_s=round(session_cpu_s() - cpu_s, 2),
            rss_bytes=peak_rss_bytes(),
            phases=tuple((phase, round(seconds, 3)) for phase, seconds in phases.items() if phase != "trace"),
        )

    try:
        if planner == "chosen":
            plan = parallelize(step, cluster=cluster, donate_argnums=0).plan(*args)
            after, case = took(dict(plan.provenance.seconds)), replace(case, num_microbatches=count_of(plan))
            one = len(plan.data.meshes) == 1 and hasattr(plan.data.body, "sharding")
            found = one_mesh(plan, case, after) if one else pipeline(plan, types_of(step, args, plan), case, after)
            return Found(found=found, counts=len(counts_of(plan)))
        if planner == "one_mesh":
            plan = parallelize(step, stages=1, **given).plan(*args)
            return Found(found=one_mesh(plan, case, took(dict(plan.provenance.seconds))))
        plan = parallelize(step, stages=(1, None), **given).plan(*args)
        after = took(dict(plan.provenance.seconds))
        return Found(found=pipeline(plan, types_of(step, args, plan), case, after))
    except (InfeasibleError, SolverTimeoutError) as error:
        return Found(found=Refused(why=str(error), took=took({})))


def count_of(plan: Any) -> int:
    """A `StepPlan`'s microbatches."""
    return plan.data.config.num_microbatches


def counts_of(plan: Any) -> set[int]:
    """Numbers of microbatches of a `StepPlan`, and of those that it was chosen from."""
    said = (re.search(r"(\d+) microbatch", row.name) for row in plan.provenance.considered)
    return {count_of(plan), *(int(found[1]) for found in said if found)}


def one_mesh(plan: Any, case: Case, took: Took) -> OneMesh:
    """A `StepPlan` as it is recorded."""
    data, sharding, predicted = plan.data, plan.sharding, plan.predictions
    specs = {(a.path, a.type.shape): a.spec.dims for a in data.inputs}
    return OneMesh(
        options=MeshOptions(
            mesh=sharding.mesh.shape,
            num_microbatches=case.num_microbatches,
            recompute=bool(sharding.recompute),
            constraints=records.as_globs(specs, records.globs_of(specs)),
        ),
        axes=sharding.mesh.axis_names,
        recomputed=tuple(sorted(Counter(r.what for r in sharding.recompute).items())),
        step_s=predicted.step_s,
        compute_s=predicted.compute_s,
        communication_s=predicted.communication_s,
        peak_bytes=predicted.peak_memory_bytes,
        status=sharding.report.status,
        gap=sharding.report.gap,
        digest=plan.digest,
        took=took,
    )


def types_of(step: Any, args: Any, plan: Any) -> Any:
    """Types of the values by which a plan in stages of ``step`` says what its layers take and hand on."""
    from autopar.frontend.layering.layers import layered

    config, cluster = plan.data.config, plan.data.cluster
    made = layered(
        step, args, num_microbatches=config.num_microbatches, layers=config.layers, platform=cluster.platform
    )
    return made.graph.values


def pipeline(plan: Any, types: Any, case: Case, took: Took) -> Pipeline:
    """A `StepPlan` in stages as it is recorded; ``types`` are its values'."""
    file, found = plan.data, plan.stages
    stages = tuple(stage_of(plan, types, number, case) for number in range(len(found.stages)))
    return Pipeline(
        options=PipelineOptions(
            num_microbatches=case.num_microbatches,
            schedule=(found.schedule.name,),
            stage_starts=tuple(s.start for s in stages),
            submeshes=tuple(s.submesh for s in stages),
            mesh=tuple(dict.fromkeys(s.mesh_shape for s in stages)),
            recompute=tuple(sorted({kept for s in stages for kept in s.remat})),
        ),
        num_layers=len(file.pipelined.layers),
        stages=stages,
        arguments=held_by_stages(file.inputs, len(stages)),
        crossings=tuple(
            Crossing(
                source=cut.source, target=cut.target, phase=cut.phase, name=value.name, type=str(value.type),
                source_spec=value.src_spec.dims, target_spec=value.dst_spec.dims,
            )
            for cut in found.cuts
            for value in cut.values
        ),
        step_s=file.predictions.step_s,
        peak_bytes=tuple(worker.peak_bytes for worker in file.predictions.workers),
        bubble=file.predictions.bubble,
        simulated=len(file.provenance.considered),
        digest=plan.digest,
        took=took,
    )  # fmt: skip


def stage_of(plan: Any, types: Any, number: int, case: Case) -> records.Stage:
    """A stage of a `StepPlan`, its arguments apart."""
    file, stage = plan.data, plan.stages.stages[number]
    (group,) = file.cluster.groups
    hosts = len({device // group.devices_per_host for device in stage.mesh.device_ids})
    return records.Stage(
        start=stage.start,
        stop=stage.stop,
        first=file.pipelined.layers[stage.start].name,
        worker=plan.stages.schedule.mesh_of_stage[number],
        submesh=(hosts, stage.mesh.num_devices // hosts),
        mesh_shape=stage.mesh.shape,
        axes=stage.mesh.axis_names,
        batch_axes=batch_axes(plan, types, number, case.global_batch // case.num_microbatches),
        remat=stage.remat,
    )


def batch_axes(plan: Any, types: Any, number: int, examples: int) -> tuple[int, ...]:
    """Which axes of a stage's mesh split dimension 0 of what its layers take and hand on, where that has a microbatch's
    ``examples`` there; as most of its bytes have it."""
    file, stage = plan.data, plan.stages.stages[number]
    size_bytes = Counter[tuple[str, ...]]()
    for k in range(stage.start, stage.stop):
        wiring, sharding = file.pipelined.layers[k].wiring, file.pipelined.sharding_of(k)
        ports = (*zip(wiring.receives, sharding.receives, strict=True), *zip(wiring.sends, sharding.sends, strict=True))
        for (value, phase), spec in ports:
            if phase == "forward" and types[value].shape[:1] == (examples,):
                size_bytes[spec.dims[0]] += types[value].size_bytes
    split = size_bytes.most_common(1)[0][0] if size_bytes else ()
    return tuple(sorted(stage.mesh.axis_names.index(axis) for axis in split))


def held_by_stages(arguments: Sequence[Any], count: int) -> tuple[Held, ...]:
    """What ``count`` stages hold of a step's arguments; stages that hold theirs alike together."""
    every = [((a.path + p.rows, p.type_of(a.type).shape), p) for a in arguments for p in a.places]
    globs = records.globs_of(list(dict.fromkeys(key for key, _ in every)))
    alike: dict[str, Held] = {}
    for number in range(count):
        mine = {key: p.spec.dims for key, p in every if p.stage == number}
        specs = records.as_globs(mine, globs)
        key = json.dumps(specs)
        stages = (*alike[key].stages, number) if key in alike else (number,)
        alike[key] = Held(stages=stages, constraints=specs)
    return tuple(alike.values())


def asked(name: str, planner: str, options: Mapping[str, Any] | None = None) -> Found:
    """`plan_one` in a child. Raises ChildError."""
    from autopar.ir.serde import decode

    answer = ask("benchmarks.choice", {"name": name, "planner": planner, "options": options or {}}, STOP_AFTER_S)
    made = decode(Found, answer.values)
    took = made.found.took
    most = max(took.rss_bytes, answer.together_bytes)
    return replace(made, found=replace(made.found, took=replace(took, rss_bytes=most)))


def planned(name: str, planner: str, options: Mapping[str, Any] | None = None) -> OneMesh | Pipeline | Refused:
    """What a child finds. Raises ChildError."""
    return asked(name, planner, options).found


def child() -> int:
    """The child's side."""
    from autopar.ir.serde import to_json

    print(to_json(plan_one(**json.load(sys.stdin))))
    return 0


# --- records and comparisons -------------------------------------------------------------------------------------


def recorded(name: str) -> Record:
    """What both planners find now, as a record."""
    from autopar._version import __version__
    from autopar.jax_compat import jax_version

    case = CASES[name]
    found = {planner: planned(name, planner) for planner in PLANNERS}
    return Record(
        name=name,
        cluster=case.cluster,
        devices=case.devices,
        global_batch=case.global_batch,
        num_microbatches=case.num_microbatches,
        autopar_version=__version__,
        jax_version=jax_version(),
        cores=os.cpu_count() or 1,
        **found,  # type: ignore[arg-type]
    )


def missed(before: OneMesh | Pipeline | Refused, now: OneMesh | Pipeline | Refused, bar: float) -> str:
    """What is worse than it was, in words; nothing where nothing is."""
    if isinstance(before, Refused):
        return ""
    if isinstance(now, Refused):
        return f"nothing is found any more: {now.why}"
    if now.step_s > bar * before.step_s:
        return f"{now.step_s:.6g} s a step, recorded {before.step_s:.6g} s, bar {bar}"
    return ""


def compared(name: str, planner: str, before: OneMesh | Pipeline | Refused, forced: bool) -> tuple[Any, str]:
    """What is found now, and what it misses; of several tries the fastest. Raises ChildError."""
    from autopar.ir.serde import encode

    options = encode(before.options) if forced and not isinstance(before, Refused) else None
    bar = FORCED_BAR if forced else SLOWER_BAR
    now = planned(name, planner, options)
    tries = TRIES if isinstance(before, OneMesh) and before.status != "optimal" else 1
    for _ in range(tries - 1):
        if not missed(before, now, bar):
            break
        again = planned(name, planner, options)
        if isinstance(now, Refused) or (not isinstance(again, Refused) and again.step_s < now.step_s):
            now = again
    return now, missed(before, now, bar)


def chosen_row(name: str, record: Record) -> tuple[list[str], list[str]]:
    """A row of the table of what is chosen, and what it misses. Raises ChildError."""
    from autopar.ir.serde import encode

    made = asked(name, "chosen")
    now, befores = made.found, [getattr(record, planner) for planner in PLANNERS]
    forced = [
        math.inf if isinstance(before, Refused) else seconds_of(planned(name, planner, encode(before.options)))
        for planner, before in zip(PLANNERS, befores, strict=True)
    ]
    step_s, best_s = seconds_of(now), min(forced)
    allowed_s = TIME_BAR * made.counts * sum(before.took.planning_s + before.took.trace_s for before in befores)
    took_s = now.took.planning_s + now.took.trace_s
    said: list[str] = []
    if not step_s <= FORCED_BAR * best_s:
        said.append(f"{name}: {step_s:.6g} s a step, {best_s:.6g} s as recorded, bar {FORCED_BAR}")
    if took_s > allowed_s:
        said.append(
            f"{name}: planned in {took_s:.1f} s, bar {allowed_s:.1f} s for {made.counts} numbers of microbatches"
        )
    cells = [f"{x:.5g}" if math.isfinite(x) else "-" for x in (*forced, step_s)]
    ratio = f"{step_s / best_s:.4f}" if math.isfinite(best_s) else "-"
    times = [f"{took_s:.1f}", str(made.counts), f"{took_s / allowed_s:.2f}"]
    return [f"{name}, {CASES[name].devices}", *cells, ratio, *times, layout_line(now)], said


def seconds_of(found: OneMesh | Pipeline | Refused) -> float:
    """Seconds a step; infinite where nothing was found."""
    return math.inf if isinstance(found, Refused) else found.step_s


def choices(names: Sequence[str], console: Console) -> int:
    """What is chosen for each model, as a table; 1 where something is missed."""
    table = Table(title="What is chosen, beside the recorded layouts under the same cost model, no device used")
    table.add_column("model, devices", no_wrap=True)
    for column in ("one program s", "stages s", "chosen s", "ratio", "plan s", "counts", "of bar"):
        table.add_column(column, justify="right")
    table.add_column("layout")
    worse: list[str] = []
    for name in names:
        with console.status(f"planning {name}"):
            cells, said = chosen_row(name, records.load(name))
        table.add_row(*cells)
        worse += said
        console.print("; ".join(cells), markup=False)
    console.print(table)
    for line in worse:
        console.print(f"missed: {line}", markup=False)
    return 1 if worse else 0


def layout_line(found: OneMesh | Pipeline | Refused) -> str:
    """A layout in a line."""
    match found:
        case Refused():
            return "nothing fits"
        case OneMesh():
            recomputed = sum(count for _, count in found.recomputed)
            counts = f", {found.options.num_microbatches} microbatches"
            return (
                "x".join(map(str, found.options.mesh)) + counts + (f", {recomputed} recomputed" if recomputed else "")
            )
        case Pipeline():
            stages = Counter("x".join(map(str, s.mesh_shape)) for s in found.stages)
            return f"{found.options.schedule[0]}: " + ", ".join(f"{n} on {shape}" for shape, n in stages.items())


def row(name: str, planner: str, before: OneMesh | Pipeline | Refused, now: OneMesh | Pipeline | Refused) -> list[str]:
    """A row of the table."""
    step_s = [f"{x.step_s:.5g}" if not isinstance(x, Refused) else "-" for x in (before, now)]
    ratio = same = ""
    if not isinstance(before, Refused) and not isinstance(now, Refused):
        ratio = f"{now.step_s / before.step_s:.4f}"
        same = "same" if now.digest == before.digest else "other"
    took = [x.took.planning_s for x in (before, now)]
    cpu = [x.took.cpu_s for x in (before, now)]
    return [
        f"{name}, {CASES[name].devices}", planner, *step_s, ratio, same, *(f"{s:.1f}" for s in took),
        f"{took[1] / took[0]:.2f}", f"{cpu[1] / cpu[0]:.2f}", layout_line(now),
    ]  # fmt: skip


def _table(title: str) -> Table:
    table = Table(title=title)
    for column in ("model, devices", "planner"):
        table.add_column(column, no_wrap=True)
    for column in ("recorded step s", "step s", "ratio", "plan", "recorded plan s", "plan s", "ratio", "CPU ratio"):
        table.add_column(column, justify="right")
    table.add_column("layout")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``--one`` is the child's side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="*", help="models of these names, as gpt-*")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--record", action="store_true", help="write what is found now")
    does.add_argument("--again", action="store_true", help="plan as recorded, one program and stages")
    does.add_argument("--forced", action="store_true", help="plan with the recorded layouts as options")
    does.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.one:
        return child()
    names = [name for name in CASES if fnmatch.fnmatch(name, flags.only)]
    if not names:
        parser.error(f"no model is named {flags.only}: there are {', '.join(CASES)}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    if not (flags.record or flags.again or flags.forced):
        return choices(names, console)
    table = _table("Plans now" + (", recorded layouts forced" if flags.forced else "") + ", no device used")
    worse: list[str] = []
    for name in names:
        if flags.record:
            with console.status(f"planning {name}"):
                record = recorded(name)
            records.save(record)
            for planner in PLANNERS:
                found = getattr(record, planner)
                console.print(f"{name}, {planner}: {found.took.planning_s:.1f} s, {layout_line(found)}")
            continue
        record = records.load(name)
        for planner in PLANNERS:
            before = getattr(record, planner)
            if flags.forced and isinstance(before, Refused):
                continue
            with console.status(f"planning {name}, {planner}"):
                now, said = compared(name, planner, before, flags.forced)
            table.add_row(*row(name, planner, before, now), end_section=planner == PLANNERS[-1])
            if said:
                worse.append(f"{name}, {planner}: {said}")
    if table.rows:
        console.print(table)
    for line in worse:
        console.print(f"missed: {line}", markup=False)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
