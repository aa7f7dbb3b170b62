"""cuDNN's attention, sharded: here its primitives are given CPU implementations, by plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir

import autopar
from autopar.cost.roofline import flops
from autopar.frontend import gradient
from autopar.frontend.trace import trace
from autopar.primitives import rule_for
from tests.planned import check_planned
from tests.shares import each

BATCH, ROWS, HEADS, KV_HEADS, SIZE = 4, 16, 8, 4, 8


def _forward(q: Any, k: Any, v: Any, bias: Any, lengths: Any, kv_lengths: Any, *_: Any, **params: Any) -> Any:
    """What the custom call computes: heads of k and v repeated, scores in float32."""
    if params["layout"] == 0:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    heads, rows, columns = q.shape[1], q.shape[2], k.shape[2]
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = params["scale"] * jnp.einsum("bntd,bnsd->bnts", q, k, preferred_element_type=jnp.float32)
    if params["variadic_args"][0]:
        scores = scores + bias
    mask = params["mask_type"].name
    if "CAUSAL" in mask:
        scores = jnp.where(jnp.tril(jnp.ones((rows, columns), bool)), scores, -1e9)
    if "PADDING" in mask:
        scores = jnp.where(jnp.arange(columns) < kv_lengths[:, None, None, None], scores, -1e9)
    out = jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(scores).astype(v.dtype), v)
    if "PADDING" in mask:
        out = jnp.where(jnp.arange(rows)[:, None] < lengths[:, None, None, None], out, 0)
    out = out if params["layout"] else jnp.swapaxes(out, 1, 2)
    statistics = jax.nn.logsumexp(scores, -1)
    return [out, statistics] if params["is_training"] else [out]


def _backward(q: Any, k: Any, v: Any, bias: Any, *rest: Any, **params: Any) -> Any:
    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return _forward(q, k, v, bias, *rest[:6], is_training=False, **params)[0]

    grads = jax.vjp(run, q, k, v, bias)[1](rest[-1])
    return grads if params["variadic_args"][1] else grads[:3]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN seems there, and its calls have an implementation for CPUs."""
    monkeypatch.setattr(cudnn, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    given = {cudnn._dot_product_attention_fwd_p: _forward, cudnn._dot_product_attention_bwd_p: _backward}
    for primitive, run in given.items():
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")
        cudnn.dispatch.prim_requires_devices_during_lowering.discard(primitive)
    yield
    for primitive in given:
        del mlir._platform_specific_lowerings["cpu"][primitive]
        cudnn.dispatch.prim_requires_devices_during_lowering.add(primitive)
    jax.clear_caches()


def _attend(options: dict[str, Any], q: Any, k: Any, v: Any, *bias: Any) -> Any:
    def loss(*args: Any) -> Any:
        out = cudnn.dot_product_attention(*args, scale=0.3, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    value, grads = autopar.value_and_grad(loss, argnums=tuple(range(3 + len(bias))))(q, k, v, *bias)
    return grads, value


def _args(*bias: int, layout: str = "BTNH", kv_heads: int = KV_HEADS) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = [(BATCH, ROWS, n, SIZE) if layout == "BTNH" else (BATCH, n, ROWS, SIZE) for n in (HEADS, *[kv_heads] * 2)]
    return tuple(rng.normal(size=s).astype(np.float16) for s in [*shapes, *([bias] if bias else [])])


LENGTHS = np.array([16, 9, 3, 12], np.int32)
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "plain": ({}, _args()),
    "causal": ({"mask_type": cudnn.MaskType.CAUSAL}, _args()),
    "heads first": ({"mask_type": cudnn.MaskType.CAUSAL, "qkv_layout": "BNTH"}, _args(layout="BNTH")),
    "as many heads": ({}, _args(kv_heads=HEADS)),
    "one head of keys": ({}, _args(kv_heads=1)),
    "bias": ({}, _args(BATCH, HEADS, ROWS, ROWS)),
    "bias of all examples": ({}, _args(1, HEADS, ROWS, ROWS)),
    "bias of all heads": ({}, _args(BATCH, 1, ROWS, ROWS)),
    "lengths": (
        {"mask_type": cudnn.MaskType.PADDING_CAUSAL, "q_seqlen": LENGTHS, "kv_seqlen": LENGTHS}, _args()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", each(2, CASES))
def test_its_numbers_are_right_split(name: str) -> None:
    options, args = CASES[name]
    plan = check_planned(partial(_attend, options), args, seed=1, tolerance=4e-3)
    assert plan.sharding.replicated == ()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_right_under_many_plans(name: str, seed: int) -> None:
    options, args = CASES[name]
    check_planned(
        partial(_attend, options), args, seed=seed, mesh=((8,), (2, 4), (4, 2), (2, 2, 2))[seed], tolerance=4e-3
    )


def _nodes(fun: Callable[..., Any], *args: Any) -> list[Any]:
    expand = lambda eqn: gradient.expand_marker(eqn) if eqn.primitive is gradient.grad_p else None
    nodes = trace(fun, *args, expand=expand).graph.nodes
    return [n for n in nodes if n.primitive.startswith("dot_product_attention")]


def test_its_flops() -> None:
    forward, backward = _nodes(partial(_attend, {}), *_args())
    product = 2 * BATCH * HEADS * ROWS * ROWS * SIZE
    assert flops(forward) == 2 * product and flops(backward) == 5 * product
    causal = _nodes(partial(_attend, {"mask_type": cudnn.MaskType.CAUSAL}), *_args())
    assert [flops(n) for n in causal] == [product, 2.5 * product]


def test_dropout_runs_whole_and_says_why() -> None:
    (node, _) = _nodes(partial(_attend, {"dropout_rate": 0.1}), *_args())
    assert "drops out by a seed" in rule_for(node).why
