"""Evosax: a generation asked, evaluated and told within the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES, PGPE, PSO, SNES, DifferentialEvolution, Open_ES, SimpleGA

from tests.ecosystem.data import normal
from tests.ecosystem.step import Made, steps

SOLUTION = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
POPULATION = (
    32  # of which half are elite: more than dimensions, so that no two of the covariance's eigenvalues are equal
)


def _evolved(strategy: Any) -> Made:
    """The fitness is a regression's loss, under vmap over the population."""
    es = strategy(population_size=POPULATION, solution=SOLUTION)
    params = es.default_params
    x, y = normal(16, 4), normal(16, 2, seed=1)
    key = jax.random.key(0)

    def fitness(solution: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ solution["w"] + solution["b"]) - y) ** 2)

    def step(carried: Any, x: jax.Array, y: jax.Array) -> Any:
        key, state = carried
        key, ask, tell = jax.random.split(key, 3)
        population, state = es.ask(ask, state, params)
        values = jax.vmap(fitness, (0, None, None))(population, x, y)
        state, metrics = es.tell(tell, population, values, state, params)
        return (key, state), metrics

    if strategy in (PSO, DifferentialEvolution, SimpleGA):
        population = jax.tree.map(lambda v: normal(POPULATION, *v.shape, seed=2).astype(v.dtype), SOLUTION)
        state = es.init(key, population, jax.vmap(fitness, (0, None, None))(population, x, y), params)
    else:
        state = es.init(key, SOLUTION, params)
    return Made(step=step, state=(key, state), rest=(x, y))


def open_es() -> Made:
    return _evolved(Open_ES)


def cma_es() -> Made:
    return _evolved(CMA_ES)


def snes() -> Made:
    return _evolved(SNES)


def pgpe() -> Made:
    return _evolved(PGPE)


def particle_swarm() -> Made:
    return _evolved(PSO)


def differential_evolution() -> Made:
    return _evolved(DifferentialEvolution)


def genetic() -> Made:
    return _evolved(SimpleGA)


STEPS = [
    *steps("evosax")(snes, particle_swarm, differential_evolution, genetic),
    *steps("evosax", float64=True)(open_es, cma_es, pgpe),
]
