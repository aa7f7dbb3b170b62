"""What is kept of running clusters, in ``~/.autopar/clusters/NAME``, which only the user may read.

``cluster.json`` on the machine that launched it: hosts and how they are reached. ``HOST/node.json`` on each host: the
process that runs its node, and on which machine; ``HOST/token``: Ray's. Homes may be shared between machines: each host
has a folder of its own, a cluster on one machine alone has its ``cluster.json`` there too, and nobody touches what
another machine's node has left (`ElsewhereError`).
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.ir import files
from autopar.ir.errors import ClusterError


class ElsewhereError(ClusterError):
    """A record is of a node on another machine, which alone knows whether it lives."""


def clusters_folder() -> Path:
    """The folder of all clusters' records: in ``~/.autopar``, or in AUTOPAR_HOME where that is set."""
    home = os.environ.get("AUTOPAR_HOME")
    return (Path(home) if home else Path.home() / ".autopar") / "clusters"


def folder_of(name: str, host: str | None = None) -> Path:
    """The folder of cluster ``name``, or of its host ``host``. Raises ClusterError for a name that can be no
    folder's."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ClusterError(f"cluster name {name!r}: expected letters, digits, '.', '_' and '-'")
    folder = clusters_folder() / name
    return folder if host is None else folder / host.replace(":", "_").replace("@", "_")


def write_node(folder: Path, pid: int, more: dict[str, Any]) -> None:
    """Records a node's process ``pid``, and ``more``, in a host's folder."""
    _write(
        folder / "node.json", {"pid": pid, "started": started(pid), "machine": machine(), "boot": files.boot(), **more}
    )


def read_node(folder: Path) -> dict[str, Any] | None:
    """The record of a node that lives; None where there is none, or its process is gone. Raises as `recorded_node`."""
    node = recorded_node(folder)
    return node if node is not None and lives(node) else None


def lives(node: Mapping[str, Any]) -> bool:
    """Whether the process of a record is there."""
    return node.get("boot") == files.boot() and started(node["pid"]) == node["started"] != ""


def recorded_node(folder: Path) -> dict[str, Any] | None:
    """The record of a node, whether it lives or not; None where there is none. Raises ClusterError where it is damaged,
    ElsewhereError where it is another machine's."""
    path = folder / "node.json"
    node = _read(path)
    if node is None:
        return None
    if not isinstance(node, dict) or not isinstance(node.get("pid"), int) or not isinstance(node.get("started"), str):
        raise ClusterError(f"{path} is damaged: it names no process; remove it")
    if node.get("machine") != machine():
        raise ElsewhereError(
            f"{path} is of a node on {node.get('machine')} (process {node['pid']}), and this is {machine()}: end it "
            "there (`autopar cluster down`); where that machine is gone, remove the file"
        )
    return node


def machine() -> str:
    """The name of the machine that this is."""
    return socket.gethostname()


def started(pid: int) -> str:
    """When a process began, in the kernel's ticks, which tells it from another that has its number later; "" for one
    that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def write_cluster(name: str, record: dict[str, Any], host: str | None = None) -> None:
    """Records a cluster on the machine that launched it; ``host``: of one that is on this machine alone. Raises
    ClusterError as `folder_of`."""
    folder = folder_of(name, host)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(folder / "cluster.json", record)


def read_cluster(name: str, host: str | None = None) -> dict[str, Any] | None:
    """What `write_cluster` wrote; None where there is nothing. Raises ClusterError where it is damaged, and as
    `folder_of`."""
    return _read(folder_of(name, host) / "cluster.json")


def forget_cluster(name: str, host: str | None = None) -> None:
    """Removes what `write_cluster` wrote. Raises ClusterError as `folder_of`."""
    (folder_of(name, host) / "cluster.json").unlink(missing_ok=True)


def _write(path: Path, data: Any) -> None:
    files.replace(path, json.dumps(data), mode=0o600)


def _read(path: Path) -> Any:
    try:
        return files.parsed(files.read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, files.DamagedError) as fault:
        raise ClusterError(f"{path} is damaged: {fault}; remove it") from None
