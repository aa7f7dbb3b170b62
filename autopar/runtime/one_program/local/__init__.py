"""Operators on local shapes: `lower_local` runs one equation on this device's shards, inside shard_map.

Most primitives bind unchanged on local operands; those with a function in ``LOCAL`` need the mesh or local shapes.
"""

from __future__ import annotations

from typing import Any

from autopar.jax_compat import bind
from autopar.runtime.one_program.local import (
    contraction,
    control,
    convolution,
    custom,
    elementwise,
    indexing,
    linalg,
    random,
    shape,
    sorting,
    windows,
)
from autopar.runtime.one_program.local.context import LocalContext, LocalRule

FAMILIES = (contraction, control, elementwise, convolution, shape, indexing, windows, random, linalg, sorting, custom)

LOCAL: dict[str, LocalRule] = {name: rule for family in FAMILIES for name, rule in family.LOCAL.items()}
"""Primitive → its local lowering; a primitive not named here binds unchanged."""


NEVER_BOUND = frozenset(
    ("debug_callback", "debug_print", "fft", "io_callback", "mulhi", "shard_map", "triangular_solve")
) | frozenset(indexing.LOCAL)
"""Primitives that do not bind unchanged even where nothing is split: effects happen once, shard_maps do not nest,
indices are brought into range (`indexing`), and some do not compile as they are (`elementwise`, `linalg`)."""


def lower_local(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    """``eqn``'s results on this device, from operands split as ``ctx.operand_specs`` say."""
    rule = LOCAL.get(eqn.primitive.name)
    if rule is None:
        return bind(eqn, *operands)
    return list(rule(ctx, eqn, *operands))
