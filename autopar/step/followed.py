"""Pins that let a step's arguments lie where the plan of another has them: what `Step.follow` gives a step.

In: a plan of one program, and a call of the step that follows it, as shapes. Out: pins. What the batch is made of is
left to the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from autopar.frontend.arguments import Args, Arguments, Kwargs
from autopar.frontend.to_graph import tensor_type
from autopar.inter_op.follow import matched
from autopar.ir.plan import Plan
from autopar.ir.sharding import Pin


@dataclass(frozen=True, kw_only=True)
class Followed:
    """The plan where parameters lie, and where its step has what the other reads, where names do not tell: path of
    this → path of that."""

    plan: Plan
    paths: Mapping[str, str] | None = None


def followed(follow: Followed, arguments: Arguments, args: Args, kwargs: Kwargs, name: str) -> tuple[Pin, ...]:
    """A pin for each argument that lies as the plan has it.

    Raises:
        OptionError: an array that carries no batch is no argument of the plan's step, has another shape there, or could
            be several that lie differently.
    """
    dynamic, _ = arguments.split(args)
    known = {a.path: {0: (a.type, a.spec)} for a in follow.plan.inputs}
    batch = arguments.batch_dims(dynamic, kwargs)
    leaves = [
        (f"{root}{jax.tree_util.keystr(path)}", tensor_type(jax.typeof(leaf)))
        for root, tree in (("args", dynamic), ("kwargs", kwargs))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    fixed = [leaf for leaf, dim in zip(leaves, batch, strict=True) if dim is None]
    found = matched(fixed, known, follow.paths, name)
    return tuple(Pin(target=path, dims=known[there][0][1].dims) for path, there in found.items())
