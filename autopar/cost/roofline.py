"""FLOPs and bytes of one operator, and its time by the roofline model.

``time = max(FLOPs / peak, bytes / memory bandwidth)`` (Williams, Waterman, Patterson, "Roofline",
CACM 2009). Bytes are those of operands and results that stand in memory: values that a compiler fuses
into their user are not counted (see `is_fusible`).
"""

from __future__ import annotations

import math

from autopar.ir.graph import Graph, Node

WHILE_TRIPS = 8
"""Assumed iterations of a loop whose length is not known (guessed; the plan says so)."""

OPAQUE = frozenset(
    """autopar_kernel composite custom_linear_solve custom_partitioning custom_vmap_call ffi_call linear_call noinline
    pallas_call pure_callback shard_map""".split()
)
"""Calls of which shapes tell nothing about the work: their FLOPs are the user's word, or those of their body. Where
there is neither, one an element of the result is assumed, and the plan says so."""

_NO_ARITHMETIC = frozenset("get swap masked_load masked_swap program_id num_programs".split())
"""What a kernel's body reads, writes and knows of its grid."""

CHEAP_TRANSCENDENTALS = frozenset(
    "exp exp2 log log1p expm1 tanh logistic erf erfc erf_inv sin cos tan pow rsqrt sqrt cbrt div atan2".split()
)
"""Elementwise primitives costed at 8 operations an element (guessed; they are memory-bound anyway)."""

_FUSIBLE = frozenset(
    """abs add add_any and atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex conj
    convert_element_type
    copy copy_p cos cosh div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite
    le one_minus_square
    log log1p logistic lt max min mul ne neg nextafter not or population_count pow real reduce_precision rem reshape rev
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze
    stop_gradient sub tan tanh transpose xor pad concatenate name sharding_constraint random_bits split stack unstack
    optimization_barrier random_wrap random_unwrap reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod
    dynamic_slice device_put pvary acos acosh asin asinh atan atanh digamma lgamma tile
    """.split()
)  # fmt: skip


def while_trips(node: Node) -> int:
    """Turns of a ``while`` loop, assumed where they depend on values."""
    known = node.params["trips"]
    return WHILE_TRIPS if known is None else known


def is_fusible(primitive: str) -> bool:
    """True for primitives that compilers fuse with their neighbours (elementwise, data movement, reductions)."""
    return primitive in _FUSIBLE


def flops(node: Node) -> float:
    """Floating-point operations of the whole operator (a multiply-add counts two)."""
    if node.flops is not None:
        return node.flops
    if node.hidden is not None:
        return node.hidden_runs * _body_flops(node.hidden)
    name, out = node.primitive, sum(t.size for t in node.result_types)
    if name == "dot_general":
        (contract, _), _ = node.params["dimension_numbers"]
        return 2.0 * out * math.prod(node.operand_types[0].shape[d] for d in contract)
    if name == "ragged_dot_general":
        return 2.0 * node.operand_types[0].size * _ragged_columns(node)
    if name in ("dot_product_attention_fwd", "dot_product_attention_bwd"):
        return _attention_flops(node)
    if name == "conv_general_dilated":
        numbers = node.params["dimension_numbers"]
        rhs = node.operand_types[1].shape
        window = math.prod(rhs[d] for d in numbers["rhs_spec"][1:])
        return 2.0 * out * window
    if name in ("cholesky", "lu", "qr", "eigh", "svd", "triangular_solve", "householder_product"):
        n = max((t.shape[-1] for t in node.operand_types if t.shape), default=1)
        return 2.0 * n * max(t.size for t in node.operand_types)
    if name in ("sort", "top_k", "approx_top_k"):
        n = node.operand_types[0].shape[-1] if node.operand_types[0].shape else 1
        return node.operand_types[0].size * max(1.0, math.log2(max(2, n)))
    if name == "fft":
        n = math.prod(node.params["fft_lengths"])
        return 5.0 * out * max(1.0, math.log2(max(2, n)))
    if name == "random_bits":
        return 60.0 * out  # threefry2x32: 20 rounds of 3 operations on pairs of words
    if name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"):
        window = math.prod(node.params.get("window_dimensions", (1,)))
        return float(max(out, node.operand_types[0].size) * window)
    if name.startswith(("reduce_", "cum", "arg", "scatter")):
        return float(max([out, *(t.size for t in node.operand_types)]))
    if name in CHEAP_TRANSCENDENTALS:
        return 8.0 * out
    return 0.0 if name in _NO_ARITHMETIC else float(out)


def _ragged_columns(node: Node) -> int:
    """Columns of the right operand that each element of the left one is multiplied with: those of its row's group."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers["dot_dimension_numbers"]
    one_each = {*contracted, *batch, *numbers["rhs_group_dimensions"]}
    return math.prod(n for d, n in enumerate(node.operand_types[1].shape) if d not in one_each)


def _attention_flops(node: Node) -> float:
    """Of cuDNN's attention: two products of the sequences forward, five backward; half of each under a causal mask
    (FlashAttention-2: Dao, 2023)."""
    query, _, value, *_ = (t.shape for t in node.operand_types)
    scores = math.prod(query[:3]) * value[2 if node.params["layout"] else 1]
    backward = node.primitive.endswith("bwd")
    products = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    return 2.0 * scores * products / (2 if "CAUSAL" in node.params["mask_type"] else 1)


def _body_flops(graph: Graph) -> float:
    """FLOPs of a hidden body: loops multiplied out, of a conditional the dearest branch."""
    total = 0.0
    for node in graph.nodes:
        bodies = [_body_flops(body) for body in node.bodies]
        if node.primitive == "scan":
            total += node.params["length"] * sum(bodies)
        elif node.primitive == "while":
            total += while_trips(node) * sum(bodies)
        elif node.bodies:
            total += max(bodies)
        else:
            total += flops(node)
    return total


def dominant_dtype(node: Node) -> str:
    """The dtype whose peak rate applies: that of the first operand, else of the first result."""
    types = node.operand_types or node.result_types
    return types[0].dtype if types else "float32"
