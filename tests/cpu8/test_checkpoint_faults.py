"""Checkpoints of several writers, damaged and interrupted ones."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.checkpoint import folder, store
from autopar.checkpoint.leaf import Index, Key, Leaf, chunk_of
from autopar.ir.errors import CheckpointError
from tests.checkpoints import ROOT, assert_same


def two_leaves() -> tuple[Leaf, Leaf]:
    boxes = [((0, 4), (0, 3)), ((4, 8), (0, 3))]
    w = Leaf(
        path=(Key(name="stage0"), Key(name="w")),
        shape=(8, 3),
        dtype="float32",
        chunk=chunk_of((8, 3), "float32", boxes),
    )
    return w, Leaf(path=(Key(name="none"),), kind="empty", empty="None")


def write_half(at: Path, writer: str, half: int, number: float = 0.0) -> None:
    index: Index = ((4 * half, 4 * half + 4), (0, 3))
    store.write_slices(at, writer, [(two_leaves()[0], [(index, np.full((4, 3), number + half, np.float32))])])


def test_writers_of_parts_make_one_checkpoint(tmp_path: Path) -> None:
    at = checkpoint.begin(tmp_path, 12)
    write_half(at, "host_b", 1)
    write_half(at, "host_a", 0)
    assert autopar.latest(tmp_path) is None
    checkpoint.commit(at, two_leaves(), ["host_a", "host_b"])
    got = autopar.restore(tmp_path)
    assert got["none"] is None and (got["stage0"]["w"][:, 0] == [0, 0, 0, 0, 1, 1, 1, 1]).all()


def test_what_nobody_wrote_is_not_committed(tmp_path: Path) -> None:
    at = checkpoint.begin(tmp_path, 12)
    write_half(at, "a", 1)
    with pytest.raises(CheckpointError, match="writer b wrote nothing"):
        checkpoint.commit(at, two_leaves(), ["a", "b"])
    with pytest.raises(CheckpointError, match=r"leaf \['stage0'\]\['w'\]: 1 chunks were written by no process"):
        checkpoint.commit(at, two_leaves(), ["a"])
    assert autopar.latest(tmp_path) is None
    checkpoint.begin(tmp_path, 13)
    with pytest.raises(CheckpointError, match="not there: begin"):
        write_half(at, "a", 0)
    w = two_leaves()[0]
    with pytest.raises(CheckpointError, match="not made of whole chunks"):
        store.write_slices(checkpoint.begin(tmp_path, 14), "a", [(w, [(((0, 3), (0, 3)), np.zeros((3, 3), "f4"))])])
    with pytest.raises(CheckpointError, match=r"got float64\[4, 3\], expected float32\[4, 3\]"):
        store.write_slices(checkpoint.begin(tmp_path, 14), "a", [(w, [(((0, 4), (0, 3)), np.zeros((4, 3)))])])


def test_a_disk_that_does_not_take_it_is_an_error_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the place of the writer's folder, no room for the folder, and none for the numbers."""
    at = checkpoint.begin(tmp_path, 12)
    (at / folder.ITEM / "ocdbt.process_a").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"writer a: .*File exists"):
        write_half(at, "a", 0)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(folder.Path, "mkdir", lambda *_, **__: _raise(full))
        with pytest.raises(CheckpointError, match=r"writer b: .*No space left on device"):
            write_half(at, "b", 0)
    leaf = Leaf(path=(Key(name="w"),), shape=(64, 4096), dtype="int32", chunk=(64, 4096))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # in the place of a disk that is full
    try:
        with pytest.raises(CheckpointError, match=r"writer c: .*File too large"):
            store.write_slices(at, "c", [(leaf, [(((0, 64), (0, 4096)), np.ones((64, 4096), np.int32))])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _raise(error: BaseException) -> None:
    raise error


# Damage and interruption.


def small_state(step: int) -> Any:
    return {"w": np.arange(600, dtype=np.float32) + step, "s": step, "k": jax.random.key(step), "none": None}


def test_no_damaged_byte_is_restored(tmp_path: Path) -> None:
    state = small_state(1)
    autopar.save(tmp_path / "whole", state, step=1).wait(60)
    bare = autopar.restore(tmp_path / "whole")
    dice = random.Random(0)
    files = [path for path in sorted((tmp_path / "whole").rglob("*")) if path.is_file()]
    refused = 0
    for path in files:
        data = path.read_bytes()
        for at in [0, len(data) - 1, *(dice.randrange(len(data)) for _ in range(12))]:
            damaged = bytearray(data)
            damaged[at] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            refused += _restored_or_refused(tmp_path / "whole", state, bare)
        path.write_bytes(data[: len(data) // 2])
        refused += _restored_or_refused(tmp_path / "whole", state, bare)
        path.unlink()
        refused += _restored_or_refused(tmp_path / "whole", state, bare)
        path.write_bytes(data)
    assert_same(autopar.restore(tmp_path / "whole", state), state)
    assert refused > 60  # the rest was in what nothing depends on


def _restored_or_refused(root: Path, state: Any, bare: Any) -> bool:
    try:
        assert_same(autopar.restore(root, step=1), bare)
        assert_same(autopar.restore(root, state, step=1), state)
    except CheckpointError:
        return True
    return False


class Killed(BaseException):
    """In the place of a process's death."""


def test_an_interruption_at_any_write_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a save in turn is the last that happens, files being written half."""
    root = tmp_path / "saves"
    autopar.save(root, small_state(1), step=1).wait(60)
    outcomes: list[int | None] = []
    for last in range(100):
        ended = _save_until(last, root, small_state(2), monkeypatch)
        outcomes.append(autopar.latest(root))
        assert_same(autopar.restore(root, small_state(0)), small_state(autopar.latest(root) or 0))
        assert_same(autopar.restore(root, small_state(0), step=1), small_state(1))
        if autopar.latest(root) == 2:
            checkpoint.delete(root, 2)
        if ended:
            break
    assert ended and len(outcomes) > 12 and outcomes[0] == 1 and outcomes[-1] == 2


def _save_until(last: int, root: Path, state: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Saves step 2, but dies in the place of the system's call number ``last``. True where it did not get so far."""
    calls = 0

    def counted(real: Callable[..., Any], half: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > last:
                if half and calls == last + 1:
                    args[0].write_bytes(args[1][: len(args[1]) // 2])
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((folder.Path, "mkdir"), (folder.Path, "rename"), (folder, "_sync_folder"),
                            (folder.shutil, "rmtree"), (store, "_check_slice"), (store, "_array"),
                            (store, "database")):  # fmt: skip
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(folder, "_write", counted(folder._write, half=True))
        handle = autopar.save(root, state, step=2)
        try:
            handle.wait(60)
        except (Killed, CheckpointError):
            return False
    return True


CHILD = """
import sys, itertools, numpy as np
from pathlib import Path
from autopar.checkpoint import begin, commit, write_slices, latest
from autopar.checkpoint.leaf import Key, Leaf
root = Path(sys.argv[1])
leaf = Leaf(path=(Key(name="w"),), shape=(64, 4096), dtype="int32", chunk=(4, 4096))
first = (latest(root) or 0) + 1
print("ready", flush=True)
for step in itertools.count(first):
    at = begin(root, step)
    write_slices(at, "0", [(leaf, [(((0, 64), (0, 4096)), np.full((64, 4096), step, np.int32))])])
    commit(at, [leaf], ["0"])
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.full)])
def test_a_process_killed_at_random_moments_leaves_whole_checkpoints(kills: int, tmp_path: Path) -> None:
    dice = random.Random(1)
    unfinished = 0
    for _ in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child, child.stdout:
            assert child.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0.0, 0.3))
            child.kill()
            said = child.stdout.read().split()
        last = autopar.latest(tmp_path)
        assert not said or (last is not None and last >= int(said[-1]))  # what was reported is there
        unfinished += any(tmp_path.glob("*.orbax-checkpoint-tmp*"))
        for step in checkpoint.steps(tmp_path)[-3:]:
            assert (autopar.restore(tmp_path, step=step)["w"] == step).all()
    assert unfinished >= kills * 3 // 10  # most kills fell into a save
