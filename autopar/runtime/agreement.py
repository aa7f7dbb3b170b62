"""Under the user's own `jax.distributed.initialize` every process plans by itself: do all have the same plan?

Processes with different plans would run different collectives, and wait for each other for ever. So before a plan is
compiled for devices of several processes, these compare its digest, through JAX's coordination service.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from autopar.ir.errors import PlanMismatchError
from autopar.ir.plan import Plan
from autopar.ir.serde import digest
from autopar.jax_compat import is_described
from autopar.processes import processes

AGREE_S = 600.0
"""For the slowest process to have planned (chosen; a large model on a busy host takes minutes)."""
_NUMBERS: dict[str, int] = {}
"""How many plans of each step this process has compared: the same in all processes."""


def check_agreed(plan: Plan, devices: Iterable[Any], name: str, deadline_s: float = AGREE_S) -> None:
    """Returns when all processes that ``devices`` belong to have come here with this plan. One process, and devices
    that are only described: at once.

    Raises PlanMismatchError where one has another, or does not come.
    """
    here = jax.process_index()
    members = sorted({device.process_index for device in devices if not is_described(device)})
    if len(members) < 2 or here not in members:
        return
    group = processes()
    number = _NUMBERS[name] = _NUMBERS.get(name, -1) + 1
    key, mine = f"autopar/plan/{name}/{number}", digest(plan)
    group.put(f"{key}/{here}", mine)
    for other in members:
        try:
            theirs = group.get(f"{key}/{other}", deadline_s)
        except TimeoutError:
            raise PlanMismatchError(
                f"{name}: process {other} has not planned this step within {deadline_s:g} s, and its devices are in "
                "the mesh. All processes must plan and call the same steps in the same order"
            ) from None
        if theirs != mine:
            raise PlanMismatchError(
                f"{name}: processes {here} and {other} have different plans (digests {mine[:16]} and {theirs[:16]}): "
                "other options, shapes or versions, or a search that ran out of time. Plan once, save the plan, and "
                "give it to all: parallelize(step, plan=…)"
            )
