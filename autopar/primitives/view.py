"""One operator as batch rules see it: in the trace of the full batch and in that of one microbatch, side by side.

A *batch rule* (`Primitive.batch`) answers with the kinds of the results, from those of the operands (`kinds`). It may
ask for operands to count in microbatch 0 only (`View.mask_same`), or for an `Action`. It is asked where operands hold
rows of the batch, or where the batch comes from shapes alone; sums and extremes over the batch go through all
primitives alike, by what records say of linearity and order (`batch.kinds_through`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.ir.graph import Node
from autopar.primitives.kinds import Coupled, Kind, Rows, Same, merge_rows, name
from autopar.primitives.row_numbers import RowNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceBits:
    """Action: random bits of the microbatch's rows, by position in the full array."""

    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIndex:
    """Action: component ``component`` (None: all) of the index operand counts examples of the full batch, ``unit`` to a
    unit; count the microbatch's."""

    operand: int
    component: int | None
    unit: int = 1


Action = SliceBits | LocalIndex


@dataclass(kw_only=True)
class View:
    """The operator, and what is known of its operands.

    Attributes:
        traced: makes the operator's Node in the full trace (True) or in the microbatch trace.
        kinds: the operands'.
        results: how many results it has.
        n: microbatches of a batch of ``batch`` units; ``blocks_first`` orders dimensions that nothing else orders.
        constant: the value of an operand, or of the given entry of its last dimension, as an array; None where it
            depends on an input.
        scalar: the number that an operand is everywhere; None where it is not one.
        numbers: what an operand is of row numbers, if it is made of ``iota`` alone: by that many examples; None else.
        variable: what an operand is, to be compared.
        counts: True where an operand has how many rows of a sort's key belong to each group, groups in the order of
            the sort.
        evaluated: the result, if the operator is elementwise, of arrays; None where it is not known.
        masked: operands that count in microbatch 0 only.
        action: what else is to be done.
        chosen: of a selection, the operand that it always takes, if it does.
    """

    traced: Callable[[bool], Node]
    kinds: list[Kind]
    results: int
    n: int
    batch: int
    blocks_first: bool
    constant: Callable[[int, int | None], npt.NDArray[Any] | None]
    scalar: Callable[[int], np.generic | None]
    numbers: Callable[[int, int], RowNumbers | None]
    variable: Callable[[int], Hashable]
    counts: Callable[[int, Hashable], bool]
    evaluated: Callable[[Sequence[npt.NDArray[Any]]], npt.NDArray[Any] | None]
    masked: set[int] = field(default_factory=set[int])
    action: Action | None = None
    chosen: int | None = None

    @cached_property
    def full(self) -> Node:
        """The operator in the full trace."""
        return self.traced(True)

    @cached_property
    def small(self) -> Node:
        """The operator in the microbatch trace."""
        return self.traced(False)

    @property
    def params(self) -> dict[str, Any]:
        """The full trace's parameters."""
        return self.full.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """An operand's shape in the full trace."""
        return self.full.operand_types[operand].shape

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """A result's shape in the full trace."""
        return self.full.result_types[result].shape

    def differing(self, result: int = 0) -> list[int]:
        """The dimensions in which a result's shape differs between the traces."""
        return differing(self.out_shape(result), self.small.result_types[result].shape)

    def rows(self) -> list[Rows]:
        """The operands that are `Rows`."""
        return [k for k in self.kinds if isinstance(k, Rows)]

    def only(self, *allowed: type) -> bool:
        """True where every operand's kind is one of the classes ``allowed``."""
        return all(isinstance(k, allowed) for k in self.kinds)

    def merged(self) -> Rows | Coupled:
        """What the rows among the operands have in common; coupled with a reason where they have nothing."""
        others = [k for k in self.kinds if not isinstance(k, (Rows, Same))]
        if not self.rows():
            return self.fail("makes something of the batch's size out of what does not depend on the batch")
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
        """Lets those of ``operands`` that are `Same` count in microbatch 0 only."""
        self.masked.update(i for i in operands if isinstance(self.kinds[i], Same))

    def fail(self, why: str) -> Coupled:
        """`Coupled`, its reason ``why`` behind the primitive's name and the user's source line."""
        where = f" ({self.full.source})" if self.full.source else ""
        return Coupled(f"{self.full.primitive}{where} {why}")

    def default_layout(self, dim: int, size: int) -> Rows:
        """The layout assumed of a result's dimension that nothing else orders, as `default_layout`."""
        return default_layout(dim, size, self.batch, self.blocks_first)

    def uniform(self, dim: int) -> Rows:
        """Rows of a result that is constant along dimension ``dim``."""
        return Rows(dim=dim, post=max(1, self.out_shape()[dim] // self.batch), uniform=True)


BatchRule: TypeAlias = Callable[[View], "Kind | list[Kind]"]
"""The kind of every result, or a list of one each."""


def default_layout(dim: int, size: int, batch: int, blocks_first: bool) -> Rows:
    """The rows assumed in dimension ``dim``, of ``size``: (batch, rest), or with ``blocks_first`` (rest, batch); rest
    is 1 where the batch does not divide the size."""
    rest = size // batch if size % batch == 0 else 1
    return Rows(dim=dim, pre=rest) if blocks_first else Rows(dim=dim, post=rest)


def differing(full: tuple[int, ...], small: tuple[int, ...]) -> list[int]:
    """The dimensions in which two shapes of one rank differ."""
    return [i for i, (a, b) in enumerate(zip(full, small, strict=True)) if a != b]
