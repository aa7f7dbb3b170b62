"""A vision transformer (Dosovitskiy et al., ICLR 2021) in flax linen, with dropout, on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.vit [--steps 30]

Dropout's key is an argument of the step; each device draws the part of the mask that it needs, so that the numbers are
those of one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import autopar

PATCH, SIZE, HIDDEN, LAYERS, HEADS, CLASSES, BATCH = 4, 16, 64, 2, 4, 8, 32
OPTIMIZER = optax.adamw(1e-3)


class ViT(nn.Module):
    """Images [batch, height, width, colours] to logits."""

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(HIDDEN, (PATCH, PATCH), (PATCH, PATCH))(images)
        x = x.reshape(x.shape[0], -1, HIDDEN)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.Dropout(0.1, deterministic=not train)(nn.MultiHeadDotProductAttention(HEADS)(y))
            y = nn.Dense(HIDDEN)(nn.gelu(nn.Dense(4 * HIDDEN)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


MODEL = ViT()


def train_step(state: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
    """One step of AdamW."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        logits = MODEL.apply(params, images, train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def batch_of(step: int) -> tuple[jax.Array, jax.Array]:
    """Noise with a bright patch, whose place is the label."""
    key, other = jax.random.split(jax.random.key(step))
    labels = jax.random.randint(key, (BATCH,), 0, CLASSES)
    rows, columns = jnp.divmod(labels, SIZE // PATCH)
    place = jnp.arange(SIZE) // PATCH
    bright = (place[None, :, None] == rows[:, None, None]) & (place[None, None] == columns[:, None, None])
    return jax.random.normal(other, (BATCH, SIZE, SIZE, 3)) * 0.3 + bright[..., None], labels


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    params = MODEL.init(jax.random.key(0), batch_of(0)[0], train=False)
    state = (params, OPTIMIZER.init(params))
    step = autopar.parallelize(train_step, donate_argnums=0, batch_argnums=(1, 2), num_microbatches=1)
    print(step.plan(state, *batch_of(0), jax.random.key(1)))
    losses: list[float] = []
    for number in range(options.steps):
        state, loss = step(state, *batch_of(number), jax.random.key(number))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
