"""cuDNN's fused attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it.

In: a `dot_product_attention_fwd` or `…_bwd` Node. Out: factors for the batch, and for the heads of keys and values,
each with the query heads that share it. Sequences stay whole, for the softmax is over one of them and masks count
positions along both; so do heads with ALiBi, whose slopes go by the number of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.notation import replicated
from autopar.primitives.record import Primitive, Traits

QUERY, KEY, VALUE, BIAS, _, _, OFFSETS, _, PAGES, _, STATISTICS, FORWARD, GIVEN = range(13)
"""Operands; those from ``STATISTICS`` on are the backward pass's."""
LENGTHS = (4, 5)
"""Operands of one number an example, empty where every example is as long as the arrays."""
BNTH = 1
"""The layout batch, heads, positions, size; 0 has heads behind positions."""


def _attention(node: Node) -> OpShardingRule:
    shapes = [t.shape for t in node.operand_types]
    if node.params["dropout_rate"]:
        return replicated(node, "cuDNN's attention drops out by a seed that is the same on every device")
    if len(shapes[OFFSETS]) == 2:
        return replicated(node, "cuDNN's attention over packed sequences, whose offsets count over the whole batch")
    backward, paged = len(shapes) > STATISTICS, len(shapes[PAGES]) == 4
    heads_at = 1 if node.params["layout"] == BNTH else 2
    batch, heads, kv_heads = shapes[QUERY][0], shapes[QUERY][heads_at], shapes[KEY][heads_at]
    of_queries = (QUERY, FORWARD, GIVEN) if backward else (QUERY,)
    statistics = {STATISTICS: 1} if backward else {}
    results = {0: 0, 1: 0, 2: 0} if backward else dict.fromkeys(range(len(node.result_types)), 0)

    by_batch = dict.fromkeys((*of_queries, *statistics, *(() if paged else (KEY, VALUE))), 0)
    by_batch |= {i: 0 for i in (*LENGTHS, PAGES, PAGES + 1) if shapes[i] and shapes[i][0] == batch}
    by_head = dict.fromkeys((*of_queries, KEY, VALUE), heads_at) | statistics
    head_results = dict.fromkeys(range(3), heads_at) if backward else {i: (heads_at, 1)[i] for i in results}
    within = dict.fromkeys(of_queries, heads_at) | statistics
    within_results = {0: heads_at} if backward else head_results

    bias = shapes[BIAS] if node.params["variadic_args"][0] else ()
    gives_bias = len(node.result_types) == 4
    per_example, per_head = bool(bias) and bias[0] == batch, bool(bias) and bias[1] == heads
    build = RuleBuilder(node)
    build.add(
        batch,
        by_batch | ({BIAS: 0} if per_example else {}),
        results | ({3: 0} if gives_bias and per_example else {}),
        kind="sum" if gives_bias and not per_example else "pass",
    )
    if node.params["mask_type"] == "ALIBI":
        return build.rule(why="cuDNN's attention of one example, with ALiBi")
    build.add(
        kv_heads,
        by_head | ({BIAS: 1} if per_head else {}),
        head_results | ({3: 1} if gives_bias and per_head else {}),
        kind="sum" if gives_bias and not per_head else "pass",
    )
    build.add(
        heads // kv_heads,
        within | ({BIAS: 1} if per_head else {}),
        within_results | ({3: 1} if gives_bias and per_head else {}),
        kind="whole",
    )
    return build.rule(why="cuDNN's attention of one example and one head")


@dataclass(frozen=True, slots=True)
class Attended:
    """Keys' ``positions`` of each head of so many elements; ``causal``: half of the scores are masked."""

    positions: int
    head_size: int
    causal: bool
    backward: bool


def attended(node: Node) -> Attended:
    """What an attention node works on."""
    query, _, value, *_ = (t.shape for t in node.operand_types)
    return Attended(
        positions=value[_positions_at(node)],
        head_size=query[-1],
        causal="CAUSAL" in node.params["mask_type"],
        backward=len(node.operand_types) > STATISTICS,
    )


def _positions_at(node: Node) -> int:
    return 2 if node.params["layout"] else 1


def forward_flops(node: Node) -> float:
    """FLOPs of two products of the sequences: queries by keys, weights by values; half of them under a causal mask."""
    return _products(node, 1, 1)


def backward_flops(node: Node) -> float:
    """FLOPs of five such products: three of the queries' head size, two of the values' (FlashAttention-2: Dao,
    2023)."""
    return _products(node, 3, 2)


def _products(node: Node, of_queries: int, of_values: int) -> float:
    """FLOPs of so many products of the sequences; half of each under a causal mask."""
    query, _, value, *_ = (t.shape for t in node.operand_types)
    scores = math.prod(query[:3]) * value[_positions_at(node)]
    width = of_queries * query[-1] + of_values * value[-1]
    return 2.0 * scores * width / (2 if "CAUSAL" in node.params["mask_type"] else 1)


PRIMITIVES: tuple[Primitive, ...] = tuple(
    Primitive(name=name, rule=_attention, flops=flops, traits=Traits(contraction=True, attends=True))
    for name, flops in (
        ("dot_product_attention_fwd", forward_flops),
        ("dot_product_attention_bwd", backward_flops),
    )
)
