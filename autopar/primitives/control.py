"""Primitives that can only replicate, each with its reason.

In: a Node. Out: a rule whose ``why`` the plan records and `inspect` shows. (scan, while, cond and remat are planned
through their bodies, not by a rule; jit, custom_jvp and custom_vjp calls are inlined before planning.)
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.notation import replicated

REASONS: dict[str, str] = {
    "accum_grad_in_ref": "mutable array: every device must see the same state",
    "addupdate": "mutable array: every device must see the same state",
    "after_all": "token: orders effects, holds no data",
    "all_gather": "collective over a named axis outside shard_map",
    "all_to_all": "collective over a named axis outside shard_map",
    "announce_jaxpr": "equinox debugging hook: holds no data worth sharding",
    "axis_index": "collective over a named axis outside shard_map",
    "check": "checkify's check: its predicate is one value",
    "compute_on": "runs on a host device, on whole values",
    "create_token": "token: orders effects, holds no data",
    "dce_sink": "keeps a value alive, computes nothing",
    "debug_callback": "host callback: the function expects whole arrays, once",
    "debug_print": "host callback: the function expects whole arrays, once",
    "empty_ref": "mutable array: every device must see the same state",
    "free_ref": "mutable array: every device must see the same state",
    "freeze": "mutable array: every device must see the same state",
    "get": "mutable array: every device must see the same state",
    "inspect_sharding": "debugging hook: shows a sharding, computes nothing",
    "io_callback": "host callback: the function expects whole arrays, once",
    "new_ref": "mutable array: every device must see the same state",
    "noinline": "equinox opaque call: its body is hidden from tracing on purpose",
    "platform_index": "one number, known when compiling",
    "ppermute": "collective over a named axis outside shard_map",
    "pure_callback": "host callback: the function expects whole arrays",
    "reduce_scatter": "collective over a named axis outside shard_map",
    "ref": "mutable array: every device must see the same state",
    "run_state": "mutable array: every device must see the same state",
    "swap": "mutable array: every device must see the same state",
}


FREE = frozenset(
    {"after_all", "announce_jaxpr", "check", "create_token", "dce_sink", "inspect_sharding", "platform_index"}
)
"""Those that cost nothing: that they are replicated is no loss."""


def _replicate(node: Node) -> OpShardingRule:
    return replicated(node, "" if node.primitive in FREE else REASONS[node.primitive])


RULES: dict[str, Callable[[Node], OpShardingRule]] = dict.fromkeys(REASONS, _replicate)
