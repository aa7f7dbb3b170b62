"""`autopar profile --out cluster.json`: measures devices and links into a ClusterSpec that `autopar plan` reads."""

from __future__ import annotations

import argparse
import json
import os
import socket
from typing import Any

from autopar.cli.cluster import add_options, cluster_of
from autopar.cli.output import saved, show
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError, PlanFormatError
from autopar.ir.pretty import cluster_text
from autopar.ir.serde import from_json, replace_file, to_json
from autopar.ir.text import bytes_text, link_text, rate_text, table
from autopar.launch.cluster import recorded, run_and_read, running, states


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="measure devices and links into a ClusterSpec file",
        description="Measures matrix products, memory bandwidth, the time of a launch, and all-reduces inside and "
        "between hosts: of --hosts (Ray is started there and ends again), of the cluster that `autopar cluster up` "
        "started, or of this process's own devices. All devices work at once. `autopar plan --cluster CLUSTER.json` "
        "reads the file.",
    )
    add_options(parser)
    parser.add_argument("--local", action="store_true", help="this process's devices, whatever cluster runs")
    add = parser.add_argument
    add(
        "--devices",
        metavar="N",
        type=int,
        help="CPU devices of this process, or of hosts without devices= (default: 1)",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, float32 only: rough figures")
    parser.add_argument("--force", action="store_true", help="start although something is wrong with the hosts")
    parser.add_argument("--out", metavar="CLUSTER.json", required=True, help="where the ClusterSpec is saved")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, saves, prints; returns 0. Raises ClusterError where the cluster cannot be reached or measured,
    PlanFormatError where the file cannot be written."""
    here = options.local or (options.hosts is None and recorded(options.name) is None)
    spec = _this_process(options) if here else _cluster(options)
    replace_file(options.out, to_json(spec) + "\n")
    device, group = spec.groups[0].device, spec.groups[0]
    rows = [["memory", f"{bytes_text(device.memory_bytes)}, {rate_text(device.memory_bytes_per_s, 'B/s')}"]]
    rows += [[dtype, rate_text(rate, "FLOP/s")] for dtype, rate in device.flops_per_s]
    rows += [["links in a host", link_text(group.intra_host)]]
    if sum(g.hosts for g in spec.groups) > 1:
        rows += [["links between", f"{link_text(group.nic)} for all of a host's devices"]]
    show("\n".join([cluster_text(spec), *table(rows)]))
    saved(options.out)
    return 0


def _this_process(options: argparse.Namespace) -> ClusterSpec:
    if options.devices is not None:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(options.devices))
    import jax

    from autopar.runtime.profile import measure_host
    from autopar.runtime.profile_hosts import cluster_from_hosts

    return cluster_from_hosts(socket.gethostname(), [measure_host(jax.local_devices(), quick=options.quick)], None)


def _cluster(options: argparse.Namespace) -> ClusterSpec:
    cluster = cluster_of(options, launched=options.hosts is None)
    request = {
        "name": cluster.name, "addresses": [host.address for host in cluster.hosts],
        "devices": [host.devices or options.devices or 1 for host in cluster.hosts], "quick": options.quick,
    }  # fmt: skip
    script = ["-P", "-m", "autopar.runtime.on_ray.measure", json.dumps(request)]
    if options.hosts is not None:
        with running(cluster, detached=False, force=options.force) as token_path:
            status, text = run_and_read(cluster, token_path, script)
    else:
        head = states(cluster)[cluster.hosts[0].name]
        if head is None:
            raise ClusterError(f"cluster {cluster.name} has ended; start it again by `autopar cluster up`")
        status, text = run_and_read(cluster, head["token_path"], script)
    if status:
        raise ClusterError(f"measuring cluster {cluster.name} failed with exit status {status}; its message is above")
    try:
        return from_json(ClusterSpec, text)
    except PlanFormatError as fault:
        raise ClusterError(f"measuring cluster {cluster.name} gave no ClusterSpec: {fault}") from None
