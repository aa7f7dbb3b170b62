"""A decoder-only GPT in plain JAX, with its train step.

In: a `GPTConfig`. Out: parameters as nested dictionaries of arrays, and a train step
``(state, batch[, key]) -> (state, loss)`` that knows nothing of devices. Pre-norm blocks, learned positions, GELU:
Radford et al., "Language models are unsupervised multitask learners" (GPT-2, 2019); AdamW: Loshchilov and
Hutter, ICLR 2019. The step's only trace of autopar is `autopar.value_and_grad`, which outside of
`autopar.parallelize` is `jax.value_and_grad`, and tells it what to accumulate over microbatches.

Letters in einsums: b batch, s and t positions, d hidden, h heads, k head size, f feed-forward size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

import autopar

Params: TypeAlias = "dict[str, Any]"

EMBED_SCALE = 0.02  # standard deviation of initial embeddings, from GPT-2
NORM_EPSILON = 1e-5  # added to the variance in layer norms, from GPT-2


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """What the model and its optimizer are. ``heads`` divides ``hidden``; ``dropout`` is a probability below 1.

    ``dtype`` is that of activations and matrix products; parameters, normalisation, softmax and loss stay float32.
    ``scan``: one traced block over stacked parameters, instead of one per layer. ``remat``: keep only each block's
    input for the backward pass. ``tied``: the token embedding is the output matrix too. The learning rate climbs over
    ``warmup_steps`` and falls as a cosine until ``total_steps``; it is constant where ``total_steps`` is 0.
    """

    vocab: int = 256
    seq: int = 128
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    dtype: str = "float32"
    scan: bool = False
    remat: bool = False
    dropout: float = 0.0
    tied: bool = True
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    warmup_steps: int = 0
    total_steps: int = 0

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("vocab", "seq", "layers", "hidden", "heads")}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"GPTConfig.{name} is {value!r}; it must be an int of at least 1")
        for name in ("scan", "remat", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)!r}; it must be True or False")
        if self.hidden % self.heads:
            raise ValueError(
                f"GPTConfig.hidden is {self.hidden}, which {self.heads} heads do not divide; "
                f"try hidden={self.heads * max(1, self.hidden // self.heads)}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"GPTConfig.dropout is {self.dropout}; it must be in [0, 1)")
        if self.total_steps and not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"GPTConfig.warmup_steps is {self.warmup_steps}; it must be in [0, total_steps={self.total_steps})"
            )


class Batch(NamedTuple):
    """``inputs`` and ``targets``: int32[batch, seq]; targets are the inputs one position later."""

    inputs: Any
    targets: Any


class TrainState(NamedTuple):
    """All that a step changes: parameters, optimizer state, and the count of steps done (int32 scalar)."""

    params: Params
    opt_state: Any
    step: Any


def init_params(key: Any, config: GPTConfig) -> Params:
    """float32 parameters. With ``scan`` every leaf under ``blocks`` has a leading dimension of size ``layers``;
    without, ``blocks`` is a list of ``layers`` dictionaries."""
    embed_key, position_key, head_key, block_key = jax.random.split(key, 4)
    d, v = config.hidden, config.vocab
    block_keys = jax.random.split(block_key, config.layers)
    params: Params = {
        "embed": _normal(embed_key, (v, d), EMBED_SCALE),
        "position": _normal(position_key, (config.seq, d), EMBED_SCALE),
        "norm": _norm_params(d),
    }
    if config.scan:
        params["blocks"] = jax.vmap(lambda k: _block_params(k, config))(block_keys)
    else:
        params["blocks"] = [_block_params(block_keys[i], config) for i in range(config.layers)]
    if not config.tied:
        params["head"] = _normal(head_key, (d, v), EMBED_SCALE)
    return params


def forward(params: Params, tokens: Any, config: GPTConfig, key: Any = None) -> Any:
    """float32[b, s, v] logits of int32[b, s] tokens, s ≤ ``config.seq``. ``key`` switches dropout on."""
    length = tokens.shape[1]
    x = (params["embed"][tokens] + params["position"][:length]).astype(config.dtype)
    x = _dropout(x, config.dropout, _fold_in(key, config.layers))
    mask = jnp.tril(jnp.ones((length, length), bool))

    def block(x: Any, layer: Params, index: Any) -> Any:
        return _block(x, layer, mask, config, _fold_in(key, index))

    if config.remat:
        block = jax.checkpoint(block)
    if config.scan:
        layers = (params["blocks"], jnp.arange(config.layers))
        with jax.named_scope("blocks"):
            x, _ = jax.lax.scan(lambda x, layer: (block(x, *layer), None), x, layers)
    else:
        for index, layer in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{index}"):
                x = block(x, layer, index)
    x = _layer_norm(x, params["norm"])
    if config.tied:
        return jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("bsd,dv->bsv", x, params["head"].astype(x.dtype), preferred_element_type=jnp.float32)


def loss_fn(params: Params, batch: Batch, config: GPTConfig, key: Any = None) -> Any:
    """Mean cross entropy in nats per token, a float32 scalar."""
    logits = forward(params, batch.inputs, config, key)
    picked = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def make_optimizer(config: GPTConfig) -> optax.GradientTransformation:
    """AdamW (plain Adam where ``weight_decay`` is 0) with the learning rate that ``config`` describes."""
    rate: Any = config.learning_rate
    if config.total_steps:
        rate = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup_steps, config.total_steps, 0.1 * config.learning_rate
        )
    if config.weight_decay:
        return optax.adamw(rate, b2=0.99, weight_decay=config.weight_decay)
    return optax.adam(rate)


def init_state(key: Any, config: GPTConfig) -> TrainState:
    """The state before the first step."""
    params = init_params(key, config)
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def make_train_step(config: GPTConfig) -> Callable[..., tuple[TrainState, Any]]:
    """The function ``train_step(state, batch, key=None) -> (state, loss)``; ``key`` is needed with dropout only."""
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, batch: Batch, key: Any = None) -> tuple[TrainState, Any]:
        if config.dropout and key is None:
            raise ValueError(
                f"train_step got no key, and GPTConfig.dropout is {config.dropout}; pass jax.random.key(…)"
            )
        step_key = jax.random.fold_in(key, state.step) if config.dropout else None
        loss, grads = autopar.value_and_grad(loss_fn)(state.params, batch, config, step_key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = cast("Params", optax.apply_updates(state.params, updates))
        return TrainState(params, opt_state, state.step + 1), loss

    return train_step


def train_step_args(config: GPTConfig, batch: int) -> tuple[Any, ...]:
    """Arguments of the train step as ShapeDtypeStructs; no array is made and no backend is started."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(key, config), key)
    tokens = jax.ShapeDtypeStruct((batch, config.seq), jnp.int32)
    args = (state, Batch(tokens, tokens))
    return (*args, key) if config.dropout else args


