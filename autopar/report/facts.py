"""What the page of a plan shows, as plain JSON values: `page_facts`.

Every figure is the plan's, in SI units, beside its text as `autopar inspect` writes it. The model is a tree: stages,
groups of equal layers, passes, source lines, operators; what is equal is one node with a count. Nodes are numbered in
order, and ``reads`` says which source lines of the same group read which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from autopar.inter_op.crossing import cut_resharding
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Event, Timeline
from autopar.ir.error_bands import error_band
from autopar.ir.graph import Graph
from autopar.ir.held_where import Held, held_where, most_bytes
from autopar.ir.in_words import in_words, parallelism
from autopar.ir.layer_text import indices_text, specs_text, split_text
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.plan_text import how_text, predicted_facts
from autopar.ir.pretty import cluster_text, fold_paths, runs_of
from autopar.ir.serde import JsonData, digest
from autopar.ir.sharding_plan import NodeStrategy, OperatorRow
from autopar.ir.spending import spending
from autopar.ir.strategy import Collective
from autopar.ir.text import bytes_text, percent_text, seconds_text

EVENTS = 40_000
"""Of a timeline, at most; of longer ones those of the first workers are shown."""
MEMORY_POINTS = 1_500
"""Of a curve of memory; between two the most is shown."""


def page_facts(plan: Plan, timeline: Timeline | None = None) -> dict[str, JsonData]:
    """All that the page shows; ``timeline``: of a pipeline what its simulation found, where it is at hand."""
    made, p = plan.provenance, plan.predictions
    if timeline is None and isinstance(plan.body, Pipelined):
        timeline = simulated(plan.body, plan)
    return {
        "name": plan.name,
        "words": in_words(plan),
        "head": [
            ["cluster", cluster_text(plan.cluster)],
            ["runs as", how_text(plan)],
            *([name.strip(), text] for name, text in predicted_facts(plan)),
            ["digest", f"{digest(plan)[:16]} (autopar {made.autopar_version}, jax {made.jax_version})"],
        ],
        "step_s": p.step_s,
        "peak_bytes": p.peak_memory_bytes,
        "bands": [
            [name, band.low, band.high, band.runs]
            for name in dict.fromkeys(mesh.device.name for mesh in plan.meshes)
            if (band := error_band(name)) is not None
        ],
        "time": [[s.what, s.seconds, s.beside, seconds_text(s.seconds)] for s in spending(plan).rows],
        "memory": _memory(plan),
        "meshes": [
            {
                "axes": [[a.name, a.size, f"{bytes_text(a.link.bytes_per_s)}/s"] for a in mesh.axes],
                "ids": list(mesh.device_ids),
                "device": mesh.device.name,
                "words": [str(words) for words in parallelism(plan)[number]],
            }
            for number, mesh in enumerate(plan.meshes)
        ],
        "arguments": _arguments(plan),
        "model": _model(plan),
        "collectives": _collectives(plan),
        "considered": [
            [c.name, c.step_s, seconds_text(c.step_s), c.fits, _against(c.step_s, p.step_s)]
            for c in sorted(made.considered, key=lambda c: c.step_s)
        ],
        "timeline": None if timeline is None else timeline_facts(timeline),
        "notes": list(made.notes),
    }


def simulated(body: Pipelined, plan: Plan) -> Timeline:
    """A pipeline's step by discrete events."""
    transfers = partial(cut_resharding, cluster=plan.cluster)
    return simulate(emit(body.plan, exchange=body.exchange, transfers_of=transfers))


def _against(step_s: float, mine: float) -> str:
    return f"{100 * (step_s / mine - 1):+.3g} %" if mine else ""


def _memory(plan: Plan) -> list[JsonData]:
    return [
        {
            "peak_bytes": w.peak_bytes,
            "limit_bytes": w.limit_bytes,
            "text": f"{bytes_text(w.peak_bytes)} of {bytes_text(w.limit_bytes)}",
            "kinds": [[kind, size, bytes_text(size)] for kind, size in w.held],
            "live": [[row.bytes, bytes_text(row.bytes), row.kind, row.what, row.count] for row in w.live],
        }
        for w in plan.predictions.workers
    ]


