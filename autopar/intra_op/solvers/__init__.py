"""What solves a reduced problem exactly, by name: a new solver is a file here and its line in `SOLVERS`."""

from __future__ import annotations

from autopar.intra_op.solvers.cbc import CBC
from autopar.intra_op.solvers.exact import ExactSolver
from autopar.intra_op.solvers.highs import HIGHS

SOLVERS: dict[str, ExactSolver] = {solver.name: solver for solver in (HIGHS, CBC)}
"""In the order in which ``auto`` looks for one that is installed."""

CHOICES = ("auto", *SOLVERS)


def solver_named(wanted: str) -> ExactSolver:
    """The solver of that name; of ``auto``, the first that is installed.

    Raises:
        ValueError: it is not installed.
    """
    for name, solver in SOLVERS.items():
        if wanted in ("auto", name) and solver.available():
            return solver
    raise ValueError(f"solver {wanted!r} is not installed; HiGHS comes with `pip install highspy`")
