"""What a pipeline plan says of the operators of its layers is what its costs and its cuts are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cost.kernels import memory_bytes_per_s
from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.layering.layers import Layered, layered
from autopar.inter_op.layer_shardings import Between
from autopar.inter_op.layer_tasks import layer_tasks, walked
from autopar.inter_op.stage_graph import stage_graph
from autopar.intra_op.specs import Mesh
from autopar.intra_op.stage_costs import pose_stage
from autopar.intra_op.strategies import op_signature
from autopar.intra_op.traffic import traffic
from autopar.ir.graph import Node, TensorType
from autopar.ir.layer_sharding import Join, LayerSharding, joins
from autopar.ir.layers import REMAT, StageGraph
from autopar.ir.pipeline import StageCost, fullest
from autopar.ir.pipelined import Pipelined
from autopar.ir.pretty import shard_bytes
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import Chain, NodeStrategy, RegionPlan
from autopar.primitives import rule_for
from tests.clusters import SLOW_8
from tests.models import build
from tests.null.test_pipeline_plans import in_stages, planned

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("layer shardings")]  # what all share is made once

TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "grad_sync_s", "update_s")


def of_model(name: str, **options: Any) -> tuple[autopar.Step[..., Any], tuple[Any, ...]]:
    """A model on four devices of a host, two stages of two."""
    model = build(name, large=True)
    more = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    given: dict[str, Any] = {
        "cluster": "p3.16xlarge:1", "num_microbatches": 2, "stages": 2, "submeshes": ["1x2"], "schedule": "1f1b",
        "workers": 1, **more,
    }  # fmt: skip
    return autopar.parallelize(model.step, **{**given, **options}), model.args


PLANS: dict[str, Any] = {
    "mlp": lambda: in_stages(stages=2, submeshes=["1x2"], cluster="cpu:4", donate_argnums=0, schedule="1f1b"),
    "mlp_clips": lambda: in_stages(stages=2, submeshes=["1x2"], cluster="cpu:4", clips=True, schedule="1f1b"),
    "gpt_tied": lambda: of_model("gpt_tied"),
    "gpt_scan": lambda: of_model("gpt_scan"),
    "moe": lambda: of_model("moe", mesh=["2"]),
    "inference": lambda: in_stages(infers=True, num_microbatches=1, stages=2, batch_argnums=(1,), cluster="cpu:4",
                                   submeshes=["1x2"]),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and the step in layers that it is of."""

    plan: autopar.StepPlan
    layers: Layered


MARKS = {"gpt_scan": pytest.mark.full, "moe": pytest.mark.full, "gpt_tied": pytest.mark.slow}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in PLANS],
)
def case(request: pytest.FixtureRequest) -> Case:
    step, args = PLANS[request.param]()
    plan, argnums = step.plan(*args), step.arguments
    layers = layered(
        step.fun, args, num_microbatches=plan.data.config.num_microbatches, batch_argnums=argnums.batch_argnums,
        static_argnums=argnums.static_argnums, donate_argnums=argnums.donate_argnums, layers=plan.data.config.layers,
        platform=plan.data.cluster.platform,
    )  # fmt: skip
    assert layers.graph.fingerprint == plan.data.fingerprint
    return Case(plan=plan, layers=layers)


@pytest.fixture(scope="module")
def plan(case: Case) -> autopar.StepPlan:
    return case.plan


def parts_of(case: Case) -> list[StageGraph]:
    plan, graph = case.plan, case.layers.graph
    return [stage_graph(graph, k, k + 1, [plan.data.pipelined.sharding_of(k).remat]) for k in range(len(graph.layers))]


def mesh_of(file: Pipelined, layer: int) -> Mesh:
    [stage] = [s for s in file.plan.stages if s.start <= layer < s.stop]
    return Mesh(stage.mesh)


def chain_s(file: Pipelined, layer: int, value_type: TensorType, have: ShardingSpec, want: ShardingSpec) -> float:
    """Seconds of a resharding that the file has a chain for."""
    mesh = mesh_of(file, layer)
    if have != want:
        [chain] = [
            c for mine in file.joins if mine.axes == mesh.logical.axes for c in mine.chains
            if (c.type, c.src, c.dst) == (value_type, have, want)
        ]  # fmt: skip
        assert led(chain) == chain.dst
    return float(mesh.costs(value_type)[mesh.code_of(value_type, have), mesh.code_of(value_type, want)])


