"""One run: a case, in a form, under a plan. Runs are drawn by seed, so that each group has its share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import outcome as o
from tests.jax_cases.cases import cases_by_group, cases_by_name
from tests.jax_cases.forms import FORMS, NoFormError, Program, in_form, with_specials
from tests.worker import Worker

MESHES = ((2, 4), (8,))
OWN_PLAN = 4
"""One run in so many is of the planner's own plan, the others of random ones."""
SPECIAL = 6
"""One run in so many has NaNs and infinities in its arguments."""
LIMIT_S = 60.0
DRAWS = 40
"""Draws after which a group is left: most forms of some do not run in plain JAX."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """``seed`` of a random plan; None: the planner's own. ``specials``: True where floats have NaNs and infinities."""

    group: str
    case: str
    form: str
    mesh: tuple[int, ...]
    seed: int | None
    specials: bool


def drawn(group: str, rng: random.Random) -> Run:
    case = rng.choice(cases_by_group()[group])
    seed = None if rng.randrange(OWN_PLAN) == 0 else rng.randrange(2**16)
    return Run(
        group=group,
        case=case.name,
        form=rng.choice(FORMS),
        mesh=rng.choice(MESHES),
        seed=seed,
        specials=rng.randrange(SPECIAL) == 0,
    )


def run(job: Run) -> o.Outcome:
    """In this process."""
    with jax.enable_x64(True):
        try:
            fun, args = in_form(cases_by_name()[job.case], job.form)
        except NoFormError as error:
            return o.Outcome(kind=o.SKIPPED, detail=str(error))
        except Exception as error:  # noqa: BLE001 -- not even its shapes can be found
            return o.Outcome(kind=o.SKIPPED, detail=f"{type(error).__name__}: {error}"[:300])
        if job.specials:
            args = with_specials(args)
        found = o.outcome(fun, args, mesh=job.mesh, seed=job.seed, settle=lambda: _wide_equal((fun, args), job))
    return found


def _wide_equal(program: Program, job: Run) -> bool:
    """Whether the case of float64 arguments, where there is one, comes out right: then rounding decided."""
    fun, args = program
    wide = tuple(_widened(x) for x in args)
    if all(x.dtype == w.dtype for x, w in zip(args, wide)):
        return False
    results = jax.tree.leaves(jax.eval_shape(fun, *wide))
    if any(r.dtype != _widened_dtype(r.dtype) for r in results):
        return False
    return o.outcome(fun, wide, mesh=job.mesh, seed=job.seed).kind in (o.EQUAL, o.COLLECTIVES)


def _widened_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _widened(x: Any) -> Any:
    return x.astype(_widened_dtype(x.dtype))


def counted_runs(groups: tuple[str, ...], count: int, seed: int, worker: Worker) -> Iterator[tuple[Run, o.Outcome]]:
    """``count`` runs that plain JAX can do, of each group in turn."""
    rng = random.Random(seed)
    left = list(groups)
    done = 0
    while left and done < count:
        for group in tuple(left):
            found = _counted(group, rng, worker)
            if found is None:
                left.remove(group)
                continue
            yield found
            done += 1
            if done == count:
                return


def _counted(group: str, rng: random.Random, worker: Worker) -> tuple[Run, o.Outcome] | None:
    for _ in range(DRAWS):
        job = drawn(group, rng)
        found = o.outcome_within(worker, job, LIMIT_S)
        if found.kind != o.SKIPPED:
            return job, found
    return None


def shares(parts: int) -> tuple[tuple[str, ...], ...]:
    """All groups, dealt into ``parts`` at random but always alike."""
    groups = list(cases_by_group())
    random.Random(0).shuffle(groups)
    return tuple(tuple(groups[k::parts]) for k in range(parts))
