"""RLax, Mctx, Gymnax and Chex: losses of reinforcement learning, tree search, environments within the step."""

from __future__ import annotations

from typing import Any

import chex
import gymnax
import jax
import jax.numpy as jnp
import mctx
import optax
import rlax

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps, trained


def _net(outputs: int, inputs: int = 8) -> Any:
    return {"one": 0.3 * normal(inputs, 32), "two": 0.3 * normal(32, outputs, seed=1)}


def _apply(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["one"]) @ params["two"]


def q_learning() -> Made:
    """DQN with a target network that follows periodically."""
    tx = optax.adam(1e-3)

    def step(state: Any, x: jax.Array, action: jax.Array, reward: jax.Array, new: jax.Array) -> Any:
        params, target, opt_state, count = state

        def loss_fn(params: Any) -> jax.Array:
            best = _apply(params, new)
            error = jax.vmap(rlax.double_q_learning)(
                _apply(params, x), action, reward, jnp.full_like(reward, 0.99), _apply(target, new), best
            )
            return rlax.huber_loss(error).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, count, 2)
        return (params, target, opt_state, count + 1), loss

    params = _net(4)
    state = params, params, tx.init(params), jnp.zeros((), jnp.int32)
    return Made(step=step, state=state, rest=(normal(32, 8), ints(4, 32), normal(32, seed=2), normal(32, 8, seed=3)))


def v_trace() -> Made:
    """IMPALA's loss over sequences."""

    def loss(params: Any, x: jax.Array, action: jax.Array, reward: jax.Array, behaviour: jax.Array) -> jax.Array:
        out = _apply(params, x)
        logits, value = out[..., :4], out[..., 4]
        rho = rlax.categorical_importance_sampling_ratios(logits[:, :-1], behaviour, action)
        discount = jnp.full_like(reward, 0.99)
        returns = jax.vmap(rlax.vtrace_td_error_and_advantage)(value[:, :-1], value[:, 1:], reward, discount, rho)
        gradient = jax.vmap(rlax.policy_gradient_loss)(
            logits[:, :-1], action, returns.pg_advantage, jnp.ones_like(reward)
        )
        entropy = jax.vmap(rlax.entropy_loss)(logits[:, :-1], jnp.ones_like(reward))
        return jnp.mean(returns.errors**2) + gradient.mean() + 0.01 * entropy.mean()

    batch = normal(8, 11, 8), ints(4, 8, 10), normal(8, 10, seed=2), normal(8, 10, 4, seed=3)
    return trained(loss, _net(5), *batch)


def ppo() -> Made:
    """Generalised advantages, then epochs of shuffled minibatches, all scanned within the step."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, old, advantage, target = batch
        out = _apply(params, x)
        logp = jnp.take_along_axis(jax.nn.log_softmax(out[:, :4]), action[:, None], 1)[:, 0]
        policy = rlax.clipped_surrogate_pg_loss(jnp.exp(logp - old), advantage, 0.2)
        return policy + 0.5 * jnp.mean((out[:, 4] - target) ** 2)

    def step(state: Any, x: jax.Array, action: jax.Array, reward: jax.Array) -> Any:
        params, opt_state, key = state
        out = _apply(params, x)
        old = jnp.take_along_axis(jax.nn.log_softmax(out[:, :-1, :4]), action[..., None], -1)[..., 0]
        discount = jnp.full_like(reward, 0.99)
        advantage = jax.vmap(rlax.truncated_generalized_advantage_estimation, (0, 0, None, 0))(
            reward, discount, 0.95, out[..., 4]
        )
        flat = jax.tree.map(
            lambda v: v.reshape(-1, *v.shape[2:]), (x[:, :-1], action, old, advantage, advantage + out[:, :-1, 4])
        )

        def epoch(carry: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, 80)
            parts = jax.tree.map(lambda v: v[order].reshape(4, 20, *v.shape[1:]), flat)

            def part(carry: Any, batch: Any) -> Any:
                params, opt_state = carry
                loss, grads = jax.value_and_grad(loss_fn)(params, batch)
                updates, opt_state = tx.update(grads, opt_state)
                return (optax.apply_updates(params, updates), opt_state), loss

            return jax.lax.scan(part, carry, parts)

        key, once = jax.random.split(key)
        (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), jax.random.split(once, 2))
        return (params, opt_state, key), losses

    params = _net(5)
    state = params, tx.init(params), jax.random.key(0)
    return Made(step=step, state=state, rest=(normal(8, 11, 8), ints(4, 8, 10), normal(8, 10, seed=2)))


def distributional() -> Made:
    """Quantile regression and categorical projections."""

    def loss(params: Any, x: jax.Array, action: jax.Array, reward: jax.Array) -> jax.Array:
        out = _apply(params, x)
        quantiles, logits = out[:, :20].reshape(-1, 5, 4), out[:, 20:].reshape(-1, 4, 11)
        tau = jnp.linspace(0.1, 0.9, 5)
        discount = jnp.full_like(reward, 0.9)
        first = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))(
            quantiles, tau, action, reward, discount, quantiles, quantiles, 1.0
        )
        atoms = jnp.linspace(-2.0, 2.0, 11)
        second = jax.vmap(rlax.categorical_q_learning, (None, 0, 0, 0, 0, None, 0))(
            atoms, logits, action, reward, discount, atoms, logits
        )
        return first.mean() + second.mean()

    return trained(loss, _net(64), normal(16, 8), ints(4, 16), normal(16, seed=2))


def _search(policy: Any, **options: Any) -> Made:
    """MuZero's loop: search with the network, then learn the policy that was found."""
    tx = optax.adam(1e-3)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state, key = state
        key, once = jax.random.split(key)

        def recurrent(params: Any, _: Any, action: jax.Array, embedding: jax.Array) -> Any:
            embedding = jnp.tanh(embedding + params["move"][action])
            out = _apply(params, embedding)
            reward = embedding.mean(-1)
            discount = jnp.full_like(reward, 0.9)
            return mctx.RecurrentFnOutput(
                reward=reward, discount=discount, prior_logits=out[:, :4], value=out[:, 4]
            ), embedding

        out = _apply(params, x)
        root = mctx.RootFnOutput(prior_logits=out[:, :4], value=out[:, 4], embedding=x)
        found = policy(params, once, root, recurrent, num_simulations=8, **options)

        def loss_fn(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy(_apply(params, x)[:, :4], found.action_weights).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), (loss, found.action)

    params = _net(5) | {"move": 0.3 * normal(4, 8, seed=4)}
    return Made(step=step, state=(params, tx.init(params), jax.random.key(0)), rest=(normal(8, 8),))


