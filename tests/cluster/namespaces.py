"""Hosts of a cluster on this machine: network namespaces with a name and an address each, and what starts commands
there as ssh would."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.namespaces import NetworkHost, network

ROOT = Path(__file__).parents[2]
_RSH = """#!/bin/sh
# rsh NAME COMMAND...: in namespace NAME, whose host name that is
name=$1
shift
exec ip netns exec "$name" unshare --uts --mount --propagation private \\
    sh -c 'hostname "$0"; mount --bind "FOLDER/$0.hosts" /etc/hosts; exec "$@"' "$name" "$@"
"""


class Network(NamedTuple):
    """Hosts, the file that lists them, and ``--rsh``."""

    hosts: tuple[NetworkHost, ...]
    file: Path
    rsh: Path
    folder: Path

    def call(self, host: int, text: str) -> None:
        """Writes a host's ``/etc/hosts``: ``text``, then all hosts and addresses."""
        known = "".join(f"{h.address} {h.name}\n" for h in self.hosts)
        (self.folder / f"{self.hosts[host].name}.hosts").write_text(f"127.0.0.1 localhost\n{text}{known}")

    def options(self) -> list[str]:
        """Of `autopar cluster`."""
        return ["--hosts", str(self.file), "--rsh", str(self.rsh), "--env", f"PYTHONPATH={ROOT}"]

    def environment(self) -> dict[str, str]:
        """Of `autopar` itself."""
        return {**os.environ, "AUTOPAR_HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT)}


@contextmanager
def hosts(count: int, folder: Path, *, bits_per_s: float = 1e9, devices: int = 2) -> Iterator[Network]:
    """``count`` of them. Raises NamespaceError where there cannot be any."""
    with network(count, bits_per_s) as made:
        rsh = folder / "rsh"
        rsh.write_text(_RSH.replace("FOLDER", str(folder)))
        rsh.chmod(0o755)
        file = folder / "hosts"
        file.write_text("".join(f"{h.name} address={h.address} devices={devices}\n" for h in made))
        out = Network(made, file, rsh, folder)
        for i in range(count):
            out.call(i, "")
        yield out
