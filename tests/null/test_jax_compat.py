"""Where an equation says it comes from."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.frontend.trace import trace


def test_source_lines_skip_autopar_itself() -> None:
    @autopar.sharding_rule("doubled", "n -> n")
    def doubled(x: Any) -> Any:
        return x * 2

    def step(x: Any) -> Any:
        value, grad = autopar.value_and_grad(lambda x: jnp.sum(x * x))(x)
        return doubled(x) + grad, value

    first = inspect.getsourcelines(step)[1]
    nodes = trace(autopar.serial(step, 1), jax.ShapeDtypeStruct((8,), "float32")).graph.nodes
    assert {n.source for n in nodes if n.primitive == "autopar_kernel"} == {f"test_jax_compat.py:{first + 2}"}
    assert {n.source.split(":")[0] for n in nodes} == {"test_jax_compat.py"}
