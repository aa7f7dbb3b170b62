"""The text form of plans: what `autopar inspect`, `autopar diff` and `print(plan)` show.

In: a `Plan`. Out: plain text in sections (a heading in column 0, its rows indented), for terminals of 100
columns and for pipes alike; or the same facts as plain JSON values (`plan_facts`). Rows of a pytree that
differ only in an index (``['layers'][0]['wq']``) are folded into one where their type and sharding are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.graph import TensorType, itemsize_bits
from autopar.ir.plan import ArgPlan, Pin, Plan, PlanConfig
from autopar.ir.serde import JsonData, digest, encode
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import Collective
from autopar.ir.text import bytes_text, link_text, percent_text, seconds_text, si_text, table


def cluster_text(cluster: ClusterSpec) -> str:
    """One line: name, hosts, devices, links."""
    parts: list[str] = []
    for group in cluster.groups:
        hosts = f"{group.hosts} host{'s' if group.hosts > 1 else ''} x {group.devices_per_host} {group.device.name}"
        text = f"{hosts} ({bytes_text(group.device.memory_bytes)} each), {bytes_text(group.intra_host.bytes_per_s)}/s"
        if group.hosts > 1:
            text += f" inside, {group.nics_per_host} x {bytes_text(group.nic.bytes_per_s)}/s between hosts"
        parts.append(text)
    return f"{cluster.name}: " + "; ".join(parts)


def mesh_text(mesh: LogicalMesh) -> str:
    """One line: shape, and each axis with its link."""
    axes = "; ".join(f"{a.name}={a.size} ({link_text(a.link)})" for a in mesh.axes)
    return f"{'x'.join(map(str, mesh.shape))}: {axes}"


def shard_bytes(value_type: TensorType, spec: ShardingSpec, mesh: LogicalMesh) -> int:
    """Bytes of one device's part of a value; dimensions that the axes do not divide are padded."""
    sizes = {a.name: a.size for a in mesh.axes}
    dims = zip(value_type.shape, spec.dims, strict=True)
    local = math.prod(-(-n // math.prod(sizes[a] for a in axes)) for n, axes in dims)
    return (local * itemsize_bits(value_type.dtype) + 7) // 8


# Folding of pytree paths ------------------------------------------------------------------------------

# A run of digits that is an index: a whole component (`[3]`, `/3/`), a suffix (`layer_3`), or a numbered
# component with something under it (`h3/wq`); `w1` at the end of a path is a name.
_INDEX = re.compile(r"(?<![0-9.])[0-9]+(?=[\]/'\"]|\.[A-Za-z_]|$)")


def _split_path(path: str) -> tuple[str, tuple[int, ...]]:
    """(pattern with one ``{}`` per index, the indices)."""
    indices: list[int] = []

    def keep(match: re.Match[str]) -> str:
        before = path[: match.start()]
        last = not re.search(r"[A-Za-z_]", path[match.end() :])
        if last and before and before[-1].isalpha():
            return match.group()
        indices.append(int(match.group()))
        return "\0"

    return _INDEX.sub(keep, path), tuple(indices)


@dataclass(frozen=True, slots=True)
class FoldedPath:
    """A path with ``*`` (every index there is) or ``{0-3,7}`` in place of the indices that vary; the
    positions in the folded sequence that it stands for."""

    path: str
    rows: tuple[int, ...]


def fold_paths(rows: Sequence[tuple[str, Hashable]]) -> tuple[FoldedPath, ...]:
    """Folds rows (path, what must be equal) whose paths differ in indices only, in the order of each fold's first
    row."""
    split = [_split_path(path) for path, _ in rows]
    everywhere: dict[tuple[str, int], set[int]] = {}
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for row, (pattern, indices) in enumerate(split):
        groups.setdefault((pattern, rows[row][1]), []).append(row)
        for position, index in enumerate(indices):
            everywhere.setdefault((pattern, position), set()).add(index)
    folded: list[FoldedPath] = []
    for (pattern, _), members in groups.items():
        pieces = pattern.split("\0")
        columns = [sorted({split[m][1][p] for m in members}) for p in range(len(pieces) - 1)]
        if math.prod(map(len, columns)) != len(members):  # not a full grid: saying so briefly would be wrong
            folded += [FoldedPath(rows[m][0], (m,)) for m in members]
            continue
        text = pieces[0]
        for position, (column, piece) in enumerate(zip(columns, pieces[1:], strict=True)):
            whole = len(column) > 1 and len(column) == len(everywhere[pattern, position])
            text += ("*" if whole else _ranges(column)) + piece
        folded.append(FoldedPath(text, tuple(members)))
    return tuple(sorted(folded, key=lambda f: f.rows[0]))


def _ranges(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


# Collectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """All collectives of one kind over the same axes. ``runs`` executions in a step move ``bytes`` operand
    bytes per device in ``time_s``; ``assumed`` where some of these are in loops of unknown length."""

    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    ops: int
    runs: int
    bytes: int
    time_s: float
    assumed: bool


def _runs(collective: Collective) -> int:
    return collective.count * collective.trips


def sum_collectives(collectives: Iterable[Collective]) -> tuple[CollectiveSum, ...]:
    """Collectives by (kind, axes), the dearest first. `Collective.time_s` is a whole row's: all its executions."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    sums = [
        CollectiveSum(
            kind=kind,
            axes=axes,
            dtypes=tuple(sorted({c.dtype for c in group})),
            ops=sum(c.count for c in group),
            runs=sum(map(_runs, group)),
            bytes=sum(c.operand_bytes * _runs(c) for c in group),
            time_s=math.fsum(c.time_s for c in group),
            assumed=any(c.trips_assumed for c in group),
        )
        for (kind, axes), group in groups.items()
    ]
    return tuple(sorted(sums, key=lambda s: (-s.time_s, s.kind, s.axes)))


# Sections ---------------------------------------------------------------------------------------------


def _facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {text}".rstrip() for name, text in rows]


def pin_text(pin: Pin) -> str:
    """``[x,?]``: as a sharding, with ? for a dimension that is left to the planner."""
    return str(ShardingSpec(dims=tuple(("?",) if axes is None else axes for axes in pin.dims)))


def config_text(config: PlanConfig) -> str:
    """What was asked for, in one line, defaults left out."""
    default = PlanConfig()
    parts = [f"method {config.method}"]
    for field in fields(PlanConfig):
        value = getattr(config, field.name)
        if field.name == "method" or value == getattr(default, field.name):
            continue
        match field.name:
            case "mesh_shape":
                parts.append("mesh " + "x".join(map(str, value)))
            case "memory_bytes":
                parts.append(f"memory {bytes_text(value)}")
            case "num_microbatches":
                parts.append(f"{value} microbatches")
            case "forbid":
                parts.append("forbid " + ", ".join(value))
            case "pins":
                parts += [f"pin {pin.target} {pin_text(pin)}" for pin in config.pins]
            case "axis_names":
                parts.append("axes " + ", ".join(value))
            case "time_limit_s":
                parts.append(f"time limit {seconds_text(value)}")
            case _:
                parts.append(f"{field.name} {value}")
    return "; ".join(parts)


def argument_rows(arguments: Sequence[ArgPlan], mesh: LogicalMesh) -> list[list[str]]:
    """Rows of a table with its heading: path, how many, type, sharding, bytes a device, what becomes of it (state,
    donated). Arguments that differ in an index only are folded into one row."""
    rows = [["path", "count", "type", "sharding", "per device", ""]]
    for fold in fold_paths([(a.path, (a.type, a.spec, _fate(a))) for a in arguments]):
        first = arguments[fold.rows[0]]
        size = sum(shard_bytes(arguments[r].type, arguments[r].spec, mesh) for r in fold.rows)
        rows.append(
            [
                fold.path,
                str(len(fold.rows)),
                str(first.type),
                str(first.spec),
                bytes_text(size),
                _fate(first),
            ]
        )
    return rows


def _fate(argument: ArgPlan) -> str:
    """``donated``: its new value takes its buffer; ``state``: it has one, of its own."""
    return "donated" if argument.donated_to >= 0 else "state" if argument.becomes >= 0 else ""


def _clip(rows: list[list[str]], limit: int | None, what: str) -> tuple[list[list[str]], list[str]]:
    if limit is None or len(rows) - 1 <= limit:
        return rows, []
    return rows[: limit + 1], [f"  ... {len(rows) - 1 - limit} more {what} (--all shows them)"]


def _arguments(heading: str, arguments: Sequence[ArgPlan], mesh: LogicalMesh, limit: int | None) -> list[str]:
    total = bytes_text(sum(shard_bytes(a.type, a.spec, mesh) for a in arguments))
    rows, more = _clip(argument_rows(arguments, mesh), limit, "rows")
    return [f"{heading}: {len(arguments)} arrays, {total} per device", *table(rows, right=(1, 4)), *more, ""]


def _predicted(plan: Plan) -> list[str]:
    p, device = plan.predictions, plan.sharding.mesh.device
    limit = plan.config.memory_bytes or device.memory_bytes
    rows = [
        (
            "step time",
            f"{seconds_text(p.step_s)} (compute {seconds_text(p.compute_s)}, "
            f"communication {seconds_text(p.communication_s)})",
        ),
        (
            "peak memory",
            f"{bytes_text(p.peak_memory_bytes)} of {bytes_text(limit)} "
            f"({percent_text(p.peak_memory_bytes, limit)}); arguments {bytes_text(p.argument_bytes)}",
        ),
        ("FLOPs", f"{si_text(p.flops)}FLOP"),
    ]
    return ["predicted, per device and step", *_facts(rows), ""]


def _collectives(plan: Plan, limit: int | None) -> list[str]:
    sums = sum_collectives(plan.sharding.collectives)
    if not sums:
        return ["collectives: none", ""]
    rows = [["kind", "over", "dtype", "ops", "runs", "bytes", "time"]]
    for s in sums:
        about = "~" if s.assumed else ""
        rows.append(
            [
                s.kind,
                ",".join(s.axes),
                ",".join(s.dtypes),
                str(s.ops),
                f"{about}{s.runs}",
                about + bytes_text(s.bytes),
                about + seconds_text(s.time_s),
            ]
        )
    total = bytes_text(sum(s.bytes for s in sums))
    spent = seconds_text(math.fsum(s.time_s for s in sums))
    lines = [f"collectives: {sum(s.ops for s in sums)} in the program; a step moves {total} per device in {spent}"]
    lines += table(rows, right=(3, 4, 5, 6))
    if any(s.assumed for s in sums):
        lines.append("  ~ : some run in a loop of unknown length, counted with the trips assumed below")
    dearest = sorted(plan.sharding.collectives, key=lambda c: (-c.time_s, c.where, c.kind))
    shown = dearest if limit is None else dearest[: min(5, limit)]
    lines.append("  dearest:" if len(shown) < len(dearest) else "  each:")
    each = [
        [seconds_text(c.time_s), c.kind, ",".join(c.axes),
         f"{'~' if c.trips_assumed else ''}{_runs(c)} x {bytes_text(c.operand_bytes)}", c.where]
        for c in shown
    ]  # fmt: skip
    return [*lines, *table(each, right=(0,), indent="    "), ""]


def _replicated(plan: Plan, limit: int | None) -> list[str]:
    rows = plan.sharding.replicated
    if not rows:
        return ["replicated for lack of a rule: none", ""]
    flops = math.fsum(r.flops for r in rows)
    lines = [
        f"replicated for lack of a rule: {sum(r.count for r in rows)} operators, "
        f"{percent_text(flops, plan.predictions.flops)} of the FLOPs"
    ]
    cells = [["operator", "count", "FLOPs", "bytes", "where", "why"]]
    cells += [
        [r.primitive, str(r.count), si_text(r.flops).strip(), bytes_text(r.bytes), r.source, r.why]
        for r in sorted(rows, key=lambda r: (-r.flops, -r.bytes, r.primitive, r.source))
    ]
    shown, more = _clip(cells, limit, "operators")
    return [*lines, *table(shown, right=(1, 2, 3)), *more, ""]


def _recomputed(plan: Plan, limit: int | None) -> list[str]:
    rows = plan.sharding.recompute
    if not rows:
        return []
    sums: dict[str, list[float]] = {}
    for r in rows:
        row = sums.setdefault(r.what, [0, 0.0, 0.0])
        row[0] += 1
        row[1] += r.saved_bytes
        row[2] += r.cost_s
    saved, spent = math.fsum(r.saved_bytes for r in rows), math.fsum(r.cost_s for r in rows)
    lines = [
        f"recomputed: {len(rows)} value{'s' if len(rows) > 1 else ''}; {bytes_text(saved)} per device not held "
        f"meanwhile, for {seconds_text(spent)} ({percent_text(spent, plan.predictions.step_s)} of the step)"
    ]
    cells = [["operator", "count", "not held", "time"]]
    dearest = sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][2], item[0]))
    cells += [[what, str(int(n)), bytes_text(size), seconds_text(time)] for what, (n, size, time) in dearest]
    shown, more = _clip(cells, limit, "operators")
    return [*lines, *table(shown, right=(1, 2, 3)), *more, ""]


