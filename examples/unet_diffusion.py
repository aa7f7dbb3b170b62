"""A small U-Net that learns to take noise out of images (DDPM; Ho et al., NeurIPS 2020), plain JAX, on 8 devices.

    JAX_NUM_CPU_DEVICES=8 python -m examples.unet_diffusion [--steps 20]

Convolutions go down, up, and across; the noise of a step is drawn inside it from a key.
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

SIZE, CHANNELS, BATCH, TIMES = 16, 16, 32, 100
OPTIMIZER = optax.adam(2e-3)
KEPT = jnp.cumprod(1 - jnp.linspace(1e-4, 0.05, TIMES))
"""Part of an image's variance that is left at each time."""


def init(key: jax.Array) -> tuple[Any, Any]:
    """Parameters and the optimizer's state."""
    keys = iter(jax.random.split(key, 16))

    def conv(size: int, come: int, go: int) -> jax.Array:
        return jax.random.normal(next(keys), (size, size, come, go)) * (size * size * come) ** -0.5

    params = {
        "first": conv(3, 1, CHANNELS),
        "down": [conv(3, CHANNELS, CHANNELS * 2), conv(3, CHANNELS * 2, CHANNELS * 4)],
        "middle": conv(3, CHANNELS * 4, CHANNELS * 4),
        "up": [conv(3, CHANNELS * 6, CHANNELS * 2), conv(3, CHANNELS * 3, CHANNELS)],
        "last": conv(3, CHANNELS, 1),
        "time": jax.random.normal(next(keys), (2, CHANNELS)),
    }
    return params, OPTIMIZER.init(params)


def convolved(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution that keeps the size, or takes each ``stride``-th pixel of it."""
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def twice(x: jax.Array) -> jax.Array:
    """Each pixel twice, both ways."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def noise_in(params: Any, x: jax.Array, times: jax.Array) -> jax.Array:
    """The noise that the model sees in images [batch, height, width, 1] at ``times``."""
    phase = times[:, None] / TIMES
    when = jnp.concatenate([jnp.sin(3 * phase), jnp.cos(3 * phase)], -1) @ params["time"]
    a = jax.nn.silu(convolved(x, params["first"]) + when[:, None, None])
    b = jax.nn.silu(convolved(a, params["down"][0], 2))
    c = jax.nn.silu(convolved(b, params["down"][1], 2))
    c = jax.nn.silu(convolved(c, params["middle"]))
    b = jax.nn.silu(convolved(jnp.concatenate([twice(c), b], -1), params["up"][0]))
    a = jax.nn.silu(convolved(jnp.concatenate([twice(b), a], -1), params["up"][1]))
    return convolved(a, params["last"])


def train_step(state: tuple[Any, Any], images: jax.Array, key: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    """One step of Adam: how far the model's noise is from what was put in."""
    params, moments = state
    of_times, of_noise = jax.random.split(key)
    times = jax.random.randint(of_times, (images.shape[0],), 0, TIMES)
    noise = jax.random.normal(of_noise, images.shape)
    kept = KEPT[times][:, None, None, None]

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((noise_in(params, jnp.sqrt(kept) * images + jnp.sqrt(1 - kept) * noise, times) - noise) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), loss


def batch_of(step: int) -> jax.Array:
    """Stripes of random width and phase."""
    a, b = jax.random.split(jax.random.key(step))
    width = jax.random.uniform(a, (BATCH, 1, 1, 1), minval=0.3, maxval=1.5)
    phase = jax.random.uniform(b, (BATCH, 1, 1, 1), maxval=6.0)
    return jnp.sin(width * jnp.arange(SIZE)[None, :, None, None] + phase) * jnp.ones((1, 1, SIZE, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, trains, prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    state = init(jax.random.key(0))
    step = autopar.parallelize(train_step, donate_argnums=0, batch_argnums=1, num_microbatches=1)
    print(step.plan(state, batch_of(0), jax.random.key(1)))
    losses: list[float] = []
    for number in range(options.steps):
        state, loss = step(state, batch_of(number), jax.random.key(number))
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
