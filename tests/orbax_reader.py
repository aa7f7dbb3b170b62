"""Run where autopar cannot be imported: an Orbax user opens what autopar saved. Prints each value's digest as JSON.

    python orbax_reader.py ROOT STEP

Also writes, into ROOT-orbax, a checkpoint of Orbax's own (``--write``). Imports nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.modules["autopar"] = None  # type: ignore[assignment]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

KEY = jax.dtypes.prng_key


def state() -> Any:
    """A training state; `tests/cpu8/test_checkpoint_orbax.py` makes the same."""
    params = {
        "w": jnp.arange(32.0).reshape(4, 8),
        "half": jnp.arange(3.0).astype(jnp.bfloat16),
        "eighth": jnp.arange(3.0).astype(jnp.float8_e4m3fn),
        "mlp/~/linear": {"w": jnp.ones((2, 3))},
        "layers": [jnp.ones(2), (jnp.int32(3),)],
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1), 4),
        "step": 3,
        "rate": 0.5,
        "flag": True,
        "none": None,
        "empty": {},
        "mask": jnp.array([True, False]),
        "bytes": np.arange(3, dtype=np.int8),
    }


def text(value: Any) -> str:
    """dtype, shape and bytes."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), KEY):
        return "key " + text(jax.random.key_data(value))
    array = np.asarray(value)
    return f"{array.dtype} {array.shape} {array.tobytes().hex()}"


def texts(tree: Any) -> list[str]:
    """Of all leaves, in order."""
    return [text(leaf) for leaf in jax.tree.leaves(tree)]


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
    into = ocp.StandardCheckpointer().restore(item, jax.tree.map(target, state()))
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
            manager.save(step, args=ocp.args.PyTreeSave(state()))
            manager.wait_until_finished()
    with ocp.CheckpointManager(root) as manager:
        manager.save(5, args=ocp.args.StandardSave(state()))
        manager.wait_until_finished()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{root}-bare", state())


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2])
    else:
        main(sys.argv[1], int(sys.argv[2]))
