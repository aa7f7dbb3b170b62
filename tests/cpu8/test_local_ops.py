"""Every operator under its strategies on 8 CPU devices equals itself unsharded; effects of callbacks happen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from autopar.frontend.trace import trace
from autopar.ir.errors import RuleError
from autopar.primitives import rule_for
from autopar.runtime.one_program.local import FAMILIES, LOCAL, lower_local
from autopar.runtime.one_program.local.context import LocalContext
from tests.cpu8.op_harness import AXES, Strategy, check_case, mesh, specs
from tests.op_case import Case
from tests.op_cases_dense import CASES as DENSE
from tests.op_cases_indexing import CASES as INDEXING
from tests.shares import each

LONG = ("random_bits uint16", "random_bits uint64", "random_gamma", "conv gradients stride 2", "conv gradients same")
"""Seconds each, for what the quick ones have too: random_bits of 8 and 32 bits, random_gamma of a batch of keys, other
gradients of convolutions."""
CASES = (*DENSE, *INDEXING)
assert {*LONG} <= {c.name for c in CASES}


@pytest.mark.parametrize(
    "c", each(2, (pytest.param(c, id=c.name, marks=[pytest.mark.full] if c.name in LONG else []) for c in CASES))
)
def test_sharded_equals_unsharded(c: Case) -> None:
    assert check_case(c) >= 1


def test_no_local_lowering_is_in_two_families() -> None:
    assert sum(len(f.LOCAL) for f in FAMILIES) == len(LOCAL)


def _run_replicated(fun: Callable[..., Any], x: Any) -> None:
    """Runs every equation of ``fun(x)`` on all devices, unsplit."""
    traced = trace(fun, x)

    def run(value: Any) -> Any:
        env: dict[int, Any] = dict(zip(traced.graph.inputs, (value,), strict=True))
        for node, eqn in zip(traced.graph.nodes, traced.jaxpr.jaxpr.eqns, strict=True):
            rule = rule_for(node)
            operand_specs, result_specs = specs(rule, Strategy(factor_axes={}))
            context = LocalContext(
                axis_sizes=dict(AXES),
                factor_axes={},
                operand_specs=operand_specs,
                result_specs=result_specs,
                rule=rule,
                node=node,
            )
            operands = [env[o] if isinstance(o, int) else o.value for o in node.operands]
            env.update(zip(node.results, lower_local(context, eqn, *operands), strict=True))
        return value

    jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False))(x)
    jax.effects_barrier()


@pytest.mark.parametrize("call", [jax.debug.callback, lambda f, x: io_callback(f, None, x)], ids=["debug", "io"])
def test_a_callback_with_effects_runs_once(call: Callable[..., Any]) -> None:
    seen: list[float] = []

    def step(x: Any) -> Any:
        call(lambda v: seen.append(float(v)), x.sum())
        return x

    _run_replicated(step, np.ones(4, np.float32))
    assert seen == [4.0]


def test_debug_print_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("sum {}", x.sum())
        return x

    _run_replicated(step, np.ones(4, np.float32))
    assert capsys.readouterr().out == "sum 4.0\n"


def test_callbacks_that_cannot_run_once_are_refused_by_name() -> None:
    shape = jax.ShapeDtypeStruct((), np.float32)
    with pytest.raises(RuleError, match=r"io_callback \(node \d+, .*\): a callback with side effects would run once"):
        _run_replicated(lambda x: io_callback(lambda v: v, shape, x.sum()), np.ones(4, np.float32))
    with pytest.raises(RuleError, match=r"io_callback \(node \d+, .*\): an ordered callback cannot run on several"):
        _run_replicated(lambda x: io_callback(print, None, x.sum(), ordered=True), np.ones(4, np.float32))
