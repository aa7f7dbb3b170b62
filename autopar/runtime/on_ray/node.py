"""The command and the environment of a Ray node, head or not, that listens on fixed ports and asks for a token."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from autopar.ir.errors import ClusterError
from autopar.runtime.on_ray.ports import AUTOSCALER_VARIABLE, Ports

START_S = 180.0
"""For a node to come up (chosen; 8 s on two cores, 23 s and more on busy ones)."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Of a node's object store: what one step ships, not the state (chosen)."""
NODE_VARIABLES = {"RAY_raylet_start_wait_time_s": f"{START_S:g}", "RAY_worker_niceness": "0"}
"""Ray's settings beside its defaults: 30 s for a raylet to register are not enough on a busy machine, and workers with
a niceness of 15 starve beside anything else (both seen; ray 2.60)."""
NUM_CPUS = 64
"""Actors that a node takes, whatever the machine has: Ray's "CPU" only counts them (chosen)."""
STARTED = "Ray runtime started"
"""What `ray start` prints when a node is up."""


def start_command(
    ports: Ports, address: str, temporary: Path, *, joins: str | None = None, num_cpus: int = NUM_CPUS,
    detached: bool = False,
) -> list[str]:  # fmt: skip
    """The command of a Ray node at ``address`` that runs until its standard input is closed (`head`), ``detached``
    until SIGTERM.

    Args:
        temporary: folder for its logs and sockets; its path short (a socket's is at most 107 bytes).
        joins: ``host:port`` of the head; None: this is the head.
        num_cpus: actors that it takes.
    """
    given = {
        "node-ip-address": address, "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager, "dashboard-agent-grpc-port": ports.agent_grpc,
        "dashboard-agent-listen-port": ports.agent_http, "metrics-export-port": ports.metrics,
        "runtime-env-agent-port": ports.runtime_env, "min-worker-port": ports.first_worker,
        "max-worker-port": ports.last_worker, "num-cpus": num_cpus, "object-store-memory": OBJECT_STORE_BYTES,
        "temp-dir": temporary,
    }  # fmt: skip
    role = ["--head", f"--port={ports.head}", "--include-dashboard=false"] if joins is None else [f"--address={joins}"]
    ray = [sys.executable, "-P", "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
    return [
        sys.executable, "-P", "-m", "autopar.runtime.on_ray.head", *["--detached"][: int(detached)], str(temporary),
        *ray, "start", *role, "--block", "--disable-usage-stats", *(f"--{k}={v}" for k, v in given.items()),
    ]  # fmt: skip


def node_environment(ports: Ports) -> dict[str, str]:
    """The environment of a node: this process's, with autopar's package on PYTHONPATH, the port that has no option, and
    `NODE_VARIABLES` where it does not say otherwise."""
    root = str(Path(__file__).parents[3])
    paths = [root, *(p for p in (os.environ.get("PYTHONPATH", "")).split(os.pathsep) if p)]
    return {
        **NODE_VARIABLES,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        AUTOSCALER_VARIABLE: str(ports.autoscaler),
    }


def wait_up(node: subprocess.Popen[bytes], address: str, log: Path, deadline_s: float = START_S) -> None:
    """Returns when the node's log says that it is up. Raises ClusterError, with the end of the log, where it ends or is
    not up within ``deadline_s`` seconds."""
    stop_s = time.monotonic() + deadline_s
    while (code := node.poll()) is None and time.monotonic() < stop_s:
        if STARTED in log.read_text(errors="replace"):
            return
        time.sleep(0.05)
    why = f"not within {deadline_s:g} s" if code is None else f"it ended with exit status {code}"
    raise ClusterError(
        f"Ray did not come up at {address}: {why}; it says:\n{log.read_text(errors='replace')[-2000:].strip()}"
    )


def token_variables(token: str, path: Path) -> Mapping[str, str]:
    """Writes ``token`` to ``path``, which only the user may read; returns the environment variables by which Ray asks
    for it."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return {"RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_MODE": "token"}


def new_token() -> str:
    """A token of 256 random bits, in hex."""
    return secrets.token_hex(32)
