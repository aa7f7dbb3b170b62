"""Where the leaves of a state lie that a pipeline's train step takes: what creates, loads or saves it needs to know.

In: a plan's arguments, and a state's leaves by path (``['w'][0]``) with their types. Out: of each leaf, the
stages that hold it, or rows of it, and how (`ir.plan.Place`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.ir.errors import PlanMismatchError
from autopar.ir.graph import TensorType
from autopar.ir.plan import ArgPlan, Place, Plan

_ARGUMENT = re.compile(r"(args\[\d+\]|kwargs\['[^']*'\])(.*)$", re.DOTALL)
_SHOWN = 3


def place_leaves(
    plan: Plan, leaves: Sequence[tuple[str, TensorType]], argument: str | None = None
) -> tuple[tuple[Place, ...], ...]:
    """Of each leaf, all places where stages hold it, or rows of it; none where no stage reads it.

    Args:
        leaves: paths below the argument, and types.
        argument: which of the step's arguments they are, ``args[0]``; default: the first whose leaves they are.

    Raises:
        PlanMismatchError: no argument has these leaves.
    """
    held: dict[str, dict[str, ArgPlan]] = {}
    for a in plan.inputs:
        found = _ARGUMENT.match(a.path)
        if found is not None and a.places:
            held.setdefault(found[1], {})[found[2]] = a
    wanted = dict(leaves)
    faults: dict[str, str] = {}
    for root, mine in held.items():
        if argument not in (None, root):
            continue
        fault = _fault(mine, wanted)
        if fault is None:
            return tuple(mine[path].places if path in mine else () for path, _ in leaves)
        faults[root] = fault
    if argument is not None and argument not in held:
        raise PlanMismatchError(f"place: stages hold nothing of {argument}; there is {', '.join(held) or 'nothing'}")
    reasons = "; ".join(f"{root}: {fault}" for root, fault in faults.items())
    raise PlanMismatchError(f"place: no argument of {plan.name} has these leaves ({reasons}). Plan for this state")


def _fault(held: Mapping[str, ArgPlan], leaves: Mapping[str, TensorType]) -> str | None:
    """Why ``leaves`` are not the argument; None where they may be."""
    missing = [path for path in held if path not in leaves]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return f"stages hold {', '.join(missing[:_SHOWN])}{more}, which the state has not"
    for path, planned in held.items():
        if leaves[path] != planned.type:
            return f"{path or 'it'} is {leaves[path]}, stages hold {planned.path}: {planned.type}"
    return None
