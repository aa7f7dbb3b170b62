"""``batch_argnums`` and a call's arguments → the batch dimension of each leaf, and the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.ir.errors import MicrobatchError

BatchArgnums = Mapping[int | str, Any] | Sequence[int | str] | None


def is_operand(leaf: Any) -> bool:
    """True for what jax traces (arrays, shapes of arrays, numbers); other leaves are passed on as they are."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else ()


def batch_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], batch_argnums: BatchArgnums, n: int
) -> tuple[list[int | None], int]:
    """The batch dimension (or None) of every leaf of ``(args, kwargs)`` in order, and the batch size.

    Raises:
        MicrobatchError: no batch, leaves that disagree about its size, or a size that ``n`` does not divide.
    """
    dims, found = leaf_dims(args, kwargs, batch_argnums)
    return dims, _size(found, n)


def leaf_dims(
    args: Sequence[Any], kwargs: Mapping[str, Any], batch_argnums: BatchArgnums
) -> tuple[list[int | None], list[tuple[str, int]]]:
    """The batch dimension (or None) of every leaf of ``(args, kwargs)`` in order, and (path, batch size) of those that
    have one.

    Raises:
        MicrobatchError: ``batch_argnums`` does not fit the arguments, or names a dimension that a leaf has not.
    """
    wanted = _by_argument(args, kwargs, batch_argnums)
    found: list[tuple[str, int]] = []

    def dims_of(argument: Any, label: str, spec: Any) -> list[int | None]:
        chosen: list[int | None] = []
        prefixes = _broadcast(spec, argument, label)
        for (path, leaf), dim in zip(jax.tree_util.tree_flatten_with_path(argument)[0], prefixes, strict=True):
            shape = _shape(leaf)
            if dim is None or not is_operand(leaf) or (dim == 0 and not shape):
                chosen.append(None)
                continue
            place = f"{label}{jax.tree_util.keystr(path)}"
            if not -len(shape) <= dim < len(shape):
                raise MicrobatchError(
                    f"{place}: batch_argnums says its batch dimension is {dim}, but its shape is {shape}. "
                    "Give a dimension that it has, or None for a leaf without batch."
                )
            chosen.append(dim % len(shape))
            found.append((place, shape[dim]))
        return chosen

    dims: list[int | None] = []
    for i, argument in enumerate(args):
        dims += dims_of(argument, f"args[{i}]", wanted.get(i))
    for key in sorted(kwargs):
        dims += dims_of(kwargs[key], f"kwargs[{key!r}]", wanted.get(key))
    return dims, found


def _size(found: Sequence[tuple[str, int]], n: int) -> int:
    if not found:
        raise MicrobatchError(
            "no argument carries a batch: by default it is dimension 0 of the second argument's leaves. "
            "Say which one does: batch_argnums=(position,) or {position: dimension}."
        )
    sizes = sorted({size for _, size in found})
    if len(sizes) > 1:
        listed = ", ".join(f"{place}: {size}" for place, size in found[:8])
        raise MicrobatchError(
            f"the leaves that carry the batch disagree about its size: {listed}. Name the batch dimension of each, or "
            "None for those without: batch_argnums={1: {'tokens': 0, 'positions': None}}."
        )
    batch = sizes[0]
    if batch < n:
        raise MicrobatchError(
            f"{found[0][0]}: the batch has {batch} examples, fewer than num_microbatches={n}. "
            f"Use a batch of at least {n}, or num_microbatches={max(batch, 1)} or less."
        )
    if batch % n:
        near = [k for k in range(1, batch + 1) if batch % k == 0]
        below, above = max(k for k in near if k <= n), min(k for k in near if k >= n)
        raise MicrobatchError(
            f"{found[0][0]}: the batch has {batch} examples, which num_microbatches={n} does not divide. "
            f"Use num_microbatches={below} or {above}, or a batch of {batch - batch % n} or {batch + n - batch % n}."
        )
    return batch


def _by_argument(args: Sequence[Any], kwargs: Mapping[str, Any], spec: BatchArgnums) -> dict[int | str, Any]:
    if spec is None:
        return {1: 0}
    given: dict[int | str, Any] = dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(spec, 0)
    out: dict[int | str, Any] = {}
    for key, dim in given.items():
        if isinstance(key, str):
            if key not in kwargs:
                raise MicrobatchError(
                    f"batch_argnums names the keyword {key!r}, but the call has {sorted(kwargs) or 'no keywords'}. "
                    "Name positional arguments by their position."
                )
            out[key] = dim
        elif -len(args) <= key < len(args):
            out[key % len(args)] = dim
        else:
            raise MicrobatchError(
                f"batch_argnums names argument {key}, but the call has {len(args)} positional arguments."
            )
    return out


def _broadcast(spec: Any, argument: Any, label: str) -> list[int | None]:
    """``spec``, a pytree prefix of ``argument`` with ints and None, for every leaf."""
    count = len(jax.tree_util.tree_leaves(argument))
    if spec is None or isinstance(spec, int):
        return [spec] * count
    out: list[int | None] = []

    def repeat(dim: Any, subtree: Any) -> None:
        out.extend([dim] * len(jax.tree_util.tree_leaves(subtree)))

    try:
        jax.tree_util.tree_map(repeat, spec, argument, is_leaf=lambda x: x is None or isinstance(x, int))
    except ValueError as error:
        raise MicrobatchError(
            f"{label}: batch_argnums={spec} is no pytree prefix of the argument: {error}. "
            "Give one dimension for all of it, or the argument's structure with a dimension (or None) at each leaf."
        ) from error
    return out
