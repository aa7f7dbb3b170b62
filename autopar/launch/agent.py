"""On each host, for as long as the launching machine is connected: answers requests, a line of JSON each.

    python -m autopar.launch.agent

A request is ``{"id": n, "do": name, "with": {…}}``, its answer ``{"id": n, "ok": …}`` or ``{"id": n, "error": text}``.
What can be asked is in `Agent.answer`; nothing that arrives is evaluated or unpickled. When the input is closed, an
attached node of Ray and a running script end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autopar.ir import files
from autopar.ir.errors import AutoparError, ClusterError
from autopar.launch.facts import facts
from autopar.launch.listening import below
from autopar.launch.records import folder_of, lives, read_node, recorded_node, started, write_node
from autopar.runtime.on_ray.node import node_environment, start_command, token_variables, wait_up
from autopar.runtime.on_ray.ports import Ports

BACKLOG = 4096
"""Connections that nobody accepts: one from each other host (the kernel's own limit is the same by default)."""
REACH_S = 3.0
"""For a connection inside a cluster; a firewall that drops packets gives no answer at all (chosen)."""
END_S = 20.0
"""For a node to end when asked to; after that it is killed (chosen)."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""A host whose link is cut is noticed after 8 s, not 64 (measured)."""

_TEMPORARY = "autopar-ray-"


class Agent:
    """What the requests of one connection share: ports that are listened on, and the node that ends with it."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._node: subprocess.Popen[bytes] | None = None
        """That is attached to this connection."""
        self._where: tuple[str, str] = ("", "")
        """Its cluster and host."""

    def answer(self, do: str, given: Mapping[str, Any]) -> Any:
        """The answer to request ``do`` with arguments ``given``, as JSON's types. Raises ClusterError for a request
        that is not known, and as what it asks for does."""
        known: dict[str, Callable[..., Any]] = {
            "environment": environment, "facts": facts, "time": time.time, "listen": self.listen,
            "unlisten": self.unlisten, "reach": reach, "start": self.start, "stop": stop, "state": state,
            "token": token,
        }  # fmt: skip
        if do not in known:
            raise ClusterError(f"this version of autopar does not know {do!r}; install the same one on all hosts")
        return known[do](**given)

    def listen(self, ports: list[int], address: str) -> list[int]:
        """Listens on ``ports`` of ``address`` until `unlisten`, as Ray will; returns the ports that could not be
        had."""
        failed: list[int] = []
        for port in ports:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(BACKLOG)
            except OSError:
                failed.append(port)
                listener.close()
            else:
                self._listeners.append(listener)
        return failed

    def unlisten(self) -> None:
        """Stops what `listen` began."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def start(
        self, *, name: str, host: str, address: str, joins: str | None, ports: dict[str, int], token: str,
        detached: bool, num_cpus: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Starts a node of Ray and waits until it is up; returns its process number and where its token is.

        Args:
            name, host: of the cluster and of this host in it.
            address: where the node is reached.
            joins: ``host:port`` of the head; None: this is the head.
            ports: of `Ports`, by name.
            detached: True: it outlives this connection.

        Raises:
            ClusterError: a node of this cluster runs here already, or the node did not come up.
        """
        folder = folder_of(name, host)
        if (old := recorded_node(folder)) is not None:
            if lives(old):
                raise ClusterError(f"cluster {name} runs here (process {old['pid']}); end it by `autopar cluster down`")
            _forget(folder, old.get("temporary"))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        where = Ports(**ports)
        variables = {**HEALTH, **node_environment(where), **token_variables(token, folder / "token")}
        variables.pop("RAY_ADDRESS", None)
        variables.pop("RAY_AUTH_TOKEN", None)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        command = start_command(where, address, temporary, joins=joins, num_cpus=num_cpus, detached=detached)
        log, node = folder / "node.log", None
        try:
            _raise_open_files()
            with open(log, "wb") as file:
                node = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL if detached else subprocess.PIPE, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True, env=variables,
                )  # fmt: skip
            write_node(folder, node.pid, {"address": address, "ports": ports, "temporary": str(temporary)})
            wait_up(node, address, log)
        except BaseException:  # without a record, nobody would end it
            if node is not None:
                _end(node.pid, started(node.pid))
            _forget(folder, str(temporary))
            raise
        if not detached:
            self._node, self._where = node, (name, host)
        return {"pid": node.pid, "token_path": str(folder / "token")}

    def close(self) -> None:
        """Ends what does not outlive the connection: listening, and the node if it is attached."""
        self.unlisten()
        if self._node is not None and self._node.stdin is not None:
            self._node.stdin.close()
            stop(name=self._where[0], host=self._where[1])


def reach(*, targets: list[tuple[str, int]]) -> list[tuple[str, int, str]]:
    """(address, port, why not) of those of ``targets`` that cannot be connected to."""

    def attempt(target: tuple[str, int]) -> str:
        try:
            with socket.create_connection((target[0], target[1]), REACH_S):
                return ""
        except TimeoutError:
            return f"no answer within {REACH_S:g} s, as behind a firewall that drops packets"
        except OSError as fault:
            return fault.strerror or str(fault)

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(attempt, targets))
    return [(address, port, why) for (address, port), why in zip(targets, found, strict=True) if why]


def environment(*, variables: dict[str, str]) -> None:
    """Sets ``variables``, for this process and all that it starts."""
    os.environ.update(variables)


def stop(*, name: str, host: str) -> bool:
    """Ends the node that `start` left, by its process number, and removes its records. False where there is none.
    Raises ClusterError as `recorded_node`."""
    folder = folder_of(name, host)
    node = recorded_node(folder)
    if node is None:
        return False
    if living := lives(node):
        _end(node["pid"], node["started"])
    _forget(folder, node.get("temporary"))
    return living


def _end(pid: int, since: str) -> None:
    """Ends the node that is process ``pid`` since ``since``; where it does not within `END_S`, it is killed with what
    it had started."""
    others = {p: started(p) for p in below(pid)}
    if started(pid) == since:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    stop_s = time.monotonic() + END_S
    while (lives := started(pid) == since != "") and time.monotonic() < stop_s:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    for process, began in {pid: since, **others}.items() if lives else ():
        if started(process) == began != "":  # its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _forget(folder: Path, temporary: object) -> None:
    """Removes what a node of this machine has left. ``temporary``: Ray's folder, as a record has it."""
    if isinstance(temporary, str) and Path(temporary).name.startswith(_TEMPORARY):
        shutil.rmtree(temporary, ignore_errors=True)
    for left in ("node.json", "token"):
        (folder / left).unlink(missing_ok=True)


def state(*, name: str, host: str) -> dict[str, Any] | None:
    """What `start` recorded, with where the token is; None where no such node lives. Raises ClusterError as
    `read_node`."""
    node = read_node(folder_of(name, host))
    return None if node is None else node | {"token_path": str(folder_of(name, host) / "token")}


def token(*, name: str, host: str) -> str:
    """The token of a node's cluster, for another node to join it. Raises ClusterError where it cannot be read."""
    path = folder_of(name, host) / "token"
    try:
        return files.read_text(path).strip()
    except (OSError, files.DamagedError) as fault:
        raise ClusterError(f"{path}: {fault}") from None


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run_script(request: Mapping[str, Any]) -> int:
    """Runs a script of a cluster until it ends, or the input is closed; returns its exit status. ``request``:
    ``script`` (words), ``folder`` to run it in, ``environment`` beside this process's. Raises ClusterError where there
    is no such folder."""
    folder = str(request["folder"])
    if not Path(folder).is_dir():
        raise ClusterError(f"{socket.gethostname()} has no folder {folder}; share it, or give --workdir")
    variables = {**os.environ, **request["environment"]}
    variables.pop("RAY_AUTH_TOKEN", None)
    command = [sys.executable, *request["script"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a process ignores its children ignore, too
    process = subprocess.Popen(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_input() -> None:
        while os.read(0, 4096):
            pass
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                return

    threading.Thread(target=end_with_input, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def main() -> int:
    """Answers requests until the input ends, or with ``--run`` runs the script of one; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is the launcher's
    if sys.argv[1:] == ["--run"]:
        line = b""
        while not line.endswith(b"\n"):  # no further: what follows is for the thread that waits for the end
            byte = os.read(0, 1)
            if not byte:
                return 1
            line += byte
        try:
            return run_script(json.loads(line))
        except AutoparError as error:
            print(f"autopar: error: {error}", file=sys.stderr)
            return 2
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing but answers goes there
    agent = Agent()
    print(json.dumps({"id": 0, "ok": "autopar agent"}), file=out, flush=True)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": agent.answer(request["do"], request["with"])}
            except AutoparError as error:
                answer = {"error": str(error)}
            except Exception as error:  # noqa: BLE001 - told to the launcher, which raises it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"id": request["id"], **answer}), file=out, flush=True)
    finally:
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
