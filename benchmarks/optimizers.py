"""Do optimizers tell equal layers apart? Needs no device.

    python -m benchmarks.optimizers [--model NAME …] [--only NAME …]

Twelve equal blocks of a model, unrolled, under every transformation of optax's documentation: how many distinct layers
there are to plan, beside how many there are under plain gradient descent, which joins nothing in its update. Exit
status 1 where there are more.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.frontend.layering import layered
from autopar.inter_op.layer_problems import parts_of, told_apart
from benchmarks.layers import Step, attention, attention_shapes, f32, layer_norm, norm_shapes, train_step
from benchmarks.llama import llama
from benchmarks.suite_vision import vit, wide_resnet

BLOCKS = 12


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


def bert(*, layers: int, hidden: int, heads: int, seq: int, vocab: int, batch: int, optimizer: Any) -> Step:
    """A masked language model (Devlin et al., 2019): normalised after each part, the embedding being the output matrix
    too; float32."""
    block = {
        "attention": attention_shapes(hidden, hidden),
        "norm1": norm_shapes(hidden),
        "up": f32(hidden, 4 * hidden),
        "up_bias": f32(4 * hidden),
        "down": f32(4 * hidden, hidden),
        "down_bias": f32(hidden),
        "norm2": norm_shapes(hidden),
    }
    params = {
        "embed": f32(vocab, hidden),
        "position": f32(seq, hidden),
        "norm": norm_shapes(hidden),
        "blocks": [block] * layers,
        "bias": f32(vocab),
    }

    def loss_fn(params: Any, batch: Any) -> Any:
        x = layer_norm(params["norm"], params["embed"][batch["tokens"]] + params["position"])
        for p in params["blocks"]:
            x = layer_norm(p["norm1"], x + attention(p["attention"], x, x, heads, None))
            h = jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
            x = layer_norm(p["norm2"], x + h)
        logits = x @ params["embed"].T + params["bias"]
        lost = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (lost * batch["masked"]).sum() / batch["masked"].sum()

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    data = {"tokens": tokens, "labels": tokens, "masked": f32(batch, seq)}
    return train_step(loss_fn, params, data, optimizer)


_SIZES: dict[str, Any] = {"layers": BLOCKS, "hidden": 64, "heads": 4, "batch": 8}
MODELS: dict[str, Callable[..., Step]] = {
    "llama": functools.partial(llama, **_SIZES, groups=2, inner=128, vocab=256, seq=32),
    "vit": functools.partial(vit, **_SIZES, patch=8, image=32, classes=16),
    "bert": functools.partial(bert, **_SIZES, seq=32, vocab=256),
    "resnet": functools.partial(wide_resnet, blocks=(BLOCKS,), channels=16, width=1, image=32, classes=16, batch=8),
}


def distinct(model: str, optimizer: Any) -> tuple[int, int, tuple[str, ...]]:
    """(layers, distinct ones, why equal ones are distinct) of a model's step."""
    step, args = MODELS[model](optimizer=optimizer)
    parts = parts_of(layered(step, args, num_microbatches=2).graph, ("none",))
    return len(parts.number), len(parts.example), told_apart(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, and of rows with more than the first why; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME")
    options = parser.parse_args(argv)
    plain = {model: distinct(model, optax.sgd(1e-2)) for model in options.model}
    table = Table("distinct layers under", *(f"{m}, of {layers}" for m, (layers, *_) in plain.items()))
    table.add_row("plain gradient descent", *(str(count) for _, count, _ in plain.values()))
    reasons: list[str] = []
    for name in track(options.only, console=Console(stderr=True)):
        found = {model: distinct(model, OPTIMIZERS[name]) for model in options.model}
        table.add_row(name, *(str(count) for _, count, _ in found.values()))
        for model, (_, count, why) in found.items():
            if count > plain[model][1]:
                reasons += [f"{name}, {model}: {line}" for line in why]
    Console(width=100).print(table, *reasons, sep="\n")
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
