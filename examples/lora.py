"""LoRA (Hu et al., ICLR 2022): low-rank adapters of a frozen transformer, planned and trained on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.lora [--steps 60]

Only the adapters are trained and have an optimizer's state; the frozen weights are an argument of their own, which no
result replaces. The plan may split them as it likes: they are gathered, or not, as is cheapest.
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

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH, RANK = 2, 128, 4, 256, 64, 32, 4
OPTIMIZER = optax.adam(1e-2)


def init_frozen(key: jax.Array) -> Any:
    """A transformer's weights, as if they were trained."""
    keys = iter(jax.random.split(key, 6 * LAYERS + 2))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    return {
        "embed": weight(VOCAB, HIDDEN),
        "blocks": [
            {n: weight(HIDDEN, HIDDEN) for n in ("query", "key", "value", "out")}
            | {"up": weight(HIDDEN, 4 * HIDDEN), "down": weight(4 * HIDDEN, HIDDEN)}
            for _ in range(LAYERS)
        ],
        "head": weight(HIDDEN, VOCAB),
    }


def init_adapters(key: jax.Array) -> tuple[Any, Any]:
    """Adapters of queries and values, A random and B zero, and their optimizer's state."""
    keys = iter(jax.random.split(key, 2 * LAYERS))
    adapters = [
        {
            name: {"a": jax.random.normal(next(keys), (HIDDEN, RANK)) / HIDDEN**0.5, "b": jnp.zeros((RANK, HIDDEN))}
            for name in ("query", "value")
        }
        for _ in range(LAYERS)
    ]
    return adapters, OPTIMIZER.init(adapters)


def forward(adapters: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
    """Logits of [batch, positions] tokens."""
    x = frozen["embed"][tokens]
    for p, lora in zip(frozen["blocks"], adapters, strict=True):

        def project(name: str, x: jax.Array = x, p: Any = p, lora: Any = lora) -> jax.Array:
            y = x @ p[name]
            if name in lora:
                y = y + (x @ lora[name]["a"]) @ lora[name]["b"]
            return y.reshape(*y.shape[:2], HEADS, HIDDEN // HEADS)

        attended = jax.nn.dot_product_attention(project("query"), project("key"), project("value"), is_causal=True)
        x = x + attended.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x @ frozen["head"]


def train_step(state: tuple[Any, Any], frozen: Any, tokens: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """One step: gradients by the adapters alone."""
    adapters, moments = state

    def loss_of(adapters: Any) -> jax.Array:
        logits = forward(adapters, frozen, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(adapters)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(adapters, updates), moments), loss


def batch_of(step: int) -> jax.Array:
    """Counting tokens from random starts: what comes next can be learnt."""
    starts = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCAB)
    return (starts + jnp.arange(SEQ + 1)) % VOCAB


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)
    frozen, state = init_frozen(jax.random.key(0)), init_adapters(jax.random.key(1))
    step = autopar.parallelize(train_step, donate_argnums=0, batch_argnums=2)
    print(step.plan(state, frozen, batch_of(0)))
    losses: list[float] = []
    for number in range(options.steps):
        state, loss = step(state, frozen, batch_of(number))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
