"""Files that outlive a process: read within bounds, written whole or not at all.

Everything that autopar keeps as JSON goes through here (plans, cluster files, records, caches): one file that is
damaged, far too large or nested without end is a `DamagedError` in bounded time and memory, whatever Python's parser
makes of it, and a write that fails leaves what was there before and nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from autopar.ir.errors import OptionError

LARGEST_BYTES = 2**28
"""Of a file that is read whole (chosen: a hundred times the largest plan seen; JSON takes some ten times its text)."""

Name = str | os.PathLike[str]


class DamagedError(ValueError):
    """What a file says cannot be what was written; the message does not name the file."""


def check_name(path: Name) -> None:
    """Raises OptionError where ``path`` names no file; a number would be one that is open."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"path: {path!r} names no file; give a str or an os.PathLike")


def read(path: Name, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """What a file has. Raises OSError where it cannot be read, DamagedError where it is larger than
    ``largest_bytes``, OptionError as `check_name`."""
    check_name(path)
    with open(path, "rb") as file:
        data = file.read(largest_bytes + 1)
    if len(data) > largest_bytes:
        raise DamagedError(f"it has more than {largest_bytes / 1e6:.4g} MB")
    return data


def read_text(path: Name, largest_bytes: int = LARGEST_BYTES) -> str:
    """The text of a file. Raises as `read`, and DamagedError where it is not UTF-8."""
    try:
        return read(path, largest_bytes).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise DamagedError(f"byte {fault.start} is not UTF-8 text") from None


def parsed(text: str | bytes) -> object:
    """JSON text as JSON's types. Raises DamagedError where it is none: cut off, with an infinity or NaN, numbers of
    thousands of digits, nested too deeply, not UTF-8."""

    def refuse(word: str) -> NoReturn:
        raise DamagedError(f"damaged JSON: {word} is not a JSON number")

    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, parse_constant=refuse)
        if "\\ud" in text or "\\uD" in text:  # halves of characters, of which one may be missing
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except json.JSONDecodeError as fault:
        place = f"at line {fault.lineno} column {fault.colno} (of {len(text)} characters)"
        raise DamagedError(f"damaged JSON: {fault.msg} {place}") from None
    except DamagedError:
        raise
    except UnicodeDecodeError as fault:
        raise DamagedError(f"damaged JSON: byte {fault.start} is not UTF-8 text") from None
    except UnicodeEncodeError:
        raise DamagedError("damaged JSON: half a character") from None
    except ValueError:  # Python's limit for integers, which is 4300 digits
        raise DamagedError("damaged JSON: a number of thousands of digits") from None
    except RecursionError:
        raise DamagedError("damaged JSON: nested too deeply") from None


def replace(path: Name, text: str, *, mode: int = 0o666) -> None:
    """Writes ``text`` to ``path``, on the disk when this returns, in one step: a reader finds the old file or the new
    one, where a link led to it, too. What is no file (a pipe, /dev/null) is written into. ``mode``: of a new file, less
    the process's umask; an old one's stays. Raises OSError, the old file then stays; OptionError as `check_name`."""
    check_name(path)
    target = Path(os.path.realpath(path))
    there = target.stat().st_mode if target.exists() else None
    if there is not None and not stat.S_ISREG(there) and not stat.S_ISDIR(there):
        target.write_text(text, encoding="utf-8")
        return
    # numbers of processes are the same in containers, and on hosts that share a folder
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if there is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(there))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def boot() -> str:
    """Which run of this machine it is, for records of its processes: their numbers, and the ticks at which they began,
    come again after a restart. "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def open_to_others(folder: Name) -> str:
    """Who else can put files into ``folder``, as a text for an error; "" where only this user and root can. One that is
    not there is made with mode 700; where it cannot be, nobody has put anything into it. A group of the user's own is
    the user."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return ""
    for place in (path, *path.parents):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0):
            return f"{place} is user {found.st_uid}'s"
        if place != path and found.st_mode & stat.S_ISVTX:
            continue  # as /tmp is: others cannot put another folder in the place of one that is there
        if found.st_mode & stat.S_IWOTH:
            return f"all users can write in {place}"
        own = found.st_gid == 0 or found.st_gid == os.getegid() == os.geteuid()
        if found.st_mode & stat.S_IWGRP and not own:
            return f"group {found.st_gid} can write in {place}"
    return ""
