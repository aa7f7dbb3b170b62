"""Options with which a plan's programs are compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autopar.cost.collectives import COMBINED_BYTES, combined_bytes
from autopar.ir.plan import Plan
from autopar.jax_compat import COMPILER_OPTIONS

_OF_MEMORY = 95
"""Percent of a GPU's memory up to which XLA's scheduler may put off what frees memory, unless it is told less."""


def compiler_options(plan: Plan, platform: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a plan's programs need on a platform, and the user's, which count for more.

    Where a plan was made for less than programs can have of a GPU's memory, the scheduler, which puts off products to
    run beside collectives, is told so: it would use all of it. Where groups of devices are large, collectives of state
    are combined into as large ones as they are priced in.
    """
    options: dict[str, Any] = dict(COMPILER_OPTIONS.get(platform, {}))
    limit = max((w.limit_bytes for w in plan.predictions.workers), default=math.inf)
    device = min((mesh.device for mesh in plan.meshes), key=lambda device: device.usable_bytes)
    if platform == "gpu" and limit < device.usable_bytes:
        options["xla_gpu_memory_limit_slop_factor"] = math.ceil(_OF_MEMORY * limit / device.memory_bytes)
    combined = combined_bytes("gpu", max(mesh.num_devices for mesh in plan.meshes))
    if platform == "gpu" and combined > COMBINED_BYTES["gpu"]:
        for kind in ("all_gather", "all_reduce", "reduce_scatter"):
            options[f"xla_gpu_{kind}_combine_threshold_bytes"] = combined
    return options | dict(given)
