"""What users call: `parallelize`, which makes a `Step` of a function.

``autopar.parallelize(step)`` looks like the step. Its first call for new shapes traces, plans, compiles and runs;
later ones go straight to the compiled program. ``.plan``, ``.lower`` and ``.init`` are the same steps one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from autopar.step.options import Options
from autopar.step.step import Step

P = ParamSpec("P")
R = TypeVar("R")


@overload
def parallelize(fun: Callable[P, R], /, **options: Unpack[Options]) -> Step[P, R]: ...
@overload
def parallelize(fun: None = None, /, **options: Unpack[Options]) -> Callable[[Callable[P, R]], Step[P, R]]: ...
def parallelize(fun: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Plans a train step and runs it sharded; use bare, ``@parallelize``, or with options.

    Args:
        fun: the step, ``step(state, batch, …)``, as it runs on one device: pytrees of arrays in, pytrees of arrays out.
            A `Step` gets these options beside its own.
        cluster: ClusterSpec, preset (``"dgx-h100:4"``) or file; default: this process's devices. ``"ray"``, or what
            `autopar.init` returned: planned for that cluster, and run on it.
        mesh: logical mesh shape, ``(2, 4)`` or ``"2x4"``, or a `jax.sharding.Mesh` whose axis names pins refer to; of
            stages, shapes that their meshes may have. Default: the best of those that fit the cluster.
        mesh_axes: axes of a mesh at most, 2 or 3, where ``mesh`` says nothing. Of stages, three are tried on parts of
            the cluster that the best stages have with two.
        memory_bytes: limit per device, in bytes. Default: what programs can have of its memory
            (`DeviceSpec.usable_bytes`).
        num_microbatches: parts of the batch that a step goes through one after the other, or sends through its stages
            (see `autopar.serial`); ``"auto"``: as many as are best, of one divisor of the batch for each power of two,
            where the step takes its gradients by `autopar.value_and_grad`; else 1.
        constraints: pins: argument path glob (``"args[0].params*"``), output path glob (``"out[0]*"``) or name of an
            intermediate (``"name:hidden"``, by `jax.ad_checkpoint.checkpoint_name`) → PartitionSpec. A dimension
            ``PartitionSpec.UNCONSTRAINED`` is left to the planner. Of several that match, the last one holds. An
            argument and the result that is its new value have one sharding: a pin of either holds for both. Axes are
            looked up in the mesh of each stage that has the value.
        forbid: collectives not to use: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``,
            ``collective-permute``; one, or several.
        method: ``auto``; or force ``data_parallel``, ``zero2``, ``zero3`` or, of one program, ``tensor_parallel``.
        zero: state that is split over the axes that the batch is split over: 0 none, 1 the optimizer's, 2 also sums of
            gradients over microbatches, 3 also parameters; default: what is best.
        tensor: degree, a number of devices: those that share each weight. Where a degree (``tensor``, ``sequence``,
            ``experts``) or ``zero`` is given, the degrees that are not are 1, and the rest of the devices have examples
            of their own, on each stage's mesh.
        sequence: degree: devices that share each example's positions.
        experts: degree: devices that share the experts' weights.
        batch_axis: the mesh axis, by name or position, that the batch is split over. Of stages also a list of what each
            has (of one entry: all), which is an axis, several, ``()`` for none, or None to leave it to the planner.
        whole_examples: of stages: no example is split, neither its positions nor its rows of pixels.
        recompute: compute values of the forward pass again instead of keeping them: where nothing that fits the limit
            is found without, or what is takes a tenth longer than without a limit (None), wherever a plan that fits
            gets faster by it (True), or never (False). Of stages also what layers may do: ``none`` (all is kept),
            ``dots`` (contractions and reductions are, but not scores of attention and their like), ``full`` (nothing
            is), or several of these.
        stages: on meshes of their own, through which the step runs as a pipeline: how many, or the least and the most,
            ``(2, None)``. Every option below that says something of stages asks for some. Default: one program on one
            mesh (which is what 1 asks for), or stages where these are faster by more than 1 %; one program where
            ``mesh``, ``method`` or ``batch_axis`` say how that is to be.
        stage_starts: the first layer of every stage, from 0.
        layers: how many layers to cut the step into; ``"names"``: one per block that the user named; default: repeated
            blocks.
        submeshes: what stages may run on: (hosts, devices of each), or ``"1x4"``; with ``stage_starts`` and one for
            each stage, that stage's.
        virtual_stages: so many stages on each mesh, which runs them in turn, as ``interleaved_1f1b`` has them; 1: no
            schedule of several.
        schedule: names of those allowed: ``gpipe``, ``1f1b``, ``eager_1f1b``, ``interleaved_1f1b``, ``zb_h1``,
            ``zb_h2``, ``inference``; default: all that suit the step.
        uniform_stages: all stages on submeshes of one kind.
        resharding: how values get from mesh to mesh: ``auto``, the fastest; or one way, to compare:
            ``split_broadcast``, ``broadcast_greedy``, ``broadcast``, ``send_recv``, ``scatter_all_gather``.
        time_limit_s: seconds after which the search ends with the best plan so far, as it does at Ctrl-C; default: its
            own end.
        solver: ``auto``, ``highs`` or ``cbc``.
        workers: planning processes for stages; default: one a core.
        cache: a folder in which solved layers and pipelines are kept: planning the same again takes tracing alone.
        donate_argnums: positions of arguments whose memory the step may use for its results, as in `jax.jit`.
        static_argnums: positions of arguments that are Python values and part of what is traced, as in `jax.jit`.
        batch_argnums: which arguments carry the batch, by position or name, or {argument: dimension}; default: the
            second, dimension 0.
        on_unsupported: operators that nobody has described run whole on every device, with a warning (``replicate``),
            or are refused (``error``).
        plan: replay this plan, or the one in this file, instead of planning.
        compiler_options: XLA's, beside those that autopar needs.
        deadline_s: on a Ray: seconds for a step, after which its workers are ended; default: 300 s.
        progress: called with an `autopar.Progress` as planning goes on; what is compiled is logged.

    Returns:
        A `Step`; without ``fun``, a decorator that makes one.

    Raises:
        OptionError: an option's value is not one, or cannot be together with another.
        ClusterError: ``cluster`` names none, or ``mesh`` is no shape.
        PlanFormatError: the file of ``plan`` cannot be read, is damaged, or of another schema version; the plan
            contradicts itself, or its schedule cannot be run.

    References:
        Two levels, operators and stages: Zheng et al., "Alpa" (OSDI 2022). Operators over mesh axes: Xu et al., "GSPMD"
        (2021). ``zero``: Rajbhandari et al., "ZeRO" (SC 2020). ``schedule``: Huang et al., "GPipe" (NeurIPS 2019);
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021),
        for 1F1B and its interleaved form; Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024). ``resharding``,
        and eager 1F1B: Zhuang et al., "On Optimizing the Communication of Model Parallelism" (MLSys 2023).
    """
    if fun is None:
        return functools.partial(parallelize, **options)
    return fun.with_options(**options) if isinstance(fun, Step) else Step(fun, options)
