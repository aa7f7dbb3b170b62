"""`autopar.init` that fails: nothing of it stays. A stand-in is in Ray's place."""

from __future__ import annotations

import importlib.machinery
import os
import socket
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.ir.errors import ClusterError
from autopar.runtime.on_ray import ray_cluster
from autopar.runtime.on_ray.node import STARTED
from autopar.runtime.on_ray.ports import Ports
from tests.ports import free_ports
from tests.processes import below, left

GONE_S = 20.0
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_ADDRESS")


class NotJoinedError(Exception):
    """What the stand-in's `init` raises."""


@pytest.fixture(params=[{}, {"RAY_AUTH_MODE": "Token", "RAY_AUTH_TOKEN_PATH": "/no/such"}], ids=["bare", "of the user"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, and nothing else is. The user has no token, or one of his own."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    stand_in: Any = types.ModuleType("ray")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("ray", None)
    raylet: Any = types.ModuleType("ray._raylet")
    raylet.Config = types.SimpleNamespace(initialize=lambda _: None)
    stand_in.is_initialized = lambda: False
    stand_in.init = _not_joined
    monkeypatch.setattr(ray_cluster, "_CURRENT", [])  # tests on Ray may have run in this process before
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setitem(sys.modules, "ray._raylet", raylet)
    return tmp_path / "temporary"


def _not_joined(**_: Any) -> None:
    raise NotJoinedError("wrong version")


def head(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What runs in the place of Ray's head."""
    command = [sys.executable, "-m", "autopar.runtime.on_ray.head"]
    code_of = [sys.executable, "-c", code]
    monkeypatch.setattr(ray_cluster, "start_command", lambda _, __, folder, **___: [*command, str(folder), *code_of])


def free() -> Ports:
    return free_ports(12_000, 19_000)


def fails(error: type[BaseException], match: str, folder: Path, **options: Any) -> None:
    """`init` does, and all is as it was."""
    before, processes = dict(os.environ), set(below(os.getpid()))
    with pytest.raises(error, match=match):
        autopar.init(**{"ports": free(), "spec": "cpu:2", **options})
    assert dict(os.environ) == before
    assert not list(folder.iterdir()), "a temporary folder is left"
    assert not left(sorted(set(below(os.getpid())) - processes), GONE_S), "a process is left"
    with pytest.raises(ClusterError, match="is connected to no Ray"):
        ray_cluster.named("ray")


@pytest.mark.parametrize("mode", ["disabled", "DISABLED", "none"])
def test_a_ray_without_a_token_is_not_started(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    head(monkeypatch, "raise AssertionError")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    fails(ClusterError, f"RAY_AUTH_MODE={mode}: a Ray that autopar starts asks for a token", folder)


def test_a_port_that_is_taken(folder: Path) -> None:
    ports = free()
    with socket.create_server(("127.0.0.1", ports.node_manager)):
        fails(ClusterError, rf"port {ports.node_manager} \(node_manager\) is taken", folder, ports=ports)


def test_a_head_that_does_not_come_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head(monkeypatch, "import sys; print('no memory'); sys.exit(3)")
    fails(ClusterError, r"(?s)Ray did not come up at 127\.0\.0\.1:\d+: .*no memory", folder)


def test_a_head_that_cannot_be_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "start_command", lambda *_, **__: [str(folder / "missing")])
    fails(FileNotFoundError, "missing", folder)


def test_a_head_that_cannot_be_joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head(monkeypatch, f"import time; print({STARTED!r}, flush=True); time.sleep(600)")
    fails(NotJoinedError, "wrong version", folder)


def test_a_ray_of_others_that_cannot_be_joined(folder: Path) -> None:
    fails(NotJoinedError, "wrong version", folder, address="127.0.0.1:1")
