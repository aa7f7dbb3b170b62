"""A small Llama in flax NNX, planned and trained on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.llama_nnx [--steps 40]

The model is an ordinary NNX module. Its parameters are split off (`nnx.split`), so that the step is a function of
arrays, and merged again inside the loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import autopar

LAYERS, HIDDEN, HEADS, GROUPS, VOCAB, SEQ, BATCH = 2, 64, 4, 2, 128, 32, 32
OPTIMIZER = optax.adamw(3e-3)


class Block(nnx.Module):
    """Attention with grouped keys and values, then a gated MLP, each behind an RMS norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        head = HIDDEN // HEADS
        self.query = nnx.Linear(HIDDEN, HEADS * head, use_bias=False, rngs=rngs)
        self.key_value = nnx.Linear(HIDDEN, 2 * GROUPS * head, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(HIDDEN, 3 * HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 3 * HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        q = self.query(y).reshape(*y.shape[:2], HEADS, -1)
        k, v = jnp.split(self.key_value(y).reshape(*y.shape[:2], 2 * GROUPS, -1), 2, axis=2)
        x = x + self.out(jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """Tokens [batch, positions] to logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, positions, heads, head]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def batch_of(step: int) -> jax.Array:
    """Counting tokens from random starts: what comes next can be learnt."""
    starts = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCAB)
    return (starts + jnp.arange(SEQ + 1)) % VOCAB


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    structure, params = nnx.split(Llama(nnx.Rngs(0)), nnx.Param)

    def train_step(state: tuple[Any, Any], tokens: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state

        def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(structure, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = autopar.value_and_grad(loss_of)(params, tokens)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    step = autopar.parallelize(train_step, donate_argnums=0, num_microbatches=2, stages=1)
    state = (params, OPTIMIZER.init(params))
    print(step.plan(state, batch_of(0)))
    losses: list[float] = []
    for number in range(options.steps):
        state, loss = step(state, batch_of(number))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
