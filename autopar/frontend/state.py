"""The trees of a call's arguments and results → which result is the new value of which argument.

What a step returns of its state is an argument of the next call. So that nothing moves in between, both get one
sharding (`ir.graph.Graph.state`). A subtree of the results is the new value of an argument, or of a part of one, that
has its tree, shapes and dtypes. Where several have them,

- whole arguments are paired before parts of others, and these level by level; large trees before small   `_Finder.run`
- what has a name is paired by it: ``args[0]['params']`` with ``out[1]['params']``, if no other is called so   `_named`
- else donated arguments go first, then positions decide                                                       `_placed`

What donation or position decided, and could be otherwise, is an ambiguity: it is listed in the notes. The type of a
single array says little: a batch has it in common with what is made of it, a learning rate with the loss. Inside an
argument such a one is paired by its name alone; a whole argument also with what is made of it in place, its elements
for themselves (`_kept_by`): w − η·g of w, but neither g nor a prediction of a batch; and scalars are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

from jax.tree_util import DictKey, GetAttrKey, keystr, treedef_is_leaf

from autopar.ir.graph import Graph, Node, TensorType
from autopar.primitives import rule_for

KeyPath: TypeAlias = tuple[Any, ...]
_SHOWN = 4
"""Paths that a note lists of each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """One side of a call. ``tree``: of (positional arguments, keyword arguments), or of the results; ``paths`` of its
    leaves, one key per level of the tree."""

    tree: Any
    paths: tuple[KeyPath, ...]


def argument_text(path: KeyPath) -> str:
    """A flat argument's path as text: ``args[0]['w']``, or ``kwargs['mask']``."""
    return ("args", "kwargs")[path[0].idx] + keystr(path[1:])


def result_text(path: KeyPath) -> str:
    """A flat result's path as text: ``out[0]['w']``."""
    return "out" + keystr(path)


def with_state(
    graph: Graph, first: int, given: Leaves, made: Leaves, donated: Sequence[bool]
) -> tuple[Graph, tuple[str, ...]]:
    """Finds the new values of arguments. One that is donated and has none gets the first result of its type that is
    none: it may take its buffer.

    Args:
        graph: what makes the results; its inputs from ``first`` on are the call's flat arguments.
        given, made: these arguments, and the results.
        donated: flags arguments.

    Returns:
        The graph with `Graph.state` and `Graph.donated`; notes on what could be paired otherwise.
    """
    finder = _Finder(graph, first, given, made, donated)
    finder.run()
    pairs = {first + i: j for i, j in finder.pair_of.items()}
    others: dict[TensorType, list[int]] = {}
    for j, o in reversed(tuple(enumerate(graph.outputs))):
        if j not in finder.taken:
            others.setdefault(graph.values[o] if isinstance(o, int) else o.type, []).append(j)
    gives = [first + i for i, flag in enumerate(donated) if flag]
    for i in gives:
        if i not in pairs and (same := others.get(graph.values[graph.inputs[i]])):
            pairs[i] = same.pop()
    graph = replace(graph, state=tuple(sorted(pairs.items())), donated=tuple(i for i in gives if i in pairs))
    return graph, finder.notes()


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
    given: list[_Subtree] = field(default_factory=list[_Subtree])
    made: list[_Subtree] = field(default_factory=list[_Subtree])
    placed: list[tuple[_Subtree, _Subtree]] = field(default_factory=list[tuple[_Subtree, _Subtree]])

    @property
    def is_array(self) -> bool:
        """True for single arrays."""
        return treedef_is_leaf(self.tree)


