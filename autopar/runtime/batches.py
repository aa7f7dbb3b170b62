"""Which of a step's arguments a source gives (`Batch`), and what a process needs of them in its own memory.

A source gives the whole batch, wherever it runs; `Batch.read` keeps the leaves that are wanted there. Stages cut their
microbatches out of host memory (`feeds`), so nothing is put on a device ahead of its microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.tree_util import keystr

from autopar.data import copied, where_of
from autopar.frontend.layering.layers import Layered
from autopar.frontend.microbatch.batch_args import BatchArgnums
from autopar.ir.errors import DataError
from autopar.ir.graph import TensorType
from autopar.runtime.pieces import key_implementation

StepSource: TypeAlias = Callable[[int], Iterable[Any]]
"""The number of batches to leave out → the batches from there on, pytrees of what `numpy.array` takes."""
Argnums: TypeAlias = int | str | Sequence[int | str] | None
"""Positions of arguments in the step's signature, or keywords; None: see `batch_of`."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as one tree.

    Attributes:
        tree: its structure.
        numbers: of its leaves, as the step's flat arguments have them.
        types: of these.
        argnums: as they were asked for.
    """

    tree: Any
    numbers: tuple[int, ...]
    types: tuple[TensorType, ...]
    argnums: Argnums = None

    def read(self, batch: Any, number: int, wanted: Collection[int]) -> dict[int, np.ndarray[Any, Any]]:
        """The leaves that are wanted, by number, in memory of their own; others are not looked at.

        Raises DataError for a batch of another tree, and for leaves of other shapes or dtypes.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(batch)
        if tree != self.tree:
            mine = jax.tree_util.tree_flatten_with_path(self.of(dict.fromkeys(self.numbers, 0)))[0]
            differs = paths_differ(*([keystr(path) for path, _ in flat] for flat in (mine, found)))
            differs = differs or f"the step takes {self.tree}, the source gave {tree}"
            raise DataError(f"batch {number}: another tree than the step takes: {differs}")
        out: dict[int, np.ndarray[Any, Any]] = {}
        for a, t, (path, leaf) in zip(self.numbers, self.types, found, strict=True):
            if a not in wanted:
                continue
            where = where_of(path, number)
            value = copied(leaf, where)
            if (value.shape, value.dtype.name) != (t.shape, t.dtype):
                gave = TensorType(shape=value.shape, dtype=value.dtype.name)
                raise DataError(
                    f"{where}: the step takes {t}; the source gave {gave}. Convert it, pad or drop the last batch, or "
                    "plan for this one"
                )
            out[a] = value
        return out

    def of(self, leaves: Mapping[int, Any]) -> Any:
        """The tree with ``leaves``, by number, as its leaves."""
        return jax.tree_util.tree_unflatten(self.tree, [leaves[a] for a in self.numbers])


def paths_differ(wanted: Collection[str], found: Collection[str]) -> str:
    """How a tree's paths differ from those that are wanted, in words; "" where they do not."""
    said: list[str] = []
    for does, paths in (("lacks", sorted({*wanted} - {*found})), ("has", sorted({*found} - {*wanted}))):
        if paths:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            said.append(f"{does} {', '.join(path or 'a leaf by itself' for path in paths[:3])}{more}")
    return f"it {' and '.join(said)}" if said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A step's arguments: how many positional ones a call has, which of them are static or carry examples, the tree of
    the others and of the keywords, and paths and types of all flat ones, ``consts`` closed-over constants first."""

    num_args: int
    static_argnums: tuple[int, ...]
    batch_argnums: BatchArgnums
    in_tree: Any
    paths: tuple[str, ...]
    types: tuple[TensorType, ...]
    consts: int


def signature_of(layered: Layered) -> Signature:
    """The signature of a step in layers."""
    source, graph = layered.source, layered.graph
    return Signature(
        num_args=len(source.args), static_argnums=source.static_argnums, batch_argnums=source.batch_argnums,
        in_tree=layered.call.in_tree, paths=graph.arg_paths, types=graph.argument_types, consts=len(layered.consts),
    )  # fmt: skip


def batch_of(signature: Signature, argnums: Argnums) -> Batch:
    """The arguments that a source gives: one by itself, several as a tuple.

    Args:
        argnums: which; None: those that carry examples, as the step was planned (``batch_argnums``).

    Raises:
        DataError: there is no such argument, or it has random keys.
    """
    count, consts, in_tree = signature.num_args, signature.consts, signature.in_tree
    asked = argnums
    if argnums is None:
        argnums = (1,) if signature.batch_argnums is None else tuple(signature.batch_argnums)
    chosen = (argnums,) if isinstance(argnums, int | str) else tuple(argnums)
    static = {i % count for i in signature.static_argnums if -count <= i < count}
    positions = [i for i in range(count) if i not in static]
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, range(consts, consts + in_tree.num_leaves))
    known = {**dict(zip(positions, args, strict=True)), **kwargs}
    trees: list[Any] = []
    for name in chosen:
        key = name % count if isinstance(name, int) and -count <= name < 0 else name
        if key not in known:
            raise DataError(f"argnums: the step has no argument {name!r} that a source could give; it has {[*known]}")
        trees.append(known[key])
    numbers, tree = jax.tree_util.tree_flatten(trees[0] if len(trees) == 1 else tuple(trees))
    types = tuple(signature.types[a] for a in numbers)
    for a, t in zip(numbers, types, strict=True):
        if key_implementation(t) is not None:
            raise DataError(f"{signature.paths[a]}: a source gives numbers, not random keys. Leave it out")
    return Batch(tree=tree, numbers=tuple(numbers), types=types, argnums=asked)


def checked(source: Any) -> StepSource:
    """A source of a step's batches. Raises DataError where it is no function."""
    if not callable(source):
        raise DataError(
            f"source: a {type(source).__name__}; expected a function of the number of batches to leave out, so that it "
            "can be called wherever batches are needed"
        )
    return cast(StepSource, source)
