"""Distrax: flows, autoencoders, mixtures and hidden Markov models."""

from __future__ import annotations

from typing import Any

import distrax
import haiku as hk
import jax
import jax.numpy as jnp

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained

KEY = jax.random.key(0)


def coupling_flow() -> Made:
    """RealNVP: masked couplings whose conditioners are Haiku networks."""

    def density(x: jax.Array) -> jax.Array:
        mask = jnp.arange(8) % 2 == 0
        layers = []
        for i in range(3):
            conditioner = hk.Sequential([hk.nets.MLP([32], activate_final=True), hk.Linear(16), hk.Reshape((8, 2))])
            affine = lambda p: distrax.ScalarAffine(shift=p[..., 0], log_scale=jnp.tanh(p[..., 1]))
            layers.append(distrax.MaskedCoupling(mask if i % 2 else ~mask, conditioner, affine))
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    model = hk.without_apply_rng(hk.transform(density))
    x = normal(16, 8)
    return trained(lambda params, x: -model.apply(params, x).mean(), model.init(KEY, x), x)


def spline_flow() -> Made:
    """Rational quadratic splines, whose bins are searched for."""
    x = jax.nn.sigmoid(normal(32, 4))
    params = 0.1 * normal(4, 3 * 6 + 1, seed=1)

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        spline = distrax.Block(distrax.RationalQuadraticSpline(params, 0.0, 1.0), 1)
        base = distrax.Independent(distrax.Uniform(jnp.zeros(4), jnp.ones(4)), 1)
        return -distrax.Transformed(base, spline).log_prob(x).mean()

    return trained(loss, params, x)


def autoencoder() -> Made:
    """A variational autoencoder with analytic divergence."""

    def elbo(x: jax.Array) -> jax.Array:
        h = hk.nets.MLP([32], activate_final=True)(x)
        posterior = distrax.MultivariateNormalDiag(hk.Linear(4)(h), jnp.exp(hk.Linear(4)(h)))
        z = posterior.sample(seed=hk.next_rng_key())
        likelihood = distrax.Independent(distrax.Bernoulli(logits=hk.nets.MLP([32, 24])(z)), 1)
        prior = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        return jnp.mean(likelihood.log_prob(x) - posterior.kl_divergence(prior))

    model = hk.transform(elbo)
    x = ints(2, 16, 24).astype(float)
    return trained(lambda params, x, key: -model.apply(params, key, x), model.init(KEY, x), x, jax.random.key(1))


def mixture() -> Made:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        parts = distrax.MultivariateNormalDiag(params["loc"], jax.nn.softplus(params["scale"]))
        return -distrax.MixtureSameFamily(distrax.Categorical(params["logits"]), parts).log_prob(x).mean()

    params = {"logits": jnp.zeros(4), "loc": normal(4, 3, seed=1), "scale": jnp.zeros((4, 3))}
    return trained(loss, params, normal(32, 3))


def hidden_markov() -> Made:
    """The forward algorithm under vmap over sequences."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        hmm = distrax.HMM(
            init_dist=distrax.Categorical(jnp.zeros(4)),
            trans_dist=distrax.Categorical(params["move"]),
            obs_dist=distrax.Normal(params["loc"], jnp.ones(4)),
        )
        return -jax.vmap(lambda x: hmm.forward(x)[1])(x).mean()

    return trained(loss, {"move": 0.1 * normal(4, 4), "loc": normal(4, seed=1)}, normal(8, 12))


STEPS = [*steps("distrax", "dm-haiku", float64=True)(coupling_flow, spline_flow, autoencoder, mixture, hidden_markov)]