def plan_target(
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    seq: int = 1024,
    vocab: int = 51200,
    batch: int = 64,
    dtype: str = "bfloat16",
    scan: bool = False,
    remat: bool = False,
    dropout: float = 0.0,
    tied: bool = True,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `autopar plan examples.gpt.model:plan_target --set layers=24 …` plans: (train step, its arguments).

    The state is donated, as in training: the new state lies where the old one did."""
    config = GPTConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=vocab,
        dtype=dtype,
        scan=scan,
        remat=remat,
        dropout=dropout,
        tied=tied,
    )
    return autopar.parallelize(make_train_step(config), donate_argnums=(0,)), train_step_args(config, batch)


def _normal(key: Any, shape: tuple[int, ...], scale: float) -> Any:
    return scale * jax.random.normal(key, shape, jnp.float32)


def _norm_params(size: int) -> Params:
    return {"scale": jnp.ones((size,), jnp.float32), "bias": jnp.zeros((size,), jnp.float32)}


def _block_params(key: Any, config: GPTConfig) -> Params:
    d, h, k, f = config.hidden, config.heads, config.hidden // config.heads, 4 * config.hidden
    keys = jax.random.split(key, 6)
    residual = (2 * config.layers) ** -0.5  # GPT-2: every block adds to the residual stream twice
    return {
        "norm_attention": _norm_params(d),
        "query": _normal(keys[0], (d, h, k), d**-0.5),
        "key": _normal(keys[1], (d, h, k), d**-0.5),
        "value": _normal(keys[2], (d, h, k), d**-0.5),
        "project": _normal(keys[3], (h, k, d), residual * d**-0.5),
        "norm_mlp": _norm_params(d),
        "up": {"kernel": _normal(keys[4], (d, f), d**-0.5), "bias": jnp.zeros((f,), jnp.float32)},
        "down": {"kernel": _normal(keys[5], (f, d), residual * f**-0.5), "bias": jnp.zeros((d,), jnp.float32)},
    }


def _block(x: Any, layer: Params, mask: Any, config: GPTConfig, key: Any) -> Any:
    """x: [b, s, d] → the same; mask: bool[s, t]."""
    out = _attention(_layer_norm(x, layer["norm_attention"]), layer, mask)
    x = x + _dropout(out, config.dropout, _fold_in(key, 0))
    out = _mlp(_layer_norm(x, layer["norm_mlp"]), layer)
    return x + _dropout(out, config.dropout, _fold_in(key, 1))


def _attention(x: Any, layer: Params, mask: Any) -> Any:
    query = jnp.einsum("bsd,dhk->bshk", x, layer["query"].astype(x.dtype))
    key = jnp.einsum("btd,dhk->bthk", x, layer["key"].astype(x.dtype))
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"].astype(x.dtype))
    scores = jnp.einsum("bshk,bthk->bhst", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    out = jnp.einsum("bhst,bthk->bshk", weights, value)
    return jnp.einsum("bshk,hkd->bsd", out, layer["project"].astype(x.dtype))


def _mlp(x: Any, layer: Params) -> Any:
    up = jnp.einsum("bsd,df->bsf", x, layer["up"]["kernel"].astype(x.dtype)) + layer["up"]["bias"].astype(x.dtype)
    out = jnp.einsum("bsf,fd->bsd", jax.nn.gelu(up), layer["down"]["kernel"].astype(x.dtype))
    return out + layer["down"]["bias"].astype(x.dtype)


def _layer_norm(x: Any, norm: Params) -> Any:
    """Computed in float32 over the last dimension; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + NORM_EPSILON) * norm["scale"] + norm["bias"]).astype(x.dtype)


def _dropout(x: Any, rate: float, key: Any) -> Any:
    """x with a share ``rate`` of its entries zeroed and the rest scaled up; x itself without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def _fold_in(key: Any, data: Any) -> Any:
    return None if key is None else jax.random.fold_in(key, data)
