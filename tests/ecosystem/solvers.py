"""Lineax, Optimistix and JAXopt: solves within a step, differentiated by the implicit function theorem."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jaxopt
import lineax as lx
import optax
import optimistix as optx

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

SGD = optax.sgd(0.1)


def _symmetric(a: jax.Array) -> jax.Array:
    return a @ a.T / a.shape[0] + jnp.eye(a.shape[0], dtype=a.dtype)


def _linear(operator: Any, solver: Any) -> Made:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        solve = lambda b: lx.linear_solve(operator(a), b, solver).value
        return jnp.mean(jax.vmap(solve)(b) ** 2)

    return trained(loss, normal(16, 16), normal(8, 16, seed=1), optimizer=SGD)


def linear_auto() -> Made:
    return _linear(lambda a: lx.MatrixLinearOperator(a + 8 * jnp.eye(16, dtype=a.dtype)), lx.AutoLinearSolver(True))


def linear_cholesky() -> Made:
    return _linear(lambda a: lx.MatrixLinearOperator(_symmetric(a), lx.positive_semidefinite_tag), lx.Cholesky())


def linear_cg() -> Made:
    return _linear(
        lambda a: lx.MatrixLinearOperator(_symmetric(a), lx.positive_semidefinite_tag), lx.CG(rtol=1e-10, atol=1e-10)
    )


def linear_gmres() -> Made:
    """An operator given as a function."""
    return _linear(
        lambda a: lx.FunctionLinearOperator(lambda x: 2 * x + 0.1 * (a @ x), jax.ShapeDtypeStruct((16,), a.dtype)),
        lx.GMRES(rtol=1e-10, atol=1e-10),
    )


def linear_least_squares() -> Made:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.mean(lx.linear_solve(lx.MatrixLinearOperator(a), b, lx.QR()).value ** 2)

    return trained(loss, normal(32, 8), normal(32, seed=1), optimizer=SGD)


def least_squares() -> Made:
    """Levenberg–Marquardt fits a curve to each example; its result is trained against."""

    def loss(scale: jax.Array, ys: jax.Array, wanted: jax.Array) -> jax.Array:
        ts = jnp.linspace(0.0, 1.0, 12, dtype=ys.dtype)

        def fit(ys: jax.Array) -> jax.Array:
            residual = lambda p, ys: p[0] * jnp.exp(-p[1] * ts) - ys * scale
            solver = optx.LevenbergMarquardt(rtol=1e-8, atol=1e-8)
            return optx.least_squares(residual, solver, jnp.ones(2, ys.dtype), ys, max_steps=64).value

        return jnp.mean((jax.vmap(fit)(ys) - wanted) ** 2)

    rates = 1 + normal(8, 1) ** 2
    ys = jnp.exp(-rates * jnp.linspace(0.0, 1.0, 12))
    return trained(loss, jnp.asarray(1.1), ys, jnp.concatenate([jnp.ones((8, 1)), rates], 1), optimizer=SGD)


def deep_equilibrium() -> Made:
    """The fixed point of a layer."""

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        layer = lambda z, args: jnp.tanh(z @ args[0] + args[1])
        solver = optx.FixedPointIteration(rtol=1e-10, atol=1e-10)
        z = optx.fixed_point(layer, solver, jnp.zeros_like(x), (w, x), max_steps=256).value
        return jnp.mean((z - y) ** 2)

    return trained(loss, 0.05 * normal(16, 16), normal(16, 16), normal(16, 16, seed=1), optimizer=SGD)


def root_find() -> Made:
    """An implicit Euler step by Newton's method, for each example."""

    def loss(rate: jax.Array, y0: jax.Array) -> jax.Array:
        residual = lambda y, y0: y - y0 + 0.1 * rate * y**3
        solve = lambda y0: optx.root_find(residual, optx.Newton(rtol=1e-9, atol=1e-9), y0, y0, max_steps=32).value
        return jnp.mean(jax.vmap(solve)(y0) ** 2)

    return trained(loss, jnp.asarray(2.0), normal(16, 4), optimizer=SGD)


def minimise() -> Made:
    """BFGS as the whole step: the state is the minimum so far."""

    def step(theta: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        loss = lambda w, _: optax.sigmoid_binary_cross_entropy(x @ w, labels).mean() + 0.01 * w @ w
        found = optx.minimise(loss, optx.BFGS(rtol=1e-6, atol=1e-6), theta, max_steps=20, throw=False)
        return found.value, loss(found.value, None)

    return Made(step=step, state=jnp.zeros(8), rest=(normal(32, 8), ints(2, 32)))


def bilevel() -> Made:
    """JAXopt's gradient descent inside, the regularisation's gradient by implicit differentiation outside."""

    def loss(log_l2: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        inner = lambda w, l2: jnp.mean((x[:16] @ w - y[:16]) ** 2) + jnp.exp(l2) * jnp.sum(w**2)
        w = jaxopt.GradientDescent(inner, maxiter=200, tol=1e-8, implicit_diff=True).run(jnp.zeros(8, x.dtype), log_l2)
        return jnp.mean((x[16:] @ w.params - y[16:]) ** 2)

    def step(log_l2: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        value, grad = jax.value_and_grad(loss)(log_l2, x, y)  # the rule holds what it was traced with
        return log_l2 - 0.1 * grad, value

    return Made(step=step, state=jnp.asarray(-1.0), rest=(normal(32, 8), normal(32, seed=1)))


def jaxopt_lbfgs() -> Made:
    solver = jaxopt.LBFGS(lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2), maxiter=10)
    x, y = normal(32, 8), normal(32, seed=1)
    w = jnp.zeros(8)

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        return tuple(solver.update(*carried, x, y)), ()

    return Made(step=step, state=(w, solver.init_state(w, x, y)), rest=(x, y))


def projected() -> Made:
    """Projected gradient onto the simplex, by sorting."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        loss = lambda w: jnp.mean((x @ w - y) ** 2)
        solver = jaxopt.ProjectedGradient(loss, jaxopt.projection.projection_simplex, maxiter=10)
        return solver.run(w).params, loss(w)

    return Made(step=step, state=jnp.full(8, 1 / 8), rest=(normal(32, 8), normal(32, seed=1)))


def quadratic_program() -> Made:
    """A differentiable quadratic program per example (OptNet)."""

    def loss(c: jax.Array, b: jax.Array) -> jax.Array:
        q = jnp.eye(4, dtype=c.dtype)
        a = jnp.ones((1, 4), c.dtype)
        solver = jaxopt.EqualityConstrainedQP()
        solve = lambda b: solver.run(params_obj=(q, c), params_eq=(a, b)).params.primal
        return jnp.mean(jax.vmap(solve)(b) ** 2)

    return trained(loss, normal(4), normal(8, 1), optimizer=SGD)


STEPS = [
    *steps("lineax")(linear_auto),
    *steps("lineax", float64=True)(linear_cholesky, linear_cg, linear_gmres, linear_least_squares),
    *steps("optimistix", float64=True)(least_squares, deep_equilibrium, root_find, minimise),
    *steps("jaxopt", float64=True)(bilevel, jaxopt_lbfgs, projected, quadratic_program),
]