def _arguments(plan: Plan) -> list[JsonData]:
    """Rows of arguments, the batch first; those that differ in an index only are one."""
    rows: list[tuple[Held, str]] = []
    for i in sorted(range(len(plan.inputs)), key=lambda i: plan.inputs[i].role != "batch"):
        rows += [(one, one.argument.path + one.place.rows) for one in held_where(plan, i)]
    keys = [(path, (one.type, one.place.spec, one.argument.role, one.device_bytes)) for one, path in rows]
    out: list[JsonData] = []
    for fold in fold_paths(keys):
        first = rows[fold.rows[0]][0]
        stages = sorted({rows[r][0].place.stage for r in fold.rows})
        size = most_bytes(rows[r][0] for r in fold.rows)
        out.append({
            "path": fold.path, "count": len(fold.rows), "role": first.argument.role, "type": str(first.type),
            "shape": list(first.type.shape), "stages": list(stages),
            "stages_text": indices_text(stages), "spec": str(first.place.spec),
            "dims": [list(axes) for axes in first.place.spec.dims],
            "device_bytes": size, "device_text": bytes_text(size),
        })  # fmt: skip
    return out


# --- the model -----------------------------------------------------------------------------------------------------


def _model(plan: Plan) -> JsonData:
    """The tree: ``[name, seconds of a device, operators, count, children or what the operator is]``."""
    match plan.body:
        case OneProgram(sharding=sharding):
            graph = plan.step.graph if plan.step is not None else None
            passes = _passes(sharding.operators, sharding.strategies)
            reads = _reads(graph) if isinstance(graph, Graph) else []
            return _node(plan.name, passes, reads=reads)
        case Pipelined() as body:
            return _node(plan.name, _stages(plan, body))


def _node(name: str, children: Sequence[JsonData], count: int = 1, **more: JsonData) -> dict[str, JsonData]:
    return {"name": name, "count": count, "children": list(children), **more}


def _stages(plan: Plan, body: Pipelined) -> list[JsonData]:
    layered = plan.step.graph if plan.step is not None else None
    made: dict[int, list[JsonData]] = {}
    links: dict[int, list[JsonData]] = {}
    out: list[JsonData] = []
    for number, stage in enumerate(body.plan.stages):
        groups: list[JsonData] = []
        layers = list(stage.layers)
        while layers:
            k = layers[0]
            which = body.layers[k].sharding
            run = [j for j in layers if body.layers[j].sharding == which]
            run = run[: next((i for i, j in enumerate(run) if j != k + i), len(run))]
            layers = [j for j in layers if j not in run]
            sharding = body.shardings[which]
            if which not in made:
                made[which] = _passes(sharding.operators, sharding.strategies)
                kind = body.layers[k].kind
                links[which] = []
                if isinstance(layered, LayeredGraph):
                    graphs = layered.kinds[kind].joint or (layered.kinds[kind].forward,)
                    links[which] = _reads(graphs[0])
            name = f"layer{'s' if len(run) > 1 else ''} {indices_text(run)}"
            group = _node(name, made[which], len(run), reads=links[which], remat=sharding.remat)
            groups.append(group)
        words = ", ".join(map(str, parallelism(plan)[number]))
        out.append(_node(f"stage {number}", groups, stage=number, words=words))
    return out


def _passes(operators: Sequence[OperatorRow], strategies: Sequence[NodeStrategy]) -> list[JsonData]:
    passes: dict[str, dict[str, list[OperatorRow]]] = {}
    for row in operators:
        passes.setdefault(row.phase, {}).setdefault(row.source or "without a line", []).append(row)
    return [
        _node(phase, [
            _node(line, [_operator(row, strategies[row.strategy]) for row in rows])
            for line, rows in lines.items()
        ])
        for phase, lines in passes.items()
    ]  # fmt: skip


