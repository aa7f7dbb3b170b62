"""A mixture of experts in equinox, its experts split over devices (GShard; Lepikhin et al., ICLR 2021), on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.moe_equinox [--experts 4] [--steps 40]

Each token goes to its best two experts, as far as they have room. ``experts=4`` has four devices share the experts,
two at a time of eight: tokens change places before and after them (all-to-alls in the plan). With ``--experts 0`` the
planner chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import autopar

HIDDEN, EXPERTS, CAPACITY, CLASSES, GROUPS, TOKENS = 32, 8, 16, 16, 8, 32
OPTIMIZER = optax.adam(3e-3)


class Mixture(eqx.Module):
    """A router, and a stack of two-layer experts."""

    router: jax.Array
    up: jax.Array
    down: jax.Array
    head: jax.Array

    def __init__(self, key: jax.Array) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.router = jax.random.normal(a, (HIDDEN, EXPERTS)) * HIDDEN**-0.5
        self.up = jax.random.normal(b, (EXPERTS, HIDDEN, 4 * HIDDEN)) * HIDDEN**-0.5
        self.down = jax.random.normal(c, (EXPERTS, 4 * HIDDEN, HIDDEN)) * HIDDEN**-0.5
        self.head = jax.random.normal(d, (HIDDEN, CLASSES)) * HIDDEN**-0.5

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of [groups, tokens, hidden]: tokens are routed within their group."""
        chances = jax.nn.softmax(x @ self.router)
        top, which = jax.lax.top_k(chances, 2)
        chosen = jax.nn.one_hot(which, EXPERTS) * top[..., None]  # [groups, tokens, 2, experts]
        weights = chosen.sum(2)
        place = jnp.cumsum(weights > 0, axis=1) - 1  # of a token among its expert's
        mask = jax.nn.one_hot(place, CAPACITY) * (weights > 0)[..., None]
        sent = jnp.einsum("gtec,gth->egch", mask, x)
        made = jnp.einsum("egcf,efh->egch", jax.nn.gelu(jnp.einsum("egch,ehf->egcf", sent, self.up)), self.down)
        back = jnp.einsum("gtec,egch->gth", mask * weights[..., None], made)
        return (x + back) @ self.head


def batch_of(step: int) -> tuple[jax.Array, jax.Array]:
    """Random vectors, and what a fixed random projection says of each."""
    x = jax.random.normal(jax.random.key(step), (GROUPS, TOKENS, HIDDEN))
    return x, jnp.argmax(x @ jax.random.normal(jax.random.key(-1), (HIDDEN, CLASSES)), -1)


def train_step(state: tuple[Any, Any], x: jax.Array, y: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """One step of Adam."""
    model, moments = state

    def loss_of(model: Mixture) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (eqx.apply_updates(model, updates), moments), loss


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4, help="devices that share the experts; 0: as planned")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)
    model = Mixture(jax.random.key(0))
    state = (model, OPTIMIZER.init(model))
    step = autopar.parallelize(
        train_step, donate_argnums=0, batch_argnums=(1, 2), num_microbatches=1, experts=options.experts or None
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