def led(chain: Chain) -> ShardingSpec:
    """Where the steps of a chain lead."""
    return walked(chain.src, chain.steps)


def compute_s(part: StageGraph, sharding: LayerSharding, mesh: Mesh) -> float:
    """Seconds of compute in a step, of the strategies that the file names for every operator."""
    posed = pose_stage(part, mesh)
    flat, moved = posed.flat, traffic(posed.kernels)
    rate = memory_bytes_per_s(mesh.logical.device)
    signatures: dict[Any, Any] = {}
    total = 0.0

    def regions(number: int, region: RegionPlan) -> Iterator[tuple[int, RegionPlan]]:
        yield number, region
        for position, bodies in region.bodies:
            for child, body in zip(flat.children[number, position], bodies, strict=True):
                yield from regions(child, body)

    for number, region in regions(0, sharding.root):
        for position, row in enumerate(region.nodes):
            n = flat.at[number][position]
            if row < 0 or flat.kind[n] != "op":
                continue
            strategy, node = sharding.strategies[row], flat.node[n]
            assert node is not None
            key = flat.key[n]
            if key not in signatures:
                signatures[key] = op_signature(mesh, node, rule_for(node), None)
            first, value = flat.first_edge[n], flat.first_value[n]
            parts = [
                moved.reads[first + i] * shard_bytes(t, spec, mesh.logical)
                for i, (t, spec) in enumerate(zip(node.operand_types, strategy.operands, strict=True))
            ] + [
                moved.writes[value + r] * shard_bytes(t, spec, mesh.logical)
                for r, (t, spec) in enumerate(zip(node.result_types, strategy.results, strict=True))
            ]
            spent = float(_cost_s(mesh, signatures[key], strategy)) + sum(parts) / rate
            spent += moved.kernels[n] * moved.fusion.launch_s
            total += flat.regions[number].trips * spent
    return total


def _cost_s(mesh: Mesh, signature: Any, strategy: NodeStrategy) -> float:
    """Of the operator's strategy that has these shardings."""
    operands = [
        None if codes is None else codes == mesh.code_of(t, spec)
        for codes, t, spec in zip(signature.operands, signature.operand_types, strategy.operands, strict=True)
    ]
    results = [
        codes == mesh.code_of(t, spec)
        for codes, t, spec in zip(signature.results, signature.result_types, strategy.results, strict=True)
    ]
    same = [all(bool(m[s]) for m in (*operands, *results) if m is not None) for s in range(signature.size)]
    found = [s for s in range(signature.size) if same[s] and _factors(mesh, signature, s) == strategy.factor_axes]
    assert found, strategy
    return signature.compute_s[found[0]]


