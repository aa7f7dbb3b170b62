"""Diffrax: ordinary, controlled and stochastic differential equations, differentiated through or by an adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix as optx

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def _field(dim: int, extra: int = 0) -> tuple[Any, Callable[[Any], Any]]:
    net = eqx.nn.MLP(dim, extra or dim, 16, 1, activation=jnp.tanh, key=KEY)
    params, static = eqx.partition(net, eqx.is_inexact_array)
    return params, lambda params: eqx.combine(params, static)


def _neural_ode(adjoint: Any, controller: Any = None, solver: Any = None, dt0: float | None = 0.1) -> Made:
    params, net = _field(4)
    ts = jnp.linspace(0.0, 1.0, 6)

    def loss(params: Any, y0: jax.Array, ys: jax.Array) -> jax.Array:
        term = diffrax.ODETerm(lambda t, y, args: net(args)(y))
        solve = lambda y: diffrax.diffeqsolve(
            term, solver or diffrax.Tsit5(), 0.0, 1.0, dt0, y, args=params, saveat=diffrax.SaveAt(ts=ts),
            adjoint=adjoint, stepsize_controller=controller or diffrax.ConstantStepSize(), max_steps=64,
        ).ys  # fmt: skip
        return jnp.mean((jax.vmap(solve)(y0) - ys) ** 2)

    return trained(loss, params, normal(16, 4), normal(16, 6, 4, seed=1))


def neural_ode() -> Made:
    return _neural_ode(diffrax.RecursiveCheckpointAdjoint())


def adaptive() -> Made:
    return _neural_ode(diffrax.RecursiveCheckpointAdjoint(), diffrax.PIDController(1e-4, 1e-6))


def backsolve() -> Made:
    return _neural_ode(diffrax.BacksolveAdjoint())


def direct() -> Made:
    return _neural_ode(diffrax.DirectAdjoint(), solver=diffrax.Heun())


def implicit() -> Made:
    """Kvaerno's method: a Newton iteration with a linear solve in each step."""
    return _neural_ode(
        diffrax.RecursiveCheckpointAdjoint(), diffrax.PIDController(1e-4, 1e-6), diffrax.Kvaerno3(), dt0=None
    )


def controlled() -> Made:
    """A neural CDE over Hermite splines of the data."""
    net = eqx.nn.MLP(8, 24, 16, 1, final_activation=jnp.tanh, key=KEY)
    params, static = eqx.partition((net, eqx.nn.Linear(8, 1, key=KEY)), eqx.is_inexact_array)
    ts = jnp.linspace(0.0, 1.0, 10)

    def loss(params: Any, xs: jax.Array, labels: jax.Array) -> jax.Array:
        def one(xs: jax.Array) -> jax.Array:
            field, readout = eqx.combine(params, static)
            path = diffrax.CubicInterpolation(ts, diffrax.backward_hermite_coefficients(ts, xs))
            term = diffrax.ControlTerm(lambda t, y, _: field(y).reshape(8, 3), path).to_ode()
            out = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 0.1, jnp.ones(8, xs.dtype), max_steps=16)
            return readout(out.ys[-1])[0]

        return optax.sigmoid_binary_cross_entropy(jax.vmap(one)(xs), labels).mean()

    return trained(loss, params, normal(8, 10, 3), ints(2, 8))


def stochastic() -> Made:
    """A neural SDE along `VirtualBrownianTree`s."""
    params, net = _field(4)

    def loss(params: Any, y0: jax.Array, key: jax.Array) -> jax.Array:
        def one(y: jax.Array, key: jax.Array) -> jax.Array:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(4,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: net(args)(y)),
                diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(4, dtype=y.dtype), noise),
            )
            return diffrax.diffeqsolve(terms, diffrax.EulerHeun(), 0.0, 1.0, 0.1, y, args=params, max_steps=16).ys[-1]

        return jnp.mean(jax.vmap(one)(y0, jax.random.split(key, len(y0))) ** 2)

    return trained(loss, params, normal(8, 4), jax.random.key(1))


def event() -> Made:
    """A ball that falls until it hits the ground: an event, found by a root finder."""

    def loss(gravity: jax.Array, height: jax.Array, when: jax.Array) -> jax.Array:
        def one(height: jax.Array) -> jax.Array:
            term = diffrax.ODETerm(lambda t, y, g: jnp.stack([y[1], -g]))
            ground = diffrax.Event(lambda t, y, args, **_: y[0], optx.Newton(1e-8, 1e-8))
            y0 = jnp.stack([height, jnp.zeros_like(height)])
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 5.0, 0.1, y0, args=gravity, event=ground).ts[-1]

        return jnp.mean((jax.vmap(one)(height) - when) ** 2)

    height = 1 + normal(8) ** 2
    return trained(loss, jnp.asarray(5.0), height, jnp.sqrt(2 * height / 9.81), optimizer=optax.sgd(0.1))


STEPS = [
    *steps("diffrax", "equinox")(direct),
    *steps("diffrax", "equinox", float64=True)(
        neural_ode, adaptive, backsolve, implicit, controlled, stochastic, event
    ),
]
