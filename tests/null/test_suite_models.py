"""The suite of models: sizes as published, steps that trace, losses that couple no examples; what is published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.trace import trace
from autopar.ir.presets import cluster_from_text
from autopar.jax_compat import name_stack
from benchmarks import large_models, llama, mixture, models, suite_vision
from benchmarks.alpa_solutions import COMPILE_S, MEASURED, SOLUTIONS
from benchmarks.suite_configs import ALPA_SUITE
from benchmarks.suite_models import SUITE, num_parameters
from tests.shares import each

pytestmark = pytest.mark.slow

SHARED = Path(__file__).parents[3] / "shared" / "data" / "alpa_suite.json"

NAMED = {"llama-3-8B": 8.03e9, "llama-3-70B": 70.6e9, "vit-h-14": 632e6}
"""Parameters of the rows whose name does not end in them, as their papers or model cards have it."""

SMALL: dict[str, Callable[[int], Any]] = {
    "gpt": lambda batch: models.gpt(
        layers=2, hidden=16, heads=2, seq=8, vocab=32, batch=batch, dtype="float32", remat=True, weight_decay=0.1
    ),
    "moe": lambda batch: large_models.moe(
        layers=2, hidden=16, heads=2, experts=4, group=8, seq=8, vocab=32, batch=batch, dtype="float32", remat=True
    ),
    "wide_resnet": lambda batch: suite_vision.wide_resnet(
        blocks=(1, 2), channels=8, width=2, image=32, classes=8, batch=batch
    ),
    "u_transformer": lambda batch: suite_vision.u_transformer(
        channels=32, multipliers=(1, 2), heads=4, image=8, batch=batch
    ),
    "llama": lambda batch: small_llama(batch),
    "mixture": lambda batch: small_mixture(batch),
    "mixture_dropless": lambda batch: small_mixture(batch, routing="dropless"),
    "vit": lambda batch: suite_vision.vit(
        layers=2, hidden=16, heads=2, patch=4, image=8, classes=8, batch=batch, dtype="float32"
    ),
}


def small_llama(batch: int, *, scan: bool = False) -> Any:
    return llama.llama(
        layers=2, hidden=32, heads=4, groups=2, inner=48, vocab=64, seq=8, batch=batch, dtype="float32", scan=scan
    )


def small_mixture(batch: int, **options: Any) -> Any:
    sizes: dict[str, int] = {
        "layers": 2,
        "dense_layers": 1,
        "hidden": 16,
        "heads": 4,
        "groups": 2,
        "size": 8,
        "inner": 24,
    }
    experts: dict[str, int] = {"experts": 4, "top": 2, "expert_inner": 12, "shared_inner": 8, "group": 8, "seq": 8}
    return mixture.mixture(**sizes, **experts, vocab=32, batch=batch, dtype="float32", **options)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def expanded(step: Any, args: Any) -> Any:
    """The step's jaxpr as the planner has it, backward pass included."""
    return trace(step, *args, expand=lambda eqn: expand_marker(eqn) if eqn.primitive is grad_p else None).jaxpr.jaxpr


