"""A planned step → its programs, compiled by a real compiler and read: `compiled_programs`.

One program for a plan of one mesh; for stages the programs of every stage's tasks (`runtime.stage_program`), those of
stages that run the same compiled once. Nothing runs, so that devices may only be described.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.frontend.layering.layers import Layered
from autopar.frontend.user_rules import registered_rules
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import CompilerError
from autopar.ir.plan import Plan
from autopar.jax_compat import Device
from autopar.runtime.compiling import compiler_options
from autopar.runtime.meshes import stage_meshes
from autopar.runtime.one_program.executor import ProgramExecutor
from autopar.runtime.part import program_of
from autopar.runtime.stage_program import StageProgram, StageTasks
from autopar.runtime.stages import StageLowering, layers_apart
from autopar.step.planning import Bound
from autopar.verify.compilers import alone
from autopar.verify.estimate import Estimate, Rates, estimate
from autopar.verify.hlo_collectives import HloCollective, collectives
from autopar.verify.hlo_text import parse

STEP = "step"
"""The task of a plan of one program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a program holds of a device, as its compiler says: bytes of arguments, results, of these those in an
    argument's place, and temporaries."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int

    @property
    def more_bytes(self) -> int:
        """Beside the arguments while it runs."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is there while it runs."""
        return self.argument_bytes + self.more_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """``task`` of stage ``stage`` runs ``runs`` times in a step. ``compile_s``: wall seconds, of several at a time;
    ``note``: how it was compiled, where that is not as for devices that are there."""

    stage: int
    task: str
    runs: int
    memory: Memory
    estimate: Estimate
    collectives: tuple[HloCollective, ...]
    compile_s: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What a stage holds of a device beside a task: always (``state``), of each microbatch from its forward task on
    (``activation``), and of each from its input gradient on (``context``), of which ``kept`` are activations."""

    state: float
    activation: float
    context: float
    kept: float


def compiled_programs(
    bound: Bound[Any], devices: Sequence[Device], options: Mapping[str, Any], unknown_trips: int
) -> tuple[tuple[CompiledProgram, ...], tuple[HeldBytes, ...]]:
    """Every program of a planned step, and of stages what each holds between its tasks.

    Args:
        devices: of the plan's cluster, as it numbers them.
        options: compiler options of the step.
        unknown_trips: of loops whose length a program does not say.

    Raises:
        CompilerError: the compiler failed; the message says at which program.
        LoweringError, RuleError: as planning does.
    """
    plan = bound.plan.data
    if isinstance(bound.traced, Layered):
        return _stages(bound.traced, plan, devices, options, unknown_trips)
    platform = devices[0].platform
    executor = ProgramExecutor(bound.traced, plan, platform, devices, options)
    program = _compiled(0, STEP, 1, executor.lower(), plan.sharding.mesh, unknown_trips)
    return (program,), ()


def _stages(
    layered: Layered, plan: Plan, devices: Sequence[Device], options: Mapping[str, Any], unknown_trips: int
) -> tuple[tuple[CompiledProgram, ...], tuple[HeldBytes, ...]]:
    pipelined = plan.pipelined
    layers = layers_apart(layered.graph, pipelined)
    schedule, _ = program_of(layered.graph, plan, layers)
    rules = registered_rules()
    runs = Counter((t.stage, t.phase) for tasks in pipelined.plan.schedule.tasks for t in tasks)
    first: dict[Hashable, int] = {}
    same_as: list[int] = []
    held: list[HeldBytes] = []
    found: dict[int, tuple[CompiledProgram, ...]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting: dict[int, list[Any]] = {}
        for s, about in enumerate(pipelined.plan.stages):
            lowering = StageLowering(layered, pipelined, layers, s, devices[0].platform, rules)
            stage = StageTasks(lowering, s, schedule)
            held.append(_held(stage, about.mesh))
            looks = stage.looks, len(lowering.layers), plan.meshes[s].axes
            same_as.append(first.setdefault(looks, s))
            if same_as[s] != s:
                continue
            ids = about.mesh.device_ids
            own = alone([devices[i] for i in ids])
            mesh = stage_meshes(pipelined.plan, dict(zip(ids, own, strict=True)), (s,))[s]
            lowered = StageProgram(stage, mesh, compiler_options(plan, lowering.platform, options)).lower()
            waiting[s] = [
                pool.submit(_compiled, s, name, _runs(runs, s, name), each, plan.meshes[s], unknown_trips)
                for name, (_, each) in lowered.items()
            ]
        for s, futures in waiting.items():
            found[s] = tuple(each.result() for each in futures)
    programs = (replace(p, stage=s) for s, same in enumerate(same_as) for p in found[same])
    return tuple(programs), tuple(held)


def _runs(runs: Mapping[tuple[int, Any], int], stage: int, task: str) -> int:
    """How often a task runs in a step: once, or for every microbatch."""
    first = "input_grad" if task == "forward_input_grad" else "forward" if task.startswith("forward") else task
    return runs.get((stage, first), 1)


def _held(stage: StageTasks, mesh: LogicalMesh) -> HeldBytes:
    sizes: dict[Any, float] = {}
    axis_sizes = stage.lowering.axis_sizes
    same = {key for task in stage.tasks.values() for key, _ in task.same}
    for task in stage.tasks.values():
        for array in (*task.takes, *task.gives):
            parts = 1
            for axes in array.spec.dims:
                for axis in axes:
                    parts *= axis_sizes[axis]
            sizes[array.key] = array.type.size_bytes / parts
    kept = {k for k in sizes if k[0] == "kept"}
    context = {k for k in sizes if k[0] == "context"}
    state = {k for k in sizes if k[0] in ("argument", "sum", "weight", "before") and k not in same}
    late: set[Any] = set()
    if "weight_grad" in stage.tasks:
        late = {a.key for a in stage.tasks["weight_grad"].takes} & kept

    def total(keys: set[Any]) -> float:
        return sum(sizes[k] for k in keys)

    return HeldBytes(
        state=total(state), activation=total(kept), context=total(context | late), kept=total(late)
    )  # fmt: skip


def _compiled(
    stage: int, task: str, runs: int, lowered: Any, mesh: LogicalMesh, unknown_trips: int
) -> CompiledProgram:  # fmt: skip
    started_s = time.perf_counter()
    compiled, note = _by_compiler(lowered, "the step" if task == STEP else f"stage {stage}, {task}")
    module, found = parse(compiled.as_text()), compiled.memory_analysis()
    return CompiledProgram(
        stage=stage, task=task, runs=runs,
        memory=Memory(
            argument_bytes=found.argument_size_in_bytes, output_bytes=found.output_size_in_bytes,
            alias_bytes=found.alias_size_in_bytes, temporary_bytes=found.temp_size_in_bytes,
        ),
        estimate=estimate(module, Rates.of(mesh), unknown_trips), collectives=collectives(module),
        compile_s=time.perf_counter() - started_s, note=note,
    )  # fmt: skip


def _by_compiler(lowered: Any, what: str) -> tuple[Any, str]:
    """The `jax.stages.Compiled`, and a note on how that was had. Without a GPU to tune for, XLA (jax 0.10.2) writes all
    products by Triton, and fails on sizes for which that has no tiles: such a program is compiled with cuBLAS."""
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as fault:
        if "output tile sizes" not in str(fault):
            raise CompilerError(f"{what} does not compile: {str(fault)[:2000]}") from fault
    try:
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}), "products by cuBLAS"
    except jax.errors.JaxRuntimeError as fault:
        raise CompilerError(f"{what} does not compile: {str(fault)[:2000]}") from fault
