"""Options two by two on a local Ray: of one program over two hosts, and of two stages (`tests.option_pairs`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.clusters import cluster
from tests.compare import assert_close
from tests.option_pairs import ONE, TWO, batch, create, rows, step_of, train

HOSTS = cluster(4, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=2)
CASES = [
    # rows that are left out may be contradictions, which one process shows
    *(("one", n) for n, row in enumerate(rows(ONE)) if not row["how"] or row["forbid"] == ()),
    *(("two", n) for n, row in enumerate(rows(TWO)) if row["forbid"] != "all-gather"),
]
QUICK = {("two", CASES[-1][1])}
CHOSEN = [*[c for c in CASES if c[0] == "one" and rows(ONE)[c[1]]["batch_axis"] is None][:6],
          *[c for c in CASES if c[0] == "two"][-6:]]  # fmt: skip


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.full) for c in CHOSEN], ids=str
)
def test_equals_serial(ray_cluster: Any, case: tuple[str, int], tmp_path: Path) -> None:
    options = rows(ONE if case[0] == "one" else TWO)[case[1]]
    near = step_of(options, tmp_path, cluster=HOSTS)
    plan = near.plan(jax.eval_shape(create), batch())
    far = near.with_options(cluster=ray_cluster, plan=plan, deadline_s=120.0)
    far.plan(jax.eval_shape(create), batch())
    want, got = create(), far.init(create)
    for seed in range(2):
        got, loss = far(got, batch(seed))
        want, expected = jax.jit(train)(want, batch(seed))
        assert_close(jax.tree.map(np.asarray, (got, loss)), (want, expected), 1e-9)
    far.close()
