"""Rules of the random primitives.

Keys stay whole: a typed key array cannot be moved by a collective, and it is a few bytes. What can be split is
what is drawn from them. Bits of threefry keys are a function of the key and of the flat position (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011; jax_threefry_partitionable), so each device
computes just its own. Other generators make a block of bits as one sequence: those are computed in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.notation import replicated

KEYS_WHY = "PRNG keys stay whole: no collective can move them, and they are a few bytes"

MANY_KEYS = 4096
"""From so many keys on, making them whole on every device is worth a word (guessed: a microsecond's work)."""

PARTITIONABLE_KEY = "key<fry>"
"""dtype of threefry2x32 keys, whose bits depend on the flat position alone."""


def _random_bits(node: Node) -> OpShardingRule:
    dtype = node.operand_types[0].dtype
    if dtype != PARTITIONABLE_KEY:
        return replicated(node, f"{dtype} draws its bits as one sequence without parts (threefry2x32 keys do not)")
    build = RuleBuilder(node)
    for d, n in enumerate(node.result_types[0].shape):
        build.add(n, results={0: d})
    return build.rule(why="a single draw")


def _random_gamma(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)  # operands: keys, alpha; keys.shape is a prefix of alpha.shape
    for d in range(len(node.operand_types[0].shape)):
        build.add(node.operand_types[1].shape[d], {1: d}, {0: d})
    return build.rule(why="one key is split by the number of samples, in their flat order")


def _threefry2x32(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)  # two words of the key, two of the counter, broadcast against each other
    for d, n in enumerate(node.result_types[0].shape):
        operands = {i: d for i, t in enumerate(node.operand_types) if t.shape and t.shape[d] == n}
        build.add(n, operands, {0: d, 1: d})
    return build.rule(why="a single draw")


def _key(node: Node) -> OpShardingRule:
    """Keys that are made, split or taken apart: a few, mostly, which costs nothing."""
    many = any(t.is_key and t.size >= MANY_KEYS for t in (*node.operand_types, *node.result_types))
    return replicated(node, KEYS_WHY if many else "")


def _sequence(node: Node) -> OpShardingRule:
    return replicated(node, f"{node.primitive} draws its bits as one sequence without parts")


RULES: dict[str, Callable[[Any], OpShardingRule]] = {
    "random_bits": _random_bits,
    "random_gamma": _random_gamma,
    "random_seed": _key,
    "random_wrap": _key,
    "random_unwrap": _key,
    "random_fold_in": _key,
    "random_split": _key,
    "random_clone": _key,
    "threefry2x32": _threefry2x32,
    "rng_bit_generator": _sequence,
    "rng_uniform": _sequence,
}
