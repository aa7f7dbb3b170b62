"""Compiling ahead of time for devices that are only described: `jax.experimental.topologies`."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

import autopar
from autopar.ir.errors import ClusterError
from autopar.verify.hlo_collectives import parse_collectives
from tests.compare import hlo_tally, plan_tally

W, X = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((8192, 512), jnp.float32)
KEY, OFFSETS = jax.random.key(0), np.arange(512.0, dtype=np.float32)


def _step(w: Any, x: Any) -> Any:
    """Closes over an array and a key."""
    noise = jax.random.normal(KEY, (512,))
    value, grad = autopar.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) + OFFSETS + noise) ** 2))(w)
    return w - grad, value


@pytest.fixture
def slice_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Topology name → the devices of that TPU slice."""
    pytest.importorskip("libtpu", reason="needs the extra verify-tpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    logging.getLogger("jax").setLevel(logging.ERROR)
    return lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices


@pytest.mark.parametrize(("topology", "hosts", "torus"), [("v5e:2x4", 2, (2, 4)), ("v5e:4x4", 4, (4, 4))])
def test_a_slice_of_several_processes(slice_of: Any, topology: str, hosts: int, torus: tuple[int, ...]) -> None:
    devices = slice_of(topology)
    assert len({d.process_index for d in devices}) == hosts
    step = autopar.parallelize(_step, mesh=Mesh(np.reshape(devices, (2, -1)), ("data", "model")), donate_argnums=0)
    plan = step.plan(W, X)
    (group,) = plan.data.cluster.groups
    assert group.torus is not None and group.torus.shape == torus
    assert (group.hosts, group.num_devices) == (hosts, len(devices))
    assert list(plan.jax_mesh(devices).devices.flat) == list(devices), "the mesh that was given keeps its order"
    compiled = step.lower(W, X).compile()
    want, got = plan_tally(plan)[0], hlo_tally(plan, parse_collectives(compiled.as_text()))[0]
    assert {key[:2] for key in want} == {key[:2] for key in got}  # of fewer bytes: products are of bfloat16
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    with pytest.raises(ClusterError, match="only described"):
        step(np.zeros(W.shape, W.dtype), np.zeros(X.shape, X.dtype))
    with pytest.raises(ClusterError, match="only described"):
        step.init(lambda: jnp.zeros(W.shape, W.dtype))
    assert step.abstract(lambda: jnp.zeros(W.shape, W.dtype)).sharding.mesh.devices.size == len(devices)
