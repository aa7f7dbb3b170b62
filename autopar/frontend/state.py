"""The trees of a call's arguments and results → which result is the new value of which argument.

What a step returns of its state is an argument of the next call. So that nothing moves in between, both get one
sharding (`ir.graph.Graph.state`). A subtree of the results is the new value of an argument, or of a part of one, that
has its tree, shapes and dtypes. Where several have them,

- whole arguments are paired before parts of others, and these level by level; large trees before small   `_Finder.run`
- what has a name is paired by it: ``args[0]['params']`` with ``out[1]['params']``, if no other is called so   `_named`
- else donated arguments go first, then positions decide                                                       `_placed`

What donation or position decided, and could be otherwise, is an ambiguity: it is listed (`State.notes`). The type of a
single array says little: a batch has it in common with what is made of it, a learning rate with the loss. Inside an
argument such a one is paired by its name alone; an argument by itself is, too, unless it is a scalar or of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.tree_util import DictKey, GetAttrKey, keystr, treedef_is_leaf

from autopar.ir.graph import TensorType

KeyPath: TypeAlias = tuple[Any, ...]
_SHOWN = 4
"""Paths that a note lists of each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """One side of a call. ``tree``: of (positional arguments, keyword arguments), or of the results; ``paths`` and
    ``types`` of its leaves, a path being one key per level of the tree."""

    tree: Any
    paths: tuple[KeyPath, ...]
    types: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """``pairs`` of (flat argument, flat result) that is its new value, each at most once; ``notes`` on those that could
    be paired otherwise."""

    pairs: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


def argument_text(path: KeyPath) -> str:
    """``args[0]['w']``, or ``kwargs['mask']``."""
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def result_text(path: KeyPath) -> str:
    """``out[0]['w']``."""
    return "out" + keystr(path)


