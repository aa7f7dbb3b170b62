"""Trees, and what tests of checkpoints and data loaders share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]


def assert_same(got: Any, wanted: Any) -> None:
    """Bit by bit, of the same types, dtypes and shardings."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree_util.tree_map_with_path(_assert_same_leaf, got, wanted)


def _assert_same_leaf(path: Any, got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted), path
    if isinstance(wanted, jax.Array):
        assert got.sharding == wanted.sharding and got.dtype == wanted.dtype, path
        if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(got) == jax.random.key_impl(wanted)
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    assert bits(got) == bits(wanted), path


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and bytes of an array or number."""
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def free_port() -> int:
    """A port on loopback that was free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(module: str, count: int, *args: str, timeout_s: float = 120.0) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of ``count`` processes ``python -m module port index count *args``."""
    port = str(free_port())
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, port, str(index), str(count), *args],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        done = [child.communicate(timeout=timeout_s) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.wait(), *texts) for child, texts in zip(children, done)]
