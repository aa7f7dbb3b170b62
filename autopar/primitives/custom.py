"""Users' own rules: text → OpShardingRule; and the rules of opaque calls that were given none.

The text is written as for einsum, one name per dimension::

    b h s _, b h _ _, b h _ _ -> b h s _

A name that stands in an operand and in a result promises that the operator, run on equal slices of all
dimensions of that name, gives that slice of the result. A name with ``+`` is summed over: run on a slice, the
operator gives a partial sum of every result that lacks the name (and of one that has it, that slice). A name in
operands only, without ``+``, and ``_`` are dimensions that stay whole. ``...`` stands for any number of leading
dimensions, aligned from the right and equal in all tensors that have it. A scalar is written ``()`` or left
empty. The notation follows einops (Rogozhnikov, ICLR 2022) and Shardy's sharding rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives.collectives import UNCOUNTED
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.notation import replicated, sum_kind
from autopar.primitives.record import ONE, Collective, Primitive, Rule, Traits

WHOLE = "_"
"""A dimension that stays whole."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*$")
_EXAMPLE = "write it like 'b s d, d f+, f+ -> b s _': operands, '->', results; one name per dimension"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """A parsed text. ``operands[i][d]`` is a name, ``_`` or ``...``; ``sums`` are the names marked ``+``.

    Constraints: a result's names occur in operands; some result lacks each sum; no tensor repeats a name or ``...``.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()

    def __str__(self) -> str:
        def side(tensors: tuple[tuple[str, ...], ...]) -> str:
            return ", ".join(" ".join(n + "+" * (n in self.sums) for n in t) or "()" for t in tensors)

        return f"{side(self.operands)} -> {side(self.results)}"

    @property
    def split_names(self) -> frozenset[str]:
        """Names whose dimensions can be split."""
        operands, results = ({n for t in side for n in t} for side in (self.operands, self.results))
        return frozenset(n for n in operands if n != WHOLE and (n in results or n in self.sums))

    def with_batch(self, batched: Sequence[bool]) -> RuleText:
        """The rule of the operator mapped over a new leading dimension, which those operands have whose ``batched`` is
        True."""
        used = {n for t in self.operands for n in t}
        name = next(f"vmap{i}" for i in range(len(used) + 1) if f"vmap{i}" not in used)
        return RuleText(
            operands=tuple((name, *t) if b else t for t, b in zip(self.operands, batched, strict=True)),
            results=tuple((name, *t) for t in self.results),
            sums=self.sums,
        )


def parse_rule(text: str, reductions: Sequence[str] = ()) -> RuleText:
    """Parses a rule; ``reductions`` names further sum factors.

    Raises:
        RuleError: the text is malformed; the message shows it and what is wrong.
    """
    if not isinstance(text, str) or text.count("->") != 1:  # pyright: ignore[reportUnnecessaryIsInstance] - users'
        raise RuleError(f"sharding rule {text!r}: expected exactly one '->'; {_EXAMPLE}")
    left, right = text.split("->")
    marked: list[str] = list(reductions)

    def tensor(part: str) -> tuple[str, ...]:
        names: list[str] = []
        for token in [] if part.strip() == "()" else part.split():
            name = token.removesuffix("+")
            if token not in ("_", "...") and not _NAME.match(name):
                raise RuleError(
                    f"sharding rule {text!r}: {token!r} is not a dimension; expected a name, a name with '+', "
                    f"'_' (a dimension that stays whole) or '...'; {_EXAMPLE}"
                )
            if name in names and name != "_":
                raise RuleError(
                    f"sharding rule {text!r}: {name!r} occurs twice in {part.strip()!r}; name each dimension of a "
                    "tensor differently, or write '_' for those that stay whole"
                )
            if token.endswith("+") and name not in marked:
                marked.append(name)
            names.append(name)
        return tuple(names)

    operands = tuple(tensor(p) for p in left.split(","))
    results = tuple(tensor(p) for p in right.split(","))
    inputs = {n for t in operands for n in t}
    for name in marked:
        if name not in inputs:
            raise RuleError(f"sharding rule {text!r}: reduction {name!r} is in no operand; it has {_listed(inputs)}")
        if all(name in t for t in results):
            raise RuleError(
                f"sharding rule {text!r}: {name!r} is a reduction but stands in every result; what is summed over is "
                "gone from one of them at least"
            )
    for name in (n for t in results for n in t):
        if name != "_" and name not in inputs:
            raise RuleError(
                f"sharding rule {text!r}: {name!r} stands in a result but in no operand, so no slice of the operands "
                "gives a slice of it; write '_'"
            )
    return RuleText(operands=operands, results=results, sums=tuple(marked))


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names - {"_"})) or "no names"


def rule_from_text(text: str, node: Node, reductions: Sequence[str] = ()) -> OpShardingRule:
    """The rule that ``text`` gives ``node``.

    Raises:
        RuleError: the text is malformed, or does not fit the node's number of operands, ranks or sizes.
    """
    parsed = parse_rule(text, reductions)
    where = f"{node}: sharding rule {text!r}"
    operands = _expand(where, "operand", parsed.operands, node.operand_types)
    results = _expand(where, "result", parsed.results, node.result_types)
    sizes: dict[str, tuple[int, str]] = {}
    sides = (("operand", operands, node.operand_types), ("result", results, node.result_types))
    for side, tensors, types in sides:
        for i, (names, tensor) in enumerate(zip(tensors, types, strict=True)):
            for d, (name, size) in enumerate(zip(names, tensor.shape, strict=True)):
                if name == "_":
                    continue
                place = f"{side} {i} dimension {d}"
                if tensor.is_key:
                    raise RuleError(f"{where}: {place} is that of a PRNG key array, which stays whole; write '_'")
                seen, first = sizes.setdefault(name, (size, place))
                if seen != size:
                    raise RuleError(
                        f"{where}: {name!r} is {seen} in {first} and {size} in {place}; dimensions of one name must be "
                        "equal; give them different names, or write '_'"
                    )
    for i, (names, tensor) in enumerate(zip(results, node.result_types, strict=True)):
        summed = [n for n in parsed.sums if n not in names]
        if summed and sum_kind(tensor.dtype) != "sum":
            raise RuleError(
                f"{where}: {summed[0]!r} leaves partial sums of result {i}, which is {tensor} and cannot hold any; "
                "return numbers of at least a byte, or write '_' for the dimension"
            )
    in_results = {n for t in results for n in t}
    sums = set(parsed.sums)
    factors = tuple(
        Factor(name=n, size=size, kind="sum" if n in sums else "pass" if n in in_results else "whole")
        for n, (size, _) in sizes.items()
    )
    return OpShardingRule(
        factors=factors,
        operands=tuple(tuple(() if n == "_" else (n,) for n in t) for t in operands),
        results=tuple(tuple(() if n == "_" else (n,) for n in t) for t in results),
        why="" if any(f.kind != "whole" for f in factors) else f"its sharding rule {text!r} keeps all dimensions whole",
    )


def spelled(text: RuleText, operands: Sequence[Any], results: Sequence[Any]) -> RuleText:
    """``text`` with a name for each dimension that ``...`` stands for; ``operands`` and ``results`` are arrays or
    types, anything with a ``shape``.

    Raises:
        RuleError: it does not fit their number, or ranks.
    """
    where = f"sharding rule {str(text)!r}"
    return RuleText(
        operands=tuple(_expand(where, "operand", text.operands, operands)),
        results=tuple(_expand(where, "result", text.results, results)),
        sums=text.sums,
    )


def _expand(where: str, side: str, tensors: tuple[tuple[str, ...], ...], types: Sequence[Any]) -> list[tuple[str, ...]]:
    """The names of each tensor, ``...`` replaced by one name per dimension, counted from the right."""
    if len(tensors) != len(types):
        raise RuleError(
            f"{where} has {len(tensors)} {side}s, the operator {len(types)}: "
            f"{', '.join(map(str, types))}; name the dimensions of every array, in flattened order"
        )
    out: list[tuple[str, ...]] = []
    for i, (names, tensor) in enumerate(zip(tensors, types, strict=True)):
        extra = len(tensor.shape) - len(names) + ("..." in names)
        if extra < 0 or (extra and "..." not in names):
            raise RuleError(
                f"{where}: {side} {i} is {tensor}, rank {len(tensor.shape)}, but the rule names "
                f"{len(names) - ('...' in names)} dimensions ({' '.join(names) or '()'})"
            )
        at = names.index("...") if "..." in names else 0
        dots = tuple(f"lead{k}" for k in reversed(range(extra)))
        out.append(names[:at] + dots + names[at + 1 :] if "..." in names else names)
    return out


def user_rule(node: Node, rules: Mapping[str, str]) -> OpShardingRule | None:
    """The rule that a user registered for ``node``'s primitive or, of an ffi call, for its target; None if none. Raises
    RuleError as `rule_from_text`."""
    text = rules.get(operator_name(node))
    return None if text is None else rule_from_text(text, node)


def operator_name(node: Node) -> str:
    """What users call the operator by: its primitive or, of an ffi call, its target."""
    name = node.params.get("target_name") if node.primitive == "ffi_call" else None
    return name if isinstance(name, str) else node.primitive


def is_opaque(node: Node) -> bool:
    """True for an ffi call, and for a pallas kernel whose grid does not say how it can be split: a rule by name can."""
    return node.primitive == "ffi_call" or (node.primitive == "pallas_call" and not node.params["split"])


def _kernel(node: Node) -> OpShardingRule:
    return rule_from_text(node.params["rule"], node)


def _opaque(what: str, remedy: str) -> Rule:
    def rule(node: Node) -> OpShardingRule:
        target = node.params.get("target_name")
        name = f" {target!r}" if isinstance(target, str) else ""
        return replicated(node, f"{what}{name} is opaque; {remedy}".replace("TARGET", str(target)))

    return rule


def _pallas_call(node: Node) -> OpShardingRule:
    """Factors are the axes of the kernel's grid that can be split (`frontend.pallas_grids`); blocks stay whole."""
    build = RuleBuilder(node)
    for axis in node.params["split"]:
        operands: dict[int, int] = dict(axis["operands"])
        results: dict[int, int] = dict(axis["results"])
        build.add(axis["parts"], operands, results)
        sides = ((operands, node.operand_types, True), (results, node.result_types, False))
        for places, types, is_operand in sides:
            for i, d in places.items():
                at = {i: d}
                build.add(types[i].shape[d] // axis["parts"], *((at, None) if is_operand else (None, at)), kind="whole")
    return build.rule(why=f"no axis of the pallas kernel's grid is independent of the others; {_DECORATE}")


_DECORATE = "decorate the function that calls it with @autopar.sharding_rule(name, '… -> …') to split it"

_OPAQUE = Traits(opaque=True, repeatable=False)


def _call(name: str, rule: Rule, *sized: str, collective: Collective | None = None) -> Primitive:
    return Primitive(
        name=name, rule=rule, flops=ONE, traits=_OPAQUE, sized=frozenset(sized),
        collective=collective,
    )  # fmt: skip


PRIMITIVES: tuple[Primitive, ...] = (
    _call("autopar_kernel", _kernel, "flops"),
    _call(
        "ffi_call",
        _opaque("the ffi call", "give it a rule with autopar.sharding_rule('TARGET', '… -> …') to split it"),
        "result_avals",
    ),
    _call("pallas_call", _pallas_call, "cost_estimate", "grid_mapping", "name", "out_avals"),
    _call(
        "shard_map",
        _opaque("a user's shard_map", "on a mesh that is not its own it runs whole on every device"),
        collective=UNCOUNTED,
    ),
)
