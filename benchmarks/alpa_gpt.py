"""GPT in the number formats of Alpa's own benchmark: the model and train step behind the one measured point.

As its published code has it (github.com/alpa-projects/alpa: alpa/model/bert_model.py, gpt_model.py and model_util.py,
benchmark/alpa/benchmark_one_case_gpt_bert.py):

- parameters and their gradients are float16, also the sums of gradients over microbatches;
- the state holds a float32 master copy and the two float32 moments of AdamW beside them: 2 + 4 + 8 bytes a parameter,
  and 2 for gradients, where `benchmarks.models.gpt` has 4 + 8 and 4;
- the output matrix is not the embedding;
- logits are float16; the loss is the sum of labels, float32[batch, seq, vocab] of zeros and ones, times the
  log-softmax, averaged over the tokens whose label is above 0;
- every block is rematerialised.

Left out: the loss has no scaling there either; biases of the attention's projections; the attention mask of the input,
which is all ones.

Letters in einsums: b batch, s and t positions, d hidden, h heads, k head size, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import autopar
from benchmarks.layers import Shapes, Step, layer_norm

LEARNING_RATE = 1e-2
"""Of Alpa's script; no figure here depends on it."""


def gpt(*, layers: int, hidden: int, heads: int, batch: int, seq: int = 1024, vocab: int = 51200) -> Step:
    """(train step, its arguments as ShapeDtypeStructs). State: (float16 parameters, float32 master copy, AdamW's state,
    int32 step); batch: dictionary of int32[batch, seq] ``inputs`` and ``labels``."""

    def half(*shape: int) -> Shapes:
        return jax.ShapeDtypeStruct(shape, jnp.float16)

    norm = {"scale": half(hidden), "bias": half(hidden)}
    block_shapes = {
        "norm1": norm,
        "qkv": half(3, hidden, hidden),
        "out": half(hidden, hidden),
        "norm2": norm,
        "up": {"kernel": half(hidden, 4 * hidden), "bias": half(4 * hidden)},
        "down": {"kernel": half(4 * hidden, hidden), "bias": half(hidden)},
    }
    params = {
        "embed": half(vocab, hidden),
        "position": half(seq, hidden),
        "blocks": [block_shapes] * layers,
        "norm": norm,
        "head": {"kernel": half(hidden, vocab), "bias": half(vocab)},
    }
    optimizer = optax.adamw(LEARNING_RATE, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))

    @jax.checkpoint
    def block(p: Any, x: Any) -> Any:
        x = x + _attention(p, layer_norm(p["norm1"], x), heads)
        up = jax.nn.gelu(layer_norm(p["norm2"], x) @ p["up"]["kernel"] + p["up"]["bias"])
        return x + up @ p["down"]["kernel"] + p["down"]["bias"]

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["inputs"]] + params["position"]
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = block(p, x)
        x = layer_norm(params["norm"], x)
        logits = jnp.einsum("bsd,dv->bsv", x, params["head"]["kernel"]) + params["head"]["bias"]
        labels = jax.nn.one_hot(batch["labels"], vocab, dtype=jnp.float32)
        loss = -jnp.sum(labels * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        counts = jnp.where(batch["labels"] > 0, 1.0, 0.0)
        return (counts * loss).sum() / counts.sum()

    def train_step(state: tuple[Any, Any, Any, Any], batch: Any) -> tuple[tuple[Any, Any, Any, Any], Any]:
        params, master, moments, count = state
        loss, grads = autopar.value_and_grad(loss_fn)(params, batch)
        updates, moments = optimizer.update(grads, moments, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda x: x.astype(jnp.float16), master)
        return (params, master, moments, count + 1), loss

    master = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    state = (params, master, jax.eval_shape(optimizer.init, master), jax.ShapeDtypeStruct((), jnp.int32))
    return train_step, (state, {"inputs": tokens, "labels": tokens})


def _attention(p: Any, x: Any, heads: int) -> Any:
    """Causal, float16[b, s, d] → the same; scores and their softmax in float16 too."""
    batch, seq, hidden = x.shape
    query, key, value = (jnp.einsum("bsd,de->bse", x, w).reshape(batch, seq, heads, -1) for w in p["qkv"])
    scores = jnp.einsum("bshk,bthk->bhst", query * (hidden // heads) ** -0.5, key)
    mask = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(x.dtype).min), axis=-1)
    out = jnp.einsum("bhst,bthk->bshk", weights, value).reshape(batch, seq, hidden)
    return out @ p["out"]
