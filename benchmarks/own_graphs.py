"""autopar's own train steps as problems for the solver: a `GraphCase` → a `MeshProblem`. Needs no device.

What planning does before and after the solver is the planner's own code (`planner.pose`), so that the problem, its
seeds and the count in full are those of a real plan. `save` writes the problems, for work on the solver alone.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.arguments import Arguments
from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.trace import trace
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.garbage import collection_paused
from autopar.intra_op.evaluate import Evaluator
from autopar.intra_op.mesh_problem import MeshProblem
from autopar.ir.plan import PlanConfig
from autopar.ir.presets import cluster_from_text
from autopar.ir.strategy import Problem
from autopar.planner import Clock, pose
from benchmarks import large_models, models

LIMIT_SHARE = 0.6
LIMIT_BETWEEN = 0.5
"""The memory limit of a limited problem: this part of the peak of the best plan without one, but no less than this far
on from what every plan needs to that peak (without rematerialisation a GPT has plans between 95 and 100 % only)."""

NEVER_FOLDED = 10**9
"""More planning nodes than any graph has."""

MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: models.gpt(layers=24),
    "gpt-remat": lambda: models.gpt(layers=24, remat=True),
    "moe": large_models.moe,
    "u-transformer": large_models.u_transformer,
}
"""Name → (train step, its arguments as ShapeDtypeStructs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCase:
    """A model of `MODELS` on a mesh of ``cluster``'s devices, equal blocks folded or not."""

    model: str
    mesh: tuple[int, ...]
    folded: bool
    cluster: str = "dgx-h100"

    @property
    def name(self) -> str:
        """``gpt-2x4-folded``: also a file's name."""
        return f"{self.model}-{'x'.join(map(str, self.mesh))}-{'folded' if self.folded else 'unfolded'}"


def pose_case(case: GraphCase) -> tuple[MeshProblem, dict[str, float]]:
    """The posed problem, and the seconds of ``trace``, ``strategies`` and ``seeds``."""
    step, args = MODELS[case.model]()
    started_s = time.perf_counter()
    traced = trace(
        step, *args, donate_argnums=(0,), expand=lambda eqn: expand_marker(eqn) if eqn.primitive is grad_p else None
    )
    graph = with_flops(traced.graph)
    clock = Clock(trace=time.perf_counter() - started_s)
    dims = Arguments(step, case.model, (0,), (), None).batch_dims(args, {})
    consts = len(traced.jaxpr.consts)
    with collection_paused():
        posed = pose(
            graph,
            logical_mesh(cluster_from_text(case.cluster), case.mesh),
            PlanConfig(mesh_shape=case.mesh),
            user_rules=registered_rules(),
            batch_inputs={consts + i: dim for i, dim in enumerate(dims) if dim is not None},
            fold_above=None if case.folded else NEVER_FOLDED,
            clock=clock,
        )
    return posed, clock.seconds


def grouped_pairs(problem: Problem) -> int:
    """Entries of all edge matrices, equal rows and columns stored once."""
    return sum(e.costs_s.size for e in problem.edges)


def limited(posed: MeshProblem, peak_bytes: int) -> Problem:
    """The problem under a limit that binds and may be kept: see `LIMIT_SHARE`. ``peak_bytes`` is the free plan's."""
    problem = posed.limited(LIMIT_SHARE * peak_bytes)
    least = Evaluator(problem).least_peak()
    return replace(problem, limit_bytes=max(LIMIT_SHARE * peak_bytes, least + LIMIT_BETWEEN * (peak_bytes - least)))


def save(directory: Path, name: str, posed: MeshProblem, problem: Problem) -> Path:
    """Pickles ``{"problem": Problem, "seeds": list of choices, "name": name}`` to ``directory``/``name``.pkl."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.pkl"
    with path.open("wb") as file:
        pickle.dump({"problem": problem, "seeds": posed.seeds, "name": name}, file, pickle.HIGHEST_PROTOCOL)
    return path
