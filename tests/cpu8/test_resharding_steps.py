"""Every step between two shardings on a mesh of three axes does on devices what its codes say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh as Devices
from jax.sharding import PartitionSpec

from autopar.cost.logical_meshes import logical_mesh
from autopar.intra_op.specs import UNREDUCED, Code, Mesh, reshard_step
from autopar.ir.graph import TensorType
from autopar.ir.presets import cluster_from_text
from autopar.runtime.one_program.lowering import emit_step
from tests.shares import each

pytestmark = pytest.mark.xdist_group("resharding steps")  # one process makes what all tests of the file share

SHAPE = (8, 16)
VALUE = np.random.default_rng(0).integers(-9, 9, SHAPE).astype(np.float32)
NAMES = ("x", "y", "z")
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice", "mask")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(logical_mesh(cluster_from_text("cpu:8"), (2, 2, 2), NAMES))


def places() -> Iterator[tuple[int, ...]]:
    return itertools.product(range(2), repeat=3)


def part(code: Code, place: tuple[int, ...]) -> Any:
    """The shard of the value that a device has: axes that split a dimension do so in mesh order."""
    out = VALUE
    for d in range(len(SHAPE)):
        for i in (place[axis] for axis in range(3) if code[axis] == d):
            out = np.split(out, 2, axis=d)[i]
    return out


def parts(code: Code) -> Any:
    """float32[2, 2, 2, *shard]: what devices hold; partial sums are random but for the last."""
    rng = np.random.default_rng(1)
    out = {place: part(code, place) for place in places()}
    for axis in (a for a in range(3) if code[a] == UNREDUCED):
        for place in (p for p in places() if p[axis] == 0):
            other = (*place[:axis], 1, *place[axis + 1 :])
            out[place] = rng.integers(-9, 9, out[place].shape).astype(np.float32)
            out[other] = out[other] - out[place]
    return np.array([out[place] for place in places()]).reshape(2, 2, 2, *out[0, 0, 0].shape)


def total(held: Any, code: Code) -> Any:
    """What devices hold, partial sums added up and on each."""
    summed = tuple(axis for axis in range(3) if code[axis] == UNREDUCED)
    return np.broadcast_to(held.sum(axis=summed, keepdims=True), held.shape)


@pytest.mark.parametrize("kind", each(2, KINDS))
def test_a_step_leads_from_code_to_code(mesh: Mesh, kind: str) -> None:
    leads(mesh, kind, "cpu")


def test_reduce_scatters_as_tpus_have_them(mesh: Mesh) -> None:
    leads(mesh, "reduce-scatter", "tpu")


def leads(mesh: Mesh, kind: str, platform: str) -> None:
    """``platform``: where steps are lowered for; they run on CPUs."""
    value_type = TensorType(shape=SHAPE, dtype="float32")
    space = mesh.space(value_type)
    steps = [step for step in space.steps if step[2] == kind]
    several = {len(axes) for _, _, _, axes, _, _ in steps}
    assert several == ({1} if kind in ("slice", "mask") else {1, 2, 3})
    devices = Devices(np.array(jax.devices()).reshape(2, 2, 2), NAMES)
    spec = PartitionSpec(*NAMES)
    runs: dict[Any, Any] = {}
    for i, j, _, axes, src, dst in steps:
        done = reshard_step(mesh, (j, kind, axes, src, dst))

        def run(x: Any, done: Any = done) -> Any:
            return emit_step(done, x[0, 0, 0], dict.fromkeys(NAMES, 2), platform)[None, None, None]

        before = parts(space.codes[i])
        if (done, before.shape) not in runs:
            runs[done, before.shape] = jax.jit(jax.shard_map(run, mesh=devices, in_specs=spec, out_specs=spec))
        after = np.asarray(runs[done, before.shape](before))
        code = space.codes[j]
        want = np.array([part(code, place) for place in places()]).reshape(after.shape)
        np.testing.assert_array_equal(total(after, code), want, err_msg=f"{space.codes[i]} to {code}")
