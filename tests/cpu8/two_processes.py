"""One of several processes of a `jax.distributed` group that save, restore and draw batches together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import checkpoint
from autopar.checkpoint import restoring, saving
from autopar.data import shard_loader
from autopar.ir.errors import CheckpointError, DataError
from autopar.processes import processes


def _tree(mesh: Mesh) -> dict[str, object]:
    def on(spec: tuple[str | None, ...], value: jax.Array | np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda i: value[i])

    weights = np.arange(48, dtype=np.float32).reshape(8, 6)
    return {
        "rows": on(("host", None), weights),
        "both": on((("host", "core"), None), weights + 100),
        "columns": on((None, "core"), weights + 200),
        "whole": [on((), weights + 300 + i) for i in range(4)],
        "half": on(("core",), np.arange(4).astype(jnp.bfloat16)),
        "step": 5,
        "numbers": np.arange(3),
    }


def _checkpoints(mesh: Mesh, root: str) -> None:
    tree = _tree(mesh)
    for step in range(3):  # more than the saves whose messages are kept
        handle = autopar.save(root, tree, step=step, keep=2)
    assert handle.wait(60) == Path(root) / "2"
    written = {path.name for path in Path(root, "2", "default").glob("ocdbt.process_*/d/*")}
    assert written
    back = autopar.restore(root, tree)
    other = Mesh(mesh.devices.T, ("core", "host"))
    turned = {
        key: NamedSharding(other, PartitionSpec(*spec))
        for key, spec in {"rows": (None, "host"), "both": ("core", "host"), "columns": ()}.items()
    }
    again = autopar.restore(root, turned, step=2, partial=True)
    for name in turned:
        for shard in again[name].addressable_shards:
            full = np.arange(48, dtype=np.float32).reshape(8, 6) + {"rows": 0, "both": 100, "columns": 200}[name]
            assert np.array_equal(np.asarray(shard.data), full[shard.index])
    for got, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        if isinstance(wanted, jax.Array):
            for a, b in zip(got.addressable_shards, wanted.addressable_shards, strict=True):
                assert a.index == b.index and np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        else:
            assert np.array_equal(got, wanted)


def _all_are_at(place: str) -> None:
    group = processes()
    group.put(f"{place}/{group.index}", "")
    for other in range(group.count):
        group.get(f"{place}/{other}", 60)


def _lagging(seen: Any) -> Any:
    """As a file system shows the steps that shows older ones three times."""
    looks = iter(range(3))
    return lambda path: (0,) if next(looks, None) is not None else seen(path)


def _restores_that_not_all_ask_for(root: str) -> None:
    """An extra restore of one process is its own error; where all restore next, all have what is the last by then, also
    one that the file system still shows an older state."""
    tell = jax.numpy.zeros(())
    for alone in (0, 1):
        autopar.save(root, {"x": tell, "step": 3 + alone}, step=3 + alone).wait(60)
        restoring.AGREE_S = 1.0
        if jax.process_index() == alone:
            try:
                autopar.restore(root)
            except CheckpointError as error:
                assert "processes do not agree" in str(error), error
            else:
                raise AssertionError("one process restored by itself")
        _all_are_at(f"alone {alone}")
        restoring.AGREE_S = 60.0
        seen = restoring.steps
        if jax.process_index():
            restoring.steps, restoring.latest = _lagging(seen), lambda _: 0
        assert autopar.restore(root)["step"] == 3 + alone
        restoring.steps = seen
        _all_are_at(f"restored {alone}")
    if jax.process_index() == 0:
        checkpoint.delete(root, 3)
        checkpoint.delete(root, 4)


def _another_driver(root: str) -> None:
    """Process 0 finds out that the root is another's; all are told."""
    if jax.process_index() == 0:
        Path(root).mkdir()
        (Path(root) / checkpoint.OWNER).write_text('{"boot": "far", "process": 7, "host": "other"}')
    for ask in (
        lambda: autopar.save(root, {"x": 1}, step=1).wait(60),
        lambda: autopar.run_elastic(lambda s, x: (s, 0), dict, lambda _: 0.0, steps=1, path=root, cluster="cpu:4"),
    ):
        try:
            ask()
        except CheckpointError as error:
            assert "process 7 of host other" in str(error), error
        else:
            raise AssertionError("two drivers")


def _a_process_that_cannot_write(mesh: Mesh, root: str) -> None:
    """Nobody commits; all are told."""
    if jax.process_index() == 1:

        def broken(*_: object) -> int:
            raise OSError(28, "No space left on device")

        saving.write_slices = broken  # pyright: ignore[reportAttributeAccessIssue]
    try:
        autopar.save(root, _tree(mesh), step=9).wait(60)
    except (CheckpointError, OSError) as error:
        assert "No space left" in str(error), error
    else:
        raise AssertionError("step 9 was saved")
    assert autopar.latest(root) == 2


def _a_step_that_is_there(mesh: Mesh, root: str) -> None:
    """Process 0 finds out; all are told why, at once."""
    try:
        autopar.save(root, _tree(mesh), step=2).wait(60)
    except CheckpointError as error:
        assert "there is a checkpoint of step 2 already" in str(error), error
    else:
        raise AssertionError("step 2 was saved again")


def _data(mesh: Mesh) -> None:
    index, sharding = jax.process_index(), NamedSharding(mesh, PartitionSpec(("host", "core")))

    def batches(count: int, rows: int = 4, fail_at: int = -1) -> Iterator[dict[str, np.ndarray]]:
        for i in range(count):
            if i == fail_at:
                raise KeyError("no such file")
            yield {"x": np.full((rows, 2), 10 * i + index, np.int32)}

    with shard_loader(batches(5 - index), sharding) as loader:
        seen = list(loader)
    assert len(seen) == 4 and loader.state() == {"batch": 4}
    assert seen[3]["x"].shape == (8, 2)
    for shard in seen[3]["x"].addressable_shards:
        assert (np.asarray(shard.data) == 30 + index).all()
    for source, message in (
        (batches(5, rows=4 + 2 * index), "parts of processes differ"),
        (batches(5, fail_at=2 if index else -1), "no such file"),
    ):
        try:
            list(shard_loader(source, sharding))
        except (DataError, KeyError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


if __name__ == "__main__":
    port, index, count, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = Mesh(np.array(jax.devices()).reshape(count, -1), ("host", "core"))
    _checkpoints(mesh, root)
    _restores_that_not_all_ask_for(root)
    _another_driver(f"{root}_other")
    _a_process_that_cannot_write(mesh, root)
    _a_step_that_is_there(mesh, root)
    _data(mesh)
    print("done")
