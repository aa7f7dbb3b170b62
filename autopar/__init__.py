"""autopar: automatic sharding of JAX train steps on stock JAX.

Names are resolved on first use, so that reading plans (``autopar inspect``) needs no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar.api import Parallelized, parallelize
    from autopar.arrays import Array
    from autopar.boundary import layer_boundary
    from autopar.checking import check
    from autopar.checkpoint import latest, restore, save
    from autopar.compiled_pipeline import CompiledPipeline
    from autopar.elastic import run_elastic
    from autopar.gradient import grad, value_and_grad
    from autopar.ir.errors import AutoparError, AutoparWarning
    from autopar.microbatch import serial
    from autopar.pipeline_api import PlannedPipeline, load_pipeline, plan_pipeline
    from autopar.runtime.on_ray.cluster import init
    from autopar.step_plan import StepPlan, load_plan
    from autopar.user_rules import sharding_rule

_HOME = {
    "Parallelized": "api",
    "parallelize": "api",
    "StepPlan": "step_plan",
    "load_plan": "step_plan",
    "PlannedPipeline": "pipeline_api",
    "CompiledPipeline": "compiled_pipeline",
    "Array": "arrays",
    "load_pipeline": "pipeline_api",
    "plan_pipeline": "pipeline_api",
    "value_and_grad": "gradient",
    "grad": "gradient",
    "layer_boundary": "boundary",
    "serial": "microbatch",
    "sharding_rule": "user_rules",
    "check": "checking",
    "save": "checkpoint",
    "restore": "checkpoint",
    "latest": "checkpoint",
    "run_elastic": "elastic",
    "init": "runtime.on_ray.cluster",
    "AutoparError": "ir.errors",
    "AutoparWarning": "ir.errors",
    "ClusterSpec": "ir.cluster",
    "DeviceSpec": "ir.cluster",
    "HostGroup": "ir.cluster",
    "LinkSpec": "ir.cluster",
}

__all__ = ["__version__", *_HOME]


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
