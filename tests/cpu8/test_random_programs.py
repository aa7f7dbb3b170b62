"""Random plans of random programs: the numbers of the unsharded program, the collectives of the plan.

The grammar is `tests.models.random_programs`; shapes are often such that no mesh axis divides them. Examples
are derandomised: the same ones each run.
"""

from __future__ import annotations

import contextlib

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import autopar
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives
from tests.models.random_programs import OPERATIONS, Instruction, Program
from tests.random_plans import random_strategies
from tests.shares import each

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def instructions() -> st.SearchStrategy[Instruction]:
    small = st.integers(0, 3)
    return st.tuples(st.sampled_from(sorted(OPERATIONS)), small, small, st.integers(0, 23))


def programs() -> st.SearchStrategy[Program]:
    shape = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).map(tuple)
    return st.builds(
        Program,
        shapes=st.tuples(shape, shape),
        rows=st.sampled_from((1, 4, 6, 8)),
        instructions=st.lists(instructions(), min_size=1, max_size=6).map(tuple),
        gradient=st.booleans(),
    )


def check(program: Program, mesh: tuple[int, ...], seed: int | None) -> None:
    """Sharded equals unsharded in float64, and the executable does what the plan lists; ``seed`` None: a free plan."""
    with jax.enable_x64(True):
        args = program.arguments(0, "float64")
        step = autopar.parallelize(program, mesh=mesh, cluster=SLOW_8)
        with contextlib.nullcontext() if seed is None else random_strategies(seed):
            step.plan(*args)
        assert_close(step(*args), jax.jit(program)(*args), 1e-9, least_norm=1.0)
        assert_same_collectives(step.plan(*args), step.lower(*args).compile().as_text())


# Without shrinking: a failure comes at once, and its program has six instructions at most.
BOUNDED = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(BOUNDED, max_examples=400)


@BOUNDED
@given(program=programs(), mesh=st.sampled_from(MESHES), seed=st.integers(0, 2**16))
def test_random_plans_of_random_programs(program: Program, mesh: tuple[int, ...], seed: int) -> None:
    check(program, mesh, seed)


@settings(BOUNDED, max_examples=8)
@given(program=programs(), mesh=st.sampled_from(MESHES))
def test_free_plans_of_random_programs(program: Program, mesh: tuple[int, ...]) -> None:
    check(program, mesh, None)


@pytest.mark.full
@settings(BOUNDED, max_examples=15)
@given(program=programs(), mesh=st.sampled_from(MESHES))
def test_more_free_plans_of_random_programs(program: Program, mesh: tuple[int, ...]) -> None:
    check(program, mesh, None)


@pytest.mark.full
@MANY
@given(program=programs(), mesh=st.sampled_from(MESHES), seed=st.integers(0, 2**16))
def test_many_random_plans_of_random_programs(program: Program, mesh: tuple[int, ...], seed: int) -> None:
    check(program, mesh, seed)


@pytest.mark.parametrize("name", each(2, sorted(OPERATIONS)))
def test_each_operation_under_a_random_plan(name: str) -> None:
    """One program per operation, so that none is left to chance: of an even and an uneven argument, differentiated."""
    steps: tuple[Instruction, ...] = (("unary", 0, 0, 0), (name, 0, 1, 1), (name, 2, 0, 8), ("binary", 0, 1, 0))
    program = Program(shapes=((8, 16), (6, 16)), rows=8, instructions=steps, gradient=True)
    check(program, (2, 4), len(name))
