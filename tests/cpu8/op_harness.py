"""Runs one operator case under many strategies on 8 CPU devices and compares with the unsharded operator.

In: a `Case`. Out: nothing, or an AssertionError that names case, node and strategy. For a node's rule the strategies
are: each shardable factor over each axis and over both, pairs of factors, and each linear group as partial sums
(with and without a sharded factor); at most ``Case.limit`` a node, the simplest first. All strategies of a case
are compiled together, for compiling is what takes the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autopar.frontend.trace import Traced, trace
from autopar.ir.graph import Constant, Node
from autopar.ir.sharding import OpShardingRule, ShardingSpec
from autopar.jax_compat import bind
from autopar.primitives import rule_for
from autopar.runtime.one_program.local import lower_local
from autopar.runtime.one_program.local.context import LocalContext
from tests.op_case import RTOL, Case, example_args, needs_x64, nodes_under_test

AXES = {"x": 2, "y": 4}
"""Compiler options that halve the time of compiling."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Mesh axes per factor, and operands that hold partial sums over ``unreduced``."""

    factor_axes: dict[str, tuple[str, ...]]
    group: tuple[int, ...] = ()
    unreduced: tuple[str, ...] = ()


def check_case(c: Case) -> int:
    """Checks every equation of ``c`` that is to be tested; returns how many strategies ran."""
    args = example_args(c)
    with jax.enable_x64(needs_x64(c, args)):
        traced = trace(c.fun, *args)
        values = _run_unsharded(traced, args)
        nodes = nodes_under_test(traced.graph.nodes, c)
        assert nodes, f"{c.name}: no equation of {c.primitive}"
        runs: list[tuple[Node, OpShardingRule, Strategy]] = []
        for node in nodes:
            rule = rule_for(node)
            rule.verify(tuple(t.shape for t in node.operand_types), tuple(t.shape for t in node.result_types))
            runs += [(node, rule, s) for s in strategies(rule, c.limit)]
        got = _run_sharded(traced, values, runs)
        for (node, rule, strategy), results in zip(runs, got, strict=True):
            where = f"{c.name}: {node} {node.params} under {strategy}\n{rule}"
            for result, value, var in zip(results, node.results, node.result_types, strict=True):
                _compare(where, result, values[value], c.rtol, var.dtype)
    return len(runs)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclass(frozen=True)
class _Key:
    """A key array's data, on the host (jax would compile a program to split a key array over devices)."""

    data: Any
    impl: Any


def _to_host(x: Any) -> Any:
    return _Key(np.asarray(jax.random.key_data(x)), jax.random.key_impl(x)) if _is_key(x) else np.asarray(x)


def _run_unsharded(traced: Traced, args: tuple[Any, ...]) -> dict[int, Any]:
    """Every value of the graph, by id, on the host."""

    def run(*flat: Any) -> dict[int, Any]:
        env: dict[int, Any] = dict(zip(traced.graph.inputs, flat, strict=True))
        for node, eqn in zip(traced.graph.nodes, traced.jaxpr.jaxpr.eqns, strict=True):
            operands = _operands(node, eqn, env)
            env.update(zip(node.results, bind(eqn, *operands), strict=True))
        return env

    values = jax.jit(run)(*traced.jaxpr.consts, *jax.tree.leaves(args))
    return {i: _to_host(value) for i, value in values.items()}


def _operands(node: Node, eqn: Any, env: dict[int, Any]) -> list[Any]:
    return [
        env[o] if isinstance(o, int) else _constant(o, a, a.aval.shape)
        for o, a in zip(node.operands, eqn.invars, strict=True)
    ]


def _constant(operand: Constant, atom: Any, shape: tuple[int, ...]) -> Any:
    """A literal, or a scalar that was broadcast: in ``shape``, a shard's or the whole."""
    return atom.val if hasattr(atom, "val") else jnp.full(shape, operand.value, atom.aval.dtype)


# --- strategies ------------------------------------------------------------------------------------------


def shardable(rule: OpShardingRule) -> list[str]:
    """Factors that some mesh axis may split: major wherever they occur, and not whole."""
    out = []
    for factor in rule.factors:
        minor = any(factor.name in dim[1:] for t in (*rule.operands, *rule.results) for dim in t)
        if factor.kind != "whole" and not minor:
            out.append(factor.name)
    return out


