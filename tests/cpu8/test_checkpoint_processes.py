"""Checkpoints and batches of two processes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import autopar
from tests.checkpoints import run_processes


def test_two_processes_save_restore_and_draw_batches(tmp_path: Path) -> None:
    root = tmp_path / "saves"
    for status, out, errors in run_processes("tests.cpu8.two_processes", 2, str(root)):
        assert (status, out) == (0, "done\n"), errors
    assert autopar.checkpoint.steps(root) == (1, 2)
    item = root / "2" / "default"
    assert all(any((item / f"ocdbt.process_{i}" / "d").iterdir()) for i in range(2))
    # One process with other devices reads what two have written.
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    like = {"both": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))}
    got = autopar.restore(root, like, partial=True)["both"]
    assert np.array_equal(np.asarray(got), np.arange(48, dtype=np.float32).reshape(8, 6) + 100)
    stored = autopar.restore(root)
    assert stored["step"] == 5 and np.array_equal(stored["whole"][3], np.arange(48.0).reshape(8, 6) + 303)