def product_flops(jaxpr: Any) -> int:
    """Of all matrix products and convolutions, the bodies of loops as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        out = math.prod(eqn.outvars[0].aval.shape)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2 * out * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            total += 2 * out * math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        inner = sum(product_flops(sub) for sub in jaxprs_in_params(eqn.params))
        total += inner * eqn.params.get("length", 1)
    return total


# --- configurations and sizes ----------------------------------------------------------------------------


def test_the_configurations_are_the_published_ones() -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED.name} is not beside this checkout")
    published = json.loads(SHARED.read_text(encoding="utf-8"))
    del published["source"]
    assert published == ALPA_SUITE


def test_the_suite_has_every_model_once() -> None:
    named = [c for family in ALPA_SUITE.values() for c in family.get("models", ())]
    assert len(SUITE) == len(named) + len(NAMED)
    assert all(name == row.name for name, row in SUITE.items())
    assert {row.family for row in SUITE.values()} == {"gpt", "moe", "wide_resnet", "u_transformer", "llama", "vit"}
    for row in SUITE.values():
        assert row.microbatch * row.num_microbatches == row.global_batch, row.name
        assert (row.build_scanned is not None) == (row.family in ("gpt", "llama")), row.name


@pytest.mark.parametrize("name", each(3, sorted(SUITE)))
def test_the_number_of_parameters_is_the_name(name: str) -> None:
    row = SUITE[name]
    _, args = row.build(row.global_batch)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    size = name.rsplit("-", 1)[1]
    stated = NAMED.get(name) or float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert num_parameters(args) == pytest.approx(stated, rel=0.1)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(args[0][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", each(3, sorted(SUITE)))
def test_a_row_traces_at_its_microbatch(name: str) -> None:
    row = SUITE[name]
    step, args = (row.build_scanned or row.build)(row.microbatch)
    state, loss = jax.eval_shape(step, *args)
    assert shapes(state) == shapes(args[0])
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_groups_of_a_mixture_must_be_full() -> None:
    with pytest.raises(ValueError, match=r"3 sequences of 1024 tokens do not fill groups of 2048"):
        SUITE["moe-10B"].build(3)


# --- work ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SUITE if name.startswith("gpt")])
def test_flops_of_a_gpt_are_those_of_the_formula(name: str) -> None:
    """Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021."""
    (sizes,) = [m for m in ALPA_SUITE["gpt"]["models"] if f"gpt-{m['name']}" == name]
    layers, hidden, seq, vocab = sizes["layers"], sizes["hidden"], 1024, 51200
    row = SUITE[name]
    assert row.build_scanned is not None
    step, args = row.build_scanned(2)
    forward = product_flops(jax.make_jaxpr(step)(*args).jaxpr)  # the gradient is one equation, over the loss
    tokens = 2 * seq
    blocks, head = 24 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden)), 2 * tokens * hidden * vocab
    assert forward == pytest.approx(blocks + head, rel=1e-6)
    assert forward == pytest.approx(2 * num_parameters(args) * tokens, rel=0.2)
    whole = product_flops(expanded(step, args))
    assert 3 * (blocks + head) < whole < 4 * blocks + 3 * head  # the end of each block need not be computed again


@pytest.mark.parametrize("name", ["llama-3-8B", "llama-3-70B"])
def test_flops_of_a_llama_are_six_to_eight_per_parameter_and_token(name: str) -> None:
    row = SUITE[name]
    assert row.build_scanned is not None
    step, args = row.build_scanned(1)
    params = args[0][0]
    seq, (layers, hidden) = 8192, params["blocks"]["norm_mlp"].shape
    products = num_parameters(args) - math.prod(params["embed"].shape)
    forward = (2 * products + 4 * layers * seq * hidden) * seq
    assert product_flops(jax.make_jaxpr(step)(*args).jaxpr) == pytest.approx(forward, rel=1e-3)
    assert 3 * forward < product_flops(expanded(step, args)) < 4 * forward


def test_flops_of_a_narrow_resnet_are_those_of_resnet_50() -> None:
    """4.09 G multiply-adds an image (torchvision's figure, which has the stride where we have it)."""
    step, args = suite_vision.wide_resnet(channels=64, width=1, classes=1000, batch=1)
    assert product_flops(jax.make_jaxpr(step)(*args).jaxpr) == pytest.approx(2 * 4.09e9, rel=0.01)


# --- meaning ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", each(2, SMALL))
def test_the_loss_of_a_batch_is_the_mean_over_its_parts(family: str) -> None:
    """So that microbatches are exact: no example depends on another."""
    step, args = SMALL[family](2)
    state, batch = models.random_arguments(args)
    loss = jax.jit(lambda state, batch: step(state, batch)[1])
    parts = [float(loss(state, jax.tree.map(lambda leaf, i=i: leaf[[i, i]], batch))) for i in (0, 1)]
    assert parts[0] != parts[1]
    assert float(loss(state, batch)) == pytest.approx(np.mean(parts), rel=1e-5)


@pytest.mark.parametrize("family", SMALL)
def test_a_small_step_returns_a_state_like_the_one_it_took(family: str) -> None:
    step, args = SMALL[family](2)
    state, _ = jax.eval_shape(step, *args)
    assert shapes(state) == shapes(args[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL)
def test_blocks_are_named(family: str) -> None:
    step, args = SMALL[family](2)
    stacks = {name_stack(eqn) for eqn in expanded(step, args).eqns}
    names = ("down_0", "middle", "up_1") if family == "u_transformer" else ("block_0", "block_1")
    for name in names:
        assert any(name in stack and "transpose(" in stack for stack in stacks), name
        assert any(name in stack and "transpose(" not in stack for stack in stacks), name


@pytest.mark.slow
def test_a_scanned_llama_is_the_unrolled_one() -> None:
    step, args = small_llama(2)
    scanned, scanned_args = small_llama(2, scan=True)
    assert num_parameters(args) == num_parameters(scanned_args)
    (params, moments), batch = models.random_arguments(args)
    stacked = {**params, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"])}
    (_, scanned_moments), _ = models.random_arguments(scanned_args)
    loss = jax.jit(lambda *args: step(*args)[1])((params, moments), batch)
    scanned_loss = jax.jit(lambda *args: scanned(*args)[1])((stacked, scanned_moments), batch)
    assert float(scanned_loss) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow
def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cos, sin = llama.rotary(8, 6)
    rng = np.random.default_rng(0)
    query, key = (np.broadcast_to(rng.normal(size=6), (1, 8, 6)).astype(np.float32) for _ in range(2))
    scores = np.asarray(llama.rotate(query, cos, sin)[0] @ llama.rotate(key, cos, sin)[0].T)
    for distance in range(-7, 8):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert abs(scores[0, 0] - scores[0, 1]) > 1e-3


# --- what is published -----------------------------------------------------------------------------------


def test_a_published_solution_fits_its_row() -> None:
    assert set(SOLUTIONS) == {name for name, row in SUITE.items() if row.family not in ("llama", "vit")}
    for name, solution in SOLUTIONS.items():
        row = SUITE[name]
        assert solution.num_microbatches == row.num_microbatches, name
        assert sum(stage.devices for stage in solution.stages) == row.gpus, name
        for stage in solution.stages:
            assert math.prod(stage.logical) == stage.devices, name
            assert stage.submesh[0] == 1, name  # no stage spans hosts
            assert stage.layers >= 1, name
    assert SOLUTIONS["wide-resnet-13B"].num_layers == 33  # its residual blocks
    assert [stage.parallel for stage in SOLUTIONS["gpt-2.6B"].stages] == [(2, 1), None, None]
    assert [stage.submesh for stage in SOLUTIONS["gpt-2.6B"].stages] == [(1, 2), (1, 2), (1, 4)]
    assert SOLUTIONS["gpt-39B"].stages[0].parallel == (1, 4)
    assert set(COMPILE_S) <= set(SUITE)


def test_the_measured_point_is_consistent() -> None:
    """Its FLOP rates follow from its time by the formulas that its code counts with."""
    (sizes,) = [m for m in ALPA_SUITE["gpt"]["models"] if f"gpt-{m['name']}" == MEASURED.row]
    layers, hidden, seq, vocab = sizes["layers"], sizes["hidden"], 1024, 51200
    devices = MEASURED.data_parallel * MEASURED.operator_parallel * MEASURED.pipeline_parallel
    (group,) = cluster_from_text(MEASURED.cluster).groups
    assert devices == group.devices_per_host == SUITE[MEASURED.row].gpus
    blocks = 24 * MEASURED.global_batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    head = 2 * MEASURED.global_batch * seq * hidden * vocab
    rate = 3 * (blocks + head) / MEASURED.step_s / devices
    assert rate == pytest.approx(MEASURED.flops_per_s, rel=0.01)
    rate = (4 * blocks + 3 * head) / MEASURED.step_s / devices
    assert rate == pytest.approx(MEASURED.flops_per_s_recomputed, rel=0.01)
    assert MEASURED.peak_bytes < group.device.memory_bytes
    assert MEASURED.flops_per_s_recomputed < group.device.peak_flops_per_s("float16")


@pytest.mark.full
def test_experts_with_room_for_all_tokens_are_those_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "CAPACITY", 4.0)
    (capacity, shapes), (dropless, _) = small_mixture(2), small_mixture(2, routing="dropless")
    args = models.random_arguments(shapes)
    (one, two), (other, same) = capacity(*args), dropless(*args)
    assert float(two) == pytest.approx(float(same), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), one[0], other[0])
