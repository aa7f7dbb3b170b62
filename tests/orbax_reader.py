"""Run where autopar cannot be imported: an Orbax user opens what autopar saved. Prints each value's digest as JSON.

    python orbax_reader.py ROOT STEP

Also writes, into ROOT-orbax, a checkpoint of Orbax's own (``--write``). Imports nothing of this repository but
`orbax_state`, which lies beside it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.modules["autopar"] = None  # type: ignore[assignment]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from orbax_state import texts, training_state  # noqa: E402 - beside this script


def main(root: str, step: int) -> None:
    """Opens the checkpoint in each way that Orbax has."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def target(value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        rows = NamedSharding(mesh, PartitionSpec("x")) if value.shape == (4, 8) else whole
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=rows)

    item = f"{root}/{step}/default"
    into = ocp.StandardCheckpointer().restore(item, jax.tree.map(target, training_state()))
    with ocp.CheckpointManager(root) as manager:
        managed = manager.restore(step, args=ocp.args.StandardRestore())
        found = list(manager.all_steps())
    found_ = {
        "steps": found,
        "target": texts(into),
        "sharded": into["params"]["w"].sharding.spec == PartitionSpec("x"),
        "pytree": texts(ocp.PyTreeCheckpointer().restore(item)),
        "standard": texts(ocp.StandardCheckpointer().restore(item)),
        "manager": texts(managed),
    }
    print(json.dumps(found_))


def write(root: str) -> None:
    """Checkpoints of Orbax's own, in each of its formats."""
    for step, ocdbt, zarr3 in ((1, True, False), (2, True, True), (3, False, False), (4, False, True)):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        with ocp.CheckpointManager(root, item_handlers=handler) as manager:
            manager.save(step, args=ocp.args.PyTreeSave(training_state()))
            manager.wait_until_finished()
    with ocp.CheckpointManager(root) as manager:
        manager.save(5, args=ocp.args.StandardSave(training_state()))
        manager.wait_until_finished()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{root}-bare", training_state())


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2])
    else:
        main(sys.argv[1], int(sys.argv[2]))
