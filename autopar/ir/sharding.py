"""Shardings of values and sharding rules of operators.

A `ShardingSpec` says which mesh axes split which dimension of a value (as a PartitionSpec does) and over
which axes the value is still a set of partial sums. An `OpShardingRule` names an operator's *factors*
(the loop dimensions that its operands and results share; the notation is that of Shardy's
sharding rules): any assignment of mesh axes to factors is a way to run the operator on local shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.ir.errors import VerifyError

FactorKind: TypeAlias = Literal["pass", "sum", "max", "min", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSpec:
    """``dims[d]``: mesh axes that split dimension d, major to minor; ``unreduced``: axes over which the
    devices hold partial sums. No axis occurs twice."""

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """True where every device holds the whole, finished value."""
        return not self.unreduced and not any(self.dims)

    def __str__(self) -> str:
        dims = ",".join("·".join(axes) if axes else "_" for axes in self.dims)
        return f"[{dims}]" + (f"+unreduced{{{','.join(self.unreduced)}}}" if self.unreduced else "")

    def verify(self) -> None:
        """Raises VerifyError where an axis occurs twice."""
        axes = [a for dim in self.dims for a in dim] + list(self.unreduced)
        if len(set(axes)) != len(axes):
            raise VerifyError(f"sharding {self} uses a mesh axis twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One loop dimension of an operator.

    kind: ``pass`` — sharding it needs no communication; ``sum`` — each device gets a partial sum, the
    results that lack it are unreduced; ``max`` / ``min`` — the results are combined by an all-reduce of that kind
    as part of the operator; ``whole`` — cannot be sharded.
    """

    name: str
    size: int
    kind: FactorKind = "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Rows that sharding ``factor`` must fetch from both neighbours along dimension ``dim`` of ``operand``."""

    factor: str
    operand: int
    dim: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShardingRule:
    """How an operator's dimensions relate.

    ``operands[i][d]`` are the names of the factors that dimension d of operand i is made of, major to
    minor; their sizes multiply to the dimension (a halo factor counts the dimension's own size; an empty
    tuple is a dimension that is never sharded). ``results`` likewise. ``linear`` lists groups of operands: the
    operator is linear in each group jointly, the other operands held fixed, so that if exactly that group
    is unreduced over an axis (and nothing else uses the axis), so are the results. ``why`` says, for a rule
    that can only replicate, for what reason.
    """

    factors: tuple[Factor, ...]
    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    linear: tuple[tuple[int, ...], ...] = ()
    halos: tuple[Halo, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        def side(tensors: tuple[tuple[tuple[str, ...], ...], ...]) -> str:
            return "(" + ",".join("[" + ",".join("".join(d) or "_" for d in t) + "]" for t in tensors) + ")"

        text = f"{side(self.operands)}->{side(self.results)} "
        text += "{" + ",".join(f"{f.name}={f.size}" for f in self.factors) + "}"
        for kind, word in (("sum", "reduction"), ("max", "max"), ("min", "min"), ("whole", "whole")):
            names = [f.name for f in self.factors if f.kind == kind]
            if names:
                text += f" {word}={{{','.join(names)}}}"
        if self.linear:
            text += " linear=" + "|".join("+".join(map(str, g)) for g in self.linear)
        for halo in self.halos:
            text += f" halo({halo.factor}: operand {halo.operand} dim {halo.dim} -{halo.low}+{halo.high})"
        return text + (f" replicate: {self.why}" if self.why else "")

    def verify(self, operand_shapes: tuple[tuple[int, ...], ...], result_shapes: tuple[tuple[int, ...], ...]) -> None:
        """Raises VerifyError unless factors are unique and dimensions are the products of their factors."""
        sizes = {f.name: f.size for f in self.factors}
        if len(sizes) != len(self.factors):
            raise VerifyError(f"rule {self} names a factor twice")
        halo_dims = {(h.operand, h.dim) for h in self.halos}
        for what, tensors, shapes in (
            ("operand", self.operands, operand_shapes),
            ("result", self.results, result_shapes),
        ):
            if len(tensors) != len(shapes):
                raise VerifyError(f"rule {self}: {len(tensors)} {what}s for {len(shapes)} shapes")
            for i, (dims, shape) in enumerate(zip(tensors, shapes, strict=True)):
                if len(dims) != len(shape):
                    raise VerifyError(f"rule {self}: {what} {i} has rank {len(shape)}")
                seen: set[str] = set()
                for d, names in enumerate(dims):
                    product = 1
                    for name in names:
                        if name not in sizes or name in seen:
                            raise VerifyError(f"rule {self}: factor {name} in {what} {i} unknown or repeated")
                        seen.add(name)
                        product *= sizes[name]
                    if names and product != shape[d] and not (what == "operand" and (i, d) in halo_dims):
                        raise VerifyError(f"rule {self}: {what} {i} dimension {d} is {shape[d]}, not {product}")


def replicate_rule(operand_ranks: tuple[int, ...], result_ranks: tuple[int, ...], why: str) -> OpShardingRule:
    """The rule that shards nothing, with its reason."""
    return OpShardingRule(
        factors=(),
        operands=tuple(((),) * r for r in operand_ranks),
        results=tuple(((),) * r for r in result_ranks),
        why=why,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A sharding that the user fixed: ``target`` is an glob over paths of arguments and results or the name of an
    intermediate (``name:…``); ``dims`` as in ShardingSpec, None for a dimension that is left to the planner."""

    target: str
    dims: tuple[tuple[str, ...] | None, ...]
