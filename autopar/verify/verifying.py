"""`autopar.verify_step`: a plan's predictions held against what the real compiler makes of it, without the hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.cost.roofline import WHILE_TRIPS
from autopar.ir.errors import CompilerError
from autopar.ir.plan import Plan
from autopar.step.step import Step
from autopar.verify.compilers import described
from autopar.verify.environment import COMPILERS, Compiler, compiler_of
from autopar.verify.programs import compiled_programs
from autopar.verify.verdict import Verification, verification


def verify_step(step: Step[..., Any], *args: Any, compiler: Compiler | None = None, **kwargs: Any) -> Verification:
    """Compiles a planned step ahead of time for the plan's own devices, and compares.

    Collectives (bytes by kind and mesh axes), peak memory and its parts, FLOPs, bytes between memory and chip, and
    seconds, which `verify.estimate` finds from the compiled text with the rates of the plan's cluster. Nothing runs.
    ``print`` shows the result; its ``agrees`` is False where a figure is past its tolerance (`verdict.TOLERANCES`).

    Args:
        step: what `autopar.parallelize` returned; it is planned if it has not been.
        args: arrays or ShapeDtypeStructs, as a call of the step has them.
        kwargs: the same.
        compiler: ``cpu``, ``cuda`` or ``tpu``; default: that of the plan's cluster. ``cuda`` and ``tpu`` come with the
            extras ``verify-cuda`` and ``verify-tpu``; the CPU's, for a plan of others, tells of collectives and FLOPs.

    Returns:
        A `Verification`; ``str`` of it is the table.

    Raises:
        CompilerError: the compiler is not installed, cannot compile for such devices, or failed.
        TraceError: the step cannot be traced; and what else `Step.plan` raises.
    """
    bound = step.bound(*args, **kwargs)
    plan = bound.plan.data
    chosen = compiler_of(plan.cluster) if compiler is None else compiler
    if chosen not in COMPILERS:
        raise CompilerError(f"compiler={chosen!r}: known are {', '.join(COMPILERS)}")
    devices = described(chosen, plan.cluster)
    programs, held = compiled_programs(bound, devices, step.compiler_options, WHILE_TRIPS)
    return verification(plan, chosen, programs, held, WHILE_TRIPS)


def step_of(target: Callable[..., Any], plan: Plan) -> Step[..., Any]:
    """``target``, a train step or what `autopar.parallelize` made of one, to run as ``plan`` says: with its own options
    on arguments, and what the plan donates donated."""
    given: dict[str, Any] = {"plan": plan}
    if isinstance(target, Step):
        own = target.arguments
        given |= {
            "donate_argnums": own.donate_argnums, "static_argnums": own.static_argnums,
            "batch_argnums": own.batch_argnums, "compiler_options": target.compiler_options,
        }  # fmt: skip
        return Step(target.fun, given)
    donated = {a.path.partition("]")[0].removeprefix("args[") for a in plan.inputs if a.donated_to >= 0}
    return Step(target, {**given, "donate_argnums": tuple(sorted(int(n) for n in donated if n.isdigit()))})
