"""NumPyro, BlackJAX and TensorFlow Probability: variational inference and Markov chains as steps."""

from __future__ import annotations

from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import tensorflow_probability.substrates.jax as tfp
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps

KEY = jax.random.key(0)


def _regression(x: jax.Array, y: jax.Array | None = None) -> None:
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def _hierarchical(group: jax.Array, y: jax.Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(5.0))
    with (
        numpyro.plate("groups", 8),
        numpyro.handlers.reparam(config={"theta": numpyro.infer.reparam.LocScaleReparam(0)}),
    ):
        theta = numpyro.sample("theta", dist.Normal(mean, spread))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, theta[group], 1.0), obs=y)


def _svi(model: Any, guide: Any, loss: Any, *batch: Any) -> Made:
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), loss)
    return Made(step=svi.update, state=svi.init(KEY, *batch), rest=batch)


def numpyro_svi() -> Made:
    x = normal(32, 8)
    return _svi(_regression, AutoNormal(_regression), Trace_ELBO(num_particles=4), x, x[:, 0])


def numpyro_low_rank_guide() -> Made:
    guide = AutoLowRankMultivariateNormal(_hierarchical, rank=2)
    return _svi(_hierarchical, guide, Trace_ELBO(), ints(8, 32), normal(32))


def numpyro_vae() -> Made:
    """A variational autoencoder with parameters by `numpyro.param`."""

    def layer(name: str, x: jax.Array, out: int) -> jax.Array:
        w = numpyro.param(name, 0.1 * jax.random.normal(jax.random.key(out), (x.shape[-1], out)).astype(float))
        return x @ w

    def model(x: jax.Array) -> None:
        with numpyro.plate("batch", x.shape[0]):
            z = numpyro.sample("z", dist.Normal(jnp.zeros((x.shape[0], 4)), 1.0).to_event(1))
            logits = layer("out", jax.nn.softplus(layer("decode", z, 32)), x.shape[1])
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    def guide(x: jax.Array) -> None:
        h = jax.nn.softplus(layer("encode", x, 32))
        with numpyro.plate("batch", x.shape[0]):
            numpyro.sample("z", dist.Normal(layer("loc", h, 4), jnp.exp(layer("scale", h, 4))).to_event(1))

    return _svi(model, guide, TraceMeanField_ELBO(), ints(2, 16, 24).astype(float))


def numpyro_nuts() -> Made:
    """One transition of NUTS."""
    x = normal(32, 8)
    kernel = NUTS(_regression, max_tree_depth=3)
    state = kernel.init(KEY, 0, None, (x,), {"y": x[:, 0]})
    return Made(step=lambda state, x, y: (kernel.sample(state, (x,), {"y": y}), ()), state=state, rest=(x, x[:, 0]))


def numpyro_mcmc() -> Made:
    """A whole run, warm-up and samples of two vectorised chains, from a key."""
    group, y = ints(8, 32), normal(32)

    def step(key: jax.Array, group: jax.Array, y: jax.Array) -> Any:
        key, once = jax.random.split(key)
        kernel = NUTS(_hierarchical, max_tree_depth=2)
        mcmc = MCMC(kernel, num_warmup=4, num_samples=4, num_chains=2, chain_method="vectorized", progress_bar=False)
        mcmc.run(once, group, y)
        return key, mcmc.get_samples(group_by_chain=True)

    return Made(step=step, state=KEY, rest=(group, y))


