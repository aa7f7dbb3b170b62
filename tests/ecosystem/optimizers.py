"""optax and optax.contrib: every kind of update, on one small network written in plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, Step, steps, trained


def _params() -> Any:
    return {
        "in": {"kernel": 0.3 * normal(16, 32), "bias": jnp.zeros(32)},
        "out": {"kernel": 0.3 * normal(32, 8, seed=1), "bias": jnp.zeros(8)},
    }


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return optax.huber_loss(h @ params["out"]["kernel"] + params["out"]["bias"], y).mean()


def _with(optimizer: Any) -> Made:
    return trained(_loss, _params(), normal(16, 16), normal(16, 8, seed=2), optimizer=optimizer)


SIMPLE = {
    "adamw_clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10))
    ),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "novograd": lambda: optax.novograd(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1, nesterov=True)),
    "ema": lambda: optax.chain(optax.scale_by_adam(), optax.scale(-1e-3), optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0, 1, 9)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "partition": lambda: optax.partition(
        {"kernel": optax.adamw(1e-3), "bias": optax.sgd(0.1)},
        lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params),
    ),
    "muon": lambda: contrib.muon(1e-2),
    "prodigy": lambda: contrib.prodigy(1e-1),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
    "cocob": lambda: contrib.cocob(),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "adopt": lambda: contrib.adopt(1e-2),
    "dog": lambda: contrib.dog(1e-1),
    "normalised": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "galore": lambda: contrib.galore(1e-2, rank=4),
}


def multi_steps() -> Made:
    return _with(optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=2))


def lbfgs() -> Made:
    """With its zoom line search, which evaluates the loss in a while loop."""
    optimizer = optax.lbfgs()
    params = _params()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        loss = lambda p: _loss(p, x, y)
        value, grad = optax.value_and_grad_from_state(loss)(params, state=opt_state)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, updates), opt_state), value

    return Made(step=step, state=(params, optimizer.init(params)), rest=(normal(16, 16), normal(16, 8, seed=2)))


def sophia() -> Made:
    """Needs the loss in its update, for a Hessian's diagonal."""
    optimizer = contrib.sophia(1e-2)
    params = _params()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        loss = lambda p: _loss(p, x, y)
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params, obj_fn=loss)
        return (optax.apply_updates(params, updates), opt_state), value

    return Made(step=step, state=(params, optimizer.init(params)), rest=(normal(16, 16), normal(16, 8, seed=2)))


def sam() -> Made:
    """Sharpness-aware minimisation: two gradients a step."""
    optimizer = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True)
    params = _params()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        grad_fn = jax.grad(lambda p, _: _loss(p, x, y))
        updates, opt_state = optimizer.update(grad_fn(params, 0), opt_state, params, grad_fn=grad_fn)
        return (optax.apply_updates(params, updates), opt_state), _loss(params, x, y)

    return Made(step=step, state=(params, optimizer.init(params)), rest=(normal(16, 16), normal(16, 8, seed=2)))


def reduce_on_plateau() -> Made:
    """Reads the loss."""
    optimizer = optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1, accumulation_size=1))
    params = _params()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return (optax.apply_updates(params, updates), opt_state), value

    return Made(step=step, state=(params, optimizer.init(params)), rest=(normal(16, 16), normal(16, 8, seed=2)))


def dpsgd() -> Made:
    """Gradients of each example, clipped one by one, with noise."""
    optimizer = contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0)
    params = _params()

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state
        values, grads = jax.vmap(jax.value_and_grad(_loss), in_axes=(None, 0, 0))(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), values.mean()

    return Made(step=step, state=(params, optimizer.init(params)), rest=(normal(16, 16), normal(16, 8, seed=2)))


def losses() -> Made:
    """CTC, focal and ranking losses together."""
    params = 0.1 * normal(16, 12)
    labels = ints(11, 8, 4) + 1

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = x @ params
        ctc = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape))
        focal = optax.sigmoid_focal_loss(logits[:, 0], jax.nn.one_hot(labels[:, 0], 12))
        rank = optax.losses.ranking_softmax_loss(logits[:, 1], jax.nn.one_hot(labels[:, 1], 12))
        return ctc.mean() + focal.mean() + rank.mean()

    return trained(loss, params, normal(8, 10, 16), labels, optimizer=optax.sgd(0.1))


def _step(name: str) -> Step:
    make = functools.partial(lambda build: _with(build()), SIMPLE[name])
    make.__name__ = name  # type: ignore[attr-defined]
    return Step(make=make, packages=("optax",), float64=True)


STEPS = [
    *map(_step, SIMPLE),
    *steps("optax", float64=True)(lbfgs, sophia, sam, reduce_on_plateau, dpsgd),
    *steps("optax")(losses, multi_steps),
]
