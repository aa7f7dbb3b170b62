"""One record per primitive: all that planning knows of an operator, in one place.

A `Primitive` says how it may be sharded, what it costs, what compilers do with it, how microbatches flow through it and
where it is linear. Each family of primitives has a file beside this one with its rules and, at its end, its records;
`autopar.primitives` has them all by name. Who asks (roofline, liveness, layering, microbatches, recomputation) asks
for a property, never for a name. To add a primitive is to add a record, and to regenerate the golden files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from types import EllipsisType
from typing import Literal, TypeAlias

from autopar.ir.errors import VerifyError
from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.ir.strategy import CollectiveKind
from autopar.primitives.view import BatchRule

Rule: TypeAlias = Callable[[Node], OpShardingRule]
Flops: TypeAlias = Callable[[Node], float]
Weights: TypeAlias = "tuple[tuple[int, float], ...]"
"""(position, weight): operands count from 0, results from the number of operands."""
Touches: TypeAlias = Callable[[Node], Weights]
Order: TypeAlias = Literal["rising", "falling", "max", "min", "or", "and"]
"""How a result follows its operands: each element rises, or falls, with one of an operand (the place may change); or it
is the largest or smallest of some, of booleans one or all of them."""
JoinedBy: TypeAlias = Literal["add_any", "max", "min"]
Group: TypeAlias = "tuple[int | EllipsisType, ...]"
"""Operands by position; ``...`` stands for all behind the one before it."""


@dataclass(frozen=True, slots=True)
class PerElement:
    """A `Flops`: so many for each element of the results."""

    flops: float

    def __call__(self, node: Node) -> float:
        return self.flops * sum(t.size for t in node.result_types)

    def __str__(self) -> str:
        return f"{self.flops:g} an element"


ONE = PerElement(1)
TRANSCENDENTAL = PerElement(8)
"""Functions that take a polynomial or a root, and divisions (guessed; they are memory-bound anyway)."""


def largest(node: Node) -> float:
    """FLOPs: one for each element of the largest operand or result."""
    return float(max(t.size for t in (*node.operand_types, *node.result_types)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What kind of operator it is, and what compilers do with it, as XLA's fusion and buffer assignment do.

    Constraints, beside those that single traits name: whatever is fused in some way is ``fusible``; contractions and
    opaque calls are not; what reads memory is expensive.
    """

    elementwise: bool = False
    """True where an element of each result is made of the operands' elements at the same place. Fusible."""
    function: bool = False
    """True for elementwise functions that take a polynomial or a root. Expensive; all cost `TRANSCENDENTAL`."""
    identity: bool = False
    """True where result i is operand i."""
    placement: bool = False
    """True where parameters say where a value lies, by all of its shape."""
    casts: bool = False
    """True where the dtype changes and nothing else does."""
    compares: bool = False
    """True where one operand is compared with the other."""
    jumps: bool = False
    """True where a result may jump though an operand varies by a rounding only: a sign, a whole number."""
    orders: bool = False
    """True where elements are put in an order: what is carried along may jump likewise."""
    random: bool = False
    """True where PRNG keys or bits are made by hashing or drawing, as jax's settings for random numbers have it."""
    contraction: bool = False
    """True for products with a sum: from memory, on matrix units where a device has any, at the rate of their dtype."""
    attends: bool = False
    """True for fused attention: a contraction."""
    looks_up: bool = False
    """True where rows are read at indices, or added there."""
    opaque: bool = False
    """True for calls of which shapes tell nothing about the work: FLOPs are the user's word, or those of the body.
    Where there is neither, one an element of the result is assumed, and the plan says so. Not repeatable."""
    repeatable: bool = True
    """True where running it a second time has no effects and gives the same again."""

    fusible: bool = False
    """True where compilers compute it inside what reads its result: elementwise, data movement, reductions."""
    expensive: bool = False
    """True where it is not computed again by each reader that fuses it."""
    reads_memory: bool = False
    """True where its operands are read from memory although it is fusible. Expensive."""
    reduces: bool = False
    """True for reductions over ``axes``; only what is ``into_reduction`` is fused into one. Reads memory."""
    into_reduction: bool = False
    """True where a reduction that reads it fuses it."""
    moves: bool = False
    """True where elements change place, so that the result cannot take an operand's buffer."""
    generates: bool = False
    """True where the result is made of nothing, or of less. Moves."""
    aliases: bool = False
    """True where the result is the first operand's buffer, perhaps under another shape."""

    def __str__(self) -> str:
        """The traits that differ from those of an operator that compilers know nothing of."""
        return " ".join(f.name if f.default is False else f"not {f.name}" for f in fields(self)
                        if getattr(self, f.name) is not f.default) or "none"  # fmt: skip

    def verify(self) -> None:
        """Raises VerifyError at the first broken constraint."""
        fused = ("elementwise", "expensive", "reads_memory", "reduces", "into_reduction", "moves", "aliases")
        implied = [(name, "fusible") for name in fused]
        implied += [("function", "elementwise"), ("function", "expensive"), ("reads_memory", "expensive")]
        implied += [("reduces", "reads_memory"), ("generates", "moves"), ("attends", "contraction")]
        for has, needs in implied:
            if getattr(self, has) and not getattr(self, needs):
                raise VerifyError(f"{has}, but not {needs}")
        excluded = [("contraction", "fusible"), ("opaque", "fusible"), ("opaque", "repeatable"), ("aliases", "moves")]
        for has, never in excluded:
            if getattr(self, has) and getattr(self, never):
                raise VerifyError(f"both {has} and {never}")


