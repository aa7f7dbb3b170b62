"""The random primitives.

Keys stay whole: a typed key array cannot be moved by a collective, and it is a few bytes. What can be split is
what is drawn from them. Bits of threefry keys are a function of the key and of the flat position (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011; jax_threefry_partitionable), so each device
computes just its own. Other generators make a block of bits as one sequence: those are computed in full.
"""

from __future__ import annotations

import math

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.elementwise import elementwise_rows
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.kinds import Kind, Rows, Same
from autopar.primitives.notation import replicated
from autopar.primitives.record import ONE, PerElement, Primitive, Rule, Traits, Weights
from autopar.primitives.view import BatchRule, SliceBits, View

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


HASHED = PerElement(60)
"""threefry2x32: 20 rounds of 3 operations on pairs of words."""
THREEFRY_WORDS = 4.0
"""Two words of state for every word of output, before and after a round."""


def draws_in_parts(node: Node) -> bool:
    """False where random bits are drawn whole, whatever part is wanted: their flat position does not give them
    (jax_threefry_partitionable off). The workspace of such a draw is `Signature.workspace`, with weight 1."""
    return node.params.get("partitionable", True)


def bits_workspace(node: Node) -> Weights:
    """The words of state, where a part is drawn by itself (`THREEFRY_WORDS` times the result); else see
    `draws_in_parts`."""
    return ((len(node.operand_types), THREEFRY_WORDS if draws_in_parts(node) else 1.0),)


def _same_dim(v: View) -> Kind:
    """The batch where the operands have it (trailing dimensions may come or go)."""
    return v.merged()


def _bits_batch(v: View) -> Kind:
    """Bits of the microbatch's rows by position (partitionable threefry); other generators are hoisted."""
    key = v.kinds[0]
    rank = len(v.shape(0))
    if isinstance(key, Rows):
        return key
    changed = v.differing()
    in_parts = v.full.operand_types[0].dtype == PARTITIONABLE_KEY and draws_in_parts(v.full)
    if isinstance(key, Same) and len(changed) == 1 and changed[0] >= rank and in_parts:
        if math.prod(v.out_shape()[rank:]) < 2**32:
            rows = v.default_layout(changed[0], v.out_shape()[changed[0]])
            v.action = SliceBits(rows=rows)
            return rows
    return v.fail("draws random numbers with a generator that cannot draw a slice")


def _draw(name: str, rule: Rule, batch: BatchRule | None = _same_dim, flops: PerElement = HASHED) -> Primitive:
    return Primitive(name=name, rule=rule, flops=flops, traits=Traits(random=True), batch=batch)


def _same_words(name: str) -> Primitive:
    """The words of a key under another type."""
    return Primitive(name=name, rule=_key, flops=ONE, traits=Traits(fusible=True), batch=_same_dim)


PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="random_bits", rule=_random_bits, flops=HASHED, batch=_bits_batch,
        sized=frozenset({"shape"}), workspace=bits_workspace, divides=draws_in_parts,
        traits=Traits(random=True, fusible=True, expensive=True, reads_memory=True),
    ),
    _draw("random_gamma", _random_gamma, elementwise_rows),
    _draw("random_fold_in", _key, elementwise_rows),
    _draw("random_seed", _key),
    _draw("random_split", _key),
    *map(_same_words, ("random_clone", "random_unwrap", "random_wrap")),
    _draw("threefry2x32", _threefry2x32, None, PerElement(30)),
    _draw("rng_bit_generator", _sequence, None),
    Primitive(
        name="rng_uniform", rule=_sequence, flops=HASHED,
        traits=Traits(random=True, repeatable=False),
    ),
)  # fmt: skip
