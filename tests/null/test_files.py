"""Files are written whole or not at all, and read within bounds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from autopar.ir import files
from autopar.ir.errors import OptionError


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.replace(path, "old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.replace(path, "new")
    assert files.read_text(path) == "old" and os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two containers, or of hosts that share the folder, have the same one."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 100_000]
    threads = [threading.Thread(target=lambda t=t: [files.replace(path, t) for _ in range(20)]) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read_text(path) in texts and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x" * 101, "more than 0.0001 MB"),
        (b"[\xff]", "byte 1 is not UTF-8"),
        (b"[1e5, Infinity]", "Infinity is not a JSON number"),
        (b'["\\ud83d"]', "half a character"),  # which nobody could print
        (b'["\\ud83d\\ude00"]', None),
        (b"9" * 100, None),
    ],
)
def test_what_is_read(tmp_path: Path, data: bytes, message: str | None) -> None:
    (tmp_path / "file").write_bytes(data)

    def read() -> Any:
        return files.parsed(files.read_text(tmp_path / "file", 100))

    if message is None:
        assert read() in (int("9" * 100), ["\U0001f600"])
        return
    with pytest.raises(files.DamagedError, match=message):
        read()


def test_who_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    assert files.open_to_others(folder) == "" and folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    assert files.open_to_others(tmp_path / "file" / "none") == ""  # cannot be made: nobody has put anything there
    folder.chmod(0o777)
    assert files.open_to_others(folder) == f"all users can write in {folder}"
    folder.chmod(0o755)
    tmp_path.chmod(0o777)  # who can rename it can put another in its place
    assert files.open_to_others(folder) == f"all users can write in {tmp_path}"
    tmp_path.chmod(0o1777)
    assert files.open_to_others(folder) == ""
    if os.geteuid() != 0:
        return  # only root gives files away
    os.chown(folder, 4321, -1)
    assert files.open_to_others(folder) == f"{folder} is user 4321's"
    os.chown(folder, os.geteuid(), 4321)
    folder.chmod(0o775)
    assert files.open_to_others(folder) == f"group 4321 can write in {folder}"


def test_what_leads_elsewhere_and_what_is_no_file(tmp_path: Path) -> None:
    """A link stays one, a pipe and a device are written into, a mode stays; a folder is refused."""
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("old")
    there.chmod(0o600)
    link.symlink_to(there)
    files.replace(link, "new")
    assert link.is_symlink() and there.read_text() == "new" and there.stat().st_mode & 0o777 == 0o600
    before = os.stat(os.devnull)
    files.replace(os.devnull, "gone")
    assert os.stat(os.devnull).st_rdev == before.st_rdev != 0
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    files.replace(tmp_path / "pipe", "through")
    reader.join()
    assert got == ["through"]
    with pytest.raises(IsADirectoryError):
        files.replace(tmp_path, "x")
    with pytest.raises(OptionError, match="path: '' names no file"):
        files.replace("", "x")