def strategies(rule: OpShardingRule, limit: int) -> list[Strategy]:
    """At most ``limit`` strategies, the simplest first; the replicated one where there is no other."""
    out = list(itertools.islice(_all_strategies(rule), limit))
    return out or [Strategy(factor_axes={})]


def _all_strategies(rule: OpShardingRule) -> Iterator[Strategy]:
    sizes = {f.name: f.size for f in rule.factors}
    names = shardable(rule)

    def fits(name: str, *axes: str) -> bool:
        return sizes[name] % math.prod(AXES[a] for a in axes) == 0

    singles = [(n, (a,)) for n in names for a in ("y", "x") if fits(n, a)]
    first: dict[str, tuple[str, ...]] = {}
    for name, axes in singles:
        first.setdefault(name, axes)
    yield from (Strategy(factor_axes={n: a}) for n, a in first.items())
    yield from (Strategy(factor_axes={}, group=g, unreduced=("x",)) for g in rule.linear)
    both = [n for n in names if fits(n, "x", "y")]
    orders = (("x", "y"), ("y", "x"))
    yield from (Strategy(factor_axes={n: orders[k % 2]}) for k, n in enumerate(both))
    pairs = [
        {a: ("x",), b: ("y",)} for a, b in itertools.permutations(names, 2) if fits(a, "x") and fits(b, "y")
    ]  # fmt: skip
    yield from (Strategy(factor_axes=p) for p in pairs[:3])
    split = [n for n in names if fits(n, "y")]
    for group, name in zip(rule.linear, itertools.cycle(split)):
        yield Strategy(factor_axes={name: ("y",)}, group=group, unreduced=("x",))
    yield from (Strategy(factor_axes={n: a}) for n, a in singles if a != first[n])
    yield from (Strategy(factor_axes={n: orders[(k + 1) % 2]}) for k, n in enumerate(both))
    yield from (Strategy(factor_axes=p) for p in pairs[3:])


