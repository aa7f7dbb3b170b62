"""A pipeline from one device to several that all want the whole: what crosses lands split and is gathered there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import autopar
from benchmarks.models import chain_loss
from tests.clusters import cluster

WIDTH = 16
PARAMS = [
    np.asarray(jax.random.normal(k, (WIDTH, WIDTH))) * WIDTH**-0.5 for k in jax.random.split(jax.random.key(0), 4)
]
ROWS = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def descend(params: Any, x: Any) -> Any:
    """(new parameters, loss)."""
    value, grads = autopar.value_and_grad(chain_loss)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def one_to_several(devices: int) -> Any:
    """The step, on slow links, so that little is worth it. One of its cuts is gathered."""
    slow = cluster(2 * devices, flops_per_s=1e9, memory_bytes_per_s=1e9, latency_s=1e-9, bytes_per_s=1e8)
    step = autopar.parallelize(
        descend, cluster=slow, stages=2, num_microbatches=2, layers=2, stage_starts=[0, 1], schedule="1f1b", workers=1,
        submeshes=["1x1", f"1x{devices}"], batch_axis=[None, ()], mesh=[(1,), (devices,)],
    )  # fmt: skip
    cuts = step.plan(PARAMS, ROWS).stages.cuts
    [cut] = [cut for cut in cuts if any(v.landed is not None for v in cut.values)]
    [value] = cut.values
    assert (cut.phase, str(value.dst_spec), str(value.landed)) == ("forward", "[_,_]", "[x,_]")
    assert 0 < cut.gather_s < cut.time_s
    return step
