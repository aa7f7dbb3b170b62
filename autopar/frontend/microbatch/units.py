"""The smallest number of examples that a step treats apart from all others: its *unit*.

Most steps treat every example apart, and a unit is one. A mixture of experts may route the tokens of g examples as one
group, with places for so many tokens an expert; batches are then exact in parts of g examples that follow one another.
A microbatch holds whole units, of u units in n microbatches the units j, j+n, j+2n, ….

Nothing is assumed of groups. Every g that divides a microbatch is tried in ascending order, by the analysis that
decides it for single examples: the batch is B / g units instead of B examples, a dimension of B then has g for the
minor factor of its `Rows`, and what `analyse` proves of units it proves as it does of examples. The step is traced at
one microbatch for all g; only where a microbatch is one unit, at several units (`one_unit`). So a group size that
follows from the batch (``min(group, tokens)``) is seen as what it is: another program at another size.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.frontend.microbatch.accumulate import MarkerPlan, plan_marker
from autopar.frontend.microbatch.one_unit import of_microbatch, traced_size
from autopar.ir.errors import MicrobatchError
from autopar.jax_compat import JaxprEqn


def units(n: int, batch: int) -> list[int]:
    """The numbers of examples that may be a unit."""
    each = batch // n
    return [g for g in range(1, each + 1) if each % g == 0]


def plan_in_units(full: JaxprEqn, traced: Callable[[int], JaxprEqn], n: int, batch: int) -> tuple[JaxprEqn, MarkerPlan]:
    """A gradient marker's program for one of ``n`` microbatches, and how its loss follows from them.

    Args:
        full: the marker traced with all ``batch`` examples.
        traced: the same with another number of examples.

    Raises:
        MicrobatchError: no unit makes it exact; says why examples do not.
    """
    reason: MicrobatchError | None = None
    for unit in units(n, batch):
        try:
            small = of_microbatch(full, traced(traced_size(n, batch, unit)), n, batch, unit)
            return small, plan_marker(full, small, n, batch // unit)
        except MicrobatchError as error:
            reason = reason or error
    assert reason is not None
    raise reason
