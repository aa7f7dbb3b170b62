"""One equation as the rules see it: its kinds and shapes in the full trace and in the microbatch trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.frontend.microbatch.kinds import Coupled, Kind, Max, Min, Rows, Same, Sum, merge_rows, name
from autopar.jax_compat import JaxprEqn, Literal, source_line


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceBits:
    """Action: random bits of the microbatch's rows, by position in the full array."""

    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIndex:
    """Action: component ``component`` of the index operand counts examples of the full batch, ``unit`` to a unit; count
    the microbatch's."""

    operand: int
    component: int
    unit: int = 1


Action = SliceBits | LocalIndex


@dataclass(kw_only=True)
class View:
    """``full`` and ``small`` are the same equation in the two traces; ``kinds`` its operands'. A rule answers with
    kinds of the results, and may ask for operands to count in microbatch 0 only (`mask`) or for an `action`."""

    full: JaxprEqn
    small: JaxprEqn
    kinds: list[Kind]
    n: int
    batch: int
    blocks_first: bool
    constant: Callable[[Any, int | None], np.ndarray | None]
    masked: set[int] = field(default_factory=set)
    action: Action | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The full trace's parameters."""
        return self.full.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """An operand's shape in the full trace."""
        return tuple(self.full.invars[operand].aval.shape)

    def small_shape(self, operand: int) -> tuple[int, ...]:
        """An operand's shape in the microbatch trace."""
        return tuple(self.small.invars[operand].aval.shape)

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """A result's shape in the full trace."""
        return tuple(self.full.outvars[result].aval.shape)

    def out_small_shape(self, result: int = 0) -> tuple[int, ...]:
        """A result's shape in the microbatch trace."""
        return tuple(self.small.outvars[result].aval.shape)

    def differing(self, result: int = 0) -> list[int]:
        """The dimensions in which a result's shape differs between the traces."""
        return differing(self.out_shape(result), self.out_small_shape(result))

    def rows(self) -> list[Rows]:
        """The operands that are `Rows`."""
        return [k for k in self.kinds if isinstance(k, Rows)]

    def only(self, *allowed: type) -> bool:
        """True if every operand's kind is one of these."""
        return all(isinstance(k, allowed) for k in self.kinds)

    def merged(self) -> Rows | Coupled:
        """What the rows among the operands have in common; coupled with a reason where they have nothing."""
        others = [k for k in self.kinds if not isinstance(k, (Rows, Same))]
        if others:
            return self.fail(
                f"combines a value per example with a {name(others[0])} (as batch normalisation does), "
                "which one microbatch alone cannot know"
            )
        merged = merge_rows(self.rows())
        return (
            merged
            if merged is not None
            else self.fail(
                "pairs examples with one another: its operands have the batch in different dimensions or orders"
            )
        )

    def mask_same(self, *operands: int) -> None:
        """Let the operands that do not depend on the batch count in microbatch 0 only."""
        chosen = operands or range(len(self.kinds))
        self.masked.update(i for i in chosen if isinstance(self.kinds[i], Same))

    def fail(self, why: str) -> Coupled:
        """Coupled, naming the operation and the user's line."""
        return Coupled(f"{where(self.full)} {why}")

    def is_zero(self, operand: int) -> bool:
        """True if the operand is the literal 0."""
        atom = self.full.invars[operand]
        return isinstance(atom, Literal) and not np.any(np.asarray(atom.val))

    def default_layout(self, dim: int, size: int) -> Rows:
        """The layout assumed of a dimension that nothing else orders: the batch first (or last, second try)."""
        return default_layout(dim, size, self.batch, self.blocks_first)


def default_layout(dim: int, size: int, batch: int, blocks_first: bool) -> Rows:
    """Rows in a dimension of ``size``, a multiple of the batch: (batch, rest), or (rest, batch)."""
    rest = size // batch if size % batch == 0 else 1
    return Rows(dim=dim, pre=rest) if blocks_first else Rows(dim=dim, post=rest)


def where(eqn: JaxprEqn) -> str:
    """``reduce_sum (model.py:12)``."""
    line = source_line(eqn)
    return f"{eqn.primitive.name} ({line})" if line else eqn.primitive.name


def differing(full: tuple[int, ...], small: tuple[int, ...]) -> list[int]:
    """Dimensions whose sizes differ."""
    return [i for i, (a, b) in enumerate(zip(full, small, strict=True)) if a != b]


def combinable(kinds: list[Kind]) -> type | None:
    """Sum, Max or Min if the operands that are not `Same` are all of it, else None."""
    found = {type(k) for k in kinds if not isinstance(k, Same)}
    if len(found) != 1:
        return None
    (only,) = found
    return only if only in (Sum, Max, Min) else None


def reshaped(rows: Rows, old: tuple[int, ...], new: tuple[int, ...], batch: int) -> Rows | None:
    """Where the batch factor lands when ``old`` becomes ``new``, or None where it is torn apart."""
    size = old[rows.dim]
    layouts = [(rows.pre, rows.post)]
    if rows.uniform and size % batch == 0:
        rest = size // batch
        layouts = [(p, rest // p) for p in range(1, rest + 1) if rest % p == 0]
    for pre, post in layouts:
        m = size // (pre * post)
        before = math.prod(old[: rows.dim]) * pre
        after = math.prod(old[rows.dim + 1 :]) * post
        for dim in range(len(new)):
            lead, tail = math.prod(new[:dim]), math.prod(new[dim + 1 :])
            if lead == 0 or tail == 0 or before % lead or after % tail:
                continue
            if (before // lead) * m * (after // tail) == new[dim] and new[dim] > 1:
                whole = (lead, tail) == (math.prod(old[: rows.dim]), math.prod(old[rows.dim + 1 :]))
                return Rows(dim=dim, pre=before // lead, post=after // tail, uniform=rows.uniform and whole)
    return None
