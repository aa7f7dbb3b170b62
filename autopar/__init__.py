"""autopar: automatic sharding of JAX train steps on stock JAX.

Names are resolved on first use, so that reading plans (``autopar inspect``) needs no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.arrays import Array
    from autopar.checking import check
    from autopar.checkpoint import latest, restore, save
    from autopar.elastic import run_elastic
    from autopar.frontend.gradient import grad, value_and_grad
    from autopar.frontend.layer_boundary import layer_boundary
    from autopar.frontend.microbatch import serial
    from autopar.frontend.user_rules import sharding_rule
    from autopar.ir.errors import AutoparError, AutoparWarning
    from autopar.ir.progress import Progress
    from autopar.runtime.on_ray.ray_cluster import init
    from autopar.step.step import Step
    from autopar.step.step_plan import StepPlan, load_plan
    from autopar.verify.verifying import verify_step

_HOME = {
    "Step": "step.step",
    "parallelize": "api",
    "StepPlan": "step.step_plan",
    "load_plan": "step.step_plan",
    "Array": "arrays",
    "value_and_grad": "frontend.gradient",
    "grad": "frontend.gradient",
    "layer_boundary": "frontend.layer_boundary",
    "serial": "frontend.microbatch",
    "sharding_rule": "frontend.user_rules",
    "check": "checking",
    "verify_step": "verify.verifying",
    "save": "checkpoint",
    "restore": "checkpoint",
    "latest": "checkpoint",
    "run_elastic": "elastic",
    "init": "runtime.on_ray.ray_cluster",
    "AutoparError": "ir.errors",
    "AutoparWarning": "ir.errors",
    "Progress": "ir.progress",
    "ClusterSpec": "ir.cluster",
    "DeviceSpec": "ir.cluster",
    "HostGroup": "ir.cluster",
    "LinkSpec": "ir.cluster",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


_MODULES = ("checkpoint", "data")
"""Modules that users name, found without importing them first."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"autopar.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(importlib.import_module(f"autopar.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
