"""Primitives that can only replicate, each with its reason.

In: a Node. Out: a rule whose ``why`` the plan records and `inspect` shows. (scan, while, cond and remat are planned
through their bodies, not by a record; jit, custom_jvp and custom_vjp calls are inlined before planning.)
"""

from __future__ import annotations

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.notation import replicated
from autopar.primitives.record import ONE, Collective, PerElement, Primitive, Rule, Traits

_STATE = "mutable array: every device must see the same state"
_WHOLE_ONCE = "host callback: the function expects whole arrays, once"
_KERNEL = "only the bodies of kernels hold it"
EFFECTS = Traits(repeatable=False)
FREE = PerElement(0)
"""What a kernel's body reads, writes and knows of its grid."""


def whole(why: str) -> Rule:
    """The rule that replicates for the reason ``why``; an empty one: that it is replicated is no loss."""

    def rule(node: Node) -> OpShardingRule:
        return replicated(node, why)

    return rule


def _replicated(
    name: str, why: str, traits: Traits = EFFECTS, flops: PerElement = ONE, collective: Collective | None = None
) -> Primitive:
    return Primitive(name=name, rule=whole(why), flops=flops, traits=traits, collective=collective)


PRIMITIVES: tuple[Primitive, ...] = (
    # mutable arrays, and what the bodies of kernels do with theirs
    *(_replicated(name, _STATE) for name in ("empty_ref", "free_ref", "freeze", "new_ref", "ref", "run_state")),
    *(_replicated(name, _STATE) for name in ("accum_grad_in_ref", "addupdate")),
    *(_replicated(name, _STATE, flops=FREE) for name in ("get", "swap")),
    *(_replicated(name, _KERNEL, flops=FREE) for name in ("masked_load", "masked_swap", "num_programs", "program_id")),
    # the host
    *(_replicated(name, _WHOLE_ONCE) for name in ("debug_callback", "debug_print", "io_callback")),
    _replicated(
        "pure_callback", "host callback: the function expects whole arrays", Traits(opaque=True, repeatable=False)
    ),
    _replicated("compute_on", "runs on a host device, on whole values"),
    _replicated(
        "noinline", "equinox opaque call: its body is hidden from tracing on purpose",
        Traits(opaque=True, repeatable=False),
    ),
    # tokens order effects and hold no data; hooks and checks compute nothing; the platform is known when compiling
    *(_replicated(name, "") for name in ("after_all", "create_token")),
    *(_replicated(name, "") for name in ("announce_jaxpr", "check", "dce_sink", "inspect_sharding")),
    _replicated("platform_index", "", Traits(fusible=True, moves=True, generates=True)),
)  # fmt: skip
