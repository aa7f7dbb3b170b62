"""How fast are checkpoints written and read, and how long does a step wait for a save?

    python -m benchmarks.checkpoint [--megabytes 1000] [--folder DIR] [--runs 3]

A training state of parameters and Adam's moments, 48 layers of them, in float32 and sharded over 8 CPU devices, is
saved, and restored into the same and into other shardings. Shown are medians in MB/s of the state, the seconds that
`save` holds up its caller, and beside them Orbax (where it is installed) and a plain file that is written and synced:
what the disk gives at this moment. Reading comes from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import autopar

LAYERS = 48


def state(megabytes: int) -> Any:
    """Three float32 matrices a layer, of ``megabytes`` in all, sharded over rows and columns."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    width = round((megabytes * 1e6 / LAYERS / 3 / 4) ** 0.5 / 8) * 8
    on = NamedSharding(mesh, PartitionSpec("a", "b"))
    make = jax.jit(lambda key: jax.random.normal(key, (width, width), jnp.float32), out_shardings=on)
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS))
    return {name: [make(next(keys)) for _ in range(LAYERS)] for name in ("params", "mu", "nu")}


def timed(run: Callable[[Path], Any], folder: Path, runs: int) -> float:
    """Median seconds of ``run`` into a fresh folder."""
    times: list[float] = []
    for _ in range(runs):
        shutil.rmtree(folder, ignore_errors=True)
        started_s = time.perf_counter()
        run(folder)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def plain_file(data: bytes, folder: Path) -> None:
    """The disk's own speed."""
    folder.mkdir()
    with (folder / "file").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    tree = state(args.megabytes)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    rows: list[tuple[str, float]] = []
    held_s: list[float] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        root = Path(made) / "saves"

        def save(path: Path) -> None:
            started_s = time.perf_counter()
            handle = autopar.save(path, tree, step=0)
            held_s.append(time.perf_counter() - started_s)
            handle.wait()

        rows.append(("autopar, save", timed(save, root, args.runs)))
        turned = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
        for name, like in (("same", tree), ("other", jax.tree.map(lambda _: turned, tree))):
            run = lambda _, like=like: jax.block_until_ready(autopar.restore(root, like))
            rows.append((f"autopar, restore in the {name} shardings", timed(run, Path(made) / "none", args.runs)))
        try:
            import orbax.checkpoint as ocp
        except ImportError:
            print("Orbax is not installed")
        else:
            theirs = Path(made) / "orbax"

            def save_orbax(path: Path) -> None:
                with ocp.StandardCheckpointer() as checkpointer:
                    checkpointer.save(path, tree)

            def restore_orbax(_: Path) -> None:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
                with ocp.StandardCheckpointer() as checkpointer:
                    jax.block_until_ready(checkpointer.restore(theirs, like))

            rows.append(("Orbax, save", timed(save_orbax, theirs, args.runs)))
            rows.append(("Orbax, restore in the same shardings", timed(restore_orbax, Path(made) / "none", args.runs)))
        data = np.random.default_rng(0).bytes(size)
        rows.append(("one plain file, written and synced", timed(lambda p: plain_file(data, p), root, args.runs)))
    table = Table("what", "s", "MB/s")
    for name, seconds in rows:
        table.add_row(name, f"{seconds:.2f}", f"{size / seconds / 1e6:.0f}")
    Console().print(table)
    print(f"{size / 1e6:.0f} MB; `save` held its caller up for {statistics.median(held_s):.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