def _always(node: Node) -> bool:
    del node
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The groups of operands that a primitive is jointly linear in, the others held fixed.

    Which dtypes partial sums survive is `notation.sums_survive`'s to say; ``when`` adds what else it hangs on.
    """

    groups: tuple[Group, ...] = ()
    when: Callable[[Node], bool] = _always
    rounds: bool = False
    """True where results are rounded to fewer bits: microbatches add up all the same, but for that rounding; partial
    sums over devices are not handed through."""

    def __str__(self) -> str:
        text = "|".join("+".join("…" if i is ... else str(i) for i in group) for group in self.groups)
        when = "" if self.when is _always else f" when {self.when.__name__.strip('_')}"
        return text + when + (" rounded" if self.rounds else "")


NONLINEAR = Linear()
FIRST = Linear(groups=((0,),))
EITHER = Linear(groups=((0,), (1,)))
BOTH = Linear(groups=((0, 1),))
ALL = Linear(groups=((0, ...),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a primitive communicates over named mesh axes: ``kind``, or None where that cannot be counted."""

    kind: CollectiveKind | None
    axes: str = ""
    """The parameter that names the mesh axes."""
    reduction: str = ""


def no_workspace(node: Node) -> Weights:
    """No workspace beside operands and results."""
    del node
    return ()


def all_of_it(node: Node) -> Weights:
    """Operands and results are read and written whole."""
    del node
    return ()


def a_part(node: Node) -> Weights:
    """Of the first operand as much as there is of the result is read."""
    return ((0, min(1.0, node.result_types[0].size / max(1, node.operand_types[0].size))),)


def in_place(update: int) -> Touches:
    """As much as operand ``update`` has is written over a part of the first operand, whose buffer the result takes."""

    def touched(node: Node) -> Weights:
        share = min(1.0, node.operand_types[update].size / max(1, node.operand_types[0].size))
        return ((0, share), (len(node.operand_types), share))

    return touched


@dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """A record. What has no default has to be said of every primitive; the defaults claim nothing.

    Attributes:
        name: as JAX has it.
        rule: how it may be sharded, of a Node; its ``linear`` is filled in from the record (`primitives.rule_for`).
        flops: floating-point operations of the whole operator; a multiply-add counts two.
        traits: what it is and what compilers do with it.
        linear: the operands in which it is linear.
        batch: how microbatches flow through it; None: as its sharding rule says (`batch.kinds_through`).
        sorted_batch: how rows of microbatches in the order of a sort flow through it; None: by its sharding rule where
            ``batch`` does, and where it is elementwise or of one operand (`in_order.through`).
        order: how it keeps the order of values, which maxima over the batch ask for; None: not at all.
        sized: parameters that follow the operands' shapes, so that a microbatch has its own.
        workspace: weights by which the bytes of each operand and result on a device count towards what it needs while
            it runs, beside these. From how XLA compiles for a CPU: others need as much or less.
        touches: weights by which the bytes of each operand and result count towards what it reads and writes, where it
            reads or writes a part of it only.
        copy_key: of an operand that ``workspace`` says is copied: equal keys, one copy for all that read the value.
        divides: False where a device that holds a part of the result has to make all of it.
        collective: what it communicates by itself inside a user's shard_map.
        joined_by: the primitive that makes one result of those of parts of the operand; None where there is none.
        tangent: False where derivatives do not flow through.
        opened: True where planning replaces it by what it is made of; the record is read before that.
    """

    name: str
    rule: Rule
    flops: Flops
    traits: Traits
    linear: Linear = NONLINEAR
    batch: BatchRule | None = None
    sorted_batch: BatchRule | None = None
    order: Order | None = None
    sized: frozenset[str] = frozenset()
    workspace: Callable[[Node], Weights] = no_workspace
    touches: Touches = all_of_it
    copy_key: Callable[[Node, int], Hashable] | None = None
    divides: Callable[[Node], bool] = _always
    collective: Collective | None = None
    joined_by: JoinedBy | None = None
    tangent: bool = True
    opened: bool = False

    @property
    def light(self) -> bool:
        """True where it may be computed wherever its result is needed, from what is there everywhere."""
        traits = self.traits
        return traits.fusible and not (traits.reduces or traits.looks_up or traits.random)

    @property
    def arithmetic(self) -> bool:
        """True for a step of arithmetic, fused into whatever reads its result at no cost beside its operands' bytes."""
        traits = self.traits
        alike = traits.elementwise or traits.generates or traits.aliases
        return alike and not traits.function and not traits.reads_memory

    def verify(self) -> None:
        """Raises VerifyError at the first broken constraint: those of `Traits`; functions cost the same; groups
        of operands ascend, ``...`` last; identities are linear."""
        self.traits.verify()
        if self.traits.function and self.flops != TRANSCENDENTAL:
            raise VerifyError(f"a function of {self.flops} FLOPs")
        if self.traits.identity and not self.linear.groups:
            raise VerifyError("an identity, but linear in nothing")
        for group in self.linear.groups:
            numbers = [i for i in group if not isinstance(i, EllipsisType)]
            if not numbers or numbers != sorted(set(numbers)) or ... in group[:-1]:
                raise VerifyError(f"linear group {group}")

    def __str__(self) -> str:
        """A line: what it costs, its traits, and what else is said of it."""

        def called(function: Callable[..., object]) -> str:
            return function.__name__.strip("_")

        said = {
            "flops": str(self.flops) if isinstance(self.flops, PerElement) else called(self.flops),
            "traits": str(self.traits),
            "linear": str(self.linear),
            "batch": called(self.batch) if self.batch is not None else "",
            "sorted batch": called(self.sorted_batch) if self.sorted_batch is not None else "",
            "order": self.order,
            "sized": ",".join(sorted(self.sized)),
            "workspace": called(self.workspace) if self.workspace is not no_workspace else "",
            "touches": called(self.touches) if self.touches is not all_of_it else "",
            "divides": called(self.divides) if self.divides is not _always else "",
            "collective": self.collective and (self.collective.kind or "uncounted"),
            "joined by": self.joined_by,
            "tangent": "" if self.tangent else "none",
            "opened": "first" if self.opened else "",
        }
        return f"{self.name}: {'; '.join(f'{k} {v}' for k, v in said.items() if v)}"
