"""Two steps as planned on mesh (2, 4), and in two stages, the second from the first's state, equal those of plain
``jax.jit``. Where the collectives are not the plan's, the table says so, and why a step has no stages.

Tolerances: 2e-5 of each leaf's max-norm (at least of 1e-2) in float32, 1e-9 (of 1) in float64.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.errors import AutoparError, MicrobatchError
from autopar.runtime.one_program import executor
from tests.clusters import SLOW_8
from tests.compare import assert_close, assert_same_collectives
from tests.ecosystem.step import Made, Step

MODULES = """
flax_linen
flax_nnx
equinox_models
haiku_models
optimizers
odes
solvers
samplers
distributions
graphs
agents
evolution
keras_models
huggingface
plain_jax
microbatched
""".split()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CASES = [
        pytest.param(step, id=f"{name}-{step.name}")
        for name in MODULES
        for step in importlib.import_module(f"tests.ecosystem.{name}").STEPS
    ]

REFUSED = ("has 1 layers", "a layer cannot be differentiated by itself")
"""Why a step cannot have two stages."""

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def lowering_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each abstract lowering."""
    taken: list[float] = []
    lower = executor.lower

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        lowered = lower(*args, **kwargs)
        taken.append(time.perf_counter() - started)
        return lowered

    monkeypatch.setattr(executor, "lower", timed)
    return taken


def _host(tree: Any) -> Any:
    """NumPy copies, which outlive donation; keys stay keys."""
    is_key = lambda x: hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: x.copy() if is_key(x) else np.array(x), tree)


def _made(step: Step) -> tuple[Made, tuple[Any, ...]]:
    """The step and its arguments, widened to 64 bits where it asks for them: packages make float32 parameters."""
    made = step.make()
    wide = lambda x: step.float64 and getattr(x, "dtype", None) == np.float32
    own = lambda x: x.copy() if isinstance(x, jax.Array) else x  # for the state is donated
    return made, jax.tree.map(lambda x: x.astype(float) if wide(x) else own(x), (made.state, *made.rest))


def _compare(planned: Callable[..., Any], plain: Callable[..., Any], args: tuple[Any, ...], close: Any) -> None:
    """Two steps of each, equal."""
    got_state, want_state, rest = args[0], args[0], args[1:]
    for _ in range(2):
        want = plain(want_state, *rest)  # first, for the planned step donates its state
        got = planned(got_state, *rest)
        assert_close(_host(got), _host(want), **close)
        got_state, want_state = got[0], want[0]


@pytest.mark.parametrize("step", CASES)
def test_equals_plain(step: Step, lowering_s: list[float], record_property: Callable[[str, object], None]) -> None:
    record_property("packages", " ".join(step.packages))
    with jax.enable_x64(True) if step.float64 else contextlib.nullcontext():
        made, args = _made(step)
        pipelined = "stages" in step.options
        mesh = {} if pipelined else {"mesh": (2, 4)}
        planned = autopar.parallelize(made.step, cluster=SLOW_8, donate_argnums=0, **mesh, **step.options)
        started = time.perf_counter()
        if step.refused:
            with pytest.raises(AutoparError, match=step.refused) as refusal:
                planned.plan(*args)
            record_property("result", f"refused: {refusal.value}".splitlines()[0])
            return
        plan = planned.plan(*args)
        record_property("plan_s", time.perf_counter() - started - sum(lowering_s))
        if not pipelined:
            record_property("lowering_s", sum(lowering_s))
        _compare(planned, jax.jit(made.step), args, step.close)
        record_property("result", "equal")
        if not pipelined and not step.rounding:  # on CPU, XLA moves bfloat16 as float32
            try:
                assert_same_collectives(plan, planned.compiled()._compiled.as_text())
            except AssertionError as other:
                record_property("result", f"equal, other collectives: {str(other).splitlines()[0]}")


@pytest.mark.parametrize("step", [case for case in CASES if not case.values[0].options])
def test_two_stages_equal_plain(step: Step, record_property: Callable[[str, object], None]) -> None:
    record_property("packages", " ".join(step.packages))
    record_property("layout", "2 stages")
    with jax.enable_x64(True) if step.float64 else contextlib.nullcontext():
        made, args = _made(step)
        batch = tuple(range(1, len(args))) if made.splits else None
        planned = autopar.parallelize(made.step, cluster=SLOW_8, donate_argnums=0, stages=2, workers=1)
        result, started = "equal", time.perf_counter()
        try:
            try:
                planned = planned.with_options(num_microbatches=2, batch_argnums=batch)
                planned.plan(*args)
            except MicrobatchError as why:
                result = f"equal, in one microbatch: {why}".splitlines()[0]
                planned = planned.with_options(num_microbatches=1, batch_argnums=())
                planned.plan(*args)
        except AutoparError as refusal:
            record_property("result", f"refused: {refusal}".splitlines()[0])
            assert any(re.search(reason, str(refusal)) for reason in REFUSED), refusal
            return
        record_property("plan_s", time.perf_counter() - started)
        _compare(planned, jax.jit(made.step), args, step.close)
        record_property("result", result)
