"""Nothing plans that does not lower: what cannot run on its shards, or on the plan's devices, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import autopar
from autopar.frontend.trace import trace
from autopar.ir.errors import LoweringError
from autopar.runtime.one_program import local

W, X = [np.full((128, 128), 0.01, np.float32)] * 2, np.ones((1024, 128), np.float32)
PIPELINE = {"schedule": "1f1b", "stages": 2, "num_microbatches": 2, "batch_argnums": 1}
BOTH = pytest.mark.parametrize("options", [{"mesh": (2, 4)}, PIPELINE], ids=["mesh", "pipeline"])


def _kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.tanh(x_ref[...])


def _of_tpus(x: Any) -> Any:
    """A kernel that CPUs and GPUs do not run; its gradient is another."""

    @jax.custom_vjp
    def call(x: Any) -> Any:
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        grid = (x.shape[0] // 8,)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(_kernel, out_shape=shape, grid=grid, in_specs=[block], out_specs=block)(x)

    call.defvjp(lambda x: (call(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))
    return call(x)


def _by_platform(x: Any) -> Any:
    return lax.platform_dependent(x, tpu=_of_tpus, default=jnp.tanh)


def _trained(act: Callable[[Any], Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        loss = lambda w: jnp.mean((act(x @ w[0]) @ w[1]) ** 2)
        value, grad = autopar.value_and_grad(loss)(w)
        return [p - g for p, g in zip(w, grad, strict=True)], value

    return step


@BOTH
def test_an_operator_that_fails_on_shards_is_named(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of autopar's own: the error says so, and where."""

    def fails(*_: Any) -> Any:
        raise TypeError("of what JAX says")

    monkeypatch.setitem(local.LOCAL, "erf", fails)
    with pytest.raises(
        LoweringError, match=r"(?s)^erf \(node \d+, test_lowering.py:\d+\) cannot run on its shards: "
    ) as e:
        autopar.parallelize(_trained(lambda x: lax.erf(x)), **options).plan(W, X)
    assert "TypeError: of what JAX says" in str(e.value) and "report it with the step" in str(e.value)


@BOTH
def test_what_the_devices_cannot_run_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        LoweringError, match=r"^pallas_call \(test_lowering.py:\d+\) does not run on cpu: .*platform_dep"
    ):
        autopar.parallelize(_trained(_of_tpus), **options).plan(W, X)


def test_an_operator_of_cpus_is_refused_for_tpus() -> None:
    with pytest.raises(LoweringError, match=r"^eig \(test_lowering.py:\d+\) does not run on tpu"):
        autopar.parallelize(lambda x: jnp.linalg.eig(x)[0], cluster="v5e-8").plan(np.ones((4, 4), np.float32))


@BOTH
def test_branches_by_platform(options: dict[str, Any]) -> None:
    """The one for the plan's devices is planned; the others need not run there."""
    step = autopar.parallelize(_trained(_by_platform), **options)
    want = jax.jit(_trained(jnp.tanh))(W, X)
    for got, value in zip(jax.tree.leaves(step(W, X)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("platform", "primitive"), [("tpu", "pallas_call"), ("gpu", "tanh")])
def test_the_platform_chooses_the_branch(platform: str, primitive: str) -> None:
    graph = trace(lambda w, x: _by_platform(x @ w[0]), W, X, platform=platform).graph
    assert [node.primitive for node in graph.nodes] == ["dot_general", primitive]


def test_a_platform_without_a_branch_is_named() -> None:
    only = lambda x: lax.platform_dependent(x, tpu=jnp.tanh)
    with pytest.raises(LoweringError, match=r"test_lowering.py:\d+: jax.lax.platform_dependent has no branch for cpu"):
        autopar.parallelize(only, mesh=8).plan(X)
    autopar.parallelize(only, cluster="v5e-8").plan(X)
