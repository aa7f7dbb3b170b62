"""Plans that no cost model would choose: to see that any plan, not only a good one, gives the right numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.intra_op import mesh_problem
from autopar.intra_op import solve as solver
from autopar.ir.strategy import Problem, Solution


@contextlib.contextmanager
def random_strategies(seed: int) -> Iterator[None]:
    """Plans made inside are random: the solver sees random costs in place of the real ones, and no memory limit."""
    rng = np.random.default_rng(seed)

    def noise(costs_s: Any) -> Any:
        return np.where(np.isfinite(costs_s), rng.random(np.shape(costs_s)), np.inf)

    def solve(problem: Problem, *args: Any, **options: Any) -> Solution:
        nodes = tuple(replace(n, costs_s=noise(n.costs_s)) for n in problem.nodes)
        edges = tuple(replace(e, costs_s=0.1 * noise(e.costs_s)) for e in problem.edges)
        return solver.solve(replace(problem, nodes=nodes, edges=edges, limit_bytes=None), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_problem, "solve", solve)
        yield
