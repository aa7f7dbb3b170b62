"""An elastic run on hosts of which one loses its link: after a step it says so, and goes on when the link is cut.

    python -m tests.ray.cut_host FOLDER DEADLINE_S        (RAY_ADDRESS says which Ray)

Meets whoever cuts in FOLDER: writes `now`, waits for `cut`. It fails where losses and state are not those of an
undisturbed run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

CUT_AFTER = 4
"""Step, of seven; checkpoints are of every second."""
HOSTS, DEVICES = 3, 2


def main(folder: Path, deadline_s: float) -> None:
    """One run."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import autopar
    from tests.clusters import cluster
    from tests.elastic_runs import STEPS, batch_at, hold, init, train

    hosts = cluster(DEVICES, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=HOSTS)
    seen: list[tuple[int, float]] = []
    cut_s: list[float] = []

    def on_step(i: int, loss: object) -> None:
        if len(cut_s) == 1:
            cut_s.append(time.monotonic())
        seen.append((i, float(loss)))  # pyright: ignore[reportArgumentType] - an autopar.Array
        if i == CUT_AFTER and not cut_s:
            (folder / "now").touch()
            while not (folder / "cut").exists():
                time.sleep(0.05)
            cut_s.append(time.monotonic())

    with autopar.init(spec=hosts) as ray_cluster:
        state = autopar.run_elastic(
            train, init, batch_at, steps=STEPS, path=folder / "saves", save_every=2, on_step=on_step,
            cluster=ray_cluster, deadline_s=deadline_s, stages=2, num_microbatches=2,
            pipeline={"layers": 3, "workers": 1, "schedules": "1f1b"},
        )  # fmt: skip
        at = CUT_AFTER // 2 * 2
        hold(seen, state, [*range(CUT_AFTER + 1), *range(at, STEPS)])
        hosts_left = {len(leaf.keeper.gang.pids) for leaf in state["w"]}
        print("processes:", *hosts_left)
        print(f"recovered in {cut_s[1] - cut_s[0]:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
