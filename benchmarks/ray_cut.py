"""Does a cut of a pipeline on Ray take what its plan says, over real links? Needs root; hosts are made as network
namespaces with links of 1 Gbit/s, as for `benchmarks.resharding_hosts`.

    python -m benchmarks.ray_cut [--hosts 4] [--megabytes 64] [--runs 5]

A step of two stages, on one host and on several: the first makes a matrix of so many bytes that no number of hosts
divides, so that the second has all of it on each. Ray runs on all hosts, started by `autopar run`, once for each way of
resharding. A time is that from the end of the first stage's task to the end of the second's, in which all of its hosts
meet: what that computes counts as the cut's. Medians of the runs, after one that opens connections. Results are
compared with the step on one device.

Exit status 1 where a bar is missed, 2 where it cannot run here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.ir.cluster import ClusterSpec
from benchmarks.resharding_hosts import CUT_BAR, INSIDE, LINK, SEND_RECV_BAR

ROOT = Path(__file__).parent.parent
WAYS = ("broadcast", "send_recv")
ROWS, INNER, OUTER = 251, 8, 16
"""Rows are a prime; columns of the first product follow from the bytes, those of the second are split over hosts."""
DEADLINE_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="of the second stage, at least 2")
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--driver", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.hosts < 2:
        parser.error("--hosts: at least 2")
    if given.driver:
        print(json.dumps(measured(given.driver, given.hosts, given.megabytes, given.runs)))
        return 0
    from benchmarks.namespaces import NamespaceError
    from tests.cluster.namespaces import hosts

    found: dict[str, dict[str, float]] = {}
    words = [f"--{name}={getattr(given, name)}" for name in ("hosts", "megabytes", "runs")]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="autopar-") as folder,
            hosts(1 + given.hosts, Path(folder), bits_per_s=8 * LINK.bytes_per_s, devices=1) as network,
        ):
            for way in WAYS:
                run = subprocess.run(
                    [sys.executable, "-m", "autopar", "run", *network.options(), "--", "-m", "benchmarks.ray_cut",
                     *words, "--driver", way], env=network.environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True,
                    timeout=DEADLINE_S, check=True,
                )  # fmt: skip
                found[way] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    except (NamespaceError, subprocess.SubprocessError) as fault:
        print(fault)
        return 2
    for way, times in found.items():
        print(f"{way}: planned {times['planned_s']:.3f} s, median {times['median_s']:.3f} ({times['least_s']:.3f} to "
              f"{times['most_s']:.3f}): {times['median_s'] / times['planned_s']:.3f}")  # fmt: skip
    ours, theirs = (found[way]["median_s"] for way in WAYS)
    print(
        f"broadcast over send/recv: {ours / theirs:.3f}; bars: {CUT_BAR} of the plan, {SEND_RECV_BAR:.3f} of send/recv"
    )
    return int(ours > CUT_BAR * found["broadcast"]["planned_s"] or ours > SEND_RECV_BAR * theirs)


def one_and(hosts: int) -> ClusterSpec:
    """A host and ``hosts`` others, of one device each, so slow that work is split over hosts where it can be."""
    from tests.clusters import cluster

    made = cluster(1, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=LINK.latency_s)
    groups = (replace(made.groups[0], hosts=n, nic=LINK, intra_host=INSIDE) for n in (1, hosts))
    return replace(made, groups=tuple(groups), between=LINK)


def measured(way: str, hosts: int, megabytes: float, runs: int) -> dict[str, float]:
    """Seconds of the cut, planned and measured. Runs on a Ray that has ``hosts`` and one more."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    columns = round(1e6 * megabytes / 4 / ROWS)
    while math.gcd(columns, hosts) > 1:
        columns += 1
    random = np.random.default_rng(0)
    shapes = (INNER, columns), (columns, OUTER), (OUTER, OUTER)
    params = [random.normal(size=shape).astype(np.float32) * shape[0] ** -0.5 for shape in shapes]
    x = random.normal(size=(ROWS, INNER)).astype(np.float32)

    def step(params: Any, x: Any) -> Any:
        first, second, third = params
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ first) @ second) @ third)

    with autopar.init(spec=one_and(hosts)) as ray_cluster:
        far = autopar.parallelize(
            step, cluster=ray_cluster, stages=2, layers=2, submeshes=["1x1", f"{hosts}x1"], stage_starts=[0, 1],
            schedule="inference", num_microbatches=1, workers=1, resharding=way, batch_argnums=1, deadline_s=DEADLINE_S,
        )  # fmt: skip
        plan = far.plan(params, x)
        [cut] = plan.stages.cuts
        assert str(cut.values[0].dst_spec) == "[_,_]", plan
        assert any(s.collectives for s in plan.data.pipelined.shardings), plan
        got = np.asarray(far(params, x))
        times: list[float] = []
        with far.trace() as traced:
            for _ in range(runs):
                far(params, x)
        for done in traced.steps:
            first, second = (next(e for e in done.workers[s].events if e.what == f"F{s}.0") for s in range(2))
            times.append(second.stop_s - first.stop_s)
        far.close()
    np.testing.assert_allclose(got, jax.jit(step)(params, x), atol=1e-5)
    return {
        "planned_s": cut.time_s, "median_s": statistics.median(times), "least_s": min(times), "most_s": max(times)
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
