"""Operators that work element by element: any dimension can be split, with no communication.

In: a Node whose operands have the result's shape or are scalars (rank 0: literals, a select's predicate, a
clamp's bounds). Out: one factor per dimension. Compilers fuse all of them. Which are computed again by every reader is
as XLA has it (`HloInstruction::IsExpensive`): not what takes a polynomial, a division or a root.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Node, itemsize_bits
from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives.kinds import Kind, Rows, Same
from autopar.primitives.notation import Dims, build, dim_factors, letters, replicated
from autopar.primitives.record import (
    ALL,
    BOTH,
    EITHER,
    FIRST,
    NONLINEAR,
    ONE,
    TRANSCENDENTAL,
    Linear,
    Order,
    Primitive,
    Rule,
    Traits,
)
from autopar.primitives.view import View

LAYER_BOUNDARY = "autopar_layer_boundary"
"""`autopar.layer_boundary`'s primitive: an identity that only `frontend.layering` reads."""
JOIN = "autopar_join"
"""Scalars of several layers by one operator (`frontend.layering.joins`)."""


def pointwise(node: Node) -> OpShardingRule:
    """Operands share the result's factors; scalars, and dimensions of size 1 that are broadcast, have none."""
    shape = node.result_types[0].shape
    if any(r.shape != shape for r in node.result_types) or not all(_fits(t.shape, shape) for t in node.operand_types):
        shapes = ", ".join(str(t) for t in node.operand_types)
        return replicated(node, f"operand shapes ({shapes}) differ from the result's {node.result_types[0]}")
    factors, dims = dim_factors(shape)
    return build(
        factors,
        tuple(tuple(d if n == m else () for d, n, m in zip(dims, t.shape, shape)) for t in node.operand_types),
        (dims,) * len(node.result_types),
    )


