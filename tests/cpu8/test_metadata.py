"""flax's partitioning metadata becomes pins; names that are no mesh axis are noted."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


class Model(nn.Module):
    names: tuple[str | None, str | None]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), self.names)
        return nn.Dense(16, kernel_init=init)(x)


def planned(names: tuple[str | None, str | None]) -> tuple[Any, Any, Any]:
    model = Model(names)
    x = jnp.linspace(0, 1, 8 * 32).reshape(8, 32)
    params = model.init(jax.random.key(0), x)

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: 0.5 * p, params), (model.apply(params, x) ** 2).mean()

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    planned_step = autopar.parallelize(step, mesh=mesh, num_microbatches=1)
    plan = planned_step.plan(params, x)
    got, want = planned_step(params, x), jax.jit(step)(params, x)
    assert got[1] == pytest.approx(float(want[1]), rel=1e-6)
    (kernel,) = [a for a in plan.data.inputs if a.path.endswith("['kernel'].value")]
    return plan, kernel, got


def test_axis_names_pin() -> None:
    plan, kernel, _ = planned((None, "model"))
    assert kernel.spec.dims == ((), ("model",))
    assert plan.provenance.notes == ()


def test_logical_names_are_noted() -> None:
    plan, _, _ = planned(("embed", "mlp"))
    assert plan.provenance.notes == ("partitioning metadata names no axis of the mesh: embed, mlp",)
