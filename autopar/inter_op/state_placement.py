"""Where the leaves of a state lie that a pipeline's train step takes: what creates, loads or saves it needs to know.

In: a plan's placed arguments, and a state's leaves by path (``['w'][0]``) with their types. Out: of each leaf, the
stages that hold it, or rows of it, and how (`PlacedArgument`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.ir.errors import PlanMismatchError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline_file import PipelineFile, PlacedArgument

_ARGUMENT = re.compile(r"(args\[\d+\]|kwargs\['[^']*'\])(.*?)(\[\d+:\d+\])?$", re.DOTALL)
_SHOWN = 3


def place_leaves(
    file: PipelineFile, leaves: Sequence[tuple[str, TensorType]], argument: str | None = None
) -> tuple[tuple[PlacedArgument, ...], ...]:
    """All parts of each leaf that stages hold, in the order of ``leaves``; none where no stage reads it.

    Args:
        leaves: paths below the argument, and types.
        argument: which of the step's arguments they are, ``args[0]``; default: the first whose leaves they are.

    Raises:
        PlanMismatchError: no argument has these leaves.
    """
    held: dict[str, dict[str, list[PlacedArgument]]] = {}
    for placed in file.arguments:
        found = _ARGUMENT.match(placed.path)
        if found is not None:
            held.setdefault(found[1], {}).setdefault(found[2], []).append(placed)
    wanted = dict(leaves)
    faults: dict[str, str] = {}
    for root, mine in held.items():
        if argument not in (None, root):
            continue
        fault = _fault(mine, wanted)
        if fault is None:
            return tuple(tuple(mine.get(path, ())) for path, _ in leaves)
        faults[root] = fault
    if argument is not None and argument not in held:
        raise PlanMismatchError(f"place: stages hold nothing of {argument}; there is {', '.join(held) or 'nothing'}")
    reasons = "; ".join(f"{root}: {fault}" for root, fault in faults.items())
    raise PlanMismatchError(f"place: no argument of {file.name} has these leaves ({reasons}). Plan for this state")


def _fault(held: Mapping[str, Sequence[PlacedArgument]], leaves: Mapping[str, TensorType]) -> str | None:
    """Why ``leaves`` are not the argument; None where they may be."""
    missing = [path for path in held if path not in leaves]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        return f"stages hold {', '.join(missing[:_SHOWN])}{more}, which the state has not"
    for path, parts in held.items():
        for part in parts:
            rows = part.path.removesuffix("]").rsplit("[", 1)[-1].split(":") if _rows(part.path) else None
            t = leaves[path]
            fits = t == part.type
            if rows is not None:
                fits = t.dtype == part.type.dtype and t.shape[1:] == part.type.shape[1:] and int(rows[1]) <= t.shape[0]
            if not fits:
                return f"{path or 'it'} is {t}, stages hold {part.path}: {part.type}"
    return None


def _rows(path: str) -> bool:
    found = _ARGUMENT.match(path)
    return found is not None and found[3] is not None
