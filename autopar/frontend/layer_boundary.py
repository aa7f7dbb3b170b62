"""`layer_boundary`: where the user wants a pipeline's layers to be cut.

One primitive, the identity, that stays in the jaxpr of a loss until `layering` has read it; everything else (jit, grad,
vmap, planning without a pipeline) sees through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from autopar.jax_compat import Primitive
from autopar.primitives.elementwise import LAYER_BOUNDARY

boundary_p = Primitive(LAYER_BOUNDARY)
"""Operands and results: the same values."""
boundary_p.multiple_results = True


def layer_boundary(x: Any) -> Any:
    """``x`` (a pytree of arrays), and a mark: layers are cut here.

    Where a loss has marks, its layers are what lies between them, and nothing else is tried. A mark inside the body of
    a scan over layers counts in every turn. A mark whose result is not used does not count.
    """
    leaves, tree = jax.tree_util.tree_flatten(x)
    return jax.tree_util.tree_unflatten(tree, boundary_p.bind(*leaves) if leaves else [])


def _same(*operands: Any) -> list[Any]:
    return list(operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return boundary_p.bind(*primals), list(tangents)


def _batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return boundary_p.bind(*operands), list(dims)


boundary_p.def_impl(_same)
boundary_p.def_abstract_eval(_same)
mlir.register_lowering(boundary_p, lambda _, *operands: list(operands))
batching.primitive_batchers[boundary_p] = _batch
ad.primitive_jvps[boundary_p] = _jvp
ad.primitive_transposes[boundary_p] = lambda cotangents, *_: list(cotangents)
