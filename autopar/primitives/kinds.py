"""What a value of one microbatch is to the same value of the full batch: the vocabulary of the analysis.

With n microbatches, microbatch j holding the rows j, j+n, j+2n, … of the batch, a value v of the full batch
and its counterparts v_0 … v_{n-1} in the microbatches are related by one of

- `Same`: v_j = v for every j.
- `Rows`: v_j is the strided slice of v along one dimension. The dimension's size is pre·m·post with the batch in
  the middle factor m (a flattened (m, post) has pre = 1); row (p, i, q) of v_j is row (p, i·n+j, q) of v.
- `Sum`: v = Σ_j v_j. `Max`, `Min`: v is the elementwise maximum or minimum over j.
- `Sorted`: v and v_j hold rows in the order that sorts a key, v those of the batch, v_j those of the microbatch.
- `Numbers`: v and v_j number their own rows in such an order, or the places in it.
- `Coupled`: none of these, for the reason given.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Self

from autopar.primitives.row_numbers import RowNumbers


@dataclass(frozen=True, slots=True)
class Same:
    """The value is equal in every microbatch, and in the full batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A strided slice of dimension ``dim``, whose size is pre·m·post. ``uniform``: constant along the dimension, so
    that any pre and post fit."""

    dim: int
    pre: int = 1
    post: int = 1
    uniform: bool = False

    def at(self, dim: int) -> Rows:
        """The same rows in another dimension."""
        return Rows(dim=dim, pre=self.pre, post=self.post, uniform=self.uniform)


@dataclass(frozen=True, slots=True)
class Sum:
    """The full value is the sum of the microbatches' values."""


@dataclass(frozen=True, slots=True)
class Max:
    """The full value is the maximum of the microbatches' values (for bool: any)."""


@dataclass(frozen=True, slots=True)
class Min:
    """The full value is the minimum of the microbatches' values (for bool: all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorting:
    """The order in which sorting ``key``, a variable, puts rows: ``size`` in the full batch, as in `Rows` with pre = 1.
    ``which``: of sorts that leave equal keys in any order, the equation."""

    key: Hashable
    size: int
    post: int
    which: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InOrder:
    """What is in the order of ``sorting`` along dimension ``dim``: `Sorted` or `Numbers`."""

    sorting: Sorting
    dim: int

    def at(self, dim: int) -> Self:
        """The same in another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted(InOrder):
    """Rows of the batch: for some w with `Rows`, v = w[order] and v_j = w_j[order_j]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers(InOrder):
    """A function of row numbers, 0, 1, …, in that order, or with ``places`` of the places that rows have in it, as the
    rows lie. The function is the same in a microbatch, which numbers its
    rows anew; ``values`` are its values for the full batch."""

    values: RowNumbers
    places: bool = False


@dataclass(frozen=True, slots=True)
class Coupled:
    """The full value cannot be computed from the microbatches' values, for ``reason``."""

    reason: str


COMBINED: dict[str, type[Sum] | type[Max] | type[Min]] = {"sum": Sum, "max": Max, "min": Min}
"""Of a factor that a rule combines over, what combining over microbatches gives."""

Kind = Same | Rows | Sum | Max | Min | Sorted | Numbers | Coupled


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A value's kind, and whether it depends on what is differentiated by."""

    kind: Kind
    trained: bool


def merge_rows(rows: list[Rows]) -> Rows | None:
    """What elementwise use of these together gives, or None where their dimensions or layouts disagree."""
    if len({r.dim for r in rows}) > 1:
        return None
    layouts = sorted({(r.pre, r.post) for r in rows if not r.uniform})
    if len(layouts) > 1:
        return None
    if not layouts:
        return rows[0]
    (pre, post) = layouts[0]
    return Rows(dim=rows[0].dim, pre=pre, post=post)


def join(a: Kind, b: Kind) -> Kind:
    """The kind of a value that is now one, now the other (a carried value, the branches of a cond)."""
    match a, b:
        case Coupled(), _:
            return a
        case _, Coupled():
            return b
        case Rows(), Rows():
            merged = merge_rows([a, b])
            return merged if merged is not None else Coupled("its rows are ordered in two ways")
        case Same(), (Sum() | Max() | Min()):
            return b
        case ((Sum() | Max() | Min()), Same()):
            return a
        case _ if a == b:
            return a
        case _:
            return Coupled(f"it is a {name(a)} in one place and a {name(b)} in another")


def name(kind: Kind) -> str:
    """What a kind is called in messages."""
    match kind:
        case Same():
            return "value that does not depend on the batch"
        case Rows():
            return "value per example"
        case Sum():
            return "sum over the batch"
        case Max():
            return "maximum over the batch"
        case Min():
            return "minimum over the batch"
        case InOrder():
            return "value per example in the order of a sort"
        case Coupled():
            return "value that mixes examples"


def split_size(kind: Rows, size: int, n: int) -> tuple[int, int, int] | None:
    """(pre, examples per microbatch, post) of a dimension of ``size`` in ``n`` microbatches, or None where the examples
    do not divide by n."""
    m, rest = divmod(size, kind.pre * kind.post)
    if rest or m % n:
        return None
    return kind.pre, m // n, kind.post
