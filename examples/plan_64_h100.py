"""A Llama of 8 billion parameters planned for 64 H100, on whatever machine this is, and opened as a page.

    python -m examples.plan_64_h100 [--cluster dgx-h100:8] [--out llama.json] [--report llama.html] [--open]

Nothing runs: the step is traced from shapes, planned in some seconds, saved, explained, and written as a report. Then
ask the plan: ``autopar explain llama.json dot_general``, ``autopar what-if llama.json --link between=100Gb``.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar

LAYERS, HIDDEN, HEADS, GROUPS, INNER, VOCAB, SEQ = 32, 4096, 32, 8, 14336, 128256, 8192
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))


def init(key: jax.Array) -> tuple[Any, Any]:
    """Parameters in float32, and the optimizer's state."""
    head = HIDDEN // HEADS
    sizes = {
        "query": (HIDDEN, HEADS, head), "key": (HIDDEN, GROUPS, head), "value": (HIDDEN, GROUPS, head),
        "out": (HEADS, head, HIDDEN), "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN),
    }  # fmt: skip

    def block(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(sizes))
        made = {n: jax.random.normal(k, s) * 0.02 for k, (n, s) in zip(keys, sizes.items(), strict=True)}
        return {**made, "norm_attention": jnp.ones(HIDDEN), "norm_mlp": jnp.ones(HIDDEN)}

    first, last, *blocks = jax.random.split(key, LAYERS + 2)
    params = {
        "embed": jax.random.normal(first, (VOCAB, HIDDEN)) * 0.02,
        "blocks": [block(k) for k in blocks],
        "norm": jnp.ones(HIDDEN),
        "head": jax.random.normal(last, (HIDDEN, VOCAB)) * 0.02,
    }
    return params, OPTIMIZER.init(params)


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMS norm, in float32 inside."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, positions, heads, head]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 500_000.0 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits of [batch, positions] tokens; products in bfloat16."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["embed"][tokens]
    for p in params["blocks"]:
        y = norm(p["norm_attention"], x)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + jnp.einsum("bshk,hkd->bsd", attended, p["out"])
        y = norm(p["norm_mlp"], x)
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return norm(params["norm"], x) @ params["head"]


def train_step(state: tuple[Any, Any], tokens: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """One step of AdamW on [batch, positions + 1] tokens."""
    params, moments = state

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = forward(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = autopar.value_and_grad(loss_of)(params, tokens)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, saves, prints, writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="dgx-h100:8")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("llama.json"))
    parser.add_argument("--report", type=Path, default=Path("llama.html"))
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    options = parser.parse_args(argv)
    step = autopar.parallelize(
        train_step, cluster=options.cluster, num_microbatches=options.microbatches, donate_argnums=0
    )
    state = jax.eval_shape(init, jax.random.key(0))
    plan = step.plan(state, jax.ShapeDtypeStruct((options.batch, SEQ + 1), jnp.int32))
    print(plan)
    plan.save(options.out)
    plan.report(options.report)
    print(f"saved {options.out} and {options.report}")
    if options.open:
        webbrowser.open(options.report.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
