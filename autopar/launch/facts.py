"""What a host says of itself: versions, name and addresses, free ports, limits. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar._version import __version__
from autopar.runtime.on_ray.ports import is_free

PACKAGES = ("jax", "jaxlib", "numpy", "ray")
"""Of which all hosts need the same version: they trace the same step, and unpickle each other's messages."""


def facts(*, ports: Sequence[int] = (), address: str | None = None) -> dict[str, Any]:
    """What this host says of itself, as JSON's types: versions ("" where a package is missing), the addresses that its
    name means, which of ``ports`` are taken, whether ``address`` is one of its own, limits and free bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "versions": {"python": platform.python_version(), "autopar": __version__}
        | {p: version_of(p) for p in PACKAGES},
        "hostname": socket.gethostname(),
        "resolves_to": _addresses(socket.gethostname()),
        "machine": _machine(),
        "taken": [port for port in ports if not is_free(port)],
        "own_address": address is None or _is_own(address),
        "open_files": {"soft": soft, "hard": hard},
        "shm_free_bytes": _free_bytes("/dev/shm"),
        "temporary": tempfile.gettempdir(),
        "temporary_free_bytes": _free_bytes(tempfile.gettempdir()),
        "auth_mode": os.environ.get("RAY_AUTH_MODE", ""),
    }


def version_of(package: str) -> str:
    """The version of a package that is installed here; "" where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _addresses(name: str) -> list[str]:
    """IPv4 addresses that ``name`` means, in the resolver's order; none where it means nothing."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _is_own(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _machine() -> str:
    """The same for two hosts that share a network: the boot's id and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def _free_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
