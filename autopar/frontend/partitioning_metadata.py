"""Partitioning metadata that a model library keeps beside its parameters → pins.

flax's ``nn.with_partitioning`` boxes a parameter with a mesh axis name per dimension; any pytree node that offers
``get_partition_spec()`` counts. Names that are no axis of the plan's mesh are logical names, which only
the user's own rules can translate: they pin nothing, and the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar.ir.sharding import Pin


def metadata_pins(arguments: Any, paths: Sequence[str]) -> tuple[Pin, ...]:
    """A pin per boxed leaf that has names; ``paths`` names the flat leaves of ``arguments``. Which names are axes of a
    mesh is the mesh's to say (`intra_op.pins.on_mesh`)."""
    pins: list[Pin] = []
    position = 0
    for box in jax.tree_util.tree_leaves(arguments, is_leaf=_is_box):
        leaves = jax.tree_util.tree_leaves(box)
        if _is_box(box) and len(leaves) == 1:
            dims = tuple(_names(entry) for entry in box.get_partition_spec())
            if any(dims):
                pins.append(Pin(target=paths[position], dims=dims))
        position += len(leaves)
    return tuple(pins)


def _is_box(x: Any) -> bool:
    return hasattr(x, "get_partition_spec") and not isinstance(x, type)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, Sequence) else ()