def muzero() -> Made:
    return _search(mctx.muzero_policy, dirichlet_fraction=0.25)


def gumbel_muzero() -> Made:
    return _search(mctx.gumbel_muzero_policy, max_num_considered_actions=4)


def _rollouts(name: str) -> Made:
    """A2C whose environments run within the step."""
    env, env_params = gymnax.make(name)
    shape = env.observation_space(env_params).shape
    actions = env.action_space(env_params).n
    size = 1
    for n in shape:
        size *= n
    params = {"one": 0.1 * normal(size, 32), "two": 0.3 * normal(32, actions + 1, seed=1)}
    tx = optax.adam(1e-3)

    def step(state: Any) -> Any:
        params, opt_state, key, obs, env_state = state
        key, once = jax.random.split(key)

        def loss_fn(params: Any) -> Any:
            def move(carry: Any, key: jax.Array) -> Any:
                obs, env_state = carry
                out = _apply(params, obs.reshape(len(obs), -1))
                one, two = jax.random.split(key)
                action = jax.random.categorical(one, out[:, :actions])
                keys = jax.random.split(two, len(obs))
                new, env_state, reward, done, _, _ = jax.vmap(env.step, (0, 0, 0, None))(
                    keys, env_state, action, env_params
                )
                logp = jnp.take_along_axis(jax.nn.log_softmax(out[:, :actions]), action[:, None], 1)[:, 0]
                return (new, env_state), (logp, out[:, actions], reward, done)

            carry, (logp, value, reward, done) = jax.lax.scan(move, (obs, env_state), jax.random.split(once, 6))
            returns = jax.vmap(rlax.discounted_returns, 1, 1)(reward, 0.99 * (1 - done), value)
            return -jnp.mean(logp * jax.lax.stop_gradient(returns - value)) + jnp.mean((returns - value) ** 2), carry

        (loss, (obs, env_state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key, obs, env_state), loss

    obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(0), 8), env_params)
    return Made(step=step, state=(params, tx.init(params), jax.random.key(1), obs, env_state))


def cart_pole() -> Made:
    return _rollouts("CartPole-v1")


def breakout() -> Made:
    return _rollouts("Breakout-MinAtar")


def chex_state() -> Made:
    """A state that is a `chex.dataclass`, with assertions at trace time."""

    @chex.dataclass
    class State:
        params: Any
        opt_state: Any
        count: jax.Array

    tx = optax.adam(1e-3)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        chex.assert_rank([x, y], 2)
        chex.assert_equal_shape_prefix([x, y], 1)
        loss_fn = lambda p: jnp.mean(chex.assert_max_traces(_apply, 9)(p, x) - y) ** 2
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        chex.assert_trees_all_equal_shapes(grads, state.params)
        updates, opt_state = tx.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, count=state.count + 1), loss

    params = _net(4)
    state = State(params=params, opt_state=tx.init(params), count=jnp.zeros((), jnp.int32))
    return Made(step=step, state=state, rest=(normal(16, 8), normal(16, 4, seed=1)))


STEPS = [
    *steps("rlax", float64=True)(q_learning, v_trace, ppo, distributional),
    *steps("mctx", float64=True)(muzero, gumbel_muzero),
    *steps("gymnax", "rlax")(cart_pole, breakout),
    *steps("chex", float64=True)(chex_state),
]
