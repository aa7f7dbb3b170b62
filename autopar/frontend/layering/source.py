"""What a step in layers was made from: `Source`, so that another process can make the same again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Source:
    """The arguments of `layering.layers.layered`; arrays are `jax.ShapeDtypeStruct`s. Pickled, it needs cloudpickle
    where ``step`` is a closure."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_microbatches: int
    batch_argnums: Any
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    layers: int | str | None
    platform: str | None


def shapes_of(args: Sequence[Any], static_argnums: Sequence[int] = ()) -> tuple[Any, ...]:
    """``args`` with shapes in place of arrays; static ones, and numbers of Python, as they are."""
    static = {i % len(args) for i in static_argnums if -len(args) <= i < len(args)}
    return tuple(x if i in static else jax.tree.map(_shape, x) for i, x in enumerate(args))


def _shape(x: Any) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
