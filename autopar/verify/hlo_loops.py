"""What a program executes, and how often: `executed`; a loop's trips where compiler or condition say them.

The condition of a counted loop is ``compare(i, limit)``, i an element of the loop's tuple that begins as a constant and
to which the body adds one: ``for`` loops of `jax.lax.scan` and ``fori_loop`` as every compiler leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.verify.hlo_text import Computation, Instruction, Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An instruction, where it stands, and how often one run of the program executes it: None below a loop whose length
    the program does not say; ``below`` then are trips of the loops around it whose length it says, within the innermost
    one that it does not."""

    computation: str
    instruction: Instruction
    trips: int | None
    below: int = 1


def executed(module: Module, *, fused: bool = True) -> Iterator[Run]:
    """Every instruction in the program's order, loops multiplied out, each branch of a conditional once. ``fused``:
    those inside fusions too, beside the fusion itself. What adds or compares in reductions and sorts is left out."""

    def visit(name: str, trips: int | None, below: int) -> Iterator[Run]:
        computation = module.computations[name]
        for i in computation.instructions.values():
            yield Run(computation=name, instruction=i, trips=trips, below=below)
            if i.opcode == "while":
                body, condition = i.called_as("body"), i.called_as("condition")
                assert body is not None and condition is not None, f"{i.name} has no body"
                n = trip_count(module, computation, i)
                if n is None:
                    yield from visit(body, None, 1)
                    yield from visit(condition, None, 1)
                elif trips is None:
                    yield from visit(body, None, below * n)
                    yield from visit(condition, None, below * (n + 1))
                else:
                    yield from visit(body, trips * n, 1)
                    yield from visit(condition, trips * (n + 1), 1)
            elif i.opcode in _CALLS or (fused and i.opcode in _FUSED):
                for called in i.called:
                    yield from visit(called, trips, below)

    yield from visit(module.entry, 1, 1)


_CALLS = ("call", "conditional", "async-start")
_FUSED = ("fusion", "custom-call")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of ``loop``, a while of ``computation``, runs; None where the program does not say it."""
    if loop.known_trips is not None:
        return loop.known_trips
    condition, body = (module.computations[loop.called_as(what) or ""] for what in ("condition", "body"))
    test, where, outer = _through(condition, condition.root), condition, dict[str, str]()
    if test.opcode == "fusion":  # of the comparison alone
        where = module.computations[test.called[0]]
        outer = {p.name: test.operands[n] for n, p in where.parameters.items()}
        test = where.root
    if test.opcode != "compare":
        return None
    counter, limit = (_constant_or(where, condition, name, outer) for name in test.operands)
    direction = test.attribute("direction")
    if counter.opcode != "get-tuple-element" or direction not in ("LT", "LE", "NE"):
        return None
    index = int(counter.attribute("index") or -1)
    start = _element(computation, loop, index)
    last = _number(limit)
    if limit.opcode == "get-tuple-element":
        last = _number(_element(computation, loop, int(limit.attribute("index") or -1)))
    first, step = _number(start), _step(module, body, index)
    if first is None or last is None or step is None:
        return None
    return max(0, -(-(last + (direction == "LE") - first) // step))


def _constant_or(inner: Computation, outer: Computation, name: str, names: dict[str, str]) -> Instruction:
    """What an instruction of a fusion is, outside of it where it is a parameter."""
    found = _through(inner, inner.instructions[name])
    return _through(outer, outer.instructions[names[found.name]]) if found.name in names else found


def _through(computation: Computation, i: Instruction) -> Instruction:
    """What a copy is a copy of."""
    while i.opcode in ("copy", "bitcast", "copy-done", "copy-start", "convert", "reshape"):
        i = computation.instructions[i.operands[0]]
    return i


def _element(computation: Computation, loop: Instruction, index: int) -> Instruction | None:
    """What a loop's tuple has at ``index`` when it begins."""
    given = _through(computation, computation.instructions[loop.operands[0]])
    if given.opcode != "tuple" or not 0 <= index < len(given.operands):
        return None
    return _through(computation, computation.instructions[given.operands[index]])


def _number(i: Instruction | None) -> int | None:
    if i is None or i.opcode != "constant":
        return None
    try:
        return int(i.text)
    except ValueError:
        return None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What a loop's body adds to its counter, above 0; None where it does something else."""
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    added, where, outer = _through(body, body.instructions[root.operands[index]]), body, dict[str, str]()
    if added.opcode == "fusion":
        where = module.computations[added.called[0]]
        outer = {p.name: added.operands[n] for n, p in where.parameters.items()}
        added = _through(where, where.root)
    if added.opcode != "add":
        return None
    parts = [_constant_or(where, body, name, outer) for name in added.operands]
    numbers = [n for n in map(_number, parts) if n is not None]
    counts = any(p.opcode == "get-tuple-element" and p.attribute("index") == str(index) for p in parts)
    return numbers[0] if counts and len(numbers) == 1 and numbers[0] > 0 else None
