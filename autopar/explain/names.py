"""What a question is about: a name → the classes of equal operators, or arguments, of a plan's problems: `found`.

Operators are called by primitive, source line, both (``dot_general (model.py:88)``), or node; a value that
`jax.ad_checkpoint.checkpoint_name` named by ``name:…``; arguments by path, with * for any text; layers by the words
that `autopar inspect --stages` has for them. What is not a name in full may be a part of one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.explain.posed import Posed
from autopar.ir.errors import OptionError
from autopar.ir.pretty import fold_paths

_LAYER = re.compile(r"layers? (\d+)")


@dataclass(frozen=True, kw_only=True)
class Named:
    """Class ``c`` of a problem: the operators, or arguments, that share one decision. ``title`` says which they are,
    ``count`` how many the problem has of them, ``phase`` when they run ("" of arguments)."""

    posed: Posed
    c: int
    title: str
    count: int
    phase: str


def found(problems: Sequence[Posed], name: str) -> list[Named]:
    """What ``name`` means, arguments first, then operators, the dearest first. Raises OptionError where nothing has it,
    with the nearest names."""
    name = name.strip()
    if (layer := _LAYER.fullmatch(name)) is not None:
        every = problems
        problems = [posed for posed in problems if int(layer[1]) in posed.layers]
        exact = [(posed, c) for posed in problems for c in _operators(posed)]
        if not exact:
            count = 1 + max((k for posed in every for k in posed.layers), default=-1)
            of = f"its layers are 0 to {count - 1}" if count else "it is of one program, without layers"
            raise OptionError(f"the plan has no layer {layer[1]}: {of}")
        return _named(exact)
    every = [(posed, c, names) for posed in problems for c, names in _names(posed)]
    exact = [(posed, c) for posed, c, names in every if name in names]
    if not exact:
        part = re.compile(".*".join(map(re.escape, name.split("*"))))
        exact = [(posed, c) for posed, c, names in every if any(part.search(known) for known in names)]
    if exact:
        return _named(exact)
    known = list(dict.fromkeys(one for _, _, names in every for one in names))
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) or known[:4]
    raise OptionError(f"nothing in the plan is called {name!r}; near to that: {', '.join(near)}")


def _named(classes: Sequence[tuple[Posed, int]]) -> list[Named]:
    out = [_one(posed, c) for posed, c in classes]
    return sorted(out, key=lambda one: (bool(one.phase), -_seconds(one)))


def _seconds(one: Named) -> float:
    """What a step spends on it, in all layers that have it."""
    this, s = one.posed.problem.graph.classes[one.c], one.posed.chosen.out.strategy[one.c]
    return float(this.compute_s[s]) * this.trips * len(this.members) * one.posed.count


def _one(posed: Posed, c: int) -> Named:
    flat, this = posed.problem.flat, posed.problem.graph.classes[c]
    node = flat.node[this.members[0]]
    where = f", {posed.what}" if posed.what else ""
    if node is None:
        paths = [path for n, path in _paths(posed).items() if n in set(this.members)]
        folded = [fold.path for fold in fold_paths([(path, None) for path in paths])]
        more = f" and {len(folded) - 1} more" if len(folded) > 1 else ""
        title = f"{folded[0]}{more}, {flat.result_types[this.members[0]][0]}{where}"
        return Named(posed=posed, c=c, title=title, count=len(this.members), phase="")
    title = f"{node}: {', '.join(map(str, node.operand_types))} -> {', '.join(map(str, node.result_types))}{where}"
    return Named(posed=posed, c=c, title=title, count=len(this.members), phase=posed.passes[this.members[0]])


def _paths(posed: Posed) -> dict[int, str]:
    """Planning node → path of the argument that it is."""
    return dict(zip(posed.problem.flat.args, posed.paths, strict=True))


def _operators(posed: Posed) -> Iterator[int]:
    flat = posed.problem.flat
    for c, this in enumerate(posed.problem.graph.classes):
        if this.members and flat.kind[this.members[0]] == "op":
            yield c


def _names(posed: Posed) -> Iterator[tuple[int, set[str]]]:
    """(class, all that its members are called)."""
    flat, paths = posed.problem.flat, _paths(posed)
    folds = fold_paths([(path, None) for path in posed.paths])
    folded = {posed.problem.flat.args[i]: fold.path for fold in folds for i in fold.rows}
    for c, this in enumerate(posed.problem.graph.classes):
        names: set[str] = set()
        for n in this.members:
            node = flat.node[n]
            if n in paths:
                names |= {paths[n], folded[n]}
            elif node is not None and flat.kind[n] == "op":
                names |= {node.called, f"node {node.id}"}
                if node.source:
                    names |= {node.source, f"{node.called} ({node.source})"}
                if node.primitive == "name":
                    names.add(f"name:{node.params.get('name')}")
        if names:
            yield c, names