def specs(rule: OpShardingRule, s: Strategy) -> tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]]:
    """Shardings of operands and results under a strategy."""

    def dims(tensor: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(s.factor_axes.get(dim[0], ()) if dim else () for dim in tensor)

    kinds = {f.name: f.kind for f in rule.factors}
    sums = tuple(a for name, axes in s.factor_axes.items() if kinds[name] == "sum" for a in axes)
    operands = tuple(
        ShardingSpec(dims=dims(t), unreduced=s.unreduced if i in s.group else ()) for i, t in enumerate(rule.operands)
    )

    def partial(tensor: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """Mesh axes of sums over factors that the result lacks."""
        return tuple(a for a in sums if not any(a in s.factor_axes.get(n, ()) for dim in tensor for n in dim))

    return operands, tuple(ShardingSpec(dims=dims(t), unreduced=s.unreduced + partial(t)) for t in rule.results)


# --- running ---------------------------------------------------------------------------------------------


def mesh() -> Mesh:
    """The (2, 4) mesh of CPU devices."""
    return Mesh(np.array(jax.devices()[:8]).reshape(tuple(AXES.values())), tuple(AXES))


def _partition_spec(spec: ShardingSpec) -> P:
    """Partial sums travel with a leading dimension of one element per shard."""
    return P(*((spec.unreduced,) if spec.unreduced else ()), *spec.dims)


def _parts(value: Any, shards: int, rng: np.random.Generator) -> Any:
    """``shards`` random parts whose sum is ``value``, along a new leading dimension."""
    value = np.asarray(value)
    if value.dtype.kind in "iu":
        parts = rng.integers(0, 5, (shards, *value.shape)).astype(value.dtype)
    else:
        parts = rng.normal(size=(shards, *value.shape)).astype(value.dtype)
    parts[0] = value - parts[1:].sum(0, dtype=value.dtype)
    return parts


def _run_sharded(traced: Traced, values: dict[int, Any], runs: list[tuple[Node, OpShardingRule, Strategy]]) -> Any:
    rng = np.random.default_rng(0)
    on = mesh()
    functions, inputs, impls = [], [], []
    for node, rule, strategy in runs:
        eqn = traced.jaxpr.jaxpr.eqns[node.id]
        operand_specs, result_specs = specs(rule, strategy)
        live = [i for i, o in enumerate(node.operands) if isinstance(o, int)]
        shards = math.prod(AXES[a] for a in strategy.unreduced)
        whole = [values[node.operands[i]] for i in live]
        impls.append([v.impl if isinstance(v, _Key) else None for v in whole])
        data = [v.data if isinstance(v, _Key) else v for v in whole]
        inputs.append(
            [_parts(v, shards, rng) if operand_specs[i].unreduced else v for i, v in zip(live, data, strict=True)]
        )
        functions.append(
            jax.shard_map(
                _local(node, eqn, rule, strategy, live),
                mesh=on,
                in_specs=tuple(_partition_spec(operand_specs[i]) for i in live),
                out_specs=tuple(_partition_spec(r) for r in result_specs),
                check_vma=False,
            )
        )

    def run(inputs: list[list[Any]]) -> list[Any]:
        out = []
        for f, arrays, kinds in zip(functions, inputs, impls, strict=True):
            args = [
                a if impl is None else jax.random.wrap_key_data(a, impl=impl)
                for a, impl in zip(arrays, kinds, strict=True)
            ]
            out.append(f(*args))
        return out

    out = jax.jit(run)(inputs)
    return [
        [_combined(r, spec) for r, spec in zip(results, specs(rule, strategy)[1], strict=True)]
        for results, (_, rule, strategy) in zip(out, runs, strict=True)
    ]


def _combined(result: Any, spec: ShardingSpec) -> Any:
    if not spec.unreduced:
        return result
    whole = np.asarray(result)
    return whole.sum(0, dtype=whole.dtype)


def _local(node: Node, eqn: Any, rule: OpShardingRule, strategy: Strategy, live: list[int]) -> Any:
    operand_specs, result_specs = specs(rule, strategy)
    context = LocalContext(
        axis_sizes=dict(AXES),
        factor_axes=strategy.factor_axes,
        operand_specs=operand_specs,
        result_specs=result_specs,
        rule=rule,
        node=node,
    )
    kinds = {f.name: f.kind for f in rule.factors}

    def run(*local: Any) -> tuple[Any, ...]:
        operands = [
            None if i in live else jnp.asarray(_constant(node.operands[i], a, context.operand_shape(i)), a.aval.dtype)
            for i, a in enumerate(eqn.invars)
        ]
        for i, value in zip(live, local, strict=True):
            operands[i] = value[0] if operand_specs[i].unreduced else value
            assert operands[i].shape == context.operand_shape(i)
        results = lower_local(context, eqn, *operands)
        for k, (result, spec) in enumerate(zip(results, result_specs, strict=True)):
            assert result.shape == context.result_shape(k), f"{node}: {result.shape}, not {context.result_shape(k)}"
            assert result.dtype == eqn.outvars[k].aval.dtype, f"{node}: {result.dtype}"
            for name, axes in strategy.factor_axes.items():
                if kinds[name] in ("max", "min") and axes:
                    result = (lax.pmax if kinds[name] == "max" else lax.pmin)(result, axes)
            results[k] = result[None] if spec.unreduced else result
        return tuple(results)

    return run


def _compare(where: str, got: Any, wanted: Any, rtol: float | None, dtype: str) -> None:
    if isinstance(wanted, _Key):
        got, wanted = jax.random.key_data(got), wanted.data
    got, wanted = np.asarray(got), np.asarray(wanted)
    if rtol is None:
        rtol = RTOL.get(dtype, 0.0)
    if got.dtype.kind not in "fc" and got.dtype.kind != "V":
        np.testing.assert_array_equal(got, wanted, err_msg=where)
        return
    got, wanted = (a.astype(np.complex128 if a.dtype.kind == "c" else np.float64) for a in (got, wanted))
    finite = wanted[np.isfinite(wanted)]
    scale = float(np.max(np.abs(finite))) if finite.size else 0.0
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=rtol * scale, equal_nan=True, err_msg=where)
