"""An inference step whose parameters lie where a train step's pipeline plan has them: `follow`.

In: the inference step in layers, the train step's plan (`ir.plan.Plan`), and which of the plan's arguments each
argument of the step is (`matched`). Out: a `Pipeline`: every layer on the stage that holds what it reads, arguments
pinned to their shardings there, each layer solved for one microbatch with these, one after the other along its stage.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from autopar.inter_op.candidates import Builder, Built
from autopar.inter_op.layer_problems import LayerProblems, MeshKind, parts_of
from autopar.inter_op.pipeline_search import Pipeline, pipeline_of
from autopar.inter_op.schedules.inference import inference_on
from autopar.intra_op.mesh_problem import Asked
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import StageProblem
from autopar.ir.errors import InfeasibleError, OptionError
from autopar.ir.graph import TensorType
from autopar.ir.layer_sharding import LayerWiring, joins
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipeline import Layout, PipelinePlan, Stage, StageCost, fullest
from autopar.ir.plan import Plan
from autopar.ir.sharding import ShardingSpec
from autopar.ir.text import bytes_text

Placement = dict[int, tuple[TensorType, ShardingSpec]]
"""Stage → how it holds an argument, or rows of it."""


def placements(trained: Plan) -> dict[str, Placement]:
    """Path of each argument that stages hold (of rows of it: ``…[2:3]``) → the stages that hold it, and how."""
    out: dict[str, Placement] = {}
    for a in trained.inputs:
        for place in a.places:
            out.setdefault(a.path + place.rows, {})[place.stage] = (place.type_of(a.type), place.spec)
    return out


def matched(
    paths: Sequence[tuple[str, TensorType]], known: Mapping[str, Placement], given: Mapping[str, str] | None, name: str
) -> dict[str, str]:
    """Path of each argument that the step's layers read → that of the train step's that it is.

    An argument of the same path and type is the same. Else all that is below an argument of the step (``args[0]``) is
    looked for below one place of the train step's: the one that ``given`` says, or the only one, or the first of
    several that lie alike. Scalars and keys that are not found are free, and left out.

    Raises:
        OptionError: an array is found nowhere, has another type there, or could be several that lie differently.
    """
    out: dict[str, str] = {}
    roots: dict[str, list[tuple[str, TensorType]]] = {}
    for path, value_type in paths:
        root = _root(path, given or {})
        roots.setdefault(root, []).append((path, value_type))
    for root, leaves in roots.items():
        wanted = [(path, t) for path, t in leaves if t.shape and not t.is_key]
        place = (given or {}).get(root)
        if place is None and all(_fits(path, t, known) for path, t in wanted):
            place = root
        if place is None:
            place = _found(root, wanted, known, name)
        for path, t in leaves:
            there = place + path[len(root) :]
            if _fits(there, t, known):
                out[path] = there
            elif (path, t) in wanted:
                raise OptionError(_missing(name, path, t, there, known))
    return out


def _root(path: str, given: Mapping[str, str]) -> str:
    """The longest part of ``path`` that ``given`` names, or its argument: ``args[0]``, ``kwargs['x']``."""
    named = [key for key in given if path.startswith(key) and path[len(key) :][:1] in ("", "[", ".")]
    if named:
        return max(named, key=len)
    found = re.match(r"(args\[\d+\]|kwargs\['[^']*'\]|const\[\d+\])", path)
    return found[0] if found else path


def _fits(path: str, value_type: TensorType, known: Mapping[str, Placement]) -> bool:
    return path in known and all(t == value_type for t, _ in known[path].values())


def _found(root: str, leaves: Sequence[tuple[str, TensorType]], known: Mapping[str, Placement], name: str) -> str:
    """Where all leaves below ``root`` are in the train step."""
    if not leaves:
        return root
    first = leaves[0][0][len(root) :]
    places = [path.removesuffix(first) for path in known if first and path.endswith(first)]
    places = [p for p in places if all(_fits(p + path[len(root) :], t, known) for path, t in leaves)]
    if not places:
        return root  # refused with a reason
    lie = {tuple(str(sorted(known[p + path[len(root) :]].items())) for path, _ in leaves) for p in places}
    if len(lie) > 1:
        raise OptionError(
            f"follow: {root} of {name} could be {', '.join(places)} of the train step, which lie differently. "
            f"Say which: follow_args={{{root!r}: {places[0]!r}}}"
        )
    return places[0]


def _missing(name: str, path: str, t: TensorType, there: str, known: Mapping[str, Placement]) -> str:
    if there in known:
        have = next(iter(known[there].values()))[0]
        return f"follow: {path} of {name} is {t}, but {there} of the train step is {have}. Plan for these shapes"
    near = difflib.get_close_matches(there, list(known), n=3, cutoff=0.4)
    text = f"; there is {', '.join(near)}" if near else ""
    return (
        f"follow: {path} of {name} ({t}) is no argument that the train step's stages hold{text}. Say where that has "
        f"it, follow_args={{{_root(path, {})!r}: 'args[0].params'}} say, or pass it with the batch (batch_argnums)"
    )


def follow(
    layered: LayeredGraph,
    trained: Plan,
    forbid: tuple[str, ...] = (),
    user_rules: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
) -> Pipeline:
    """The pipeline of an inference step that follows ``trained``. ``memory_bytes``: a limit of its own.

    Raises:
        OptionError: the step takes gradients, its arguments are not the train step's, or a layer reads what lies on
            several stages, or on an earlier one than the layer before.
        InfeasibleError: it does not fit the devices' memory.
    """
    if layered.loss >= 0:
        raise OptionError(f"follow: {layered.name} takes gradients; only a step that infers can follow another")
    return _Follower(layered, trained, forbid, user_rules, given).run(memory_bytes)


class _Follower:
    def __init__(
        self, layered: LayeredGraph, trained: Plan, forbid: tuple[str, ...],
        user_rules: Mapping[str, str] | None, given: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        self.layered, self.trained, self.forbid = layered, trained, forbid
        self.plan = trained.pipelined.plan
        self.parts = parts_of(layered)
        self.known = placements(trained)
        graphs = [part.graph for part in self.parts.layers]
        paths = {p: g.values[v] for g in graphs for p, v in zip(g.arg_paths, g.inputs, strict=True)}
        self.matched = matched(list(paths.items()), self.known, given, layered.name)
        self.posed = LayerProblems(self.parts, forbid, Asked(user_rules=user_rules or {}))
        self.problems: dict[tuple[int, MeshKind], StageProblem] = {}
        self.solved: dict[tuple[int, MeshKind, tuple[tuple[tuple[str, int], int], ...]], Layout] = {}
        self.every = joins([
            LayerWiring(
                receives=tuple((p.value, p.phase) for p in part.receives),
                sends=tuple((p.value, p.phase) for p in part.sends),
                inputs=tuple((v, *where) for v, where in zip(part.input_values, part.inputs, strict=True)),
            )
            for part in self.parts.layers
        ])  # fmt: skip

    def run(self, memory_bytes: int | None) -> Pipeline:
        home = self._home()
        used = sorted(set(home))
        meshes = {m: i for i, m in enumerate(sorted({self.plan.schedule.mesh_of_stage[s] for s in used}))}
        schedule = inference_on(
            [meshes[self.plan.schedule.mesh_of_stage[s]] for s in used], self.layered.num_microbatches
        )
        layouts: list[Layout] = []
        for k, s in enumerate(home):
            layouts.append(self._layout(k, s, layouts[-1] if k and home[k - 1] == s else None))
        stages: list[Stage] = []
        for s in used:
            here = range(home.index(s), home.index(s) + home.count(s))
            stages.append(
                Stage(
                    start=here.start, stop=here.stop, mesh=self.plan.stages[s].mesh, remat=("none",) * len(here),
                    cost=self._cost(here, layouts, s),
                )
            )  # fmt: skip
        builder = Builder(
            self.parts, self.trained.cluster, (), (), self.forbid,
            "auto" if self.trained.config.stages is None else self.trained.config.stages.resharding,
        )  # fmt: skip
        plan = PipelinePlan(stages=tuple(stages), cuts=builder.cuts(stages, layouts), schedule=schedule)
        step = builder.simulated(Built(f"following {self.trained.name}", plan, tuple(layouts), 0.0))
        part, peak = step.fullest(memory_bytes)
        if part > 1:
            raise InfeasibleError(
                f"follow: {self.layered.name} needs {bytes_text(peak)} a device, {bytes_text(peak - peak / part)} over "
                "the limit. More microbatches, or a smaller batch, lower that"
            )
        rows = ((step.built.text, len(stages), step.timeline.makespan_s),)
        return pipeline_of(step, rows, self.posed)

    # --- where layers run --------------------------------------------------------------------------------------------

    def _home(self) -> list[int]:
        """Layer → stage of the train step: of those that hold all it reads, the first that is not before the stage of
        the layer before it. Layers that read nothing are with the next that does."""
        out: list[int | None] = []
        at = 0
        for k, part in enumerate(self.parts.layers):
            holders = {
                path: set(self.known[self.matched[path]]) for path in part.graph.arg_paths if path in self.matched
            }
            if not holders:
                out.append(None)
                continue
            both = set[int].intersection(*holders.values())
            if not both or max(both) < at:
                raise OptionError(self._scattered(k, holders, at))
            at = min(s for s in both if s >= at)
            out.append(at)
        last = len(self.plan.stages) - 1
        filled: list[int] = []
        following = next((s for s in reversed(out) if s is not None), last)
        for s in reversed(out):
            following = following if s is None else s
            filled.append(following)
        return filled[::-1]

    def _scattered(self, k: int, holders: Mapping[str, set[int]], at: int) -> str:
        layer = self.layered.layers[k]
        where = f"{layer.name}{f' ({layer.sources[0]})' if layer.sources else ''} of {self.layered.name}"
        late = [p for p, stages in holders.items() if max(stages) < at]
        if late:
            return (
                f"follow: {where} reads {late[0]}, which lies on stage {max(holders[late[0]])} of the train step, "
                f"after a layer that runs on stage {at}. Both steps must use their layers in one order"
            )
        first, *others = holders
        other = next(p for p in others if not holders[p] & holders[first])
        return (
            f"follow: {where} reads {first}, which lies on stage {min(holders[first])} of the train step, and {other}, "
            f"on stage {min(holders[other])}. Cut it where the train step is cut: layers=, or autopar.layer_boundary"
        )

    # --- how they run ------------------------------------------------------------------------------------------------

    def _mesh(self, stage: int) -> Mesh:
        return self.posed.mesh(self.plan.stages[stage].mesh)

    def _layout(self, k: int, stage: int, before: Layout | None) -> Layout:
        """The cheapest layout of a layer with its arguments as they lie: as it likes to receive, or as the layer before
        it sends."""
        part, mesh = self.parts.layers[k], self._mesh(stage)
        pins: dict[tuple[str, int], int] = {}
        for i, (path, v) in enumerate(zip(part.graph.arg_paths, part.graph.inputs, strict=True)):
            if path in self.matched:
                value_type, spec = self.known[self.matched[path]][stage]
                assert value_type == part.graph.values[v]
                pins["input", i] = mesh.code_of(value_type, spec)
        found = [self._solved(k, mesh, pins)]
        if before is None:
            return found[0]
        wires = [j for j in self.every if (j.phase, j.source, j.target) == ("forward", k - 1, k)]
        problem = self._problem(k, mesh)
        likes = {("receive", j.to): before.sends[j.at] for j in wires}
        likes = {port: code for port, code in likes.items() if code in problem.codes(*port)}
        found.append(self._solved(k, mesh, {**pins, **likes}))

        def cost_s(layout: Layout) -> float:
            costs = (mesh.costs(part.receives[j.to].type)[before.sends[j.at], layout.receives[j.to]] for j in wires)
            return layout.cost.forward_s + float(sum(costs))

        return min(found, key=cost_s)

    def _problem(self, k: int, mesh: Mesh) -> StageProblem:
        key = (self.parts.number[k], (mesh.logical.axes, mesh.logical.device))
        if key not in self.problems:
            self.problems[key] = StageProblem(
                self.parts.layers[k], self.posed.posed(self.parts.number[k], "none", mesh.logical)
            )
        return self.problems[key]

    def _solved(self, k: int, mesh: Mesh, pins: Mapping[tuple[str, int], int]) -> Layout:
        key = (self.parts.number[k], (mesh.logical.axes, mesh.logical.device), tuple(sorted(pins.items())))
        if key not in self.solved:
            self.solved[key] = self._problem(k, mesh).solve(pins=pins)
        return self.solved[key]

    def _cost(self, here: range, layouts: Sequence[Layout], stage: int) -> StageCost:
        """A stage's, of its layers' and of what is resharded between them."""
        mesh = self._mesh(stage)
        total: dict[str, float] = {
            f.name: sum(getattr(layouts[k].cost, f.name) for k in here)
            for f in fields(StageCost)
            if f.name != "transients"
        }
        total["transient_bytes"] = max(layouts[k].cost.transient_bytes for k in here)
        spread: dict[tuple[TensorType, int, int, int], list[int]] = {}
        """(type, layer, port, code) of what layers send each other → the codes that these want."""
        for join in self.every:
            if join.source not in here or join.target not in here:
                continue
            part, one, other = self.parts.layers[join.target], layouts[join.source], layouts[join.target]
            if join.phase == "forward":
                key = part.receives[join.to].type, join.source, join.at, one.sends[join.at]
                spread.setdefault(key, []).append(other.receives[join.to])
            elif join.phase == "argument":
                value_type = part.graph.values[part.graph.inputs[join.to]]
                have, want = one.inputs[join.at], other.inputs[join.to]
                total["grad_sync_s"] += float(mesh.costs(value_type)[have, want])
                total["state_bytes"] -= value_type.size_bytes / float(mesh.space(value_type).shards[want])
        total["forward_s"] += sum(mesh.spread_s(t, have, codes) for (t, _, _, have), codes in spread.items())
        return replace(layouts[here[0]].cost, **total, transients=fullest([layouts[k].cost for k in here]))
