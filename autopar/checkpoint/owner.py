"""Who writes checkpoints into a root: one driver at a time.

The first save of a process, or `run_elastic`, makes it the root's owner until it ends or calls `release`. It says so
in a file there, `OWNER`, and holds a lock on that (POSIX's, which NFS has too), so the kernel tells whether the owner
still lives. Another driver is refused meanwhile: each would remove what the other is writing, and go on from whichever
step is highest. A file that is left without its lock is one of a driver that died: here (same boot of the same machine)
it is replaced, with a warning; of one on another host it cannot be known, and `release` or ``take_over`` says so.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from autopar.ir import files
from autopar.ir.errors import CheckpointError

OWNER = "autopar_owner.json"
"""The file's name."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OWNED: dict[Path, tuple[int, int]] = {}
"""Root → the process that owns it (a fork does not), and the file's descriptor, which is the lock."""
_LOCK = threading.Lock()

_log = logging.getLogger(__name__)


def own(root: str | os.PathLike[str], *, take_over: bool = False) -> None:
    """Makes this process the owner of a root, which is made where it is not there; nothing where it is that already.

    Args:
        root: folder of all checkpoints.
        take_over: True: a driver of another host that left the root without a word is known to be gone.

    Raises:
        CheckpointError: another driver owns it, or may; or the file cannot be written.
    """
    root = Path(root).resolve()
    with _LOCK:
        if _OWNED.get(root, (0, 0))[0] == os.getpid():
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            file, locked = _locked(root)
        except OSError as error:
            raise CheckpointError(f"{root}: cannot begin a checkpoint there: {error}") from error
        try:
            old = _read(file)
            if old is not None:
                _may_take(root, old, locked, take_over)
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_me()).encode(), 0)
            os.fsync(file)
        except BaseException as error:
            os.close(file)
            if isinstance(error, OSError):
                raise CheckpointError(f"{root / OWNER}: cannot be written: {error}") from error
            raise
        _OWNED[root] = (os.getpid(), file)


def release(root: str | os.PathLike[str]) -> None:
    """Lets another driver save into a root.

    Args:
        root: this process's, which has no save under way there, or one whose owner is known to be gone.

    Raises:
        CheckpointError: another driver that lives owns it.
    """
    root = Path(root).resolve()
    if root.is_dir():
        own(root, take_over=True)
        _let_go(root)


def _let_go(root: Path) -> None:
    with _LOCK:
        pid, file = _OWNED.pop(root, (0, -1))
        if pid == os.getpid():
            (root / OWNER).unlink(missing_ok=True)
        if file >= 0:
            os.close(file)


@atexit.register
def _release_all() -> None:
    for root, (pid, _) in list(_OWNED.items()):
        if pid == os.getpid():
            _let_go(root)


def _locked(root: Path) -> tuple[int, bool]:
    """The file, open and locked, and False in the place of True on a file system without locks."""
    while True:
        file = os.open(root / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        locked = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            old = _read(file)
            if error.errno not in _NO_LOCKS:
                os.close(file)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise CheckpointError(
                    f"{root}: {_said(old)} saves checkpoints there, and lives. Two drivers would remove each other's. "
                    "End that one, or give another path"
                ) from None
            locked = False
        try:
            same = os.path.samestat(os.fstat(file), os.stat(root / OWNER))
        except FileNotFoundError:
            same = False
        if same:
            return file, locked
        os.close(file)  # its owner removed it meanwhile


def _may_take(root: Path, old: dict[str, Any], locked: bool, take_over: bool) -> None:
    """Raises CheckpointError where the owner that ``old`` describes may still live."""
    here = old.get("boot") == files.boot() != ""
    if take_over or (here and locked):
        _log.warning("autopar: %s: taken over from %s, which is gone", root, _said(old))
        return
    raise CheckpointError(
        f"{root}: {_said(old)} saved checkpoints there, and has not said that it ended. If it is gone for good, take "
        "over: take_over=True, or autopar.checkpoint.release(path)"
    )


def _read(file: int) -> dict[str, Any] | None:
    """What the file says; None where it is empty. What is damaged says nothing of its owner."""
    data = os.pread(file, 65536, 0)
    if not data:
        return None
    try:
        found = files.parsed(data)
    except files.DamagedError:
        return {}
    return found if isinstance(found, dict) else {}


def _me() -> dict[str, Any]:
    return {
        "run": secrets.token_hex(8), "host": socket.gethostname(), "process": os.getpid(), "boot": files.boot(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def _said(old: dict[str, Any] | None) -> str:
    if not old:
        return "a driver that cannot be read of"
    process, host, run, since = (str(old.get(key))[:100] for key in ("process", "host", "run", "since"))
    return f"process {process} of host {host} (run {run}, since {since})"
