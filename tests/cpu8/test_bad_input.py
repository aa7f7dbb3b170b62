"""What a user can get wrong, and what is said about it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.errors import (
    ArgumentError,
    AutoparError,
    ClusterError,
    MicrobatchError,
    OptionError,
    PlanFormatError,
    PlanMismatchError,
    RuleError,
    ShardingError,
    TraceError,
)
from autopar.ir.presets import cluster_from_text


def step(w: Any, x: Any) -> Any:
    loss, grad = autopar.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, loss


W = np.ones((16, 6), np.float32)
X = np.ones((8, 16), np.float32)


CPUS = cluster_from_text("cpu:8")
NO_HOSTS = replace(CPUS, groups=(replace(CPUS.groups[0], hosts=0),))


def refused(kind: type[AutoparError], text: str, call: Callable[[], Any]) -> None:
    """``call`` raises exactly ``kind`` with ``text`` in its message."""
    with pytest.raises(kind, match=re.escape(text)) as error:
        call()
    assert type(error.value) is kind


# --- the step and its arguments ---------------------------------------------------------------------------------


def test_a_step_that_cannot_be_traced() -> None:
    def branches(w: Any, x: Any) -> Any:
        return w if x.sum() > 0 else -w

    call = lambda: autopar.parallelize(branches, mesh=(8,))(W, X)
    refused(TraceError, "branches cannot be traced: TracerBoolConversionError: Attempted boolean conversion", call)
    refused(TraceError, "autopar plans the jaxpr that jax.jit sees: make the step work under jax.jit first", call)


def test_arguments_that_are_no_arrays() -> None:
    s = autopar.parallelize(lambda w, x: w, mesh=(8,))
    refused(TraceError, "<lambda>: args[0]['name'] is 'adam', a str, where an array or", lambda: s({"name": "adam"}, X))
    s = autopar.parallelize(lambda w, x, sizes: w, mesh=(8,), static_argnums=2)
    refused(TraceError, "args[2] is static (static_argnums), but a list cannot be hashed", lambda: s(W, X, [1]))


def test_shapes_where_a_call_needs_arrays() -> None:
    s = autopar.parallelize(step, mesh=(8,))
    text = "step: args[0]['up'] is a ShapeDtypeStruct: a call needs arrays; step.plan takes shapes"
    refused(ArgumentError, text, lambda: s({"up": jax.ShapeDtypeStruct((16, 6), "float32"), "x": W}, X))
    assert s.last_plan is None


def test_a_constraint_without_a_mesh() -> None:
    def constrained(w: Any, x: Any) -> Any:
        return step(w, jax.lax.with_sharding_constraint(x, P("data")))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    s = autopar.parallelize(constrained, mesh=mesh)
    text = "constrained cannot be traced: a PartitionSpec in with_sharding_constraint has no mesh that its axes are of"
    refused(TraceError, text, lambda: s.plan(W, X))
    with jax.set_mesh(mesh):
        assert s.plan(W, X).in_specs[1] == P("data", None)


def test_transforming_a_parallelized_step() -> None:
    s = autopar.parallelize(step, mesh=(8,))
    text = "step is parallelized, and cannot be differentiated or batched as a whole (args[0] is a "
    refused(TraceError, text, lambda: jax.grad(lambda w: s(w, X)[1])(W))
    refused(TraceError, text, lambda: jax.vmap(lambda w: s(w, X))(np.stack([W, W])))


def test_closing_over_a_traced_value() -> None:
    text = "<lambda> closes over a value of the jax.jit (or other transformation) that calls it: pass that value as "
    refused(TraceError, text, lambda: jax.jit(lambda w, x: autopar.parallelize(lambda x: x @ w, mesh=(8,))(x))(W, X))


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"method": "zero9"}, OptionError, "method: 'zero9' is not one of auto, data_parallel, zero2, zero3, tens"),
        ({"forbid": ("gather",)}, OptionError, "forbid: 'gather' is not one of all-reduce, all-gather, reduce-"),
        ({"solver": "cplex"}, OptionError, "solver: 'cplex' is not one of auto, highs, cbc"),
        ({"memory_bytes": 0}, OptionError, "memory_bytes must be above 0, got 0"),
        ({"time_limit_s": -1}, OptionError, "time_limit_s must be above 0, got -1"),
        ({"donate_argnums": 0, "static_argnums": (0, 1)}, OptionError, "argument 0 is in donate_argnums and in stat"),
        ({"constraints": {"args[0]": 3}}, OptionError, "constraints['args[0]'] is 3; give a jax.sharding.Partition"),
        ({"num_microbatches": 0}, OptionError, "num_microbatches: 0 is no number of microbatches; at least 1"),
        ({"mesh": "2by4"}, ClusterError, "mesh '2by4' is not a shape; write its axis sizes as in 8, 2x4 or 2x2x2"),
        ({"cluster": "dgx-z100"}, ClusterError, "unknown cluster 'dgx-z100'"),
        ({"cluster": NO_HOSTS}, ClusterError, "cluster cpu:8, group 0: hosts, devices_per_host, nics_per_host and"),
    ],
)
def test_options_are_refused_at_once(options: dict[str, Any], kind: type[AutoparError], text: str) -> None:
    refused(kind, text, lambda: autopar.parallelize(step, **options))
    text = "meshes: parallelize has no such option (did you mean submeshes?)"
    refused(OptionError, text, lambda: autopar.parallelize(step, meshes=(8,)))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"mesh": (4, 4)},
            ClusterError,
            "mesh 4x4 needs 16 devices; cluster cpu:8 has 8. Use a smaller mesh or a larger cluster",
        ),
        ({"mesh": (0, 8)}, ClusterError, "mesh 0x8: every axis needs a size of at least 1"),
        ({"batch_axis": "data"}, OptionError, "batch_axis 'data' is no axis of the mesh 2x4 (x, y)"),
        (
            {"constraints": {"args[0]": P(None, "y")}},
            ShardingError,
            "args[0]: cannot shard dimension 1 (size 6) over mesh axis \"y\" (size 4), as pin 'args[0]' says: not "
            "divisible. ",
        ),
        (
            {"constraints": {"args[1]": P("data")}},
            ShardingError,
            "pin 'args[1]': PartitionSpec('data') names axis 'data'; the mesh is 2x4 (x, y). ",
        ),
        (
            {"constraints": {"args[0].params": P("x")}},
            ShardingError,
            "pin 'args[0].params' matches no argument or result: there are args[0], args[1] and 2 more. ",
        ),
        (
            {"constraints": {"out[1]": P("x")}},
            ShardingError,
            "out[1]: pin 'out[1]' has 1 dimensions, PartitionSpec('x'), for a value of rank 0, float32[]. ",
        ),
        (
            {"num_microbatches": 16},
            MicrobatchError,
            "args[1]: the batch has 8 examples, fewer than num_microbatches=16. Use a batch of at least 16, or "
            "num_micro",
        ),
        (
            {"num_microbatches": 3},
            MicrobatchError,
            "args[1]: the batch has 8 examples, which num_microbatches=3 does not divide. Use num_microbatches=2 or 4, "
            "or",
        ),
        (
            {"batch_argnums": (5,), "num_microbatches": 2},
            MicrobatchError,
            "batch_argnums names argument 5, but the call has 2 positional arguments.",
        ),
    ],
)
def test_options_that_do_not_fit_the_step(options: dict[str, Any], kind: type[AutoparError], text: str) -> None:
    refused(kind, text, lambda: autopar.parallelize(step, **{"mesh": (2, 4), **options}).plan(W, X))


def test_paths_and_rules_of_another_type() -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    text = "path: None names no file; give a str or an os.PathLike"
    for call in (lambda: autopar.load_plan(None), lambda: plan.save(None), lambda: plan.report(None)):  # type: ignore[arg-type]
        refused(OptionError, text, call)
    text = "sharding rule 3: expected exactly one '->'; write it like"
    refused(RuleError, text, lambda: autopar.sharding_rule("x", 3))  # type: ignore[arg-type]


# --- plans ------------------------------------------------------------------------------------------------------


def test_a_plan_for_more_devices_than_there_are() -> None:
    s = autopar.parallelize(step, mesh=(4, 4), cluster="cpu:16")
    plan = s.plan(W, X)  # planning needs no devices
    text = (
        "the plan's mesh 4x4 (x, y) needs 16 devices; this process sees 8 (cpu). Plan for the devices that are there, "
        "or, "
        "to try it on a CPU, set JAX_NUM_CPU_DEVICES=16"
    )
    refused(ClusterError, text, lambda: s(W, X))
    refused(ClusterError, text, lambda: autopar.parallelize(step, plan=plan)(W, X))


def test_fewer_devices_than_a_plan_has() -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    text = "the plan's mesh 8 (x) needs 8 devices; 2 were given. Plan for as many"
    refused(ClusterError, text, lambda: plan.jax_mesh(devices=jax.devices()[:2]))


def test_what_a_plan_of_the_other_kind_does_not_have() -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    text = "the plan of step is of one program, without stages"
    for call in (lambda: plan.stages, lambda: plan.program, lambda: plan.simulate()):
        refused(PlanMismatchError, text, call)


def test_a_plan_was_made_with_other_degrees() -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    text = "zero, tensor, sequence, experts: the plan that is given was made with method auto; mesh 8; axes x; leave it"
    refused(OptionError, text, lambda: autopar.parallelize(step, plan=plan, tensor=2))


def test_a_plan_for_other_shapes_or_another_function() -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    s = autopar.parallelize(step, plan=plan)
    refused(
        PlanMismatchError,
        "the plan was made for other arguments: plan has args[1]: float32[8,16], step got args[1]: float32[16,16]. "
        "Plan ",
        lambda: s(W, np.ones((16, 16), np.float32)),
    )
    refused(PlanMismatchError, "the plan was made for", lambda: s(W, X.astype(jnp.bfloat16)))

    def other(w: Any, x: Any) -> Any:
        return w * 2, jnp.mean(x)

    refused(
        PlanMismatchError,
        "the plan was made for another function (planned 'step', given 'other'): the first operator that differs is "
        "mul",
        lambda: autopar.parallelize(other, plan=plan)(W, X),
    )
    refused(
        PlanMismatchError,
        "the plan was made for 2 argument leaves; <lambda> got 1",
        lambda: autopar.parallelize(lambda w: w, plan=plan)(W),
    )


def test_init_without_a_plan_or_for_another_state() -> None:
    s = autopar.parallelize(step, mesh=(8,))
    refused(PlanMismatchError, "step.init needs a plan: call step.plan(*shapes) first", lambda: s.init(lambda: W))
    s.plan(W, X)
    text = "step.init: no argument of the planned step has the tree, shapes and dtypes that "
    refused(PlanMismatchError, text, lambda: s.init(lambda: jnp.zeros((3, 3))))
    refused(PlanMismatchError, text, lambda: s.init(lambda: jnp.zeros(W.shape, jnp.bfloat16)))
    text = "that <lambda> returns: args[0] is float32[16,6] in the plan, and bfloat16[16,6] here. Plan with the"
    refused(PlanMismatchError, text, lambda: s.init(lambda: jnp.zeros(W.shape, jnp.bfloat16)))
    text = "<lambda> returns: beside args[0] of the plan it lacks a leaf by itself and has ['b'], ['w']. Plan with the"
    refused(PlanMismatchError, text, lambda: s.init(lambda: {"w": jnp.asarray(W), "b": jnp.zeros(3)}))


def test_a_plan_from_a_file_holds_no_trees(tmp_path: Path) -> None:
    plan = autopar.parallelize(step, mesh=(8,)).plan(W, X)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load_plan(tmp_path / "plan.json")
    text = "plan of 'step' was loaded from a file, which holds paths but no pytrees: give it to its step first"
    refused(PlanMismatchError, text, lambda: loaded.in_specs)
    assert autopar.parallelize(step, plan=tmp_path / "plan.json").plan(W, X).in_specs == plan.in_specs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text[: len(text) // 2], "damaged JSON: "),
        (lambda text: "not a plan", "damaged JSON: Expecting value at line 1 column 1 (of 10 characters)"),
        (lambda text: "{}", "is not a plan file: no schema_version at its top level"),
        (
            lambda text: json.dumps({**json.loads(text), "schema_version": 99}),
            "was written by a newer autopar (schema 99; this one reads ",
        ),
    ],
)
def test_damaged_and_newer_plan_files(tmp_path: Path, change: Any, text: str) -> None:
    path = tmp_path / "plan.json"
    autopar.parallelize(step, mesh=(8,)).plan(W, X).save(path)
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    for call in (lambda: autopar.load_plan(path), lambda: autopar.parallelize(step, plan=path)):
        refused(PlanFormatError, f"{path}: {text}", call)
    assert path.read_bytes() == before


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    refused(PlanFormatError, f"{path}: cannot be read: No such file or directory", lambda: autopar.load_plan(path))