class _Finder:
    def __init__(self, graph: Graph, first: int, given: Leaves, made: Leaves, donated: Sequence[bool]) -> None:
        self.graph, self.first, self.donated = graph, first, donated
        self.pair_of: dict[int, int] = {}
        """Flat argument → flat result."""
        self.taken: set[int] = set()
        """Flat results that are new values."""
        self.kept_by = cache(lambda i: _kept_by(graph, graph.inputs[first + i]))
        old = [graph.values[v] for v in graph.inputs[first:]]
        new = [graph.values[o] if isinstance(o, int) else o.type for o in graph.outputs]
        by_types: dict[tuple[TensorType, ...], list[_Alike]] = {}
        for subtree in _subtrees(given, 2):
            those = by_types.setdefault(tuple(old[subtree.start : subtree.stop]), [])
            _alike(those, subtree).given.append(subtree)
        for subtree in _subtrees(made, 0):
            for alike in by_types.get(tuple(new[subtree.start : subtree.stop]), ()):
                if _same(alike.tree, subtree.tree):
                    alike.made.append(subtree)
        self.alike = [alike for those in by_types.values() for alike in those if alike.made]

    def run(self) -> None:
        """All pairs, whole arguments and large trees first."""
        self.alike.sort(key=lambda alike: (-alike.tree.num_leaves, alike.given[0].start))
        for level in range(1 + max((a.level for alike in self.alike for a in alike.given), default=-1)):
            for alike in self.alike:
                if given := [a for a in alike.given if a.level == level and self._is_old(a)]:
                    self._named(given, [r for r in alike.made if self._is_new(r)])
                    self._placed(alike, [a for a in given if self._is_old(a)])

    def _is_old(self, given: _Subtree) -> bool:
        """True for an argument that is in no pair."""
        return all(i not in self.pair_of for i in range(given.start, given.stop))

    def _is_new(self, made: _Subtree) -> bool:
        """True for a result that is in no pair."""
        return all(j not in self.taken for j in range(made.start, made.stop))

    def _take(self, given: _Subtree, made: _Subtree) -> None:
        self.pair_of.update(zip(range(given.start, given.stop), range(made.start, made.stop), strict=True))
        self.taken.update(range(made.start, made.stop))

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

    def _placed(self, alike: _Alike, given: Sequence[_Subtree]) -> None:
        """Pairs by position, where there are more arguments than results the donated ones first."""
        given, made = self._candidates(alike, given, [r for r in alike.made if self._is_new(r)])
        first = sorted(given, key=lambda a: (not any(self.donated[a.start : a.stop]), a.start))[: len(made)]
        for a in sorted(first, key=lambda a: a.start):
            r = next((r for r in made if self._is_new(r) and self._may_become(alike, a, r)), None)
            if r is not None:
                self._take(a, r)
                alike.placed.append((a, r))

    def _candidates(
        self, alike: _Alike, given: Sequence[_Subtree], made: Sequence[_Subtree]
    ) -> tuple[list[_Subtree], list[_Subtree]]:
        """Those that may be the old value, and the new one, of any of the others."""
        return (
            [a for a in given if any(self._may_become(alike, a, r) for r in made)],
            [r for r in made if any(self._may_become(alike, a, r) for a in given)],
        )

    def _may_become(self, alike: _Alike, given: _Subtree, made: _Subtree) -> bool:
        """Whether a pair is worth more than its equal types."""
        if not alike.is_array:
            return True
        whole = given.level == 0 and self.graph.values[self.graph.inputs[self.first + given.start]].shape
        return bool(whole) and made.start in self.kept_by(given.start)

    def notes(self) -> tuple[str, ...]:
        """What is said of pairs that could be others."""
        out: list[str] = []
        for alike in self.alike:
            placed = {id(x) for pair in alike.placed for x in pair}
            given, made = self._candidates(
                alike,
                [a for a in alike.given if id(a) in placed or self._is_old(a)],
                [r for r in alike.made if id(r) in placed or self._is_new(r)],
            )
            if not placed or len(given) == len(made) == 1:
                continue
            taken = (f"{result_text(r.path)} for the new {argument_text(a.path)}" for a, r in alike.placed)
            sides = (argument_text(a.path) for a in given), (result_text(r.path) for r in made)
            out.append(
                f"state: {_listed(taken)} (donated arguments first, then by position); "
                f"{' and '.join(map(_listed, sides))} have one tree, shapes and dtypes"
            )
        return tuple(out)


def _kept_by(graph: Graph, value: int) -> frozenset[int]:
    """Outputs whose elements are made of the same elements of ``value``, and others': the dimensions of operands and
    results are the same on the way from one to the other."""
    reached = {value}
    for node in graph.nodes:
        for k, o in enumerate(node.operands):
            if isinstance(o, int) and o in reached:
                reached.update(v for r, v in enumerate(node.results) if _keeps(node, k, r))
    return frozenset(j for j, o in enumerate(graph.outputs) if isinstance(o, int) and o in reached)


def _keeps(node: Node, operand: int, result: int) -> bool:
    """Whether a result has an operand's dimensions, one by one; of what has a body, their sizes."""
    if node.operand_types[operand].shape != node.result_types[result].shape:
        return False
    if node.bodies or node.hidden is not None:
        return True
    rule = rule_for(node)
    return rule.operands[operand] == rule.results[result]


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
    those.append(_Alike(tree=subtree.tree))
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
