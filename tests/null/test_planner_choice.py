"""What a call is planned as: one program or stages, in how many microbatches, with the step's checkpoints or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend.layering import layered
from autopar.frontend.layering.layers import outline
from autopar.frontend.layering.phases import inlined
from autopar.inter_op.pipeline_search import plan_pipeline
from autopar.inter_op.work_bound import _slowest_stage_s, least_in_stages_s
from autopar.intra_op.mesh_problem import MeshProblem
from autopar.intra_op.plan_search import PlanSearch
from autopar.intra_op.refusals import OverLimitError
from autopar.ir.cluster import ClusterSpec, LinkSpec
from autopar.ir.errors import InfeasibleError, MicrobatchError, SolverTimeoutError
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan import PlanConfig
from autopar.ir.presets import cluster_from_text
from autopar.ir.pretty import shard_bytes
from autopar.ir.progress import Watch
from autopar.step import choice, stages_search
from autopar.step.choice import NOT_WHOLE
from autopar.step.microbatch_counts import MicrobatchCounts, counts_of
from benchmarks.small_steps import random_case
from tests.clusters import cluster

FAST = cluster(4, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e11)
"""Links on which sharding costs little."""
WIDTH, LAYERS, EXAMPLES = 256, 4, 512


def apart(flops_per_s: float = 1e12) -> ClusterSpec:
    """Two hosts of a device on a slow network, which gradients should not cross."""
    spec = cluster(1, flops_per_s=flops_per_s, memory_bytes_per_s=1e11, latency_s=1e-5, hosts=2)
    (group,) = spec.groups
    return replace(spec, groups=(replace(group, nic=LinkSpec(latency_s=1e-5, bytes_per_s=2e8)),))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(
    *, checkpoint: bool = False, marked: bool = True, width: int = WIDTH, examples: int = EXAMPLES
) -> tuple[Any, tuple[Any, Any]]:
    """Gradient descent on blocks of two products each, equally wide."""

    def block(w: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = (jax.checkpoint(block) if checkpoint else block)(w, x)
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        value, grads = (autopar if marked else jax).value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    layer = {"up": array(width, 4 * width), "down": array(4 * width, width)}
    return step, ([layer] * LAYERS, array(examples, width))


def deep(width: int, examples: int) -> tuple[Any, tuple[Any, Any]]:
    """Gradient descent on four products, one after the other."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = array(examples, width)
    return step, ([array(width, width)] * LAYERS, {"x": x, "y": x})


def plan_of(step: Any, args: Any, spec: ClusterSpec, **options: Any) -> Any:
    one = (options.get("stages") == 1 or "mesh" in options) and "layers" not in options
    more = {} if one else {"workers": 1}
    return autopar.parallelize(step, cluster=spec, donate_argnums=0, **more, **options).plan(*args)


@pytest.mark.slow
def test_stages_where_gradients_cross_a_slow_network() -> None:
    step, args = chain()
    plan = plan_of(step, args, apart())
    assert len(plan.stages.stages) == 2 and plan.data.config.num_microbatches > 2
    (one,) = (row for row in plan.provenance.considered if row.name == "one program, 1 microbatch")
    assert one.step_s > 1.01 * plan.predictions.step_s
    assert "zero3" in {row.name for row in plan.provenance.considered}
    again = autopar.parallelize(step, cluster=apart(), donate_argnums=0, plan=plan).plan(*args)
    assert again.data is plan.data


@pytest.mark.slow
@pytest.mark.full
def test_one_program_where_links_are_fast() -> None:
    step, args = chain()
    plan = plan_of(step, args, FAST)
    assert plan.data.config.num_microbatches == 1 and plan.sharding.mesh.num_devices == 4


@pytest.mark.slow
def test_a_deep_step_is_planned_in_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.step.choice.DEEP_NODES", 10)
    monkeypatch.setattr("autopar.step.choice.DEEP_SHARE", 0.9)
    step, args = chain()

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the whole step was planned")

    with monkeypatch.context() as patched:
        patched.setattr("autopar.step.choice.plan_program", never)
        plan = plan_of(step, args, FAST, num_microbatches=4)
    assert plan.data.pipelined.plan.stages and NOT_WHOLE in plan.provenance.notes
    unmarked, args = chain(marked=False)
    assert plan_of(unmarked, args, FAST).sharding.mesh.num_devices == 4
    monkeypatch.setattr("autopar.step.choice.DEEP_SHARE", 0.01)
    few = plan_of(step, args, FAST, num_microbatches=4)
    assert NOT_WHOLE not in few.provenance.notes


