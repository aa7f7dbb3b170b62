"""Acceptance: planned equals serial, the compiled program's collectives equal the plan's, memory is as predicted.

Every model of `tests.models` on a 1-D, 2-D and 3-D mesh of 8 host devices, under a free, a memory-limited and a
pinned plan, with 1 microbatch and several. `make test` runs one cell per model, which together cover all pairs,
`make test-all` every combination, in numbers of 64 bits; collectives of 32 bits are compared in the cover.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.ir.errors import InfeasibleError, SolverTimeoutError
from benchmarks.memory import MEASURED, measure
from tests.clusters import SLOW_8
from tests.compare import OPTIMISED, assert_close, assert_same_collectives, graph_of, total_bytes, total_flops
from tests.models import MODELS, UNEVEN, build
from tests.models.base import Model
from tests.random_plans import random_strategies

MESHES = ((8,), (2, 4), (2, 2, 2))
PLANS = ("free", "memory", "pinned")
MEMORY_FRACTIONS = (0.6, 0.75, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One cell of the cover. ``split``: the model's several microbatches instead of one."""

    model: str
    mesh: tuple[int, ...]
    plan: str
    split: bool

    def __str__(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.mesh))}-{self.plan}-{'split' if self.split else 'whole'}"


TURNS = (
    "gpt_remat", "moe", "gpt_dropout",
    "mlp", "dlrm", "lstm",
    "gpt_scan_dropout", "flax_linen", "encoder_decoder",
    "equinox", "conv_net_uneven", "unet",
    "conv_net", "mlp_uneven", "gpt_tied",
    "gpt", "gpt_scan", "gpt_scan_remat",
    "haiku", "flax_nnx", "gpt_uneven",
    "gpt_scan_uneven", "lstm_uneven", "dlrm_uneven",
    "resnet", "encoder_decoder_uneven", "moe_uneven",
)  # fmt: skip
"""Models in the order in which they get the cells of the quick cover, a row of `PLANS` each. Under a limit of memory a
step is planned up to five times in each dtype, so these rows have the models that are planned fast."""


