"""Every two values of two options together, of plans of one program and of two stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from allpairspy import AllPairs
from jax.sharding import PartitionSpec

import autopar
from tests.clusters import SLOW_8
from tests.compare import OPTIMISED

LAYERS, WIDTH, EXAMPLES = 4, 16, 32
CACHE = "cache"
"""In place of a folder."""

DEGREES = ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tensor": 2}, {"sequence": 2, "zero": 3})
METHODS = ("data_parallel", "zero2", "zero3", "tensor_parallel")

ONE: Mapping[str, tuple[Any, ...]] = {
    "stages": (None, 1),
    "mesh": (None, 8, "2x4", (2, 2, 2)),
    "mesh_axes": (2, 3),
    "memory_bytes": (None, 10**8),
    "num_microbatches": (1, 2, 4, "auto"),
    "constraints": (None, {"args[0]['w'][0]": PartitionSpec("x", None)}),
    "forbid": ((), "all-gather", ("all-to-all", "reduce-scatter")),
    "how": ({}, *({"method": method} for method in METHODS), *DEGREES),
    "batch_axis": (None, "x", 0),
    "recompute": (None, True, False),
    "time_limit_s": (None, 600.0),
    "solver": ("auto", "highs", "cbc"),
    "donate_argnums": ((), 0),
    "batch_argnums": (None, {1: 0}),
    "on_unsupported": ("replicate", "error"),
    "compiler_options": (None, OPTIMISED),
}
TWO: Mapping[str, tuple[Any, ...]] = {
    "stages": (2, (2, 2), None),
    "stage_starts": ([0, 2], [0, 1]),
    "layers": (None, LAYERS),
    "mesh": (None, "4", ["2x2", 4]),
    "mesh_axes": (2, 3),
    "submeshes": (None, ["1x4"], [(1, 4), (1, 4)]),
    "virtual_stages": (None, 1),
    "schedule": (None, "1f1b", ("gpipe", "zb_h1")),
    "uniform_stages": (False, True),
    "resharding": ("auto", "send_recv", "scatter_all_gather"),
    "how": ({}, {"method": "zero2"}, *DEGREES),
    "whole_examples": (False, True),
    "batch_axis": (None, "x", 0, [()]),
    "recompute": (None, True, False, "full", ("none", "dots")),
    "num_microbatches": (2, 4),
    "memory_bytes": (None, 10**8),
    "constraints": (None, {"args[0]['w'][0]": PartitionSpec("x", None)}),
    "forbid": ((), "all-gather", ("all-to-all", "reduce-scatter")),
    "time_limit_s": (None, 600.0),
    "solver": ("auto", "highs", "cbc"),
    "workers": (1, 2),
    "cache": (None, CACHE),
    "donate_argnums": ((), 0),
    "batch_argnums": (None, {1: 0}),
    "on_unsupported": ("replicate", "error"),
    "compiler_options": (None, OPTIMISED),
}


def rows(values: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Options that together have every two values of two of them, but for those that are refused as options
    (`tests.null.test_degrees`); ``how`` stands for several. The covering array is of positions, as values may not be
    hashable."""

    def named(row: Sequence[int]) -> dict[str, Any]:
        return {name: values[name][i] for name, i in zip(values, row, strict=False)}

    found = AllPairs([list(range(len(each))) for each in values.values()], filter_func=lambda row: _can_be(named(row)))
    return [named(row) for row in found]


def _can_be(options: Mapping[str, Any]) -> bool:
    """False where degrees make the mesh, and the batch's axes, that another option says, or a mesh its axes."""
    degrees = options.get("how", {}).keys() - {"method", "zero"}
    if degrees and any(options.get(name) is not None for name in ("mesh", "batch_axis", "constraints")):
        return False
    if options.get("mesh_axes") == 3 and (degrees or options.get("mesh") is not None):
        return False
    if "sequence" in degrees and options.get("whole_examples"):
        return False
    return not ("zero" in options.get("how", {}) and options.get("batch_axis") == [()])


def train(state: Any, batch: Any) -> Any:
    """A chain of equal layers."""

    def loss_of(weights: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = autopar.value_and_grad(loss_of)(state["w"], batch)
    new = [w - 0.1 * m for w, m in zip(state["w"], grads, strict=True)]
    return {"w": new, "n": state["n"] + 1}, loss


def create() -> Any:
    """The state, float64 where that is on."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {"w": [0.3 * jax.random.normal(k, (WIDTH, WIDTH), float) for k in keys], "n": jnp.zeros((), int)}


def batch(seed: int = 0) -> Any:
    """Arrays of NumPy, of the state's dtype."""
    random, dtype = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(np.float64)
    return {name: random.normal(size=(EXAMPLES, WIDTH)).astype(dtype) for name in "xy"}


def step_of(options: Mapping[str, Any], folder: Any, **more: Any) -> Any:
    """The step, parallelized for `SLOW_8`."""
    given = {name: folder if value == CACHE else value for name, value in options.items()}
    given |= given.pop("how", {})
    return autopar.parallelize(train, **{"cluster": SLOW_8, **given, **more})
