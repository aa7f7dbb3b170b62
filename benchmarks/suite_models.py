"""The suite: train steps at the sizes of Alpa's suites, and newer ones, by name.

In: nothing. Out: `SUITE`, name → `Row`; ``SUITE["gpt-39B"].build(batch)`` is a train step and its arguments for
``batch`` examples, so that a planner may ask for the whole batch or for one microbatch. Arguments are
ShapeDtypeStructs: nothing is allocated, whatever the size.

Alpa's rows are `benchmarks.suite_configs.ALPA_SUITE`. What Alpa's code does and that table does not say: all models
rematerialise every block, the Wide-ResNets too. float16 steps have no loss scaling, which costs next to nothing. Not
Alpa's: numbers of devices, batches and microbatches of the Llamas and the ViT are ours, with about 65,000 tokens a
microbatch; the ViT's batch of 4096 is its paper's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks import alpa_gpt, large_models, llama, models, suite_vision
from benchmarks.layers import Step
from benchmarks.suite_configs import ALPA_SUITE

Build = Callable[[int], Step]
"""Number of examples → (train step, its arguments as ShapeDtypeStructs); the state is the first argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model at one size, the devices it is for, and its batch. ``build_scanned`` has one traced block for all layers,
    where the family offers that."""

    family: str
    name: str
    gpus: int
    num_microbatches: int
    global_batch: int
    build: Build
    build_scanned: Build | None = None

    @property
    def microbatch(self) -> int:
        """Examples of a microbatch."""
        return self.global_batch // self.num_microbatches


def num_parameters(args: tuple[Any, ...]) -> int:
    """Of a step's arguments: the entries of the first part of the state."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(args[0][0]))


def _gpt(config: dict[str, Any], batch: int, *, scan: bool) -> Step:
    suite = ALPA_SUITE["gpt"]
    return models.gpt(
        layers=config["layers"],
        hidden=config["hidden"],
        heads=config["heads"],
        seq=suite["seq_len"],
        vocab=suite["vocab"],
        dtype=suite["dtype"],
        remat=suite["remat"],
        scan=scan,
        batch=batch,
        weight_decay=0.01,
    )


def gpt_as_measured(name: str, batch: int) -> Step:
    """A row of the GPTs, ``gpt-2.6B`` say, in the number formats of Alpa's own benchmark (`benchmarks.alpa_gpt`)."""
    suite = ALPA_SUITE["gpt"]
    config = next(c for c in suite["models"] if f"gpt-{c['name']}" == name)
    sizes = {key: config[key] for key in ("layers", "hidden", "heads")}
    return alpa_gpt.gpt(**sizes, seq=suite["seq_len"], vocab=suite["vocab"], batch=batch)


def _moe(config: dict[str, Any], batch: int) -> Step:
    suite = ALPA_SUITE["moe"]
    return large_models.moe(
        layers=config["layers"],
        hidden=config["hidden"],
        heads=suite["heads"],
        experts=config["experts"],
        mlp_factor=suite["mlp_factor"],
        group=suite["expert_group_size"],
        seq=suite["seq_len"],
        vocab=suite["vocab"],
        dtype=suite["dtype"],
        remat=True,
        batch=batch,
    )


def _wide_resnet(config: dict[str, Any], batch: int) -> Step:
    return suite_vision.wide_resnet(
        layers=config["layers"],
        channels=config["channels"],
        width=config["width"],
        image=ALPA_SUITE["wide_resnet"]["image"],
        batch=batch,
    )


def _u_transformer(config: dict[str, Any], batch: int) -> Step:
    suite = ALPA_SUITE["u_transformer"]
    return suite_vision.u_transformer(
        channels=config["channels"],
        multipliers=tuple(suite["channel_multipliers"]),
        layers_per_block=suite["layers_per_block"],
        image=suite["image"],
        remat=suite["remat"],
        batch=batch,
    )


def _llama(sizes: dict[str, int], batch: int, *, scan: bool) -> Step:
    return llama.llama(**sizes, batch=batch, scan=scan)


def _vit(batch: int) -> Step:
    return suite_vision.vit(batch=batch)


def _alpa_rows(family: str, build: Callable[..., Step], scans: bool = False) -> dict[str, Row]:
    suite = ALPA_SUITE[family]
    rows: dict[str, Row] = {}
    for config in suite["models"]:
        name = f"{family.replace('_', '-')}-{config['name']}"
        rows[name] = Row(
            family=family,
            name=name,
            gpus=config["gpus"],
            num_microbatches=config["microbatches"],
            global_batch=config.get("batch") or suite["global_batch"],
            build=functools.partial(build, config, **({"scan": False} if scans else {})),
            build_scanned=functools.partial(build, config, scan=True) if scans else None,
        )
    return rows


def _llama_row(name: str, *, gpus: int, num_microbatches: int, global_batch: int, **sizes: int) -> Row:
    return Row(
        family="llama",
        name=name,
        gpus=gpus,
        num_microbatches=num_microbatches,
        global_batch=global_batch,
        build=functools.partial(_llama, sizes, scan=False),
        build_scanned=functools.partial(_llama, sizes, scan=True),
    )


SUITE: dict[str, Row] = {
    **_alpa_rows("gpt", _gpt, scans=True),
    **_alpa_rows("moe", _moe),
    **_alpa_rows("wide_resnet", _wide_resnet),
    **_alpa_rows("u_transformer", _u_transformer),
    "llama-3-8B": _llama_row("llama-3-8B", gpus=8, num_microbatches=16, global_batch=128),
    "llama-3-70B": _llama_row(
        "llama-3-70B", gpus=64, num_microbatches=64, global_batch=512, layers=80, hidden=8192, heads=64, inner=28672
    ),
    "vit-h-14": Row(family="vit", name="vit-h-14", gpus=8, num_microbatches=16, global_batch=4096, build=_vit),
}
"""Name → row. Building imports nothing further and starts no backend's arrays."""
