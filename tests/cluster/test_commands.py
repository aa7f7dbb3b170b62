"""`autopar cluster`, `run`, `doctor` and `profile` by their text, without Ray."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.cost.logical_meshes import candidate_shapes, logical_mesh
from autopar.ir.presets import PRESETS, cluster_from_text, sources
from autopar.ir.serde import to_json
from autopar.ir.text import link_text
from autopar.launch.hosts import Host, hosts_to_json
from autopar.launch.records import folder_of, write_cluster, write_node


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("autopar: error: ") and "Traceback" not in err
    return err


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a\nb devices=none\n")
    assert f"{hosts}, line 2: devices=none" in fails(capsys, "cluster", "check", "--hosts", str(hosts))
    assert "No such file" in fails(capsys, "cluster", "up", "--hosts", str(tmp_path / "none"))
    for words in (["run", "s.py"], ["cluster", "status"], ["cluster", "down"]):
        assert "no cluster 'default' was launched from here" in fails(capsys, *words)
    assert "list them in a file" in fails(capsys, "cluster", "check", "--rsh", "ssh")
    assert "expected 1024 to 65535" in fails(capsys, "cluster", "check", "--port-base", "80")
    assert "expected letters" in fails(capsys, "cluster", "status", "--name", "../x")


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"hosts": [], "reach": {}, "ports": {}},
        {"hosts": [{"name": "a;b"}], "reach": {}, "ports": {}},
        {"hosts": hosts_to_json([Host(name="a", address="a")]), "reach": {"rsh": "x"}, "ports": {}},
        {
            "hosts": hosts_to_json([Host(name="a", address="a")]), "ports": {"no": 1},
            "reach": {"rsh": "x", "python": "p", "environment": {}},
        },
    ],
)  # fmt: skip
def test_a_damaged_record(record: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_cluster("default", record)
    said = fails(capsys, "cluster", "down")
    assert "the cluster's record" in said or "the record of cluster default is damaged" in said


@pytest.mark.parametrize("command", ["check", "spec --like dgx-a100 --out x.json"])
def test_a_hosts_file_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *command.split(), "--hosts", "none"]) == 2
    assert capsys.readouterr().err == "autopar: error: hosts file none: cannot be read: No such file or directory\n"


def test_spec_of_a_hosts_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts, out = tmp_path / "hosts", tmp_path / "spec.json"
    hosts.write_text("a devices=4\nb devices=4\n")
    assert main(["cluster", "spec", "--hosts", str(hosts), "--like", "dgx-a100", "--out", str(out)]) == 0
    spec = cluster_from_text(str(out))
    assert spec.groups[0].hosts == 2 and spec.num_devices == 8 and "A100" in spec.groups[0].device.name
    assert "2 hosts, 8 devices" in capsys.readouterr().err
    assert main(["cluster", "spec", "--like", "v5p-128:2", "--out", str(out)]) == 0
    assert cluster_from_text(str(out)) == cluster_from_text("v5p-128:2")
    assert "32 hosts, 128 devices" in capsys.readouterr().err and out.read_text().count("\n") > 20, "to edit"


@pytest.mark.parametrize("name", [*PRESETS, "v5p-128", "v7x-128:2", "v5e-1", "dgx-a100+dgx-h100:2"])
def test_doctor_describes_clusters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every axis of the natural meshes with what it has of the links; every part with its sources."""
    assert main(["doctor", "--cluster", name]) == 0
    out, spec = capsys.readouterr().out, cluster_from_text(name)
    assert out.startswith(f"{name}: ")
    assert all(source in out for _, source in sources(name))
    assert out.count("natural meshes") == len(spec.groups)
    for shape in candidate_shapes(replace(spec, groups=spec.groups[:1])):
        for axis in logical_mesh(spec, shape).axes:
            seen = rf"{axis.name} +{axis.size} +{link_text(axis.link)} +{link_text(axis.exchange or axis.link)}\n"
            assert re.search(seen, out), (shape, axis)


def test_doctor_describes_a_file_as_the_slice_of_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = tmp_path / "mine.json"
    path.write_text(to_json(cluster_from_text("v5p-64")))
    assert main(["doctor", "--cluster", str(path)]) == 0
    by_file = capsys.readouterr().out
    main(["doctor", "--cluster", "v5p-64"])
    by_name = capsys.readouterr().out
    assert by_file.partition("\ndevices")[2] == by_name.partition("\ndevices")[2] != ""
    assert f"the file {path}" in by_file


def test_doctor_lists_ports_and_judges(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)  # of a Ray that this process has
    base = ["doctor", "--no-devices", "--port-base", "19200"]
    assert main(base) == 0
    out = capsys.readouterr().out
    assert re.search("19207 +head +the head's autoscaler", out) and "tcp dport { 19200-19207, 19221-19320, " in out
    assert "Ray's token  made for each cluster" in out and out.endswith("nothing wrong\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(base) == 1
    out = capsys.readouterr().out
    assert "Ray's token  switched off" in out and "RAY_AUTH_MODE=disabled: whoever reaches" in out


def test_check_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    assert main(["cluster", "check", "--port-base", "19600"]) == 0
    assert capsys.readouterr().out == "1 host: nothing wrong\n"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 19601))
        taken.listen(1)
        assert main(["cluster", "check", "--port-base", "19600"]) == 1
        assert f"{socket.gethostname()}: port 19601 (raylet: leases workers) is taken" in capsys.readouterr().out


def test_what_runs_is_not_ended_by_starting_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("default", socket.gethostname())
    folder.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as node:
        write_node(folder, node.pid, {"temporary": "/no/such"})
        for words in (["cluster", "up"], ["run", "--here", "script.py"]):
            assert f"cluster default runs already on {socket.gethostname()}" in fails(capsys, *words)
        assert node.poll() is None
        node.kill()
    (folder / "node.json").write_text("{}")
    assert "names no process; remove it" in fails(capsys, "cluster", "up")
