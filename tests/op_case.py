"""One line of an operator case table: a function, its argument types, and which of its equations to test.

Argument types are written ``f64[4,8]``, ``i32[5]<7`` (integers drawn from 0…6), ``bool[3]``, ``key[]``; floats are
drawn from a normal distribution. The tables are `tests/op_cases_dense.py` and `tests/op_cases_indexing.py`; the
golden test prints each case's rule, the 8-device test runs it under every strategy it can afford.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.graph import Node

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "bool": "bool", "key": "key",
}  # fmt: skip
RTOL = {"float64": 1e-11, "complex128": 1e-11, "float32": 1e-5, "complex64": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""dtype → allowed error relative to the max-norm; dtypes not named here must be equal."""

_ARG = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,]*)\](<(?P<high>\d+))?$")


@dataclass(frozen=True, kw_only=True)
class Case:
    """``name`` is the golden line's; ``primitive``: test only that primitive's equations (default: all of them).

    ``positive``: draw floats from (0.2, 2). ``values``: a function of a numpy Generator that returns the
    arguments, where the draws above do not do. ``rtol``: allowed error relative to the result's max-norm, where that of
    its dtype (`RTOL`) does not do; 0 asks for equal values.
    ``limit``: at most so many strategies are run. ``x64``: trace with 64-bit types though no argument is of one.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[str, ...]
    primitive: str | None = None
    positive: bool = False
    values: Callable[[np.random.Generator], tuple[Any, ...]] | None = None
    rtol: float | None = None
    limit: int = 12
    x64: bool = False


def case(name: str, fun: Callable[..., Any], *args: str, **options: Any) -> Case:
    """A `Case`, written short."""
    return Case(name=name, fun=fun, args=args, **options)


def example_args(c: Case) -> tuple[Any, ...]:
    """The case's arguments, the same on every run."""
    rng = np.random.default_rng(sum(map(ord, c.name)))
    if c.values is not None:
        return c.values(rng)
    return tuple(_draw(text, rng, c.positive) for text in c.args)


def needs_x64(c: Case, args: tuple[Any, ...]) -> bool:
    """Whether the case is traced with 64-bit types."""
    names = {str(getattr(a, "dtype", "")) for a in args}
    return c.x64 or bool(names & {"float64", "int64", "uint64", "complex128"})


def nodes_under_test(nodes: Sequence[Node], c: Case) -> list[Node]:
    """The nodes that the case is about."""
    return [n for n in nodes if c.primitive in (None, n.primitive)]


def _draw(text: str, rng: np.random.Generator, positive: bool) -> Any:
    import jax
    import ml_dtypes

    match = _ARG.match(text)
    if match is None:
        raise ValueError(f"not an argument type: {text!r}")
    shape = tuple(int(d) for d in match["shape"].split(",") if d)
    name = DTYPES[match["dtype"]]
    if name == "key":
        seeds = rng.integers(0, 2**31, shape)
        return jax.vmap(jax.random.key)(seeds.ravel()).reshape(shape) if shape else jax.random.key(int(seeds))
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        low = 0 if match["high"] or dtype.kind == "u" else -9
        return rng.integers(low, int(match["high"] or 9), shape).astype(dtype)
    draw = rng.uniform(0.2, 2.0, shape) if positive else rng.normal(size=shape)
    if dtype.kind == "c":
        draw = draw + 1j * rng.normal(size=shape)
    return np.asarray(draw).astype(dtype)
