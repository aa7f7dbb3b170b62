"""An elastic run on a Ray of two nodes; the second is killed with all that runs on it, as a host would be lost:

    python -m tests.ray.lost_host HEAD_PORT CHECKPOINTS

It prints how often Ray and autopar count hosts just afterwards, and how long it takes from the kill to the first step
done again; it fails where losses and state are not those of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KILLED_AFTER = 4
"""Step, of seven; checkpoints are of every second."""
GONE_S = 20.0
"""For processes that were killed (chosen)."""


def main(port: int, saves: Path) -> None:
    """One run."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_enable_x64", True)
    import autopar
    from autopar.runtime.on_ray.ports import SPAN, ports_from

    with (
        tempfile.TemporaryDirectory(prefix="autopar-ray-", dir="/tmp") as folder,
        autopar.init(ports=ports_from(port), spec=HOSTS, compilation_cache=saves / "compiled") as cluster,
    ):
        node = start_node(ports_from(port + SPAN), cluster.address, Path(folder))
        try:
            train_on(cluster, node, saves)
        finally:
            kill(node)


def start_node(ports: Any, head: str, folder: Path) -> subprocess.Popen[bytes]:
    """A second node beside the head, up."""
    from autopar.runtime.on_ray.node import node_environment, start_command, wait_up

    log = folder / "node.log"
    with open(log, "wb") as file:
        node = subprocess.Popen(
            start_command(ports, "127.0.0.1", folder, joins=head), stdin=subprocess.PIPE, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True, env=node_environment(ports),
        )  # fmt: skip
    wait_up(node, head, log)
    return node


def kill(node: subprocess.Popen[bytes]) -> None:
    """The node's processes, all at once."""
    from tests.processes import below, left

    processes = [node.pid, *below(node.pid)] if node.poll() is None else []
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    node.wait()
    assert not left(processes, GONE_S)


def train_on(cluster: Any, node: subprocess.Popen[bytes], saves: Path) -> None:
    """Training, with one failure."""
    import ray

    import autopar
    from autopar.runtime.on_ray.nodes import alive_hosts
    from tests.elastic_runs import STEPS, batch_at, hold, init, train

    seen: list[tuple[int, float]] = []
    killed_s: list[float] = []

    def on_step(i: int, loss: Any) -> None:
        if len(killed_s) == 1:
            killed_s.append(time.monotonic())
            print(f"done again: {i}")
        seen.append((i, float(loss)))
        if i == KILLED_AFTER and not killed_s:
            assert alive_hosts() == 2
            kill(node)
            killed_s.append(time.monotonic())
            print(f"hosts: {sum(n['Alive'] for n in ray.nodes())} say Ray, {alive_hosts()} answer")

    state = autopar.run_elastic(
        train, init, batch_at, steps=STEPS, path=saves, save_every=2, on_step=on_step, cluster=cluster, stages=2,
        num_microbatches=2, pipeline={"layers": 3, "workers": 1, "schedules": "1f1b"},
    )  # fmt: skip
    at = KILLED_AFTER // 2 * 2
    hold(seen, state, [*range(KILLED_AFTER + 1), *range(at, STEPS)])
    print("devices of a stage:", *sorted({len(w.devices) for leaf in state["w"] for w in leaf.keeper.loaded}))
    print(f"recovered in {killed_s[1] - killed_s[0]:.1f} s")


if __name__ == "__main__":
    from tests.clusters import cluster as _cluster

    HOSTS = _cluster(2, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=2)
    main(int(sys.argv[1]), Path(sys.argv[2]))