def _operator(row: OperatorRow, strategy: NodeStrategy) -> JsonData:
    return {
        "name": row.primitive, "count": row.count, "s": row.time_s, "text": seconds_text(row.time_s), "work": row.work,
        "split": split_text(strategy), "specs": specs_text(strategy),
    }  # fmt: skip


def _reads(graph: Graph) -> list[JsonData]:
    """[(pass, line) that makes, (pass, line) that reads], each once, as [pass, line, pass, line]."""
    found: dict[tuple[str, str, str, str], None] = {}

    def walk(graph: Graph, outer: dict[int, tuple[str, str]], phase: str) -> None:
        made = dict(outer)
        for node in graph.nodes:
            mine = node.phase if phase == "update" else phase
            place = (mine, node.source or "without a line")
            for operand in node.operands:
                if isinstance(operand, int) and (maker := made.get(operand)) is not None and maker != place:
                    found[*maker, *place] = None
            for body in node.bodies:
                inner = [made.get(o) if isinstance(o, int) else None for o in node.operands][-len(body.inputs) :]
                known = {v: m for v, m in zip(body.inputs[-len(inner) :], inner, strict=False) if m is not None}
                walk(body, known, mine)
            made.update(dict.fromkeys(node.results, place))

    walk(graph, {}, "update")
    return [list(link) for link in found]


# --- collectives, timeline -----------------------------------------------------------------------------------------


def _collectives(plan: Plan) -> list[JsonData]:
    """[where, kind, axes, runs a step, operand bytes, seconds, text, beside compute, for what], the dearest first."""
    rows: list[tuple[str, Collective]] = []
    match plan.body:
        case OneProgram(sharding=sharding):
            rows += [("", c) for c in sharding.collectives]
        case Pipelined() as body:
            for number, sharding in enumerate(body.shardings):
                layers = [k for k, layer in enumerate(body.layers) if layer.sharding == number]
                where = f"layer{'s' if len(layers) > 1 else ''} {indices_text(layers)}"
                rows += [(where, c) for c in sharding.collectives]
            rows += [(f"stage {s}", c) for s, between in enumerate(body.between) for c in between]
    rows.sort(key=lambda row: -row[1].time_s)
    return [
        [
            where, c.kind, ",".join(c.axes), runs_of(c), c.operand_bytes, c.time_s, seconds_text(c.time_s), c.beside,
            c.where,
        ]
        for where, c in rows
    ]  # fmt: skip


def timeline_facts(timeline: Timeline) -> dict[str, JsonData]:
    """A timeline as the page takes it: events of workers and links, numbered names, curves of memory."""
    names: dict[str, int] = {}
    left = EVENTS

    def events(found: Iterable[Event]) -> Iterator[JsonData]:
        nonlocal left
        for event in found:
            left -= 1
            if left >= 0:
                yield [round(event.start_s, 9), round(event.stop_s, 9), names.setdefault(event.what, len(names))]

    workers: list[JsonData] = [list(events(worker.events)) for worker in timeline.workers]
    links: list[JsonData] = [[f"{link.source} to {link.target}", list(events(link.events))] for link in timeline.links]
    return {
        "makespan_s": timeline.makespan_s,
        "text": seconds_text(timeline.makespan_s),
        "workers": workers,
        "bubbles": [percent_text(timeline.bubble(w), 1) for w in range(len(timeline.workers))],
        "links": links,
        "memory": [_curve(worker.memory, timeline.makespan_s) for worker in timeline.workers],
        "names": [*names],
        "cut": left < 0,
    }


def _curve(points: Sequence[tuple[float, float]], stop_s: float) -> list[JsonData]:
    """At most `MEMORY_POINTS` of [second, bytes], the most of each stretch."""
    if len(points) <= MEMORY_POINTS or not stop_s:
        return [[t, b] for t, b in points]
    most: dict[int, tuple[float, float]] = {}
    for t, b in points:
        slot = math.floor(t / stop_s * (MEMORY_POINTS - 1))
        if slot not in most or b > most[slot][1]:
            most[slot] = (t, b)
    return [[t, b] for t, b in most.values()]
