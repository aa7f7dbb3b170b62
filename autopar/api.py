"""What users call: `parallelize`, its options, and which kind of step they make.

``autopar.parallelize(step)`` looks like the step. Its first call for new shapes traces, plans, compiles and runs;
later ones go straight to the compiled program. ``.plan``, ``.lower`` and ``.init`` are the same steps one by one.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import OptionError
from autopar.ir.plan import Plan
from autopar.runtime.on_ray.ray_cluster import Cluster
from autopar.step.parallelized import Parallelized
from autopar.step.pipeline_step import pipelined
from autopar.step.step_plan import StepPlan


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: int | Sequence[int] | str | Mesh | None = None,
    cluster: ClusterSpec | Cluster | str | None = None,
    memory_bytes: int | None = None,
    num_microbatches: int = 1,
    constraints: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    batch_argnums: Any = None,
    method: str = "auto",
    forbid: Sequence[str] = (),
    batch_axis: str | None = None,
    plan: StepPlan | Plan | str | os.PathLike[str] | None = None,
    time_limit_s: float = 60.0,
    solver: str = "auto",
    recompute: bool | None = None,
    on_unsupported: str = "replicate",
    pipeline: bool | Mapping[str, Any] = False,
    stages: int | None = None,
) -> Any:
    """Plans a train step and runs it sharded; use bare, ``@parallelize``, or with options.

    Args:
        fun: the step, ``step(state, batch, …)``, as it runs on one device.
        mesh: logical mesh shape, ``(2, 4)`` or ``"2x4"``, or a `jax.sharding.Mesh` whose axis names pins refer to.
            Default: the best of the shapes that fit the cluster.
        cluster: ClusterSpec, preset (``"dgx-h100:4"``) or file. Default: this process's devices. For pipelines also
            ``"ray"``, or what `autopar.init` returned: planned for that cluster, and run on it.
        memory_bytes: limit per device. Default: the device's memory.
        num_microbatches: gradient accumulation; see `autopar.serial`.
        constraints: pins: argument path glob (``"args[0].params*"``), output path glob (``"out[0]*"``) or name of an
            intermediate (``"name:hidden"``, by `jax.ad_checkpoint.checkpoint_name`) → PartitionSpec. A dimension
            ``PartitionSpec.UNCONSTRAINED`` is left to the planner. Of several that match, the last one holds. An
            argument and the result that is its new value have one sharding: a pin of either holds for both.
        donate_argnums, static_argnums: as in jax.jit.
        batch_argnums: which arguments carry the batch; default the second, dimension 0.
        method: ``auto``; or force ``data_parallel``, ``zero2``, ``zero3`` or ``tensor_parallel``.
        forbid: collectives not to use: ``all-gather``, ``all-to-all``, ``reduce-scatter``.
        batch_axis: force the batch dimension onto this mesh axis.
        plan: replay this plan instead of planning.
        time_limit_s: solver's limit, seconds.
        solver: ``auto``, ``highs`` or ``cbc``.
        recompute: compute values of the forward pass again instead of keeping them: where nothing that fits the limit
            is found without (None), also where a plan that fits gets faster by it (True), or never (False).
        on_unsupported: operators that nobody has described run whole on every device, with a warning (``replicate``),
            or are refused (``error``).
        pipeline: plan stages on meshes of their own, and run the step as a pipeline: True, or options of
            `autopar.plan_pipeline`, ``{"schedules": "1f1b", "layers": 8}``. Of the options above it takes ``cluster``,
            ``memory_bytes``, ``num_microbatches``, ``forbid``, ``on_unsupported``, the argnums, and as ``plan`` a
            `PlannedPipeline`.
        stages: how many; implies ``pipeline``.

    Returns:
        A `Parallelized` step, or a `PipelineStep`.

    Raises:
        ClusterError, MicrobatchError, OptionError, PlanFormatError: an option's value is not one.
    """
    options = {name: value for name, value in locals().items() if name != "fun"}
    if fun is None:
        return functools.partial(parallelize, **options)
    if pipeline is not False or stages is not None:
        return pipelined(
            fun, options, {name: p.default for name, p in inspect.signature(parallelize).parameters.items()}
        )
    if cluster == "ray" or isinstance(cluster, Cluster):
        raise OptionError(
            "cluster: on a Ray, steps run as pipelines; give pipeline=True, or stages=1 for a single mesh"
        )
    return Parallelized(fun, options, parallelize)