def numpyro_discrete() -> Made:
    """A mixture whose labels are enumerated."""

    def model(y: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        with numpyro.plate("data", y.shape[0]):
            label = numpyro.sample("label", dist.Categorical(weights), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(loc[label], 1.0), obs=y)

    guide = AutoNormal(numpyro.handlers.block(model, hide=["label"]))
    return _svi(model, guide, numpyro.infer.TraceEnum_ELBO(), normal(32))


def numpyro_hmm() -> Made:
    """A state space model through `numpyro.contrib.control_flow.scan`."""

    def model(y: jax.Array) -> None:
        drift = numpyro.sample("drift", dist.Normal(0.9, 0.1))

        def move(x: jax.Array, y: jax.Array) -> Any:
            x = numpyro.sample("x", dist.Normal(drift * x, 1.0))
            numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
            return x, None

        scan(move, jnp.zeros(()), y)

    return _svi(model, AutoNormal(model), Trace_ELBO(), normal(16))


def _posterior(x: jax.Array, y: jax.Array) -> Any:
    return lambda w: -0.5 * jnp.sum((x @ w["w"] + w["b"] - y) ** 2) - 0.5 * jnp.sum(w["w"] ** 2)


def _start() -> Any:
    return {"w": jnp.zeros(8), "b": jnp.zeros(())}


def _chain(build: Any, position: Any = None) -> Made:
    """One transition of a BlackJAX sampler, whose density is of the batch."""
    x, y = normal(32, 8), normal(32, seed=1)
    position = _start() if position is None else position

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, state = carried
        key, once = jax.random.split(key)
        state, info = build(_posterior(x, y)).step(once, state)
        return (key, state), info

    return Made(step=step, state=(KEY, build(_posterior(x, y)).init(position)), rest=(x, y))


def blackjax_hmc() -> Made:
    return _chain(lambda p: blackjax.hmc(p, 1e-2, jnp.ones(9), 5))


def blackjax_nuts() -> Made:
    return _chain(lambda p: blackjax.nuts(p, 1e-2, jnp.ones(9), max_num_doublings=3))


def blackjax_mala() -> Made:
    return _chain(lambda p: blackjax.mala(p, 1e-3))


def blackjax_many_chains() -> Made:
    """NUTS under vmap: 8 chains, trees of their own depth."""
    x, y = normal(32, 8), normal(32, seed=1)

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, states = carried
        key, once = jax.random.split(key)
        nuts = blackjax.nuts(_posterior(x, y), 1e-2, jnp.ones(9), max_num_doublings=3)
        states, info = jax.vmap(nuts.step)(jax.random.split(once, 8), states)
        return (key, states), info.acceptance_rate

    init = blackjax.nuts(_posterior(x, y), 1e-2, jnp.ones(9)).init
    starts = {"w": 0.1 * normal(8, 8), "b": jnp.zeros(8)}
    return Made(step=step, state=(KEY, jax.vmap(init)(starts)), rest=(x, y))


def blackjax_warm_up() -> Made:
    """`window_adaptation`: a scan over NUTS that adapts step size and mass matrix."""

    def step(key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        key, once = jax.random.split(key)
        warm_up = blackjax.window_adaptation(blackjax.nuts, _posterior(x, y), max_num_doublings=2)
        (state, parameters), _ = warm_up.run(once, _start(), num_steps=30)
        return key, (state.position, parameters)

    return Made(step=step, state=KEY, rest=(normal(32, 8), normal(32, seed=1)))


def blackjax_smc() -> Made:
    """Adaptive tempering of 32 particles, moved by HMC, with systematic resampling."""
    x, y = normal(32, 8), normal(32, seed=1)

    def sampler(x: jax.Array, y: jax.Array) -> Any:
        likelihood = lambda w: -0.1 * jnp.sum((x @ w - y) ** 2)
        parameters = {
            "step_size": jnp.full(1, 1e-2),
            "inverse_mass_matrix": jnp.ones((1, 8)),
            "num_integration_steps": jnp.full(1, 3),
        }
        return blackjax.adaptive_tempered_smc(
            lambda w: -0.5 * jnp.sum(w**2), likelihood, blackjax.hmc.build_kernel(), blackjax.hmc.init, parameters,
            blackjax.smc.resampling.systematic, 0.5, num_mcmc_steps=2,
        )  # fmt: skip

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, state = carried
        key, once = jax.random.split(key)
        state, info = sampler(x, y).step(once, state)
        return (key, state), info.log_likelihood_increment

    return Made(step=step, state=(KEY, sampler(x, y).init(normal(32, 8, seed=2))), rest=(x, y))


def blackjax_sgld() -> Made:
    """Stochastic-gradient Langevin dynamics on minibatches."""

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, position = carried
        key, once = jax.random.split(key)
        gradient = lambda w, batch: jax.grad(_posterior(*batch))(w)
        return (key, blackjax.sgld(gradient).step(once, position, (x, y), 1e-3)), ()

    return Made(step=step, state=(KEY, _start()), rest=(normal(32, 8), normal(32, seed=1)))


def blackjax_elliptical_slice() -> Made:
    x, y = normal(32, 8), normal(32, seed=1)

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, state = carried
        key, once = jax.random.split(key)
        likelihood = lambda w: -0.5 * jnp.sum((x @ w - y) ** 2)
        sampler = blackjax.elliptical_slice(likelihood, mean=jnp.zeros(8), cov=jnp.eye(8))
        state, info = sampler.step(once, state)
        return (key, state), info.theta

    init = blackjax.elliptical_slice(lambda w: -0.5 * jnp.sum((x @ w - y) ** 2), mean=jnp.zeros(8), cov=jnp.eye(8)).init
    return Made(step=step, state=(KEY, init(jnp.zeros(8))), rest=(x, y))


def blackjax_pathfinder() -> Made:
    """Variational inference along the path of L-BFGS."""

    def step(key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        key, once = jax.random.split(key)
        posterior = lambda w: -0.5 * jnp.mean((jnp.tanh(x @ w) - y) ** 2) - 0.5 * jnp.sum(w**2)
        state, _ = blackjax.vi.pathfinder.approximate(once, posterior, jnp.ones(8), num_samples=16, maxiter=8)
        return key, (state.elbo, state.position)

    return Made(step=step, state=KEY, rest=(normal(32, 8), normal(32, seed=1)))


def blackjax_meanfield_vi() -> Made:
    x, y = normal(32, 8), normal(32, seed=1)
    vi = lambda x, y: blackjax.meanfield_vi(_posterior(x, y), optax.adam(1e-2), num_samples=8)

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, state = carried
        key, once = jax.random.split(key)
        state, info = vi(x, y).step(once, state)
        return (key, state), info.elbo

    return Made(step=step, state=(KEY, vi(x, y).init(_start())), rest=(x, y))


def tfp_hmc() -> Made:
    """`tfp.mcmc.sample_chain` with step-size adaptation, over 8 chains."""

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, w = carried
        key, once = jax.random.split(key)
        target = lambda w: -0.5 * jnp.sum((w @ x.T - y) ** 2, -1) - 0.5 * jnp.sum(w**2, -1)
        hmc = tfp.mcmc.HamiltonianMonteCarlo(target, step_size=jnp.asarray(1e-2, w.dtype), num_leapfrog_steps=3)
        kernel = tfp.mcmc.SimpleStepSizeAdaptation(hmc, num_adaptation_steps=4)
        draws = tfp.mcmc.sample_chain(8, w, kernel=kernel, trace_fn=None, seed=once)
        return (key, draws[-1]), draws.mean(0)

    return Made(step=step, state=(KEY, 0.1 * normal(8, 8)), rest=(normal(32, 8), normal(32, seed=1)))


def tfp_gaussian_process() -> Made:
    """The marginal likelihood of a Gaussian process, by Cholesky."""
    x, y = normal(32, 2), normal(32, seed=1)
    tx = optax.adam(1e-2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(
                jnp.exp(params["amplitude"]), jnp.exp(params["length"])
            )
            noise = jnp.exp(params["noise"])
            return -tfp.distributions.GaussianProcess(kernel, x, observation_noise_variance=noise).log_prob(y)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = {name: jnp.zeros(()) for name in ("amplitude", "length", "noise")}
    return Made(step=step, state=(params, tx.init(params)), rest=(x, y))


def tfp_mixture() -> Made:
    """A mixture of multivariate normals."""
    x = normal(64, 3)
    params = {"logits": jnp.zeros(4), "loc": normal(4, 3, seed=1), "scale": jnp.zeros((4, 3))}
    tx = optax.adam(1e-2)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state

        def loss_fn(p: Any) -> jax.Array:
            d = tfp.distributions
            parts = d.MultivariateNormalDiag(p["loc"], jax.nn.softplus(p["scale"]))
            return -d.MixtureSameFamily(d.Categorical(logits=p["logits"]), parts).log_prob(x).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Made(step=step, state=(params, tx.init(params)), rest=(x,))


STEPS = [
    *steps("numpyro", float64=True)(
        numpyro_svi, numpyro_low_rank_guide, numpyro_vae, numpyro_nuts, numpyro_mcmc, numpyro_discrete, numpyro_hmm
    ),
    *steps("blackjax", float64=True)(
        blackjax_hmc, blackjax_nuts, blackjax_mala, blackjax_many_chains, blackjax_warm_up, blackjax_smc, blackjax_sgld,
        blackjax_elliptical_slice, blackjax_pathfinder, blackjax_meanfield_vi,
    ),
    *steps("tfp-nightly", float64=True)(tfp_hmc, tfp_gaussian_process, tfp_mixture),
]  # fmt: skip
