"""Local lowerings of host callbacks: an effect happens once, not once per device.

In: whole operands, the same on every device. Out: no results. (A `pure_callback` binds unchanged: each device calls
the function on the same values, which by its contract cannot be told from one call.)
"""

from __future__ import annotations

from typing import Any

from jax import lax

from autopar.ir.errors import RuleError
from autopar.jax_compat import bind
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


def _once(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    """Runs the callback on the first device alone.

    Raises:
        RuleError: on several devices, the callback is ordered or returns values.
    """
    if ctx.num_shards(tuple(ctx.axis_sizes)) == 1:
        return bind(eqn, *operands)
    if eqn.params.get("ordered"):
        raise RuleError(
            f"{ctx.node}: an ordered callback cannot run on several devices. "
            "Got ordered=True, expected ordered=False. Call it unordered, or outside of the step."
        )
    if eqn.outvars:
        raise RuleError(
            f"{ctx.node}: a callback with side effects would run once per device, "
            f"to return {len(eqn.outvars)} value(s). Expected no results. "
            "Use jax.pure_callback if it has no side effects, or call it outside of the step."
        )

    def call() -> None:
        bind(eqn, *operands)

    lax.cond(ctx.shard_index(tuple(ctx.axis_sizes)) == 0, call, lambda: None)
    return []


LOCAL: dict[str, LocalRule] = {
    "debug_callback": _once,
    "debug_print": _once,
    "io_callback": _once,
}
