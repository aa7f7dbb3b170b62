"""A driver that is ended from outside:

    python -m tests.ray.driver HEAD_PORT

It starts a Ray there, prints the processes that should not outlive it, one a line, then "running", and runs steps until
it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main(port: int) -> None:
    """Runs steps for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores it, and hands that on
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_enable_x64", True)
    import autopar
    from autopar.runtime.on_ray.ports import ports_from
    from tests.processes import below
    from tests.ray.steps import X, init, train

    with autopar.init(ports=ports_from(port), spec="cpu:2", compilation_cache=False) as cluster:
        step = autopar.parallelize(
            train, cluster=cluster, num_microbatches=2, stages=2, layers=2, submeshes=["1x1"], schedule="1f1b",
            workers=1, donate_argnums=0,
        )  # fmt: skip
        step.plan(jax.eval_shape(init, jax.random.key(0)), X)
        workers: Any = step.compiled()
        state = step.init(init, jax.random.key(0))
        print(*workers.pids, *below(os.getpid()), sep="\n")
        print("running", flush=True)
        while True:
            state, _ = step(state, X)


if __name__ == "__main__":
    main(int(sys.argv[1]))
