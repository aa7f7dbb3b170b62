"""Optax's transformations, with whatever joins layers in an update, and a small step of unrolled layers for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar

WIDTH, VOCABULARY, BATCH = 16, 32, (8, 4)


def _then_sgd(transformation: Any) -> Any:
    return optax.chain(transformation, optax.sgd(1e-2))


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


_CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
_SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(_SCHEDULE, mask=_matrices),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adan": optax.adan(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "cocob": optax.contrib.cocob(),
    "dadapt": optax.contrib.dadapt_adamw(),
    "dog": optax.contrib.dog(1.0),
    "fromage": optax.fromage(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "lion": optax.lion(1e-3),
    "mechanic": optax.contrib.mechanize(optax.sgd(1e-2)),
    "muon": optax.contrib.muon(1e-2),
    "nadamw": optax.nadamw(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "novograd": optax.novograd(1e-2),
    "optimistic": optax.optimistic_gradient_descent(1e-2),
    "prodigy": optax.contrib.prodigy(),
    "radam": optax.radam(1e-2),
    "rprop": optax.rprop(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "sm3": optax.sm3(1e-2),
    "yogi": optax.yogi(1e-2),
    "adaptive_grad_clip": _then_sgd(optax.adaptive_grad_clip(0.01)),
    "clip": _then_sgd(optax.clip(1.0)),
    "clip_by_global_norm": _CLIPPED,
    "clip_by_block_rms": _then_sgd(optax.clip_by_block_rms(1.0)),
    "centralize": _then_sgd(optax.centralize()),
    "ema": _then_sgd(optax.ema(0.9)),
    "normalize_by_update_norm": _then_sgd(optax.normalize_by_update_norm()),
    "scale_by_trust_ratio": _then_sgd(optax.scale_by_trust_ratio()),
    "zero_nans": _then_sgd(optax.zero_nans()),
    "keep_params_nonnegative": optax.chain(optax.sgd(1e-2), optax.keep_params_nonnegative()),
    "masked": optax.masked(optax.adam(1e-2), _matrices),
    "multi_transform": optax.multi_transform({"matrix": _CLIPPED, "vector": optax.sgd(1e-2)}, _labels),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(1e-2),
    "apply_if_finite": optax.apply_if_finite(_CLIPPED, 5),
    "multi_steps": optax.MultiSteps(_CLIPPED, 2),
    "skip_not_finite": optax.MultiSteps(optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite),
    "skip_large_updates": optax.MultiSteps(
        optax.adam(1e-2), 2, should_skip_update_fn=lambda u, step, p: optax.skip_large_updates(u, step, p, 10.0)
    ),
}


def _init(key: jax.Array, layers: int, dtype: Any) -> Any:
    keys = jax.random.split(key, 2 * layers + 2)
    blocks = [
        {
            "in": jax.random.normal(keys[2 * i], (WIDTH, 2 * WIDTH), dtype) / 4,
            "out": jax.random.normal(keys[2 * i + 1], (2 * WIDTH, WIDTH), dtype) / 4,
            "scale": jnp.ones(WIDTH, dtype),
        }
        for i in range(layers)
    ]
    embedding = jax.random.normal(keys[-2], (VOCABULARY, WIDTH), dtype)
    return {"embedding": embedding, "blocks": blocks, "head": jax.random.normal(keys[-1], (WIDTH, VOCABULARY), dtype)}


def _loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"][tokens]
    for block in params["blocks"]:
        x = x + jnp.tanh((x * block["scale"]) @ block["in"]) @ block["out"]
    log_p = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[..., None], -1))


def train_step(optimizer: Any, layers: int, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """A step (state, tokens) → (state, {loss, norm of the gradients, that all are finite}), and its arguments'
    shapes."""

    def step(state: Any, tokens: Any) -> Any:
        loss, grads = autopar.value_and_grad(_loss)(state["params"], tokens)
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        said = {"loss": loss, "norm": optax.tree.norm(grads), "finite": finite}
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, said

    state = jax.eval_shape(lambda: fresh(optimizer, layers, dtype))
    return step, state, jax.ShapeDtypeStruct(BATCH, jnp.int32)


def fresh(optimizer: Any, layers: int, dtype: Any = jnp.float32) -> Any:
    """A state of it."""
    params = _init(jax.random.key(0), layers, dtype)
    return {"params": params, "optimizer": optimizer.init(params)}


def batch() -> Any:
    """Tokens."""
    return jax.random.randint(jax.random.key(1), BATCH, 0, VOCABULARY)
