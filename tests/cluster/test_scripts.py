"""The scripts in cluster/, with the commands that they call replaced: what they ask for, and that they parse."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.on_ray.node import NUM_CPUS, OBJECT_STORE_BYTES, start_command
from autopar.runtime.on_ray.ports import AUTOSCALER_VARIABLE, Ports
from tests.cluster.namespaces import ROOT

FOLDER = ROOT / "cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])


def command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def called(tmp_path: Path, script: str, *words: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, output and errors with ``autopar`` printing what it was given, and the hosts file."""
    command(
        tmp_path, "autopar", 'printf "%s|" "$@"; echo\nfor w; do case $w in */autopar-hosts.*) cat "$w";; esac; done'
    )
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), **variables}
    done = subprocess.run(
        [str(FOLDER / script), *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_they_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def test_local(tmp_path: Path) -> None:
    assert called(tmp_path, "local.sh", "a b.py", "-x")[:2] == (0, "run|--here|a b.py|-x|\n")
    assert called(tmp_path, "local.sh", "--check", AUTOPAR_FLAGS="--name n")[:2] == (0, "doctor|--name|n|\n")
    assert called(tmp_path, "local.sh")[0] == 2


def test_ssh(tmp_path: Path) -> None:
    flags = "--rsh rsh"
    status, out, _ = called(tmp_path, "ssh.sh", "hosts", "s.py", "a b", AUTOPAR_FLAGS=flags)
    assert (status, out) == (0, "run|--hosts|hosts|--rsh|rsh|s.py|a b|\n")
    assert called(tmp_path, "ssh.sh", "--check", "hosts")[1] == "cluster|check|--hosts|hosts|\n"
    assert called(tmp_path, "ssh.sh", "--profile", "hosts", "o")[1] == "profile|--hosts|hosts|--out|o|\n"
    for words in ([], ["hosts"], ["--check"], ["--no-such", "hosts"]):
        status, _, _ = called(tmp_path, "ssh.sh", *words)
        assert status == 2, words


def test_slurm(tmp_path: Path) -> None:
    command(tmp_path, "scontrol", "echo n1; echo n2")
    command(
        tmp_path, "srun", 'for w; do case $w in --nodelist=n*) echo "10.0.0.${w#--nodelist=n} 192.168.0.1";; esac; done'
    )
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    status, out, errors = called(tmp_path, "slurm.sbatch", "s.py", "--steps", "3", **job)
    first, *listed = out.splitlines()
    assert status == 0, errors
    assert listed == ["n1 address=10.0.0.1 devices=4", "n2 address=10.0.0.2 devices=4"]
    words = first.split("|")
    assert words[:2] == ["run", "--hosts"] and words[3] == "--rsh" and words[-4:-1] == ["s.py", "--steps", "3"]
    assert words[4].startswith("srun --overlap") and words[4].endswith(" --nodelist={}")
    assert called(tmp_path, "slurm.sbatch", "--check", **job)[1].startswith("cluster|check|--hosts|")
    assert not list(tmp_path.glob("autopar-hosts*"))
    assert called(tmp_path, "slurm.sbatch", "s.py")[0] == 2


def test_kuberay_says_what_is_missing(tmp_path: Path) -> None:
    command(tmp_path, "kubectl", 'case "$*" in *readyz) ;; *) exit 1;; esac')
    status, _, errors = called(tmp_path, "kuberay.sh", "check")
    assert status == 1 and "the KubeRay operator is not installed" in errors
    command(tmp_path, "kubectl", "exit 1")
    status, _, errors = called(tmp_path, "kuberay.sh", "check")
    assert status == 1 and "cannot be reached" in errors


def test_kuberay_checks_pods_that_run(tmp_path: Path) -> None:
    head, worker = (f'*node-type={k}*) echo "{k} address=10.0.0.{i}";;' for i, k in enumerate(("head", "worker")))
    command(tmp_path, "kubectl", f'case "$*" in {head} {worker} esac')
    status, out, _ = called(tmp_path, "kuberay.sh", "check", KUBECTL="kubectl -n mine")
    assert status == 0
    assert out.startswith("cluster|check|--running|--hosts|") and "kubectl -n mine exec -i {} -c ray --|" in out


def test_the_manifest_has_autopars_ports() -> None:
    yaml = pytest.importorskip("yaml")
    cluster, policy = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
    spec: Any = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    head, worker = spec["headGroupSpec"]["rayStartParams"], spec["workerGroupSpecs"][0]["rayStartParams"]
    assert head.pop("port") == str(Ports().head)
    assert head.pop("dashboard-host") == "127.0.0.1"  # which the operator's probes ask, inside the pod
    assert head == worker
    words = start_command(Ports(), "a", Path("t"), joins="h:1")
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    for name in ("address", "node-ip-address", "temp-dir"):  # the operator's own
        options.pop(name)
    assert worker == options | {"disable-usage-stats": "true"}
    assert (worker["num-cpus"], worker["object-store-memory"]) == (str(NUM_CPUS), str(OBJECT_STORE_BYTES))
    (pod,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": AUTOSCALER_VARIABLE, "value": str(Ports().autoscaler)} in pod["env"]
    mine = policy["spec"]["podSelector"]
    assert mine["matchLabels"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": mine}]}]  # nobody else, of whatever namespace
