"""Pins that let a step's arguments lie where the plan of another has them: what `Parallelized.follow` gives a step.

In: a `Plan`, and a call of the step that follows it, as shapes. Out: argument path → PartitionSpec, for
`parallelize(constraints=…)`. What the batch is made of is left to the planner.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from autopar.frontend.arguments import Args, Arguments, Kwargs
from autopar.frontend.trace import tensor_type
from autopar.inter_op.follow import matched
from autopar.ir.plan import Plan
from autopar.runtime.partition_specs import partition_spec


def followed(
    plan: Plan, arguments: Arguments, args: Args, kwargs: Kwargs, follow_args: Mapping[str, str] | None, name: str
) -> dict[str, PartitionSpec]:
    """Path of each argument that lies as the plan has it → its PartitionSpec there.

    Raises:
        OptionError: an array that carries no batch is no argument of the plan's step, has another shape there, or could
            be several that lie differently.
    """
    args, kwargs = arguments.positional(args, kwargs)
    dynamic, _ = arguments.split(args)
    known = {a.path: {0: (a.type, a.spec)} for a in plan.inputs}
    batch = arguments.batch_dims(dynamic, kwargs)
    leaves = [
        (f"{root}{jax.tree_util.keystr(path)}", tensor_type(jax.typeof(leaf)))
        for root, tree in (("args", dynamic), ("kwargs", kwargs))
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    fixed = [leaf for leaf, dim in zip(leaves, batch, strict=True) if dim is None]
    found = matched(fixed, known, follow_args, name)
    return {path: partition_spec(known[there][0][1]) for path, there in found.items()}