def _fits(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """True for the result's shape, a scalar, and a shape of the same rank whose other dimensions are 1."""
    return not operand or (len(operand) == len(result) and all(n in (1, m) for n, m in zip(operand, result)))


def _tuple_identity(node: Node) -> OpShardingRule:
    """Result i is operand i."""
    factors: list[Factor] = []
    tensors: list[Dims] = []
    for i, t in enumerate(node.operand_types):
        own, dims = dim_factors(t.shape, suffix=str(i) if len(node.operand_types) > 1 else "")
        factors += own
        tensors.append(dims)
    return build(factors, tensors, tensors)


def _bitcast(node: Node) -> OpShardingRule:
    """A change of width adds or removes a last dimension, which stays whole."""
    (operand,), (result,) = node.operand_types, node.result_types
    if itemsize_bits(operand.dtype) == itemsize_bits(result.dtype):
        return pointwise(node)
    shape = min(operand.shape, result.shape, key=len)
    factors = [Factor(name=n, size=s) for n, s in zip(letters(len(shape)), shape, strict=True)]
    shared = tuple((f.name,) for f in factors)

    def dims(rank: int) -> Dims:
        return shared + ((),) * (rank - len(shape))

    return build(factors, (dims(len(operand.shape)),), (dims(len(result.shape)),))


def _is_true_division(node: Node) -> bool:
    """Integers are rounded."""
    return not node.result_types[0].dtype.startswith(("int", "uint"))


def _adds(node: Node) -> bool:
    """What is joined is added up."""
    return node.params["op"] == "add_any"


def _keeps_sums(node: Node) -> bool:
    """Floats are rounded to integers, and to booleans everything is."""
    operand, result = node.operand_types[0].dtype, node.result_types[0].dtype
    integers = ("int", "uint")
    return result.startswith(("float", "bfloat", "complex")) or (
        operand.startswith(integers) and result.startswith(integers)
    )


def elementwise_rows(v: View) -> Kind:
    """Rows where the operands have them; constant along them if all operands are."""
    merged = v.merged()
    if not isinstance(merged, Rows):
        return merged
    alone = all(k.uniform for k in v.rows()) and not any(
        isinstance(k, Same) and len(v.shape(i)) > merged.dim and v.shape(i)[merged.dim] != 1
        for i, k in enumerate(v.kinds)
    )
    return Rows(dim=merged.dim, pre=merged.pre, post=merged.post, uniform=alone)


def arithmetic(
    name: str, linear: Linear = NONLINEAR, rule: Rule = pointwise, order: Order | None = None, **traits: bool
) -> Primitive:
    """The record of an elementwise operator of one FLOP an element, computed again by every reader that fuses it."""
    return Primitive(
        name=name, rule=rule, flops=ONE, linear=linear, batch=elementwise_rows, order=order,
        traits=Traits(elementwise=True, fusible=True, **traits),
    )  # fmt: skip


def division(name: str, linear: Linear = NONLINEAR, **traits: bool) -> Primitive:
    """The record of an elementwise operator that costs what a division does: computed once, whoever reads it."""
    return Primitive(
        name=name, rule=pointwise, flops=TRANSCENDENTAL, linear=linear, batch=elementwise_rows,
        traits=Traits(elementwise=True, fusible=True, expensive=True, **traits),
    )  # fmt: skip


def function(name: str) -> Primitive:
    """The record of an elementwise polynomial or root: computed once."""
    return division(name, function=True)


def identity(name: str, placement: bool = False, tangent: bool = True, opened: bool = False) -> Primitive:
    """The record of an operator whose one result is its one operand."""
    return Primitive(
        name=name, rule=pointwise, flops=ONE, linear=FIRST, tangent=tangent, opened=opened,
        traits=Traits(elementwise=True, identity=True, placement=placement, fusible=True, aliases=True),
    )  # fmt: skip


def identities(name: str, traits: Traits, opened: bool = False) -> Primitive:
    """The record of an operator whose result i is its operand i."""
    return Primitive(name=name, rule=_tuple_identity, flops=ONE, linear=ALL, traits=traits, opened=opened)


PRIMITIVES: tuple[Primitive, ...] = (
    # arithmetic
    arithmetic("add", BOTH, into_reduction=True),
    arithmetic("add_any", BOTH, into_reduction=True),
    arithmetic("sub", BOTH, into_reduction=True),
    arithmetic("mul", EITHER, into_reduction=True),
    arithmetic("neg", FIRST, order="falling", into_reduction=True),
    arithmetic("square", into_reduction=True),
    arithmetic("integer_pow", into_reduction=True),
    arithmetic("sign", jumps=True),
    arithmetic("max", order="max"),
    arithmetic("min", order="min"),
    *map(arithmetic, "abs mulhi nextafter one_minus_square polynomial".split()),
    division("div", Linear(groups=((0,),), when=_is_true_division)),
    division("rem", jumps=True),
    # functions
    *map(
        function,
        """acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2
        expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma pow random_gamma_grad
        regularized_incomplete_beta rsqrt sin sinh sqrt tan tanh zeta""".split(),
    ),
    # rounding and representation
    replace(arithmetic("bitcast_convert_type", rule=_bitcast, aliases=True)),
    arithmetic("convert_element_type", Linear(groups=((0,),), when=_keeps_sums), order="rising", casts=True),
    arithmetic("reduce_precision", Linear(groups=((0,),), rounds=True), order="rising"),
    *(arithmetic(name, jumps=True) for name in ("ceil", "floor", "round")),
    # complex
    arithmetic("complex", BOTH),
    *(arithmetic(name, FIRST) for name in ("conj", "imag", "real")),
    # comparison, logic, bits
    *(arithmetic(name, compares=True) for name in ("eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne")),
    arithmetic("and", order="and"),
    arithmetic("or", order="or"),
    arithmetic("not", order="falling"),
    *map(
        arithmetic,
        "clz is_finite population_count shift_left shift_right_arithmetic shift_right_logical xor".split(),
    ),
    # choice
    arithmetic("clamp"),
    arithmetic("select_n", Linear(groups=((1, ...),))),
    arithmetic("tie", Linear(groups=((1,),))),
    # identities
    *map(identity, "copy copy_p name pvary reduced_vary_cast_p stage xla_metadata_value".split()),
    identity("stop_gradient", tangent=False),
    *(identity(name, placement=True) for name in ("layout_constraint", "mesh_cast", "reshard", "sharding_constraint")),
    *(identities(name, Traits(identity=True, placement=True, fusible=True)) for name in ("device_put", "shard_alike")),
    identities(
        "optimization_barrier", Traits(identity=True, aliases=True, fusible=True, expensive=True, reads_memory=True)
    ),
    arithmetic(JOIN, Linear(groups=((0, ...),), when=_adds)),
    identities(LAYER_BOUNDARY, Traits(identity=True), opened=True),
    # equinox's, for what JAX must not batch, differentiate or map
    *(identity(name, opened=True) for name in ("nonbatchable", "nondifferentiable_backward")),
    replace(arithmetic("select_if_vmap"), opened=True),
)
