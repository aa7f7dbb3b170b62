"""The cases: JAX's harnesses of its primitives, and the operators of the tables that its own tests of `jax.lax` use.

A case makes arguments from a `numpy.random.RandomState` and is a function of them.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.internal_test_util import lax_test_util, test_harnesses

SHAPES = ((8, 4), (2, 3, 4), (8, 1), (0, 8))
"""Of the tables' operands: which mesh axes divide, with a dimension that none does, of size 1 and of size 0."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``make(rng)`` → arguments of ``fun``, arrays each; ``group`` is the primitive as a rule."""

    group: str
    name: str
    fun: Callable[..., Any]
    make: Callable[[np.random.RandomState], tuple[Any, ...]]

    def arguments(self, k: int) -> tuple[Any, ...]:
        """The k-th draw."""
        rng = np.random.RandomState((zlib.crc32(self.name.encode()) + k) % 2**32)
        return tuple(x if isinstance(x, jax.Array) else np.asarray(x) for x in self.make(rng))


@functools.cache
def cases_by_group() -> dict[str, tuple[Case, ...]]:
    """All cases that JAX itself runs on CPU. Names are unique."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in (*_harnesses(), *_operators(), *_reductions(), *_named_reductions()):
        groups[case.group].append(case)
    return {group: tuple(groups[group]) for group in sorted(groups)}


@functools.cache
def cases_by_name() -> dict[str, Case]:
    return {case.name: case for cases in cases_by_group().values() for case in cases}


def _harnesses() -> Iterator[Case]:
    seen: dict[str, int] = defaultdict(int)
    for harness in test_harnesses.all_harnesses:
        if not harness.filter("cpu"):
            continue
        seen[harness.fullname] += 1
        name = f"{harness.fullname}#{seen[harness.fullname]}" if seen[harness.fullname] > 1 else harness.fullname
        yield Case(group=harness.group_name, name=name, fun=harness.dyn_fun, make=harness.dyn_args_maker)


def _operators() -> Iterator[Case]:
    for record in lax_test_util.lax_ops():
        for shape in SHAPES:
            for dtype in record.dtypes:
                yield _of_table(
                    f"lax.{record.op}", getattr(lax, record.op), record.rng_factory, shape, dtype, record.nargs
                )


def _reductions() -> Iterator[Case]:
    """`lax.reduce` with an operator: which JAX turns into a primitive of its own where it knows one."""
    for k, record in enumerate(lax_test_util.lax_reduce_ops()):
        for shape in SHAPES[:2]:
            for dtype in record.dtypes:
                start = np.asarray(record.init_val).astype(dtype)
                fun = functools.partial(_reduced, record.op, start)
                yield _of_table(f"lax.reduce {record.op.__name__}", fun, _default, shape, dtype, 1, f" {k}")


def _reduced(op: Callable[..., Any], start: Any, x: Any) -> Any:
    return lax.reduce(x, start, op, (0,)), lax.reduce(x, start, op, (1,))


def _named_reductions() -> Iterator[Case]:
    for record in lax_test_util.lax_named_reduce_ops():
        for shape in SHAPES[:2]:
            for dtype in record.dtypes:
                fun = functools.partial(_over_each, record.op)
                yield _of_table(f"lax.{record.op.__name__}", fun, _default, shape, dtype, 1)


def _over_each(op: Callable[..., Any], x: Any) -> Any:
    return op(x, (0,)), op(x, (1,))


def _default(rng: np.random.RandomState) -> Callable[..., Any]:
    return test_harnesses.jtu.rand_small(rng)


def _of_table(
    group: str, fun: Callable[..., Any], factory: Any, shape: tuple[int, ...], dtype: Any, count: int, suffix: str = ""
) -> Case:  # fmt: skip
    def make(rng: np.random.RandomState) -> tuple[Any, ...]:
        draw = factory(rng)
        return tuple(np.asarray(draw(shape, dtype), dtype) for _ in range(count))

    return Case(group=group, name=f"{group}{suffix} {np.dtype(dtype).name}{list(shape)}", fun=fun, make=make)