def _factors(mesh: Mesh, signature: Any, s: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    out: dict[str, tuple[str, ...]] = {}
    for axis, option in enumerate(signature.options[s]):
        name = signature.names[option]
        if name and not name.startswith("+"):
            out[name] = (*out.get(name, ()), mesh.names[axis])
    return tuple(sorted(out.items()))


@pytest.mark.slow
def test_a_layers_cost_is_that_of_its_shardings(case: Case) -> None:
    """Compute of every operator's strategy, and the collectives, are all that a layer takes in a step; of those
    that may run beside compute a part."""
    plan = case.plan
    m = plan.stages.schedule.num_microbatches
    parts, seen = parts_of(case), set[int]()
    for k, layer in enumerate(plan.data.pipelined.layers):
        if layer.sharding in seen:
            continue
        seen.add(layer.sharding)
        sharding = plan.data.pipelined.sharding_of(k)
        cost = sharding.cost
        known = m * (cost.forward_s + cost.backward_s) + cost.grad_sync_s + cost.update_s
        shown = compute_s(parts[k], sharding, mesh_of(plan.data.pipelined, k)) + sum(
            c.time_s for c in sharding.collectives if not c.beside
        )
        beside = sum(c.time_s for c in sharding.collectives if c.beside)
        assert shown * (1 - 1e-9) <= known <= (shown + beside) * (1 + 1e-9)


@pytest.mark.slow
def test_a_stages_cost_is_that_of_its_layers_and_what_is_resharded_between(case: Case) -> None:
    parts, file = parts_of(case), case.plan.data.pipelined
    every = joins([layer.wiring for layer in file.layers])
    for stage in file.plan.stages:
        here = range(stage.start, stage.stop)
        costs = [file.sharding_of(k).cost for k in here]
        total = {f.name: sum(getattr(c, f.name) for c in costs) for f in fields(StageCost) if f.name != "transients"}
        assert stage.cost.transients == fullest(costs)
        total["transient_bytes"] = max(c.transient_bytes for c in costs)
        for join in every:
            if join.source not in here or join.target not in here or join.phase == "update":
                continue
            one, other = file.sharding_of(join.source), file.sharding_of(join.target)
            if join.phase == "argument":
                graph = parts[join.target].graph
                t = graph.values[graph.inputs[join.to]]
                have, want = one.inputs[join.at], other.inputs[join.to]
                total["state_bytes"] -= shard_bytes(t, want, stage.mesh)  # counted once
                total["grad_sync_s"] += chain_s(file, join.target, t, have, want)
                continue
            t = parts[join.target].receives[join.to].type
            spent = chain_s(file, join.target, t, one.sends[join.at], other.receives[join.to])
            field = {"forward": "forward_s", "backward": "input_grad_s", "gradient": "grad_sync_s"}[join.phase]
            total[field] += spent
        for name, value in total.items():
            assert value == pytest.approx(getattr(stage.cost, name), rel=1e-9, abs=1e-15), name


def test_chains_lead_from_sharding_to_sharding(plan: autopar.StepPlan) -> None:
    every = [*plan.data.pipelined.joins, *plan.data.pipelined.shardings]
    assert all(led(chain) == chain.dst for mine in every for chain in mine.chains)


def test_what_stages_hold_of_arguments(plan: autopar.StepPlan) -> None:
    """Arguments are on the stages that read them, as the first of their readers has them."""
    file = plan.data.pipelined
    for stage_number, stage in enumerate(file.plan.stages):
        first: dict[tuple[int, ...], Any] = {}
        for k in range(stage.start, stage.stop):
            for (_, *where), spec in zip(file.layers[k].wiring.inputs, file.sharding_of(k).inputs, strict=True):
                first.setdefault(tuple(where), spec)
        here = [(n, a, p) for n, a in enumerate(plan.data.inputs) for p in a.places if p.stage == stage_number]
        assert {(n, p.start, p.stop): p.spec for n, _, p in here} == first
        held = sum(shard_bytes(p.type_of(a.type), p.spec, stage.mesh) for _, a, p in here)
        assert held <= stage.cost.state_bytes * (1 + 1e-9)


def test_equal_layers_share_a_sharding(plan: autopar.StepPlan) -> None:
    assert len(plan.data.pipelined.shardings) <= len(plan.data.pipelined.layers)
    assert len(set(plan.data.pipelined.shardings)) == len(plan.data.pipelined.shardings)
    plan.data.verify()


def test_operators_are_all_listed(case: Case) -> None:
    for k, part in enumerate(parts_of(case)):
        sharding = case.plan.data.pipelined.sharding_of(k)
        want: Counter[Any] = Counter()

        def walk(nodes: Sequence[Node], region: RegionPlan, want: Counter[Any] = want) -> None:
            bodies = dict(region.bodies)
            for p, node in enumerate(nodes):
                if p in bodies:
                    for graph, body in zip(node.bodies, bodies[p], strict=True):
                        walk(graph.nodes, body)
                elif node.primitive not in ("stage_recv", "stage_send"):
                    want[node.primitive, node.source, region.nodes[p]] += 1

        walk(part.graph.nodes, sharding.root)
        found: Counter[Any] = Counter()
        for row in sharding.operators:
            found[row.primitive, row.source, row.strategy] += row.count
        assert found == want


def test_tasks_cover_the_loop(case: Case) -> None:
    """Every node of the loop's body in one part; what one part takes another gives."""
    for k, part in enumerate(parts_of(case)):
        tasks = layer_tasks(part, case.plan.data.pipelined.sharding_of(k))
        parts = [t for t in (tasks.forward, tasks.backward) if t is not None]
        ports = [p.node for p in (*part.receives, *part.sends) if p.phase in ("forward", "backward")]
        nodes = [node.id for task in parts for node in task.graph.nodes]
        assert sorted((*nodes, *ports)) == list(range(len(part.body.nodes)))
        given = set(tasks.begins)
        for task in parts:
            task.graph.verify()
            assert set(task.takes) <= given
            given |= set(task.gives)


def test_nodes_lead_back_to_the_jaxprs(case: Case) -> None:
    plan, layers = case.plan, case.layers
    remat = [plan.data.pipelined.sharding_of(k).remat for k in range(len(plan.data.pipelined.layers))]
    for k, part in enumerate(parts_of(case)):
        check_origins(layers, part, remat)
        assert {layer for layer, _ in part.body_origins} <= {-1, k}
    for stage in plan.stages.stages:
        check_origins(layers, stage_graph(layers.graph, stage.start, stage.stop, stage.remat), remat)


def check_origins(layers: Layered, part: StageGraph, remat: Sequence[str]) -> None:
    graph = layers.graph
    for node, (layer, equation) in zip(part.body.nodes, part.body_origins, strict=True):
        if equation < 0:
            assert node.primitive in ("stage_recv", "stage_send", "add_any")
            continue
        code = layers.kinds[graph.layers[layer].kind]
        jaxpr = code.joint[REMAT.index(remat[layer])] if graph.loss >= 0 else code.forward
        eqn = jaxpr.eqns[equation]
        assert eqn.primitive.name == node.primitive
        assert tuple(t.shape for t in node.result_types) == tuple(v.aval.shape for v in eqn.outvars)
    for node, (_, equation) in zip(part.graph.nodes, part.origins, strict=True):
        if equation < 0:
            assert node.primitive in ("stage_recv", "stage_send", "add_any", "scan", "reduce_sum", "max", "min")
        else:
            assert layers.update.eqns[equation].primitive.name == node.primitive


@pytest.mark.slow
def test_shardings_are_kept_with_solved_layers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stages": 2, "submeshes": ["1x2"], "cluster": "cpu:4", "schedule": "1f1b"}
    first = planned(**options, cache=tmp_path)
    again = planned(**options, cache=tmp_path)
    assert list(tmp_path.iterdir())
    assert first.digest == again.digest == planned(**options).digest
    assert first.data.pipelined.shardings == again.data.pipelined.shardings
    assert first.data.provenance.notes == again.data.provenance.notes
    assert any(" layers, " in note for note in again.data.provenance.notes)


def test_readers_of_one_value_take_the_same_steps_between_layers_once() -> None:
    mesh = Mesh(logical_mesh(SLOW_8, (2, 4)))
    value = TensorType(shape=(64, 64), dtype="float32")
    rows, columns, whole = (ShardingSpec(dims=dims) for dims in ((("x",), ()), ((), ("x",)), ((), ())))
    between = Between(mesh, 4)
    first = Join(phase="forward", value=5, source=0, at=0, target=1, to=0)
    for join, want in (
        (first, columns), (replace(first, target=2), columns), (replace(first, target=3), whole), (first, rows),
        (replace(first, source=1), columns), (replace(first, phase="gradient"), whole),
        (replace(first, phase="update"), whole),
    ):  # fmt: skip
        between.add(join, value, rows, want)
    found = {(c.kind, c.trips): c for c in between.rows()}
    assert {key: c.count for key, c in found.items()} == {
        ("all-to-all", 4): 2, ("all-gather", 4): 1, ("all-gather", 1): 1
    }  # fmt: skip
    assert all(c.operand_bytes == 32 * 64 * 4 for c in found.values())
    assert found["all-gather", 4].time_s == pytest.approx(4 * found["all-gather", 1].time_s)