def _assumptions(plan: Plan, limit: int | None) -> list[str]:
    rows = plan.sharding.assumptions
    if not rows:
        return []
    cells = [["operator", "count", "assumed", "where", "why"]]
    cells += [[r.primitive, str(r.count), r.assumed, r.source, r.why] for r in rows]
    shown, more = _clip(cells, limit, "operators")
    return ["assumed, for the step does not say it", *table(shown, right=(1,)), *more, ""]


def _solved(plan: Plan) -> list[str]:
    report, made = plan.sharding.report, plan.provenance
    total = math.fsum(s for _, s in made.seconds)
    status = report.status.replace("_", " ")
    rows = [
        (
            "solver",
            f"{report.solver}, {status}: objective {seconds_text(report.objective_s)}, "
            f"bound {seconds_text(report.bound_s)}, gap {100 * report.gap:.3g} %, took {seconds_text(report.seconds)}",
        ),
        (
            "planning time",
            seconds_text(total)
            + (" (" + ", ".join(f"{name} {seconds_text(s)}" for name, s in made.seconds) + ")" if made.seconds else ""),
        ),
    ]
    lines = ["solved", *_facts(rows), ""]
    if made.baselines:
        mine = plan.predictions.step_s
        cells = [["plan", "step time", "against this", "peak memory", ""]]
        cells.append(["this plan", seconds_text(mine), "", bytes_text(plan.sharding.peak_memory_bytes), "fits"])
        for name, objective, peak, fits in made.baselines:
            against = f"{100 * (objective - mine) / mine:+.3g} %" if mine > 0 else ""
            cells.append([name, seconds_text(objective), against, bytes_text(peak), "fits" if fits else "does not fit"])
        lines += ["compared under the same cost model", *table(cells, right=(1, 2, 3)), ""]
    if made.notes:
        lines += ["notes", *(f"  - {note}" for note in made.notes), ""]
    return lines


