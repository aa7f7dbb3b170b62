"""Operators that nobody has described: they run whole on every device, with a warning, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

import autopar
from autopar.ir.errors import AutoparWarning, LoweringError, OptionError
from autopar.ir.plan_text import plan_text

W, X = np.full((4, 4), 0.1, np.float32), np.ones((8, 4), np.float32)

_tanh_p = Primitive("tanh_of_a_package")
_tanh_p.def_impl(lambda x: np.tanh(np.asarray(x)))
_tanh_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_tanh_p, lambda _, x: [stablehlo.tanh(x)])


def _primitive(w: Any, x: Any) -> Any:
    return jax.lax.map(lambda row: _tanh_p.bind(row), x @ w)


def _kernel(w: Any, x: Any) -> Any:
    def turned(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.tanh(x_ref[...][::-1])

    return pl.pallas_call(turned, out_shape=x, interpret=True)(x @ w)


def _target(w: Any, x: Any) -> Any:
    return jax.ffi.ffi_call("a_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x @ w)


STEPS = {"tanh_of_a_package": _primitive, "pallas_call": _kernel, "a_target": _target}


@pytest.mark.parametrize("name", STEPS)
def test_they_are_refused_where_the_user_asks_for_it(name: str) -> None:
    step = autopar.parallelize(STEPS[name], mesh=(2, 4), on_unsupported="error")
    with pytest.raises(LoweringError, match=rf"does not know how to split {name} .*test_unsupported\.py:\d+") as info:
        step.plan(W, X)
    assert "on_unsupported='replicate'" in str(info.value)


@pytest.mark.parametrize("step", [_primitive, _kernel])
def test_they_run_whole_with_a_warning(step: Callable[..., Any]) -> None:
    planned = autopar.parallelize(step, mesh=(2, 4))
    with pytest.warns(AutoparWarning, match=r"does not know how to split .* Decorate the function that calls") as told:
        plan = planned.plan(W, X)
    assert told[0].filename == __file__
    assert "replicated for lack of a rule" in plan_text(plan.data)
    np.testing.assert_allclose(planned(W, X), jax.jit(step)(W, X), rtol=1e-6)


def test_a_rule_by_name_silences_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.frontend.user_rules._RULES", {"tanh_of_a_package": "b ... -> b ..."})
    autopar.parallelize(_primitive, mesh=(2, 4), on_unsupported="error").plan(W, X)


def test_pipelines_have_the_option() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2) + _tanh_p.bind(jnp.mean(x))

        value, grad = autopar.value_and_grad(loss)(w)
        return [p - g for p, g in zip(w, grad, strict=True)], value

    options = {"schedule": "1f1b", "stages": 2, "num_microbatches": 2, "batch_argnums": 1}
    with pytest.raises(LoweringError, match="step: autopar does not know how to split tanh_of_a_package"):
        autopar.parallelize(step, **options, on_unsupported="error").plan([W, W], X)
    with pytest.raises(OptionError, match="on_unsupported: 'never' is not one of replicate, error"):
        autopar.parallelize(step, on_unsupported="never")
