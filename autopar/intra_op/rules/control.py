"""Primitives that can only replicate, each with its reason, and equinox's buffer update.

In: a Node. Out: a rule whose ``why`` the plan records and `inspect` shows. (scan, while, cond and remat are planned
through their bodies, not by a rule; jit, custom_jvp and custom_vjp calls are inlined before planning.)
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rules.notation import build, dim_factors, linear_in, replicated
from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule

REASONS: dict[str, str] = {
    "accum_grad_in_ref": "mutable array: every device must see the same state",
    "addupdate": "mutable array: every device must see the same state",
    "after_all": "token: orders effects, holds no data",
    "all_gather": "collective over a named axis outside shard_map",
    "all_to_all": "collective over a named axis outside shard_map",
    "announce_jaxpr": "equinox debugging hook: holds no data worth sharding",
    "axis_index": "collective over a named axis outside shard_map",
    "check": "checkify's check: its predicate is one value",
    "composite": "opaque call: its body is chosen by the compiler",
    "compute_on": "runs on a host device, on whole values",
    "create_token": "token: orders effects, holds no data",
    "custom_linear_solve": "its solver and transpose are functions of the whole right-hand side",
    "custom_vmap_call": "opaque call with a batching rule of its own",
    "dce_sink": "keeps a value alive, computes nothing",
    "debug_callback": "host callback: the function expects whole arrays, once",
    "debug_print": "host callback: the function expects whole arrays, once",
    "empty_ref": "mutable array: every device must see the same state",
    "free_ref": "mutable array: every device must see the same state",
    "freeze": "mutable array: every device must see the same state",
    "get": "mutable array: every device must see the same state",
    "inspect_sharding": "debugging hook: shows a sharding, computes nothing",
    "io_callback": "host callback: the function expects whole arrays, once",
    "linear_call": "opaque call with a transpose of its own",
    "new_ref": "mutable array: every device must see the same state",
    "noinline": "equinox opaque call: its body is hidden from tracing on purpose",
    "platform_index": "one number, known when compiling",
    "ppermute": "collective over a named axis outside shard_map",
    "pure_callback": "host callback: the function expects whole arrays",
    "reduce_scatter": "collective over a named axis outside shard_map",
    "ref": "mutable array: every device must see the same state",
    "run_state": "mutable array: every device must see the same state",
    "swap": "mutable array: every device must see the same state",
    "vprim": "equinox primitive under vmap: which function it maps is hidden in its parameters",
}


def _replicate(node: Node) -> OpShardingRule:
    return replicated(node, REASONS[node.primitive])


def _maybe_set(node: Node) -> OpShardingRule:
    """equinox: ``xs.at[i].set(x)`` where a predicate holds; (pred, xs, x, index leaves…) → xs.

    The index is hidden in the parameters. If it is one scalar and x has the shape of xs without one dimension, and only
    one dimension fits, that one stays whole and the others pass.
    """
    if len(node.operand_types) == 4 and node.operand_types[0].shape == node.operand_types[3].shape == ():
        xs, x = node.operand_types[1].shape, node.operand_types[2].shape
        fits = [d for d in range(len(xs)) if xs[:d] + xs[d + 1 :] == x]
        if len(fits) == 1:
            (at,) = fits
            factors, dims = dim_factors(xs, whole=(at,))
            return build(
                factors,
                ((), dims, dims[:at] + dims[at + 1 :], ()),
                (dims,),
                linear=linear_in(node, (1, 2)),
            )
    return replicated(node, "equinox buffer update: which dimensions its index covers is hidden in its parameters")


RULES: dict[str, Callable[[Node], OpShardingRule]] = {
    **dict.fromkeys(REASONS, _replicate),
    "maybe_set": _maybe_set,
}
