"""Agents on hosts, as the launching machine sees them: requests with deadlines, through ssh or the like.

The remote command is words that no shell changes, so that it is the same with a shell between (ssh) and without (srun,
ip netns exec). All else goes through its input, as everybody on both machines can read a command: neither tokens nor
variables are in it, but for those that an interpreter needs to start (`STARTING`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autopar.ir.errors import ClusterError
from autopar.launch.hosts import SAFE, Host
from autopar.launch.records import machine

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
STARTING = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
"""Variables without which an interpreter there may not be found, or not find this package."""
CONNECT_S = 60.0
"""For an agent to say hello: ssh, an interpreter, imports (chosen)."""
ASK_S = 60.0
"""For an answer, where the request does not say (chosen)."""
CLOSE_S = 30.0
"""For an agent to end with its node (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How commands are started on hosts: ``rsh`` (``{}`` stands for the host's name, which else comes last; "" for this
    machine), ``python`` there, ``environment`` for the agent and all that it starts."""

    rsh: str
    python: str
    environment: Mapping[str, str]

    def command(self, host: Host, *arguments: str) -> list[str]:
        """The command that starts an agent on ``host``. Raises ClusterError where ``rsh`` is no command, or a word
        could not pass through a shell."""
        # -P: nothing is imported from the folder that it is started in
        words = [host.python or self.python, "-P", "-m", "autopar.launch.agent", *arguments]
        given = {key: self.environment[key] for key in STARTING if key in self.environment}
        if not self.rsh:
            mine = given.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
            given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *mine]))
            return ["env", *(f"{key}={value}" for key, value in given.items()), *words]
        named = [(f"--env {key}", value) for key, value in given.items()] + [(repr(word), word) for word in words]
        for what, word in named:
            if not SAFE.fullmatch(word):
                raise ClusterError(
                    f"{what} cannot be passed to another host: it has spaces or signs that shells read. Use another "
                    "path (python= in the hosts file, --env)"
                )
        variables = [f"{key}={value}" for key, value in given.items()]
        prefix = shlex.split(self.rsh)
        if not prefix or shutil.which(prefix[0]) is None:
            raise ClusterError(f"--rsh {self.rsh!r}: there is no command {prefix[0] if prefix else ''!r}")
        placed = [word.replace("{}", host.name) for word in prefix]
        return [*(placed if placed != prefix else [*prefix, host.name]), "env", *variables, *words]


class Session:
    """A connection to one host's agent, which is there once `hello` has returned.

    Raises ClusterError where the command cannot be made (`Reach.command`).
    """

    def __init__(self, host: Host, reach: Reach) -> None:
        self.host, self._environment = host, dict(reach.environment)
        command = reach.command(host)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        # a group of its own: an interrupt at the terminal is for the launcher, which closes the input
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._asked = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def hello(self, deadline_s: float = CONNECT_S) -> None:
        """Waits for the agent, and gives it its variables. Raises ClusterError where it does not come within
        ``deadline_s`` seconds; the message holds what the remote shell said."""
        while True:
            try:
                if self._take("connecting", deadline_s)[1] == "autopar agent":
                    break
            except ClusterError:  # which is a ValueError too
                raise
            except ValueError:  # a greeting of the remote shell
                continue
        self.ask("environment", deadline_s, variables=self._environment)

    def send(self, do: str, **given: Any) -> None:
        """Sends request ``do`` with arguments ``given``; `receive` has the answer."""
        assert self._process.stdin is not None
        self._asked += 1
        with contextlib.suppress(BrokenPipeError):  # receive says why
            self._process.stdin.write(json.dumps({"id": self._asked, "do": do, "with": given}).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, do: str, deadline_s: float = ASK_S) -> Any:
        """The answer to the last `send`, as JSON's types; older ones, which nobody waited for, are dropped. Raises
        ClusterError where the agent answers with an error, has ended, or does not answer within ``deadline_s``
        seconds."""
        try:
            while True:
                number, answer = self._take(do, deadline_s)
                if number == self._asked:
                    return answer
        except ClusterError:
            raise
        except ValueError as fault:
            raise ClusterError(f"{self.host.name}: {do}: not an answer: {fault}") from None

    def ask(self, do: str, deadline_s: float = ASK_S, **given: Any) -> Any:
        """`send`, then `receive`."""
        self.send(do, **given)
        return self.receive(do, deadline_s)

    def _take(self, do: str, deadline_s: float) -> tuple[int, Any]:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise ClusterError(f"{self.host.name}: {do}: no answer within {deadline_s:g} s. {self._said()}") from None
        if not line:
            raise ClusterError(f"{self.host.name}: {do}: {self._ended()}")
        answer = json.loads(line)
        if not isinstance(answer, dict) or "id" not in answer or not answer.keys() & {"ok", "error"}:
            raise ValueError(line[:80])
        if "error" in answer and answer["id"] == self._asked:
            raise ClusterError(f"{self.host.name}: {do}: {answer['error']}")
        return answer["id"], answer.get("ok")

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-1000:].decode(errors="replace").strip()

    def _ended(self) -> str:
        code, said = self._process.wait(), self._said()
        if "No module named" in said:
            hint = "Install autopar there (the same version), name another python=, or pass --env PYTHONPATH"
        elif code in (126, 127):
            hint = f"There is no such interpreter: name it by python= in the hosts file (here it is {sys.executable})"
        elif code == 255:
            hint = f"Try it by hand: ssh {self.host.name} true (keys, known hosts, the name)"
        else:
            hint = "Its agent ended"
        return f"{said or f'exit status {code}'}. {hint}"

    def ping(self, count: int = 5) -> tuple[float, float]:
        """(the host's clock less this machine's, by how much that may be wrong) in seconds, by the fastest of ``count``
        requests. Raises ClusterError as `receive`."""
        found: list[tuple[float, float]] = []
        for _ in range(count):
            started, before = time.monotonic(), time.time()
            there = self.ask("time")
            took_s = time.monotonic() - started
            found.append((took_s / 2, there - (before + took_s / 2)))
        error, offset = min(found)
        return offset, error

    def close(self) -> None:
        """Ends the agent, and with it what is attached to it."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@contextmanager
def connected(hosts: Sequence[Host], reach: Reach) -> Iterator[list[Session]]:
    """Sessions to all hosts, started at once and closed after the block. Raises ClusterError with all that cannot be
    reached."""
    sessions: list[Session] = []
    try:
        for host in hosts:
            sessions.append(Session(host, reach))  # one by one: those before one that cannot be made are closed
        failed: list[str] = []
        for session in sessions:
            try:
                session.hello()
            except ClusterError as fault:
                failed.append(str(fault))
        if failed:
            raise ClusterError("\n".join(failed))
        yield sessions
    finally:
        for session in reversed(sessions):  # workers before the head
            session.close()


def ask_all(
    sessions: Sequence[Session], do: str, given: Callable[[Session], dict[str, Any]], deadline_s: float = ASK_S
) -> dict[str, Any]:
    """The answer of each host, by name; all are asked before the first answer is waited for.

    Args:
        given: session → the arguments of its request ``do``.

    Raises:
        ClusterError: hosts answered with an error or not at all; says what each of them said.
    """
    for session in sessions:
        session.send(do, **given(session))
    out: dict[str, Any] = {}
    failed: list[str] = []
    for session in sessions:
        try:
            out[session.host.name] = session.receive(do, deadline_s)
        except ClusterError as fault:
            failed.append(str(fault))
    if failed:
        raise ClusterError("\n".join(failed))
    return out


def run_on(host: Host, reach: Reach, request: Mapping[str, Any], out: IO[bytes] | None = None) -> int:
    """Runs the script of ``request`` (`agent.run_script`) on ``host``, its output going where this process's goes, or
    to ``out``; returns its exit status. Raises ClusterError as `Reach.command`."""
    process = subprocess.Popen(reach.command(host, "--run"), stdin=subprocess.PIPE, stdout=out, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    try:
        return process.wait()
    except BaseException:
        process.stdin.close()  # the script ends, and then the command
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_S)
        process.kill()
        raise
    finally:
        if not process.stdin.closed:
            process.stdin.close()


def this_machine() -> Host:
    """The only host of a cluster on one machine."""
    return Host(name=machine(), address="127.0.0.1")


def environment_from(texts: Sequence[str]) -> dict[str, str]:
    """Variables from texts ``KEY=VALUE``, or ``KEY`` for this process's. Raises ClusterError for other texts, and for a
    KEY that is not set here."""
    out: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key.isidentifier():
            raise ClusterError(f"--env {text!r}: write KEY=VALUE, or KEY to pass this machine's on")
        if not equals and key not in os.environ:
            raise ClusterError(f"--env {key}: it is not set here")
        out[key] = value if equals else os.environ[key]
    return out
