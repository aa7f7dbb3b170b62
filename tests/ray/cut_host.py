"""An elastic run on three hosts of which one loses its link: after a step it says so, and goes on when the link is cut.

    python -m tests.ray.cut_host FOLDER DEADLINE_S        (RAY_ADDRESS says which Ray)

Meets whoever cuts in FOLDER: writes `now`, waits for `cut`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(folder: Path, deadline_s: float) -> None:
    """One run (`tests.elastic_runs.through_a_failure`)."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import autopar
    from tests.clusters import cluster
    from tests.elastic_runs import through_a_failure

    def cut() -> None:
        (folder / "now").touch()
        while not (folder / "cut").exists():
            time.sleep(0.05)

    hosts = cluster(2, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=3)
    with autopar.init(spec=hosts) as ray_cluster:
        state = through_a_failure(cut, folder / "saves", cluster=ray_cluster, deadline_s=deadline_s)
        print("processes:", *{len(leaf.keeper.gang.pids) for leaf in state["w"]})


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
