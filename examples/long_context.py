"""Long sequences: positions split over devices as well as the batch (sequence parallelism), on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.long_context [--sequence 4] [--steps 20]

With two sequences and eight devices the batch alone cannot fill them. ``sequence=4`` splits each sequence's positions
over four devices; what attention needs of the others is gathered. Leave it to the planner with ``--sequence 0``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH = 2, 64, 4, 128, 1024, 2
OPTIMIZER = optax.adam(1e-3)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Parameters and the optimizer's state."""
    keys = iter(jax.random.split(key, 5 * LAYERS + 2))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    blocks = [
        {
            "qkv": weight(HIDDEN, 3, HEADS, HIDDEN // HEADS), "out": weight(HIDDEN, HIDDEN),
            "up": weight(HIDDEN, 4 * HIDDEN), "down": weight(4 * HIDDEN, HIDDEN),
        }
        for _ in range(LAYERS)
    ]  # fmt: skip
    params = {"embed": weight(VOCAB, HIDDEN), "blocks": blocks, "head": weight(HIDDEN, VOCAB)}
    return params, OPTIMIZER.init(params)


def train_step(state: tuple[Any, Any], tokens: jax.Array, targets: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """One step of Adam on [batch, positions] tokens."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        x = params["embed"][tokens]
        for p in params["blocks"]:
            q, k, v = jnp.moveaxis(jnp.einsum("bsd,dnhk->bsnhk", x, p["qkv"]), 2, 0)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), loss


def batch_of(step: int) -> tuple[jax.Array, jax.Array]:
    """Counting tokens from random starts, and what comes next."""
    starts = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCAB)
    tokens = (starts + jnp.arange(SEQ + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequence", type=int, default=4, help="devices that share a sequence; 0: the planner's choice"
    )
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    state = init(jax.random.key(0))
    step = autopar.parallelize(
        train_step, donate_argnums=0, batch_argnums=(1, 2), sequence=options.sequence or None, num_microbatches=1
    )
    print(step.plan(state, *batch_of(0)))
    losses: list[float] = []
    for number in range(options.steps):
        state, loss = step(state, *batch_of(number))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