def find_state(given: Leaves, made: Leaves, donated: Sequence[bool], batch: Sequence[bool]) -> State:
    """Pairs a call's arguments with their new values among its results.

    Args:
        given, made: its arguments and its results.
        donated: flags flat arguments.
        batch: flags those that carry the batch.
    """
    return _Finder(given, made, donated, batch).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subtree:
    """Leaves ``start`` to ``stop``, which make ``tree``; ``level`` 0: an argument, or all results."""

    tree: Any
    start: int
    stop: int
    level: int
    path: KeyPath


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Subtrees of one tree, shapes and dtypes. ``placed``: pairs of these that positions decided."""

    tree: Any
    scalar: bool
    given: list[_Subtree] = field(default_factory=list[_Subtree])
    made: list[_Subtree] = field(default_factory=list[_Subtree])
    placed: list[tuple[_Subtree, _Subtree]] = field(default_factory=list[tuple[_Subtree, _Subtree]])


class _Finder:
    def __init__(self, given: Leaves, made: Leaves, donated: Sequence[bool], batch: Sequence[bool]) -> None:
        self.donated, self.batch = donated, batch
        self.pair_of: dict[int, int] = {}
        self.taken: set[int] = set()
        """Flat results that are new values."""
        by_types: dict[tuple[TensorType, ...], list[_Alike]] = {}
        for subtree in _subtrees(given, 2):
            _alike(by_types.setdefault(given.types[subtree.start : subtree.stop], []), subtree).given.append(subtree)
        for subtree in _subtrees(made, 0):
            for alike in by_types.get(made.types[subtree.start : subtree.stop], ()):
                if _same(alike.tree, subtree.tree):
                    alike.made.append(subtree)
        self.alike = [alike for those in by_types.values() for alike in those if alike.made]
        for alike in self.alike:
            alike.scalar = treedef_is_leaf(alike.tree) and not given.types[alike.given[0].start].shape

    def run(self) -> State:
        """All pairs, whole arguments and large trees first."""
        self.alike.sort(key=lambda alike: (-alike.tree.num_leaves, alike.given[0].start))
        for level in range(1 + max((a.level for alike in self.alike for a in alike.given), default=-1)):
            for alike in self.alike:
                self._pair(alike, [a for a in alike.given if a.level == level and self._is_free(a)])
        notes = tuple(note for alike in self.alike if alike.placed for note in self._ambiguity(alike))
        return State(pairs=tuple(sorted(self.pair_of.items())), notes=notes)

    def _is_free(self, given: _Subtree) -> bool:
        return all(i not in self.pair_of for i in range(given.start, given.stop))

    def _is_new(self, made: _Subtree) -> bool:
        return all(j not in self.taken for j in range(made.start, made.stop))

    def _take(self, given: _Subtree, made: _Subtree) -> None:
        self.pair_of.update(zip(range(given.start, given.stop), range(made.start, made.stop), strict=True))
        self.taken.update(range(made.start, made.stop))

    def _pair(self, alike: _Alike, given: list[_Subtree]) -> None:
        """Pairs arguments of one level."""
        array = treedef_is_leaf(alike.tree)
        if array and all(self.batch[a.start] for a in given):
            return
        self._named(given, [r for r in alike.made if self._is_new(r)])
        if not array or not (alike.scalar or any(a.level for a in given)):
            self._placed(alike, [a for a in given if self._is_free(a)], [r for r in alike.made if self._is_new(r)])

    def _named(self, given: Iterable[_Subtree], made: Iterable[_Subtree]) -> None:
        """Pairs an argument with the only result whose path ends as its own does, if that ends in a name."""
        ending: dict[KeyPath, list[_Subtree]] = {}
        for r in made:
            names = _names(r.path)
            for k in range(len(names)):
                ending.setdefault(names[k:], []).append(r)
        called: dict[KeyPath, list[_Subtree]] = {}
        for a in given:
            called.setdefault(_names(_inside(a)), []).append(a)
        for names, those in sorted(called.items(), key=lambda found: -len(found[0])):
            new = [r for r in ending.get(names, ()) if self._is_new(r)]
            if len(those) == len(new) == 1 and isinstance(names[-1], str):
                self._take(those[0], new[0])

    def _placed(self, alike: _Alike, given: Sequence[_Subtree], made: Sequence[_Subtree]) -> None:
        """Pairs by position, where there are more arguments than results the donated ones first."""
        first = sorted(given, key=lambda a: (not any(self.donated[a.start : a.stop]), a.start))[: len(made)]
        for a, r in zip(sorted(first, key=lambda a: a.start), made, strict=False):
            self._take(a, r)
            alike.placed.append((a, r))

    def _ambiguity(self, alike: _Alike) -> list[str]:
        """What is said of pairs that could be others."""
        placed = {id(x) for pair in alike.placed for x in pair}
        array = treedef_is_leaf(alike.tree)
        given = [a for a in alike.given if id(a) in placed or (self._is_free(a) and not (array and a.level))]
        made = [r for r in alike.made if id(r) in placed or self._is_new(r)]
        if len(given) == len(made) == 1:
            return []
        taken = (f"{result_text(r.path)} for the new {argument_text(a.path)}" for a, r in alike.placed)
        sides = (argument_text(a.path) for a in given), (result_text(r.path) for r in made)
        return [
            f"state: {_listed(taken)} (donated arguments first, then by position); {' and '.join(map(_listed, sides))} "
            "have one tree, shapes and dtypes"
        ]


def _subtrees(side: Leaves, top: int) -> list[_Subtree]:
    """All subtrees with leaves from level ``top`` of the tree on, each before its parts."""
    out: list[_Subtree] = []

    def walk(tree: Any, start: int, depth: int) -> None:
        if tree.num_leaves and depth >= top:
            out.append(
                _Subtree(
                    tree=tree, start=start, stop=start + tree.num_leaves, level=depth - top,
                    path=side.paths[start][:depth],
                )
            )  # fmt: skip
        for child in tree.children():
            walk(child, start, depth + 1)
            start += child.num_leaves

    walk(side.tree, 0, 0)
    return out


def _alike(those: list[_Alike], subtree: _Subtree) -> _Alike:
    """The one among ``those`` that has the subtree's tree, made where there is none."""
    for alike in those:
        if _same(alike.tree, subtree.tree):
            return alike
    those.append(_Alike(tree=subtree.tree, scalar=False))
    return those[-1]


def _same(one: Any, other: Any) -> bool:
    """Whether two trees are equal; not those whose metadata cannot be compared (arrays, say)."""
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False


def _inside(given: _Subtree) -> KeyPath:
    """Its path inside its argument; that of a keyword argument begins with its name."""
    return given.path[1 + (given.path[0].idx == 0) :]


def _names(path: KeyPath) -> KeyPath:
    """The keys of a path, fields' and dictionaries' as their names."""
    return tuple(
        key.name if isinstance(key, GetAttrKey) else key.key if isinstance(key, DictKey) else key for key in path
    )


def _listed(texts: Iterable[str]) -> str:
    """``a, b and 3 more``."""
    every = list(texts)
    if len(every) <= _SHOWN:
        return ", ".join(every)
    return f"{', '.join(every[:_SHOWN])} and {len(every) - _SHOWN} more"
