"""Three hosts on this machine train the GPT by the launch scripts that users run: network namespaces, 1 Gbit/s each."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.ir.presets import cluster_from_text
from benchmarks.namespaces import NamespaceError
from examples.gpt.data import load_corpus, sample_batch
from examples.gpt.model import GPTConfig, init_state, make_train_step
from tests.cluster.namespaces import ROOT, Network, hosts

SIZES = {"layers": 3, "hidden": 32, "heads": 2, "seq": 32}
STEPS, BATCH = 10, 8
DEADLINE_S = 600.0
"""For one script: Ray starts within 30 s where the machine does nothing else, within 180 s where it is busy."""
STEP_S = 120.0
"""For a step, on a machine that does other things too. Ray misses a host after some 10 s."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autopar[ray]'")
    try:
        with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
            yield made
    except NamespaceError as fault:
        pytest.skip(str(fault))


def script(network: Network, *words: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    """Runs ``cluster/ssh.sh``."""
    variables = {
        "AUTOPAR": f"{sys.executable} -m autopar",
        "AUTOPAR_FLAGS": f"--rsh {network.rsh} --env PYTHONPATH={ROOT} {flags}",
    }
    return subprocess.run(
        [str(ROOT / "cluster" / "ssh.sh"), *words], env=network.environment() | variables, cwd=ROOT,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def serial() -> tuple[float, float]:
    """The losses of the first and the last step, of the plain step on one device."""
    config = GPTConfig(**SIZES, learning_rate=3e-3, warmup_steps=STEPS // 10, total_steps=STEPS)
    corpus, step = load_corpus(None), jax.jit(make_train_step(config))
    with jax.enable_x64(False):
        state = init_state(jax.random.key(0), config)
        losses: list[float] = []
        for i in range(STEPS):
            batch = sample_batch(corpus.train, batch=BATCH, seq=config.seq, seed=0, step=i)
            state, loss = step(state, batch)
            losses.append(float(loss))
    return losses[0], losses[-1]


def ray_processes(network: Network) -> list[str]:
    """In the namespaces."""
    found: list[str] = []
    for host in network.hosts:
        listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
        found += listed.stdout.split()
    return found


@pytest.mark.full
@pytest.mark.slow
def test_three_hosts_train_the_gpt(network: Network, tmp_path: Path) -> None:
    checked = script(network, "--check", str(network.file))
    assert (checked.returncode, checked.stdout) == (0, "3 hosts: nothing wrong\n"), checked.stderr
    spec_file = tmp_path / "spec.json"
    profiled = script(network, "--profile", str(network.file), str(spec_file), flags="--quick")
    assert profiled.returncode == 0, profiled.stderr
    spec = cluster_from_text(str(spec_file))
    (group,) = spec.groups
    assert (group.hosts, group.devices_per_host) == (3, 2)
    assert group.nic.bytes_per_s < 1.2 * 1e9 / 8, "more than the link carries"
    sizes: list[Any] = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    trained = script(
        network, str(network.file), "--", "-m", "examples.gpt.train_ray", "--cluster", str(spec_file), "--stages", "3",
        "--steps", str(STEPS), "--batch", str(BATCH), "--microbatches", "2", *sizes,
        "--plan-out", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert trained.returncode == 0, f"{trained.stdout}\n{trained.stderr}"
    losses = [float(text) for text in re.findall(r"step +\d+  loss ([0-9.]+)", trained.stdout)]
    assert losses == pytest.approx(serial(), abs=2e-3)
    assert losses[0] == pytest.approx(math.log(256), abs=0.1) and losses[1] < losses[0]
    assert not ray_processes(network)


@pytest.mark.full
def test_a_host_loses_its_link(network: Network, tmp_path: Path) -> None:
    """One of two that a mesh lies on: Ray misses it, and training goes on without it (`tests.ray.cut_host`)."""
    link = ["ip", "-n", network.hosts[-1].name, "link", "set", "nic"]

    def cut() -> None:
        while not (tmp_path / "now").exists():
            if ended.wait(0.05):
                return
        subprocess.run([*link, "down"], check=True)
        (tmp_path / "cut").touch()

    ended = threading.Event()
    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        run = script(network, str(network.file), "--", "-m", "tests.ray.cut_host", str(tmp_path), str(STEP_S))
    finally:
        ended.set()
        cutting.join()
        subprocess.run([*link, "up"], check=True)
    print(run.stdout)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "processes: 2\n" in run.stdout, "not those of two hosts"
    assert "restart 1 of 3, from step 4" in run.stderr
    assert not ray_processes(network)


def test_what_is_wrong_is_said(network: Network) -> None:
    """A name that means loopback, and a host that another cannot reach."""
    first, second, third = network.hosts
    network.call(1, f"127.0.1.1 {second.name}\n")
    route = ["ip", "-n", first.name, "route", "{}", "unreachable", third.address]
    subprocess.run([word.replace("{}", "add") for word in route], check=True)
    try:
        checked = script(network, "--check", str(network.file))
    finally:
        network.call(1, "")
        subprocess.run([word.replace("{}", "del") for word in route], check=True)
    assert checked.returncode == 1
    assert f"{second.name}: its own name, '{second.name}', means 127.0.1.1" in checked.stdout
    assert f"{third.name}: {first.name} cannot connect to {third.address}, port 26380" in checked.stdout
    assert not ray_processes(network)
