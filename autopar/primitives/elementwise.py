"""Rules of operators that work element by element: any dimension can be split, with no communication.

In: a Node whose operands have the result's shape or are scalars (rank 0: literals, a select's predicate, a
clamp's bounds). Out: one factor per dimension, and the operands in which the operator is linear.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import Node, itemsize_bits
from autopar.ir.sharding import Factor, OpShardingRule
from autopar.primitives.notation import Dims, build, dim_factors, letters, linear_in, replicated

_FIRST = ((0,),)
_EITHER = ((0,), (1,))
_BOTH = ((0, 1),)

LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": _BOTH, "add_any": _BOTH, "sub": _BOTH, "complex": _BOTH,
    "mul": _EITHER,
    "neg": _FIRST, "real": _FIRST, "imag": _FIRST, "conj": _FIRST, "convert_element_type": _FIRST,
    "copy": _FIRST, "copy_p": _FIRST, "stop_gradient": _FIRST, "name": _FIRST, "stage": _FIRST,
    "reduced_vary_cast_p": _FIRST, "pvary": _FIRST, "sharding_constraint": _FIRST, "layout_constraint": _FIRST,
    "reshard": _FIRST, "mesh_cast": _FIRST, "xla_metadata_value": _FIRST,
    "tie": ((1,),),
}  # fmt: skip
"""Primitive → groups of operands it is jointly linear in (`div` and `select_n` have rules of their own)."""


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
        linear=linear_in(node, *LINEAR.get(node.primitive, ())),
    )


def _fits(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """True for the result's shape, a scalar, and a shape of the same rank whose other dimensions are 1."""
    return not operand or (len(operand) == len(result) and all(n in (1, m) for n, m in zip(operand, result)))


def _div(node: Node) -> OpShardingRule:
    rule = pointwise(node)
    if node.result_types[0].dtype.startswith(("int", "uint")):
        return rule  # rounds
    return _with_linear(rule, linear_in(node, (0,)))


def _select_n(node: Node) -> OpShardingRule:
    """The cases jointly, the predicate fixed."""
    return _with_linear(pointwise(node), linear_in(node, tuple(range(1, len(node.operands)))))


def _with_linear(rule: OpShardingRule, linear: tuple[tuple[int, ...], ...]) -> OpShardingRule:
    return OpShardingRule(
        factors=rule.factors, operands=rule.operands, results=rule.results, linear=linear, why=rule.why
    )


def _tuple_identity(node: Node) -> OpShardingRule:
    """Result i is operand i; linear in all of them together."""
    factors: list[Factor] = []
    tensors: list[Dims] = []
    for i, t in enumerate(node.operand_types):
        own, dims = dim_factors(t.shape, suffix=str(i) if len(node.operand_types) > 1 else "")
        factors += own
        tensors.append(dims)
    same = len(node.operand_types) == 1 or all(
        o.dtype == r.dtype for o, r in zip(node.operand_types, node.result_types, strict=True)
    )
    additive = same and all(linear_in_own_type(t.dtype) for t in node.result_types)
    groups = (tuple(range(len(tensors))),) if additive and all(isinstance(o, int) for o in node.operands) else ()
    return build(factors, tensors, tensors, linear=groups)


def linear_in_own_type(dtype: str) -> bool:
    """True for dtypes that partial sums can be held in."""
    return dtype.startswith(("int", "uint", "bfloat", "complex")) or dtype in ("float16", "float32", "float64")


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


RULES: dict[str, Callable[[Node], OpShardingRule]] = {
    # arithmetic
    "abs": pointwise, "add": pointwise, "add_any": pointwise, "div": _div, "max": pointwise, "min": pointwise,
    "mul": pointwise, "mulhi": pointwise, "neg": pointwise, "one_minus_square": pointwise, "polynomial": pointwise,
    "pow": pointwise, "integer_pow": pointwise, "rem": pointwise, "sign": pointwise, "square": pointwise,
    "sub": pointwise, "nextafter": pointwise,
    # functions
    "acos": pointwise, "acosh": pointwise, "asin": pointwise, "asinh": pointwise, "atan": pointwise,
    "atan2": pointwise, "atanh": pointwise, "bessel_i0e": pointwise, "bessel_i1e": pointwise, "cbrt": pointwise,
    "cos": pointwise, "cosh": pointwise, "digamma": pointwise, "erf": pointwise, "erf_inv": pointwise,
    "erfc": pointwise, "exp": pointwise, "exp2": pointwise, "expm1": pointwise, "igamma": pointwise,
    "igamma_grad_a": pointwise, "igammac": pointwise, "lgamma": pointwise, "log": pointwise, "log1p": pointwise,
    "log2": pointwise, "logistic": pointwise, "polygamma": pointwise, "random_gamma_grad": pointwise,
    "regularized_incomplete_beta": pointwise, "rsqrt": pointwise, "sin": pointwise, "sinh": pointwise,
    "sqrt": pointwise, "tan": pointwise, "tanh": pointwise, "zeta": pointwise,
    # rounding and representation
    "bitcast_convert_type": _bitcast, "ceil": pointwise, "convert_element_type": pointwise, "floor": pointwise,
    "reduce_precision": pointwise, "round": pointwise,
    # complex
    "complex": pointwise, "conj": pointwise, "imag": pointwise, "real": pointwise,
    # comparison, logic, bits
    "and": pointwise, "clz": pointwise, "eq": pointwise, "eq_to": pointwise, "ge": pointwise, "gt": pointwise,
    "is_finite": pointwise, "le": pointwise, "le_to": pointwise, "lt": pointwise, "lt_to": pointwise,
    "ne": pointwise, "not": pointwise, "or": pointwise, "population_count": pointwise, "shift_left": pointwise,
    "shift_right_arithmetic": pointwise, "shift_right_logical": pointwise, "xor": pointwise,
    # choice
    "clamp": pointwise, "select_n": _select_n, "tie": pointwise,
    # identities
    "copy": pointwise, "copy_p": pointwise, "device_put": _tuple_identity, "layout_constraint": pointwise,
    "mesh_cast": pointwise, "name": pointwise, "optimization_barrier": _tuple_identity, "pvary": pointwise,
    "reduced_vary_cast_p": pointwise, "reshard": pointwise, "shard_alike": _tuple_identity,
    "sharding_constraint": pointwise, "stage": pointwise, "stop_gradient": pointwise,
    "xla_metadata_value": pointwise,
}  # fmt: skip
