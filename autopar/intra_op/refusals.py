"""Why no plan of one program was found, by how much what there is misses, and what may help."""

from __future__ import annotations

from autopar.intra_op.flatten import Flat
from autopar.intra_op.plan_search import SOLVE_S, FoundPlan
from autopar.intra_op.problem import argument_bytes, least_argument_bytes
from autopar.intra_op.remat.choose import UNDONE, Kept
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import AutoparError, InfeasibleError, SolverTimeoutError
from autopar.ir.plan import PlanConfig
from autopar.ir.strategy import SolverReport
from autopar.ir.text import bytes_text


class OverLimitError(InfeasibleError):
    """The fastest plan, of ``step_s`` seconds and ``peak_bytes`` on a device, does not fit ``limit_bytes``, and no
    other was asked for."""

    def __init__(self, message: str, step_s: float, peak_bytes: float, limit_bytes: float) -> None:
        super().__init__(message)
        self.step_s, self.peak_bytes, self.limit_bytes = step_s, peak_bytes, limit_bytes


def no_plan(report: SolverReport, config: PlanConfig, why: str) -> AutoparError:
    """What to raise where no plan was found: ``why`` is proven, unless time ended the search."""
    if report.status != "time_limit":
        return InfeasibleError(why)
    passed = f"{SOLVE_S:g} s passed (time_limit_s= gives more)"
    if config.time_limit_s is not None:
        passed = f"time_limit_s={config.time_limit_s:g} passed"
    return SolverTimeoutError(f"{passed} before a plan was found; until then: {why}")


def contradiction(mesh: LogicalMesh, config: PlanConfig) -> str:
    """Why no plan at all is what was asked for."""
    asked = [f"method={config.method!r}"] if config.method != "auto" else []
    asked += [f"forbid={', '.join(config.forbid)}"] if config.forbid else []
    asked += [f"batch_axis={config.batch_axis!r}"] if config.batch_axis is not None else []
    asked += [str(config.degrees)] if config.degrees else []
    asked += [f"constraints of {', '.join(pin.target for pin in config.pins)}"] if config.pins else []
    asked += [] if asked else ["the sharding constraints in the step"]
    return (
        f"no plan on mesh {mesh} has all that is asked for: {'; '.join(asked)}. Values would have to be resharded by "
        "what is forbidden, or operators run as no strategy of theirs does. Leave one of these out"
    )


def refusal(found: FoundPlan, limit: int, config: PlanConfig, kept: Kept) -> str:
    """Why there is no plan, and what may help."""
    graph, nearest, least = found.nearest.posed.graph, found.nearest, found.least_bytes
    over = f"memory_bytes={limit} ({bytes_text(limit)} a device) on mesh {graph.mesh.logical}"
    arguments = least_argument_bytes(graph)
    if arguments > limit:
        return (
            f"no plan fits {over}: its arguments take at least {bytes_text(arguments)}, "
            f"{bytes_text(arguments - limit)} over the limit. More devices lower it"
        )
    ways, end = "More devices, more microbatches (num_microbatches), a smaller batch or ", ""
    if not kept.within:
        ways, end = ways + "jax.checkpoint in the body of a scan", f"; other recomputation does not: {UNDONE}"
    elif config.recompute is False:
        ways += "recomputation (recompute=None, or jax.checkpoint)"
    else:
        ways, end = ways + "jax.checkpoint in the body of a scan", "; recomputing other values was tried"
    advice = f"{ways} lower it{end}"
    if least > limit:
        every = "every plan that recomputes nothing" if kept.within else "every plan"
        return (
            f"no plan fits {over}: {every} needs at least {bytes_text(least)}, {bytes_text(least - limit)} over the "
            f"limit. {advice}"
        )
    return (
        f"no plan found fits {over}: the least peak found is {bytes_text(nearest.peak)}, "
        f"{bytes_text(nearest.peak - limit)} over the limit, at {_where(graph.flat, nearest.worst)}; of it "
        f"{bytes_text(argument_bytes(nearest.out))} are arguments. {advice}"
    )


def _where(flat: Flat, n: int) -> str:
    node = flat.node[n]
    return str(node) if node is not None else f"a loop's {flat.kind[n]}"