def _pairwise() -> set[Combination]:
    """One cell per model; mesh, plan and microbatches shift from model to model at different rates, so that all models
    together hold every pair of them."""
    return {
        Combination(model=model, mesh=MESHES[i % 3], plan=PLANS[i // 3 % 3], split=(i + i // 9) % 2 == 0)
        for i, model in enumerate(TURNS)
    }


PAIRWISE = _pairwise()
ALL = [
    Combination(model=m, mesh=mesh, plan=p, split=s)
    for m, mesh, p, s in itertools.product((*MODELS, *UNEVEN), MESHES, PLANS, (False, True))
]


QUICK = TURNS[:10]
"""Models of `make test`: the others have the operators of these, in loops, with tied weights, in uneven sizes."""

AS_USERS_DO = ("mlp", "lstm", "conv_net")
"""Models whose programs are compiled and called as users' are; those of the others are compiled fast."""

QUICK_MEMORY = ("mlp", "dlrm", "lstm")
"""Models whose memory is compared in `make test` too, on one mesh."""


def _params(cells: Collection[Combination] = ALL, quick: Collection[str] = QUICK) -> list[Any]:
    """``cells``; those of the cover, of models ``quick``, are `make test`'s."""

    def marks(c: Combination) -> list[Any]:
        return [pytest.mark.xdist_group(c.model)] + ([] if c in PAIRWISE and c.model in quick else [pytest.mark.full])

    return [pytest.param(c, id=str(c), marks=marks(c)) for c in ALL if c in cells]


def test_the_cover_holds_every_pair() -> None:
    fields = ("mesh", "plan", "split")
    quick = [c for c in PAIRWISE if c.model in QUICK]

    def pairs(cells: Iterable[Combination], a: str, b: str) -> set[Any]:
        return {(getattr(c, a), getattr(c, b)) for c in cells}

    for a, b in itertools.combinations(fields, 2):
        assert pairs(quick, a, b) == pairs(ALL, a, b)
    assert {c.model for c in PAIRWISE} == {*MODELS, *UNEVEN}


@functools.lru_cache(maxsize=4)
def model_of(name: str, dtype: str) -> Model:
    return build(name, dtype)


def _num_microbatches(c: Combination) -> int:
    return model_of(c.model, "float32").microbatches[int(c.split)]


def pins(model: Model, mesh: tuple[int, ...]) -> dict[str, PartitionSpec]:
    """Pins that the planner would hardly choose by itself: the two largest parameters of rank 2 or more that some
    axis divides, each on its last such dimension, by the mesh's last axis and its first."""
    names = ("x", "y", "z")[: len(mesh)]
    leaves = jax.tree_util.tree_leaves_with_path(model.args[0]["params"])
    leaves.sort(key=lambda item: -item[1].size)
    out: dict[str, PartitionSpec] = {}
    for path, leaf in leaves:
        axis, size = ((names[-1], mesh[-1]), (names[0], mesh[0]))[len(out)]
        dims = [d for d, n in enumerate(leaf.shape) if n % size == 0]
        if leaf.ndim >= 2 and dims:
            spec = [axis if d == dims[-1] else None for d in range(leaf.ndim)]
            out[f"args[0]['params']{jax.tree_util.keystr(path)}"] = PartitionSpec(*spec)
        if len(out) == 2:
            break
    if not out:  # no axis divides anything: keep the largest whole
        path, leaf = leaves[0]
        out[f"args[0]['params']{jax.tree_util.keystr(path)}"] = PartitionSpec(*(None,) * leaf.ndim)
    return out


LIMITED_S = 6.0
"""For the solver, under a limit below the free plan's peak: whatever is found in that time has to be right. Under that
peak itself it has as long as the free plan had: a slow machine would find the one and not the other."""
_first_fraction: dict[Combination, int] = {}
"""Cell → the least of `MEMORY_FRACTIONS` that its model fits in one dtype; the other starts from there."""


@functools.lru_cache(maxsize=4)
def planned_step(c: Combination, dtype: str) -> Any:
    """The step parallelized as ``c`` says."""
    model = model_of(c.model, dtype)
    options: dict[str, Any] = {
        "cluster": SLOW_8,
        "mesh": c.mesh,
        "num_microbatches": _num_microbatches(c),
        "compiler_options": OPTIMISED if c.model in AS_USERS_DO else None,
        **model.kwargs,
    }
    if c.plan == "pinned":
        options["constraints"] = pins(model, c.mesh)
    elif c.plan == "memory":
        free = planned_step(replace(c, plan="free"), dtype).plan(*model.args).predictions.peak_memory_bytes
        assert free > 0
        for fraction in MEMORY_FRACTIONS[_first_fraction.get(c, 0) :]:
            limit = int(free * fraction)
            limits = {"memory_bytes": limit} | ({"time_limit_s": LIMITED_S} if fraction < 1 else {})
            limited = autopar.parallelize(model.step, **options, **limits)
            try:
                plan = limited.plan(*model.args)
            except (InfeasibleError, SolverTimeoutError):
                continue
            assert plan.predictions.peak_memory_bytes <= limit
            _first_fraction[c] = MEMORY_FRACTIONS.index(fraction)
            return limited
        raise AssertionError("infeasible at the unconstrained plan's own peak")
    return autopar.parallelize(model.step, **options)


def run_steps(step: Any, model: Model, count: int) -> Any:
    args = model.fresh_args()
    out: Any = None
    for _ in range(count):
        out = step(*args)
        args = model.next_args(out)
    return out


@functools.lru_cache(maxsize=4)
def serial_result(name: str, num_microbatches: int) -> Any:
    """New state and loss after three serial steps, in float64 (numpy)."""
    model = model_of(name, "float64")
    step = jax.jit(autopar.serial(model.step, num_microbatches))
    out = run_steps(step, model, 3)
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("c", _params())
def test_planned_equals_serial(c: Combination) -> None:
    """Three steps, and the collectives of the program are the plan's."""
    with jax.enable_x64(True):
        model = model_of(c.model, "float64")
        step = planned_step(c, "float64")
        plan = step.plan(*model.args)
        compiled = step.compiled().compile() if c.model in AS_USERS_DO else step.lower(*model.args).compile()
        assert_same_collectives(plan, compiled.as_text())
        got = run_steps(step if c.model in AS_USERS_DO else compiled, model, 3)
        assert_close(got, serial_result(c.model, _num_microbatches(c)), 1e-9)


@pytest.mark.parametrize("c", _params(PAIRWISE, quick=TURNS[1:2]))
def test_collectives_equal_the_plans(c: Combination) -> None:
    """In numbers of 32 bits, and pins are kept."""
    model = model_of(c.model, "float32")
    step = planned_step(c, "float32")
    plan = step.plan(*model.args)
    assert_same_collectives(plan, step.lower(*model.args).compile().as_text())
    for path, spec in pins(model, c.mesh).items() if c.plan == "pinned" else ():
        (found,) = [arg for arg in plan.data.inputs if arg.path == path]
        assert found.spec.dims == tuple(() if axis is None else (axis,) for axis in spec), path


@pytest.mark.full
def test_loops_and_other_collectives_do_not_meet() -> None:
    """Many steps of a program in which loops communicate beside collectives: on CPU those that run at the same time end
    the process (`runtime.one_program.collective_order`)."""
    c = Combination(model="gpt_scan", mesh=(8,), plan="pinned", split=False)
    with jax.enable_x64(True):
        model = model_of("gpt_scan", "float64")
        step = planned_step(c, "float64").with_options(compiler_options=OPTIMISED)
        for _ in range(20):
            jax.block_until_ready(run_steps(step, model, 3))


def _per_model(quick: tuple[str, ...] = ()) -> list[Any]:
    return [
        pytest.param(m, id=m, marks=[pytest.mark.xdist_group(m)] + ([] if m in quick else [pytest.mark.full]))
        for m in (*MODELS, *UNEVEN)
    ]


@pytest.mark.parametrize("name", _per_model(quick=("mlp", "lstm")))
def test_a_random_plan(name: str) -> None:
    """One that no cost model would choose, with several microbatches: right all the same, and as listed."""
    with jax.enable_x64(True):
        model = model_of(name, "float64")
        n = model.microbatches[1]
        step = autopar.parallelize(model.step, mesh=(2, 4), cluster=SLOW_8, num_microbatches=n, **model.kwargs)
        with random_strategies(len(name)):
            plan = step.plan(*model.args)
        executable = step.lower(*model.args).compile()
        assert_same_collectives(plan, executable.as_text())
        serial = jax.jit(autopar.serial(model.step, n))
        assert_close(executable(*model.fresh_args()), serial(*model.fresh_args()), 1e-9)


@pytest.mark.parametrize("name", _per_model())
def test_float32_loss_and_gradients(name: str) -> None:
    model = model_of(name, "float32")
    assert model.loss_and_grad is not None
    n = model.microbatches[1]
    got = autopar.parallelize(model.loss_and_grad, mesh=(2, 4), cluster=SLOW_8, num_microbatches=n)(*model.grad_args)
    want = jax.jit(autopar.serial(model.loss_and_grad, n))(*model.grad_args)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("name", _per_model())
def test_serial_is_the_plain_step(name: str) -> None:
    with jax.enable_x64(True):
        model = model_of(name, "float64")
        assert model.loss_and_grad is not None
        got = jax.jit(autopar.serial(model.loss_and_grad, model.microbatches[1]))(*model.grad_args)
        assert_close(got, jax.jit(model.loss_and_grad)(*model.grad_args), 1e-9)


def _memory_params() -> list[Any]:
    return [
        pytest.param(
            name,
            mesh,
            id=f"{name}-{'x'.join(map(str, mesh))}",
            marks=[pytest.mark.xdist_group(name)]
            + ([] if mesh == (2, 4) and name in QUICK_MEMORY else [pytest.mark.full]),
        )
        for name in MEASURED
        for mesh in MESHES
    ]


@pytest.mark.parametrize(("name", "mesh"), _memory_params())
def test_memory_is_as_predicted(name: str, mesh: tuple[int, ...]) -> None:
    row = measure(name, mesh)
    assert row.within, str(row)


@pytest.mark.full
def test_under_one_percent_is_replicated_for_lack_of_a_rule() -> None:
    """Over all models together: FLOPs and bytes of the operators that every device runs whole."""
    all_flops = all_bytes = 0.0
    rows: list[Any] = []
    for name in (*MODELS, *UNEVEN):
        model = model_of(name, "float32")
        plan = autopar.parallelize(model.step, mesh=(2, 4), cluster=SLOW_8, **model.kwargs).plan(*model.args)
        graph = graph_of(model.step, *model.args)
        all_flops, all_bytes = all_flops + total_flops(graph), all_bytes + total_bytes(graph)
        rows += plan.sharding.replicated
    assert all_flops > 0 and all_bytes > 0
    text = "\n".join(
        f"{r.primitive} {r.source} ×{r.count}: {r.why} ({r.flops:.3g} FLOPs, {r.bytes:.3g} B)" for r in rows
    )
    assert sum(r.flops for r in rows) < 0.01 * all_flops, text
    assert sum(r.bytes for r in rows) < 0.01 * all_bytes, text
