"""Whom autopar listens to, and what it makes of what it hears."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import autopar
from autopar.launch.listening import below, listeners
from autopar.runtime.on_ray import group
from autopar.runtime.on_ray.head import ERRORS, SLOW
from autopar.runtime.on_ray.node import new_token, node_environment, start_command, token_variables
from autopar.runtime.on_ray.ports import AUTOSCALER_VARIABLE, Ports
from tests.cluster.namespaces import ROOT

PACKAGE = Path(autopar.__file__).parent


def test_transfers_listen_on_the_address_given_and_on_no_other() -> None:
    from autopar.runtime.transports.jax_transfer import JaxTransfer

    before = set(listeners([os.getpid()]))
    transfer = JaxTransfer({0: jax.devices()[0]}, "127.0.0.3")
    new = set(listeners([os.getpid()])) - before
    assert new and {one.address for one in new} == {"127.0.0.3"}
    assert transfer.address.startswith("127.0.0.3:")


def test_listeners_are_found() -> None:
    with socket.socket() as here, socket.socket() as everywhere:
        here.bind(("127.0.0.1", 0))
        everywhere.bind(("", 0))
        here.listen(1)
        everywhere.listen(1)
        found = {one.port: one for one in listeners([os.getpid()])}
        assert found[here.getsockname()[1]].address == "127.0.0.1" and not found[here.getsockname()[1]].everywhere
        assert found[everywhere.getsockname()[1]].everywhere
    assert os.getpid() in below(os.getppid())


PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}


def unpickles(source: str) -> set[str]:
    """What of a module's code can turn bytes into code, by whichever name it goes there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.ImportFrom():
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            case ast.Attribute():
                names = [node.attr]
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg="allow_pickle"):
                found.add("allow_pickle")
            case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" as name)):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="__import__"), args=[ast.Constant() as a]
            ):
                names = str(a.value).split(".")
            case _:
                pass
        found |= PICKLES & set(names)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from ray import cloudpickle", "import ray.cloudpickle as x",
        "from ray.cloudpickle import loads", "ray.cloudpickle.loads(b)", "np.load(f, allow_pickle=True)",
        "importlib.import_module('pickle')", "eval(x)", "from multiprocessing.reduction import pickle",
    ],
)  # fmt: skip
def test_what_unpickles_is_found(source: str) -> None:
    assert unpickles(source)


@pytest.mark.slow
def test_nothing_is_unpickled() -> None:
    """But for the user's own functions, which the driver sends (`shipping`) and workers get as arguments of Ray's
    calls: whoever can make these can run code there anyway."""
    found = {str(path.relative_to(PACKAGE)): unpickles(path.read_text()) for path in PACKAGE.rglob("*.py")}
    by_ray = {f"runtime/on_ray/{name}.py": {"cloudpickle"} for name in ("feeder", "shipping", "worker")}
    assert {where: names for where, names in found.items() if names} == by_ray


@pytest.mark.slow
def test_a_meeting_place_is_kept() -> None:
    """Until the group has met there: a port that is only found free may be another's by then."""
    place = group.meeting_place("127.0.0.1")
    host, _, port = place.partition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    with subprocess.Popen([sys.executable, "-c", MEETS, place], cwd=PACKAGE.parent) as process:
        assert process.wait(60) == 0  # of this user's, as JAX's coordinator binds
    group._HELD.pop(place).close()


MEETS = """
import sys
from autopar.runtime.on_ray import group
group.JOIN_S = 30
group.join(sys.argv[1], 1, 0)
"""


def test_every_port_of_a_node_is_fixed() -> None:
    ports = Ports(head=20001)
    words = start_command(ports, "10.0.0.1", Path("/tmp/x"))
    given = {word.partition("=")[2] for word in words}
    for name, port in ports.daemons():
        assert str(port) in given or name == "autoscaler"
    assert node_environment(ports)[AUTOSCALER_VARIABLE] == str(ports.autoscaler)
    assert {str(ports.first_worker), str(ports.last_worker)} <= given
    assert "--include-dashboard=false" in words


def test_a_token_is_private_and_new(tmp_path: Path) -> None:
    assert len({new_token() for _ in range(100)}) == 100 and len(new_token()) == 64
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    assert token_variables("new", path) == {"RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_MODE": "token"}
    assert path.read_text() == "new" and path.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_what_a_node_starts_ends_with_it(tmp_path: Path) -> None:
    """By its input or by SIGTERM; its own exit status is handed on."""
    folder = str(tmp_path)
    for words, end in (([], "input"), ([], "signal"), (["--detached"], "signal")):
        command = [
            sys.executable,
            "-m",
            "autopar.runtime.on_ray.head",
            *words,
            folder,
            "sh",
            "-c",
            "echo $$; sleep 600; true",
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as node:
            assert node.stdin is not None and node.stdout is not None
            below_it = int(node.stdout.readline())
            assert Path(f"/proc/{below_it}").exists()
            if end == "signal":
                node.send_signal(signal.SIGTERM)
            else:
                node.stdin.close()
            node.wait(30)
            assert not Path(f"/proc/{below_it}").exists(), (words, end)
    done = subprocess.run([*command[:3], "--detached", folder, "sh", "-c", "exit 3"], cwd=ROOT, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize("why", ["Timed out waiting for file /tmp/a_port", "Failed to start the grpc server"])
def test_a_raylet_that_fails(tmp_path: Path, why: str) -> None:
    """`ray start` goes on waiting for it: the node ends with the reason, and is started again where its agent was slow
    only."""
    errors = tmp_path / ERRORS
    errors.parent.mkdir(parents=True)
    line = f"[2026-11-26 06:37:08,984 C 35 35] (raylet) grpc_server.cc:134:  Check failed: {why}"
    script = (
        f"if [ -e {tmp_path}/again ]; then exit 5; fi; touch {tmp_path}/again; echo '{line}' > {errors}; exec sleep 600"
    )
    command = [sys.executable, "-m", "autopar.runtime.on_ray.head", "--detached", str(tmp_path), "sh", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[0] == line
    assert done.returncode == (5 if SLOW in why else 1)
    assert errors.exists() == (SLOW not in why)