def plan_text(plan: Plan, *, limit: int | None = 40) -> str:
    """The whole plan for a reader; at most ``limit`` rows a table (None: all)."""
    made = plan.provenance
    lines = [
        f"plan of {plan.name}",
        *_facts(
            [
                ("digest", digest(plan)[:16] + f" (autopar {made.autopar_version}, jax {made.jax_version})"),
                ("cluster", cluster_text(plan.cluster)),
                ("mesh", mesh_text(plan.sharding.mesh)),
                ("asked for", config_text(plan.config)),
            ]
        ),
        "",
        *_predicted(plan),
        *_arguments("arguments", plan.inputs, plan.sharding.mesh, limit),
        *_arguments("results", plan.outputs, plan.sharding.mesh, limit),
        *_collectives(plan, limit),
        *_recomputed(plan, limit),
        *_replicated(plan, limit),
        *_assumptions(plan, limit),
        *_solved(plan),
    ]
    return "\n".join(lines).rstrip() + "\n"


def plan_facts(plan: Plan) -> dict[str, JsonData]:
    """What `plan_text` shows, unfolded and unformatted, as values for json.dumps; SI units in the names."""
    mesh, report = plan.sharding.mesh, plan.sharding.report

    def argument(a: ArgPlan) -> dict[str, JsonData]:
        return {
            "path": a.path,
            "shape": list(a.type.shape),
            "dtype": a.type.dtype,
            "dims": [list(axes) for axes in a.spec.dims],
            "unreduced": list(a.spec.unreduced),
            "bytes_per_device": shard_bytes(a.type, a.spec, mesh),
            "donated_to": a.donated_to if a.donated_to >= 0 else None,
            "becomes": a.becomes if a.becomes >= 0 else None,
        }

    return {
        "name": plan.name,
        "digest": digest(plan),
        "schema_version": plan.schema_version,
        "cluster": {"name": plan.cluster.name, "devices": plan.cluster.num_devices},
        "mesh": {
            "shape": list(mesh.shape),
            "axes": [{"name": a.name, "size": a.size, **encode(a.link)} for a in mesh.axes],
        },
        "config": encode(plan.config),
        "predictions": encode(plan.predictions),
        "arguments": [argument(a) for a in plan.inputs],
        "results": [argument(a) for a in plan.outputs],
        "collectives": [encode(c) for c in plan.sharding.collectives],
        "recompute": [encode(r) for r in plan.sharding.recompute],
        "replicated": [encode(r) for r in plan.sharding.replicated],
        "assumptions": [encode(a) for a in plan.sharding.assumptions],
        "solver": {**encode(report), "gap": report.gap},
        "planning_s": math.fsum(s for _, s in plan.provenance.seconds),
        "planning_phases_s": dict(plan.provenance.seconds),
        "baselines": [
            {"name": name, "objective_s": objective, "peak_memory_bytes": peak, "fits": fits}
            for name, objective, peak, fits in plan.provenance.baselines
        ],
        "notes": list(plan.provenance.notes),
        "autopar_version": plan.provenance.autopar_version,
        "jax_version": plan.provenance.jax_version,
    }
