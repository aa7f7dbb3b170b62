"""The models of Alpa's own tests (Zheng et al., OSDI 2022), rebuilt: an MLP, a transformer without embeddings, a
convolution net and a mixture-of-experts layer, all with Adam. In: sizes. Out: a `Model` in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.models.base import Init, Model, Tree, train_model
from tests.models.plain import attend, layer_norm


def mlp(*, batch: int, hidden: int, layers: int = 6) -> Model:
    """Square dense layers with bias and relu; mean squared error."""
    init = Init("float32")
    params = [{"w": init.normal(hidden, hidden), "b": init.zeros(hidden)} for _ in range(layers)]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        h = batch["x"]
        for i, layer in enumerate(params):
            h = h @ layer["w"] + layer["b"]
            if i < len(params) - 1:
                h = jax.nn.relu(h)
        return jnp.mean(jnp.square(h - batch["y"]))

    data = {k: init.normal(batch, hidden, scale=1.0) for k in ("x", "y")}
    return train_model("alpa_mlp", loss, params, data, microbatches=(1, 2))


def transformer(*, batch: int, seq: int, hidden: int, heads: int = 8, layers: int = 2, remat: bool = False) -> Model:
    """Post-norm encoder blocks on given hidden states, with an attention mask as an input; mean squared error."""
    init = Init("float32")

    def block_params() -> Tree:
        return {
            "q": init.normal(hidden, hidden),
            "k": init.normal(hidden, hidden),
            "v": init.normal(hidden, hidden),
            "out": init.normal(hidden, hidden),
            "up": init.normal(hidden, 4 * hidden),
            "down": init.normal(4 * hidden, hidden),
            "bias": {
                **{n: init.zeros(hidden) for n in ("q", "k", "v", "out", "down")},
                "up": init.zeros(4 * hidden),
            },
            "ln1": {"scale": init.ones(hidden), "bias": init.zeros(hidden)},
            "ln2": {"scale": init.ones(hidden), "bias": init.zeros(hidden)},
        }

    params = [block_params() for _ in range(layers)]

    def block(p: Tree, x: jax.Array, mask: jax.Array) -> jax.Array:
        b = p["bias"]
        q, k, v = (x @ p[n] + b[n] for n in ("q", "k", "v"))
        x = layer_norm(p["ln1"], x + attend(q, k, v, heads, mask) @ p["out"] + b["out"])
        h = jax.nn.gelu(x @ p["up"] + b["up"]) @ p["down"] + b["down"]
        return layer_norm(p["ln2"], x + h)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        run = jax.checkpoint(block) if remat else block
        x = batch["x"]
        for p in params:
            x = run(p, x, batch["mask"][:, None, None, :])
        return jnp.mean(jnp.square(x - batch["y"]))

    data: dict[str, Any] = {k: init.normal(batch, seq, hidden, scale=1.0) for k in ("x", "y")}
    data["mask"] = init.rng.random((batch, seq)) > 0.2
    data["mask"][:, 0] = True
    return train_model("alpa_transformer", loss, params, data, microbatches=(1, 2))


def conv(*, batch: int, size: int, channels: int, layers: int = 3) -> Model:
    """Convolutions 3×3 with relu and 2×2 average pooling, then a dense layer; mean squared error."""
    init = Init("float32")
    params = {
        "conv": [init.normal(3, 3, channels, channels) for _ in range(layers - 1)],
        "bias": [init.zeros(channels) for _ in range(layers - 1)],
        "head": init.normal((size >> (layers - 1)) ** 2 * channels, 8),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for w, b in zip(params["conv"], params["bias"], strict=True):
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
            x = lax.reduce_window(jax.nn.relu(x), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        out = x.reshape(x.shape[0], -1) @ params["head"]
        return jnp.mean(jnp.square(out - batch["y"]))

    data = {"x": init.normal(batch, size, size, channels, scale=1.0), "y": init.normal(batch, 8, scale=1.0)}
    return train_model("alpa_conv", loss, params, data, microbatches=(1, 2))


def moe(*, batch: int = 64, seq: int = 16, hidden: int = 64, experts: int = 16, heads: int = 8) -> Model:
    """One layer: attention, then top-2 experts with a capacity per example, both with residual and norm."""
    init = Init("float32")
    capacity = 2 * 2 * seq // experts
    params = {
        **{n: init.normal(hidden, hidden) for n in ("q", "k", "v", "out")},
        "gate": init.normal(hidden, experts),
        "up": init.normal(experts, hidden, 4 * hidden, scale=hidden**-0.5),
        "down": init.normal(experts, 4 * hidden, hidden, scale=(4 * hidden) ** -0.5),
        "ln1": {"scale": init.ones(hidden), "bias": init.zeros(hidden)},
        "ln2": {"scale": init.ones(hidden), "bias": init.zeros(hidden)},
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        p, x = params, batch["x"]
        x = layer_norm(p["ln1"], x + attend(x @ p["q"], x @ p["k"], x @ p["v"], heads, None) @ p["out"])
        gates = jax.nn.softmax(x @ p["gate"])
        first = jax.nn.one_hot(jnp.argmax(gates, -1), experts, dtype=x.dtype)
        others = gates * (1 - first)
        second = jax.nn.one_hot(jnp.argmax(others, -1), experts, dtype=x.dtype)
        place1 = (jnp.cumsum(first, 1) - first) * first
        place2 = (jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)) * second
        combine = jnp.zeros((), x.dtype)
        for mask, place in ((first, place1), (second, place2)):
            slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
            combine = combine + jnp.einsum("gs,gse,gsc->gsec", (gates * mask).sum(-1), mask, slot)
        dispatch = (combine > 0).astype(x.dtype)
        h = jax.nn.relu(jnp.einsum("egcd,edf->egcf", jnp.einsum("gsec,gsd->egcd", dispatch, x), p["up"]))
        y = jnp.einsum("gsec,egcd->gsd", combine, jnp.einsum("egcf,efd->egcd", h, p["down"]))
        return jnp.mean(jnp.square(layer_norm(p["ln2"], x + y) - batch["y"]))

    data = {k: init.normal(batch, seq, hidden, scale=1.0) for k in ("x", "y")}
    return train_model("alpa_moe", loss, params, data, microbatches=(1, 2))
