"""Fuzzed steps: nested tuples of small integers → a train step of a dictionary of arrays and of integers.

An `Op` takes two earlier values, counted back from the newest, and appends one. A `Block` runs its bodies inside a
scan, a loop, a branch, `vmap`, `jax.checkpoint` or a custom derivative, and appends the last body's last value.
Integers beyond what a shape allows wrap around, so that every program runs. Its ``repr`` is Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from jax import lax

from tests import outcome as o
from tests.fuzz_operations import (
    DTYPES,
    OPERATIONS,
    as_float,
    as_real,
    at_least,
    is_complex,
    is_inexact,
    like,
    total,
    wide,
)
from tests.rounding import narrowest_float

MAX_SIZE = 2048
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SIZES = (8, 4, 16, 8, 2, 6, 1, 3, 0)
LIMIT_S = 120.0
Array = Any


class Op(NamedTuple):
    name: str
    a: int
    b: int
    c: int


class Block(NamedTuple):
    """``kind`` is a key of BLOCKS."""

    kind: str
    a: int
    c: int
    bodies: tuple[tuple[Any, ...], ...]


Body = tuple[Op | Block, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """``leaves``: shape and dtype of each parameter; ``rows``: how many integers a batch has; ``gradient``: a train
    step, else a function; ``x64``: numbers of 64 bits are on; ``twin``: every float has 64 bits."""

    leaves: tuple[tuple[tuple[int, ...], str], ...]
    rows: int
    body: Body
    gradient: bool
    x64: bool
    twin: bool = False

    def __call__(self, params: dict[str, Array], ids: Array) -> Any:
        if not self.gradient:
            return self._outputs(params, ids)[-3:]
        learned = {name: x for name, x in params.items() if is_inexact(x)}

        def loss_fn(learned: dict[str, Array]) -> Any:
            outputs = self._outputs(params | learned, ids)
            return sum(_mean(x) for x in outputs[-3:]), outputs[-2:]

        (loss, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(learned)
        return params | jax.tree.map(lambda p, g: p - 0.1 * g.conj(), learned, grads), loss, outputs

    def _outputs(self, params: dict[str, Array], ids: Array) -> list[Array]:
        return interpret(self.body, [ids, *params.values()])

    def arguments(self) -> tuple[dict[str, Array], Array]:
        rng = np.random.default_rng(0)
        names = [f"p{k}" for k in range(len(self.leaves))]
        params = {n: _draw(rng, shape, wide(d) if self.twin else d) for n, (shape, d) in zip(names, self.leaves)}
        return params, rng.integers(0, 64, (self.rows,), dtype=np.int32)


def _mean(x: Array) -> Array:
    return total(as_real(as_float(x)), None).astype(jnp.result_type(float))


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """The same numbers, but for rounding, in every float dtype."""
    x = rng.standard_normal(shape)
    if dtype == "bool":
        return x > 0
    kind = jnp.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.inexact):
        return np.abs(np.round(9 * x)).astype(kind)
    x = np.round(x * 64) / 64  # what bfloat16 can hold, nearly
    return (x - 0.5j * x if jnp.issubdtype(kind, jnp.complexfloating) else x).astype(kind)


# --- running -------------------------------------------------------------------------------------------------


def interpret(body: Body, values: list[Array]) -> list[Array]:
    """``values`` and those that ``body`` appends; the first are integers."""
    values = [v if hasattr(v, "dtype") else jnp.asarray(v, jnp.int32) for v in values]  # counters without jit
    for step in body:
        x = values[-1 - step.a % len(values)]
        if isinstance(step, Block):
            out = BLOCKS[step.kind](step, x, values)
        else:
            out = OPERATIONS[step.name](x, values[-1 - step.b % len(values)], _integers(values), step.c)
        values.append(out if out.size <= MAX_SIZE else total(out, 0))
    return values


def _integers(values: list[Array]) -> Array:
    """The newest that are drawn or computed, of 32 bits."""
    return next(v for v in reversed(values) if v.dtype == jnp.int32)


def _count(values: list[Array], limit: int) -> Array:
    return jnp.abs(_integers(values).sum()) % limit


def _last(body: Body, values: list[Array]) -> Array:
    return interpret(body, values)[-1]


def _scan(block: Block, x: Array, values: list[Array]) -> Array:
    rows = at_least(x, 1)
    init = values[-1 - block.c % len(values)]

    def turn(carry: Array, row: Array) -> tuple[Array, Array]:
        out = _last(block.bodies[0], [*values, row, carry])
        return like(out, carry), out

    carry, stacked = lax.scan(turn, init, rows, reverse=bool(block.c % 2), unroll=1 + block.c // 4 % 2)
    return (carry, stacked)[block.c // 2 % 2]


def _fori(block: Block, x: Array, values: list[Array]) -> Array:
    trips = block.c % 4
    return lax.fori_loop(0, trips, lambda k, c: like(_last(block.bodies[0], [*values, k, c]), c), x)


def _while(block: Block, x: Array, values: list[Array]) -> Array:
    """As many turns as integers say: where these are vmapped, each example its own."""
    values = [lax.stop_gradient(v) for v in values]
    trips = _count(values, 4)

    def turn(state: tuple[Array, Array]) -> tuple[Array, Array]:
        k, c = state
        return k + 1, like(_last(block.bodies[0], [*values, k, c]), c)

    return lax.while_loop(lambda s: s[0] < trips, turn, (jnp.zeros((), jnp.int32), lax.stop_gradient(x)))[1]


def _cond(block: Block, x: Array, values: list[Array]) -> Array:
    first = lambda x: _last(block.bodies[0], [*values, x])
    shape = jax.eval_shape(first, x)
    second = lambda x: like(_last(block.bodies[1], [*values, x]), shape)
    return lax.cond(_count(values, 2) == block.c % 2, lambda x: like(first(x), shape), second, x)


def _switch(block: Block, x: Array, values: list[Array]) -> Array:
    branches = [lambda x, b=b: like(_last(b, [*values, x]), x) for b in block.bodies]
    return lax.switch(_count(values, 3), [*branches, lambda x: x], x)


def _vmap(block: Block, x: Array, values: list[Array]) -> Array:
    """Over a dimension of ``x`` and the first of every value that is as long."""
    x = at_least(x, 1)
    axis = block.c % x.ndim
    if x.shape[axis] == 0:
        return _last(block.bodies[0], [*values, x])
    along = [
        0 if v.ndim and v.shape[0] == x.shape[axis] and k % 2 == block.c // 3 % 2 else None
        for k, v in enumerate(values)
    ]
    run = lambda x, *values: _last(block.bodies[0], [*values, x])
    return jax.vmap(run, in_axes=(axis, *along), out_axes=0)(x, *values)


def _remat(block: Block, x: Array, values: list[Array]) -> Array:
    policy = (None, jax.checkpoint_policies.dots_saveable)[block.c % 2]
    return jax.checkpoint(lambda x: _last(block.bodies[0], [*values, x]), policy=policy)(x)


def _jit(block: Block, x: Array, values: list[Array]) -> Array:
    return jax.jit(lambda x: _last(block.bodies[0], [*values, x]))(x)


def _slope(x: Array) -> Array:
    return jnp.full(x.shape, 0.5, x.dtype) if is_complex(x) else jnp.cos(x)


def _custom_vjp(block: Block, x: Array, values: list[Array]) -> Array:
    """The last value, differentiated as a sine; it sees ``x`` and integers only."""
    x = as_float(x)
    fun = jax.custom_vjp(lambda x: like(_last(block.bodies[0], [jnp.arange(4, dtype=jnp.int32), x]), x))
    fun.defvjp(lambda x: (fun(x), x), lambda x, g: (g * _slope(x),))
    return fun(x)


def _custom_jvp(block: Block, x: Array, values: list[Array]) -> Array:
    x = as_float(x)
    fun = jax.custom_jvp(lambda x: like(_last(block.bodies[0], [jnp.arange(4, dtype=jnp.int32), x]), x))
    fun.defjvp(lambda primals, tangents: (fun(*primals), _slope(primals[0]) * tangents[0]))
    return fun(x)


BLOCKS: dict[str, Callable[[Block, Array, list[Array]], Array]] = {
    "scan": _scan,
    "fori": _fori,
    "while": _while,
    "cond": _cond,
    "switch": _switch,
    "vmap": _vmap,
    "remat": _remat,
    "jit": _jit,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
}


# --- drawing -------------------------------------------------------------------------------------------------


def bodies(depth: int) -> st.SearchStrategy[Body]:
    small = st.integers(0, 4)
    op = st.builds(Op, st.sampled_from(sorted(OPERATIONS)), small, small, st.integers(0, 23))
    if not depth:
        return st.lists(op, min_size=1, max_size=3).map(tuple)
    inner = st.tuples(bodies(depth - 1), bodies(depth - 1))
    block = st.builds(Block, st.sampled_from(sorted(BLOCKS)), small, st.integers(0, 11), inner)
    return st.lists(st.one_of(op, block, op), min_size=2, max_size=5).map(tuple)


def programs() -> st.SearchStrategy[Program]:
    shape = st.one_of(*(st.tuples(*[st.sampled_from(SIZES)] * rank) for rank in (2, 1, 3, 0)))
    return st.builds(
        Program,
        leaves=st.lists(st.tuples(shape, st.sampled_from(DTYPES)), min_size=1, max_size=3).map(tuple),
        rows=st.sampled_from((1, 4, 6, 8)),
        body=bodies(2),
        gradient=st.booleans(),
        x64=st.booleans(),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """``seed`` of a random plan; None: the planner's own."""

    program: Program
    mesh: tuple[int, ...]
    seed: int | None


def runs() -> st.SearchStrategy[Run]:
    seeds = st.one_of(st.none(), st.integers(0, 2**16), st.integers(0, 2**16))
    return st.builds(Run, program=programs(), mesh=st.sampled_from(MESHES), seed=seeds)


def drawn(count: int, seed: int) -> list[Run]:
    """``count`` runs; the same for the same seed."""
    found: list[Run] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(runs())
    def collect(run: Run) -> None:
        found.append(run)

    collect()
    return found


def run(job: Run) -> o.Outcome:
    """In this process."""
    return _outcome(job, settle=lambda: _outcome(_twin(job)).kind in (o.EQUAL, o.COLLECTIVES))


def _twin(job: Run) -> Run:
    return replace(job, program=replace(job.program, twin=True, x64=True))


def _outcome(job: Run, settle: Callable[[], bool] = lambda: False) -> o.Outcome:
    with jax.enable_x64(job.program.x64):
        args = job.program.arguments()
        inside = narrowest_float(job.program, args) if job.program.twin else None  # some operations make float32
        return o.outcome(job.program, args, mesh=job.mesh, seed=job.seed, settle=settle, least_norm=1.0, inside=inside)
