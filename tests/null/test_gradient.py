"""`autopar.value_and_grad` and `grad` mean jax's, and mark the loss by one equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend.gradient import evaluate, expand_marker, grad, grad_p, value_and_grad
from autopar.jax_compat import jaxpr_as_fun


def weights() -> dict[str, Any]:
    return {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4)}


X = np.arange(6.0, dtype=np.float32).reshape(2, 3) / 7


def loss(p: Any, x: Any, scale: float = 2.0, *, power: int = 2) -> Any:
    h = jnp.tanh(x @ p["w"] + p["b"])
    return (h**power).sum() * scale, {"h": h, "n": x.shape[0]}


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1,), -1, [1, 0]])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_equals_jax(argnums: Any, wrap: Any) -> None:
    args = weights(), jnp.asarray(X)
    if argnums == [1, 0]:
        argnums = (1, 0)
    ours = wrap(value_and_grad(loss, argnums, has_aux=True))(*args)
    same(ours, jax.value_and_grad(loss, argnums, has_aux=True)(*args))
    same(wrap(grad(loss, argnums, has_aux=True))(*args), jax.grad(loss, argnums, has_aux=True)(*args))


def test_static_python_arguments_stay_python() -> None:
    def branching(p: Any, flag: bool, name: str, *, depth: int) -> Any:
        assert isinstance(flag, bool) and name == "tanh"
        return jnp.tanh(p).sum() * depth if flag else p.sum()

    same(grad(branching)(jnp.ones(3), True, "tanh", depth=3), jax.grad(branching)(jnp.ones(3), True, "tanh", depth=3))


@pytest.mark.slow
def test_under_transformations() -> None:
    only = lambda p, x: loss(p, x)[0]
    each = lambda g: jax.vmap(g, in_axes=(None, 0))(weights(), jnp.asarray(X)[:, None])
    same(each(grad(only)), each(jax.grad(only)))
    curved = lambda w: jnp.sum(jnp.sin(w) * jnp.arange(3.0))
    hessian = lambda g: jax.jacfwd(g(curved))(jnp.ones(3))
    same(hessian(grad), hessian(jax.grad))
    penalty = lambda g: jax.grad(lambda w: jnp.sum(g(curved)(w) ** 2))(jnp.ones(3))
    same(penalty(grad), penalty(jax.grad))
    looped = lambda g: jax.lax.scan(lambda w, _: (w - 0.1 * g(curved)(w), None), jnp.ones(3), None, length=3)[0]
    same(jax.jit(looped, static_argnums=0)(grad), looped(jax.grad))


def test_closed_over_tracers_and_keys() -> None:
    @jax.jit
    def ours(w: Any, key: Any) -> Any:
        c = w * 2
        return grad(lambda v: (c * v * jax.random.normal(key, v.shape)).sum())(w)

    key = jax.random.key(0)
    same(ours(jnp.ones(4), key), 2 * jax.random.normal(key, (4,)))


def test_integers_get_float0() -> None:
    tree = {"w": jnp.ones(2), "i": 3, "k": jax.random.key(0)}
    found = grad(lambda p: p["w"].sum() * p["i"], allow_int=True)(tree)
    assert found["i"].dtype == jax.dtypes.float0 and found["k"].dtype == jax.dtypes.float0
    same(found["w"], 3 * jnp.ones(2))


@pytest.mark.slow
def test_complex() -> None:
    z = jnp.asarray([1 + 2j, 3 - 1j])
    holomorphic = lambda z: jnp.sum(z**3)
    same(grad(holomorphic, holomorphic=True)(z), jax.grad(holomorphic, holomorphic=True)(z))
    real = lambda z: jnp.sum(jnp.abs(z) ** 2)
    same(grad(real)(z), jax.grad(real)(z))


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g(lambda p: p)(jnp.ones(3)),
        lambda g: g(lambda p: (p, p))(1.0),
        lambda g: g(lambda p: p.sum())(jnp.arange(3)),
        lambda g: g(lambda k: 1.0)(jax.random.key(0)),
        lambda g: g(lambda p: 1)(1.0),
        lambda g: g(lambda p: p * 1j)(1.0),
        lambda g: g(lambda p: p, argnums=2)(1.0),
        lambda g: g(lambda p: p, holomorphic=True)(1.0),
        lambda g: g(3),
        lambda g: g(lambda p: p, has_aux=True)(1.0),
    ],
)
def test_errors_are_jax_s(call: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        call(jax.grad)
    with pytest.raises(TypeError) as ours:
        call(grad)
    first = str(theirs.value).split()
    if "aux" not in str(theirs.value) and "scalar-output" not in str(theirs.value):
        assert str(ours.value).split()[:6] == first[:6]


def test_one_equation_carries_the_undifferentiated_loss() -> None:
    closed = jax.make_jaxpr(value_and_grad(loss, has_aux=True))(weights(), X)
    (eqn,) = closed.jaxpr.eqns
    assert eqn.primitive is grad_p and not eqn.params["jaxpr"].consts
    inner = [e.primitive.name for e in eqn.params["jaxpr"].jaxpr.eqns]
    assert "tanh" in inner and "transpose" not in inner
    assert len(eqn.outvars) == 1 + 2 + len(eqn.params["wrt"])


def test_expand_marker_gives_the_differentiated_jaxpr() -> None:
    closed = jax.make_jaxpr(grad(lambda p, x: loss(p, x)[0]))(weights(), X)
    (eqn,) = closed.jaxpr.eqns
    expanded = expand_marker(eqn)
    assert [v.aval.shape for v in expanded.jaxpr.invars] == [v.aval.shape for v in eqn.invars]
    assert [v.aval.shape for v in expanded.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]
    operands = [jnp.full(v.aval.shape, 0.3, v.aval.dtype) for v in eqn.invars]
    same(jaxpr_as_fun(expanded)(*operands), evaluate(*operands, **eqn.params))


def test_effects_run_once() -> None:
    seen: list[float] = []

    def noisy(p: Any) -> Any:
        jax.debug.callback(lambda s: seen.append(float(s)), p.sum())
        return (p**2).sum()

    jax.block_until_ready(jax.jit(grad(noisy))(jnp.ones(3)))
    jax.effects_barrier()
    assert seen == [3.0]
    jax.block_until_ready(jax.jit(lambda p: (grad(noisy)(p), p + 1)[1])(jnp.ones(4)))
    jax.effects_barrier()
    assert seen == [3.0, 4.0], "kept where the gradient is not used"