@pytest.mark.parametrize(
    ("seconds", "several", "again", "tried"),
    [
        ({16: 3.0, 8: 2.0, 4: 1.0, 2: 2.0}, False, False, [16, 8, 4, 2]),
        ({16: 3.0, 8: 4.0, 32: 2.0}, False, False, [16, 8, 32]),
        ({16: 3.0, 8: 4.0, 32: 2.0, 64: 1.0}, False, True, [16, 8, 32, 64]),
        ({16: 3.0, 8: 4.0, 32: 5.0}, False, False, [16, 8, 32]),
        ({16: 3.0, 8: 4.0, 32: 5.0}, True, False, [16, 32, 8]),
        ({16: 3.0, 64: 1.0, 32: 2.0}, True, True, [16, 64, 32]),
        ({16: 3.0, 64: 2.0, 32: 1.0}, True, True, [16, 64, 32]),
        ({16: 3.0, 64: 4.0, 32: 2.0}, True, True, [16, 64, 32]),
        ({16: 3.0, 64: 4.0, 32: 5.0, 8: 3.5}, True, True, [16, 64, 32, 8]),
        ({16: 3.0, 32: 4.0, 8: 2.0, 4: 2.5}, True, False, [16, 32, 8, 4]),
        ({16: None, 32: 2.0, 64: 1.0}, True, True, [16, 32, 64]),
        ({16: None, 32: None, 64: 1.0}, False, True, [16, 32, 64]),
    ],
)
def test_stages_begin_where_each_host_of_two_stages_has_an_example(
    seconds: dict[int, float | None], several: bool, again: bool, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 examples on 8 hosts of a device. One stage goes on with fewer microbatches, several with more."""
    assert walk(monkeypatch, seconds, several, again) == tried


def test_stages_begin_with_more_microbatches_to_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert walk(monkeypatch, {32: 1.0, 64: 1.0, 16: 1.0}, True, True, more=1) == [32, 64, 16]


def walk(
    patched: pytest.MonkeyPatch,
    seconds: Mapping[int, float | None],
    several: bool,
    again: bool,
    *,
    more: int = 0,
    alone: Mapping[int, float] | None = None,
    below_s: float = math.inf,
    busy: float = 1.0,
) -> list[int]:
    """Numbers of microbatches that are tried, the best of ``seconds`` among them. ``more``: so many numbers later all
    is kept. ``alone``: seconds of what is asked to be one stage, where that fits; they are tried as negative
    numbers. ``below_s``: what one program takes. ``busy``: of a step's seconds, what the busiest stage has to do."""
    seen: list[int] = []

    def planned(forms: Any, config: PlanConfig) -> Any:
        count, one = config.num_microbatches, config.stages is not None and config.stages.stages == (1, 1)
        if not one or alone is not None:
            seen.append(-count if one else count)
        step_s = (alone or {}).get(count) if one else seconds[count]
        if step_s is None:
            raise InfeasibleError("does not fit")
        workers = [SimpleNamespace(busy_s=busy * step_s), SimpleNamespace(busy_s=0.5 * busy * step_s)]
        plan = SimpleNamespace(data=SimpleNamespace(predictions=SimpleNamespace(workers=workers)))
        return SimpleNamespace(step_s=step_s, is_several=several and not one, computes_again=again, plan=plan), math.inf

    patched.setattr(stages_search, "plan_stages", planned)
    patched.setattr(MicrobatchCounts, "batch", lambda _: 64)
    patched.setattr(MicrobatchCounts, "keeping", lambda _self, _counts, number, *_: number + more)
    spec = cluster(1, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, hosts=8)
    request = SimpleNamespace(asked=SimpleNamespace(auto=True, stages=None), watch=Watch(), cluster=spec)
    forms: Any = SimpleNamespace(request=request, outline=None)
    search = stages_search.StagesSearch(forms, MicrobatchCounts(forms), lambda _: None)
    best: Any = search.best(PlanConfig(stages=PipelineOptions()), counts_of(64, 1, 8), below_s, alone=True)[0]
    least = min(s for n in seen if n > 0 and (s := seconds[n]) is not None)
    alone_s = min((alone or {}).values(), default=math.inf)
    assert best.step_s == (alone_s if alone_s <= stages_search.MARGIN * least else least)
    return seen


@pytest.mark.parametrize(
    ("below_s", "busy", "tried"),
    [
        pytest.param(math.inf, 1.0, [16, 32, 8, 4, 2], id="nothing else"),
        pytest.param(2.2, 1.0, [16, 8], id="4 leave 0.9 of 2.5 to do"),
        pytest.param(2.3, 1.0, [16, 8, 4, 2], id="4 do not"),
        pytest.param(3.7, 1.0, [16, 32, 8, 4, 2], id="32 may take 0.9 of 4"),
        pytest.param(1.2, 0.5, [16, 8, 4, 2], id="half is waiting"),
    ],
)
def test_numbers_that_leave_more_to_do_than_one_program_takes(
    below_s: float, busy: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: dict[int, float | None] = {32: 8.0, 16: 4.0, 8: 3.0, 4: 2.5, 2: 2.6}
    assert walk(monkeypatch, seconds, True, False, below_s=below_s, busy=busy) == tried


def test_one_stage_is_not_tried_beside_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert walk(monkeypatch, {16: 1.0, 32: 2.0, 8: 2.0}, True, False, alone={}, below_s=9.0) == [16, 32, 8]


@pytest.mark.parametrize(
    ("alone", "tried"),
    [
        pytest.param({1: 0.5}, [-1, -2, -4, -8], id="one fits"),
        pytest.param({2: 0.9, 4: 0.8, 8: 0.85}, [-1, -2, -4, -8], id="fewest do not fit"),
        pytest.param({1: 1.5, 2: 1.6}, [-1, -2], id="slower"),
        pytest.param({1: 1.005, 2: 1.6}, [-1, -2], id="as fast"),
    ],
)
def test_where_several_stages_win_one_is_tried_in_the_fewest_microbatches(
    alone: dict[int, float], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: dict[int, float | None] = {8: 1.2, 16: 1.0, 32: 1.1, 64: 1.3}
    found = walk(monkeypatch, seconds, True, False, alone=alone)
    assert [count for count in found if count < 0] == tried


@pytest.mark.parametrize("marked", [True, False])
def test_an_outline_is_what_the_step_has_in_one_microbatch(marked: bool) -> None:
    step, args = chain(checkpoint=True, marked=marked)
    assert outline(step, args, {}, inlined(step, args, {}, (), (), None)) == layered(step, args).graph.outline


def test_stages_begin_where_nothing_has_to_be_computed_again() -> None:
    """Two microbatches' activations beside weights and sums of their gradients, on four devices."""
    step, args = chain()
    found = outline(step, args, {}, inlined(step, args, {}, (), (), None))
    kept = sum(layer.activation_bytes for layer in found.layers) / 4
    block = 4 * EXAMPLES // 4 * WIDTH
    assert LAYERS * 4 * block <= kept <= (LAYERS + 1) * 6 * block  # a tanh of four times the width, or little beside it
    state, counts = 2 * LAYERS * 2 * 4 * WIDTH * WIDTH * 4, [1, 2, 4, 8, 16]
    request = SimpleNamespace(cluster=FAST)
    forms: Any = SimpleNamespace(request=request)

    def begun(parts: float) -> int:
        """Where devices have room for the state and that many microbatches' of the four."""
        limit = math.ceil((state + 4 * EXAMPLES * WIDTH + parts * kept) / FAST.num_devices)
        return counts[MicrobatchCounts(forms).keeping(counts, 2, found, limit)]

    assert [begun(parts) for parts in (2.1, 1.9, 1.05, 0.95, 0.55)] == [4, 8, 8, 16, 16]
    assert begun(0.4) == 4, "the most microbatches keep too much"
    assert counts[MicrobatchCounts(forms).keeping(counts, 2, found, None)] == 4


@pytest.mark.parametrize(
    ("limit_s", "first", "tried"),
    [
        pytest.param(0.0, 4e9, [1, 4], id="a second is predicted to fit"),
        pytest.param(0.0, 20e9, [1], id="none is"),
        pytest.param(None, 4e9, [1, 4, 8], id="no limit"),
    ],
)
def test_once_time_is_over_no_more_than_a_second_number_of_microbatches_is_tried(
    limit_s: float | None, first: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def over(forms: Any, config: PlanConfig, **more: Any) -> Any:
        seen.append(config.num_microbatches)
        if config.num_microbatches == 8:
            raise MicrobatchError("not exact")
        raise OverLimitError("too much", 1.0, {1: first, 4: 1.3e9}[config.num_microbatches], 1_000_000_000)

    monkeypatch.setattr(choice, "plan_program", over)
    request = SimpleNamespace(asked=SimpleNamespace(auto=True, program=None), watch=Watch(limit_s), cluster=FAST)
    forms: Any = SimpleNamespace(request=request)
    choice._Choice(forms)._freely(PlanConfig(), [1, 2, 4, 8], False)
    assert seen == tried


@pytest.mark.parametrize(
    ("squeezed", "tried", "best"),
    [
        pytest.param({1: 1.2}, [1], 1.2, id="what nearly fits"),
        pytest.param({2: 1.5}, [1, 2], 1.5, id="the next"),
        pytest.param({4: 1.6}, [1, 2, 4], 1.6, id="the one after"),
        pytest.param({8: 1.7}, [1, 2, 4], 3.0, id="no more"),
        pytest.param({2: 4.0}, [1, 2], 3.0, id="slower"),
        pytest.param({2: 1.2}, [1], 1.4, id="little to gain"),
    ],
)
def test_fewer_microbatches_that_compute_again(
    squeezed: Mapping[int, float], tried: list[int], best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without computing again 1 to 8 microbatches do not fit and would take 1 s, 16 take 3 s, or ``best``."""
    seen: list[int] = []
    free_s = 1.4 if best == 1.4 else 3.0

    def planned(forms: Any, config: PlanConfig, *, checkpoints: bool, freely: bool = False, **more: Any) -> Any:
        count = config.num_microbatches
        if freely and count < 16:
            raise OverLimitError("too much", 1.0, 4e9, 1_000_000_000)
        if not freely:
            seen.append(count)
            if count not in squeezed:
                raise InfeasibleError("does not fit")
        data = SimpleNamespace(config=config)
        return SimpleNamespace(step_s=free_s if freely else squeezed[count], plan=SimpleNamespace(data=data))

    class Trial(choice._Choice):
        def _counts(self, config: PlanConfig) -> list[int]:
            return [1, 2, 4, 8, 16]

        def _lost(self, found: Any) -> None: ...

    monkeypatch.setattr(choice, "plan_program", planned)
    monkeypatch.setattr(choice, "peak_at", lambda count, seen: 1e9 if count == 16 else 4e9)
    monkeypatch.setattr(MicrobatchCounts, "usual", lambda *_: 4)
    request = SimpleNamespace(asked=SimpleNamespace(auto=True, program=None), watch=Watch(), cluster=FAST)
    forms: Any = SimpleNamespace(request=request)
    found: Any = Trial(forms)._freely(PlanConfig(), [1, 2, 4, 8, 16], False)
    assert seen == tried and found.step_s == best


@pytest.mark.slow
def test_a_step_without_a_marked_gradient_is_one_program() -> None:
    step, args = chain(marked=False)
    plan = plan_of(step, args, apart())
    assert plan.data.config.num_microbatches == 1
    assert any(note.startswith("no stages: the step takes no gradients by autopar") for note in plan.provenance.notes)


def test_tiny_steps_are_not_cut() -> None:
    step, args = chain(width=8)
    plan = plan_of(step, args, apart(1e15))
    assert plan.sharding is not None
    assert any("dispatching the tasks of two stages takes as long" in note for note in plan.provenance.notes)


@pytest.mark.slow
@pytest.mark.full
def test_microbatches_where_memory_is_short() -> None:
    step, args = chain()
    free = plan_of(step, args, FAST, stages=1)
    assert free.data.config.num_microbatches == 1
    tight = plan_of(step, args, FAST, stages=1, memory_bytes=int(0.8 * free.predictions.peak_memory_bytes))
    assert tight.data.config.num_microbatches > 1
    assert tight.predictions.step_s < 1.2 * free.predictions.step_s
    rows = {row.name: row.fits for row in tight.provenance.considered}
    assert rows["one program, 1 microbatch"] is False
    with pytest.raises(InfeasibleError, match="no plan"):
        plan_of(step, args, FAST, stages=1, memory_bytes=10**5)


@pytest.mark.slow
def test_what_is_under_a_checkpoint_is_kept_where_it_fits() -> None:
    gpu = replace(FAST, groups=(replace(FAST.groups[0], device=replace(FAST.groups[0].device, name="NVIDIA H100")),))
    plain, own = chain(examples=8 * EXAMPLES), chain(checkpoint=True, examples=8 * EXAMPLES)
    keeping = plan_of(*own, gpu, stages=1)
    assert keeping.data.body.checkpoints is False
    assert keeping.predictions.step_s == pytest.approx(plan_of(*plain, gpu, stages=1).predictions.step_s)
    limit = int(0.6 * keeping.predictions.peak_memory_bytes)
    short = plan_of(*own, gpu, stages=1, memory_bytes=limit, num_microbatches=1, recompute=False)
    assert short.data.body.checkpoints is True and short.predictions.step_s > keeping.predictions.step_s
    replayed = autopar.parallelize(own[0], cluster=gpu, donate_argnums=0, plan=short).plan(*own[1])
    assert replayed.data is short.data


@pytest.mark.slow
@pytest.mark.full
def test_one_program_and_one_stage_are_predicted_alike() -> None:
    """Under one cost model: else they could not be compared. Stages may take longer by what is resharded between
    layers, whose layouts are searched apart. In one microbatch they keep gradients as sums, too: read, written, and
    read again by the update."""
    step, args = chain()
    for spec in (FAST, apart()):
        for count in (1, 2, 4):
            one = plan_of(step, args, spec, stages=1, num_microbatches=count)
            both = plan_of(step, args, spec, stages=1, layers=LAYERS, num_microbatches=count)
            mesh, inputs = both.stages.stages[0].mesh, both.data.inputs
            held = sum(shard_bytes(a.type, a.places[0].spec, mesh) for a in inputs if a.becomes >= 0)
            sums_s = 3 * held / spec.groups[0].device.memory_bytes_per_s if count == 1 else 0.0
            between_s = math.fsum(c.time_s for c in both.data.pipelined.between[0])
            step_s = one.predictions.step_s
            more_s = both.predictions.step_s - sums_s - step_s
            assert -0.006 * step_s < more_s < 0.006 * step_s + between_s


@pytest.mark.slow
@pytest.mark.full
def test_work_by_itself_is_a_bound() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(6):
        case = random_case(rng)
        options = replace(case.options, stages=(2, None))
        if len(case.layered.layers) < 2 or case.cluster.num_devices < 2:
            continue
        found = plan_pipeline(case.layered, case.cluster, options)
        least_s = least_in_stages_s(case.layered, case.cluster, PipelineOptions(remat=options.remat), {})
        assert least_s <= found.step_s * (1 + 1e-9), case.text
        held += least_s > 0.3 * found.step_s
    assert held >= 3, "a bound that says something"


@pytest.mark.parametrize(
    ("seconds", "sizes", "devices", "slowest"),
    [
        ([1.0, 1.0], [1], 2, 1.0), ([1.0, 3.0], [1, 2], 4, 1.5), ([4.0], [1, 2], 4, math.inf),
        ([2.0, 2.0, 2.0], [1], 2, 4.0),
    ],
)  # fmt: skip
def test_the_slowest_stage(seconds: list[float], sizes: list[int], devices: int, slowest: float) -> None:
    """All devices are used: one layer on 2 of 4 is no cut."""
    assert _slowest_stage_s(np.array(seconds), sizes, devices) == slowest


def test_layers_of_a_marked_step_are_those_of_the_whole() -> None:
    step, args = chain()
    graph = layered(step, args, num_microbatches=1, donate_argnums=(0,)).graph
    assert least_in_stages_s(graph, apart(), PipelineOptions(), {}) > 0


@pytest.mark.slow
def test_meshes_to_choose_from_hold_what_one_of_them_holds() -> None:
    """The leanest plan without a limit need not be of the count that fits under one."""
    step, args = deep(width=64, examples=64)
    limit = 40_000
    for options in ({"mesh": 8}, {"stages": 1}):
        plan = plan_of(step, args, cluster_from_text("cpu:8"), memory_bytes=limit, **options)
        assert plan.predictions.peak_memory_bytes <= limit


@pytest.mark.slow
def test_out_of_time_is_not_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = chain()
    free = plan_of(step, args, FAST, stages=1, num_microbatches=1)
    limit = int(0.9 * free.predictions.peak_memory_bytes)
    limited = PlanSearch.limited

    def late(self: PlanSearch, limit: int, free: Any) -> Any:
        none = limited(self, limit, free)
        return replace(none, best=None, report=replace(none.report, status="time_limit"))

    monkeypatch.setattr(PlanSearch, "limited", late)
    for options in ({"stages": 1, "num_microbatches": 1}, {"mesh": 4, "num_microbatches": 1}):
        with pytest.raises(SolverTimeoutError, match=r"^time_limit_s=1 passed before a plan was found; until"):
            plan_of(step, args, FAST, memory_bytes=limit, recompute=False, time_limit_s=1.0, **options)


@pytest.mark.parametrize(
    ("batch", "parts", "devices", "counts"),
    [
        (1, 1, 8, [1]),
        (64, 1, 8, [1, 2, 4, 8, 16, 32, 64]),
        (64, 8, 8, [1, 2, 4, 8]),
        (24, 1, 8, [1, 3, 6, 12, 24]),
        (24, 1, 4, [1, 2, 6, 12, 24]),
        (1520, 1, 64, [1, 2, 5, 10, 19, 38, 95, 190, 380, 760, 1520]),
        (7, 1, 8, [1, 7]),
        (7, 2, 8, [1]),
    ],
)
def test_numbers_of_microbatches_leave_examples_that_devices_can_share(
    batch: int, parts: int, devices: int, counts: list[int]
) -> None:
    found = counts_of(batch, parts, devices)
    assert found == counts
    assert all(batch % count == 0 for count in found)


@pytest.mark.slow
def test_a_plan_says_the_time_limit_that_was_asked_for() -> None:
    """One microbatch, computed a little again, gets less time than the call, which the plan does not say."""
    weights_cost = cluster(4, flops_per_s=1e14, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e12)
    (group,) = weights_cost.groups
    tpus = replace(weights_cost, groups=(replace(group, device=replace(group.device, name="TPU")),))
    step, args = chain(width=512, examples=1024)
    two = plan_of(step, args, tpus, mesh=4, num_microbatches=2)
    plan = plan_of(step, args, tpus, mesh=4, memory_bytes=int(0.8 * two.predictions.peak_memory_bytes))
    assert plan.data.config.num_microbatches == 1 and plan.sharding.recompute
    rows = {row.name: row.fits for row in plan.provenance.considered}
    assert rows["one program, 1 microbatch"] is False and rows["one program, 2 microbatches"] is False
    assert plan.data.config.time_limit_s == two.data.config.time_limit_s is None
    with pytest.raises(InfeasibleError, match="recomputing other values was tried"):  # whose types differ, in part
        plan_of(step, args, tpus, mesh=4, memory_bytes=int(0.6 * two.predictions.peak_memory_bytes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, (8.0, "auto")),
        ({"solver": "highs"}, (8.0, "highs")),
        ({"time_limit_s": 9999.0}, (8.0, "auto")),
    ],
)
def test_layers_of_stages_are_solved_as_asked(options: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[float, str]]()
    solve = MeshProblem.solve

    def seeing(self: Any, problem: Any, time_limit_s: float, solver: str, **more: Any) -> Any:
        seen.add((time_limit_s, solver))
        return solve(self, problem, time_limit_s, solver, **more)

    monkeypatch.setattr(MeshProblem, "solve", seeing)
    step, args = chain(width=8)
    plan = plan_of(step, args, apart(), stages=2, num_microbatches=2, **options)
    assert seen == {given} and len(plan.data.meshes) == 2
    wanted = {"time_limit_s": None, "solver": "auto", **options}
    assert {name: getattr(plan.data.config, name) for name in wanted} == wanted


def test_layers_that_are_not_solved_in_time_are_told_from_those_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = MeshProblem.solve

    def late(self: Any, *args: Any, **more: Any) -> Any:
        found = solve(self, *args, **more)
        return replace(found, report=replace(found.report, status="time_limit", objective_s=math.inf))

    monkeypatch.setattr(MeshProblem, "solve", late)
    step, args = chain(width=8)
    with pytest.raises(SolverTimeoutError, match=r"8 s passed before a layout of layer 0 on mesh \d.* was found"):
        plan_of(step, args, apart(), stages=2, num_microbatches=2)
