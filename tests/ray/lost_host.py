"""An elastic run on a Ray of two nodes; the second is killed with all that runs on it, as a host would be lost:

    python -m tests.ray.lost_host HEAD_PORT CHECKPOINTS

It prints how many hosts Ray and autopar count just afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GONE_S = 20.0
"""For processes that were killed (chosen)."""


def main(port: int, saves: Path) -> None:
    """One run (`tests.elastic_runs.through_a_failure`)."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_enable_x64", True)
    import ray

    import autopar
    from autopar.runtime.on_ray.live_nodes import alive_hosts
    from autopar.runtime.on_ray.ports import ports_from
    from tests.clusters import cluster
    from tests.elastic_runs import through_a_failure
    from tests.ports import SPAN

    hosts = cluster(2, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=2)
    with (
        tempfile.TemporaryDirectory(prefix="autopar-ray-", dir="/tmp") as folder,
        autopar.init(ports=ports_from(port), spec=hosts, compilation_cache=saves / "compiled") as ray_cluster,
    ):
        node = start_node(ports_from(port + SPAN), ray_cluster.address, Path(folder))

        def lose() -> None:
            assert alive_hosts() == 2
            kill(node)
            print(f"hosts: {sum(n['Alive'] for n in ray.nodes())} say Ray, {alive_hosts()} answer")

        try:
            state = through_a_failure(lose, saves, cluster=ray_cluster)
            print(f"devices of a stage: {sorted({len(w.devices) for leaf in state['w'] for w in leaf.keeper.loaded})}")
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


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
