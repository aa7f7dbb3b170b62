"""Plans as code: what is exported lays a step out as planned, under plain JAX, flax and equinox."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli import main
from autopar.ir.errors import OptionError
from autopar.ir.plan import Plan
from autopar.ir.serde import save_plan
from autopar.report.export import STYLES, exported
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline

OPTIMIZER = optax.adam(1e-2)


def train_step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["layers"][0]["w"] + params["layers"][0]["b"])
        hidden = checkpoint_name(hidden, "hidden")
        return jnp.mean((hidden @ params["layers"][1]["w"] + params["layers"][1]["b"] - batch["y"]) ** 2)

    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "layers": [
            {"w": jax.random.normal(keys[i], (32, 32)) / 6, "b": jnp.zeros(32)}
            for i in range(2)
        ]
    }  # fmt: skip
    batch = {"x": jax.random.normal(keys[2], (16, 32)), "y": jax.random.normal(keys[3], (16, 32))}
    return (params, OPTIMIZER.init(params)), batch


def planned(**options: Any) -> Any:
    step = autopar.parallelize(train_step, cluster="cpu:8", donate_argnums=0, num_microbatches=1, **options)
    return step.plan(*arguments())


def loaded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), found)
    return found


@pytest.mark.parametrize("options", [{"mesh": (2, 4)}, {"mesh": (8,), "method": "zero3"}, {"mesh": (8,), "tensor": 2}])
def test_plain_jit_runs_as_laid_out(options: dict[str, Any]) -> None:
    if "tensor" in options:
        del options["mesh"]
    plan = planned(**options)
    module = loaded(plan.export())
    on = module["mesh"]()
    args = arguments()
    specs = jax.tree.map(lambda s: s.spec, [module["shardings"](a, f"args[{i}]", on) for i, a in enumerate(args)])
    wanted = jax.tree.map(_trimmed, list(plan.in_specs), is_leaf=_is_spec)
    assert jax.tree.leaves(jax.tree.map(_trimmed, specs, is_leaf=_is_spec), is_leaf=_is_spec) == jax.tree.leaves(
        wanted, is_leaf=_is_spec
    )
    expected = jax.jit(train_step)(*args)
    got = module["jit"](train_step, on, *args)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)
    assert got[0][0]["layers"][0]["w"].sharding.spec == _trimmed(plan.out_specs[0][0]["layers"][0]["w"])


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _trimmed(spec: P) -> P:
    dims = list(spec)
    while dims and dims[-1] is None:
        dims.pop()
    return P(*dims)


def test_named_values_are_constrained() -> None:
    module = loaded(planned(mesh=(2, 4)).export())
    on = module["mesh"]()
    assert "hidden" in module["NAMED"]
    found = jax.jit(lambda x: module["constrained"](x, "hidden", on))(jnp.zeros((16, 32)))
    assert found.sharding.spec == module["NAMED"]["hidden"]
    with pytest.raises(KeyError, match=r"args\[0\]\['new'\]: the plan is of a step without it"):
        module["shardings"]({"new": 1}, "args[0]", on)


def test_flax_rules_say_the_same() -> None:
    module = loaded(planned(mesh=(2, 4)).export("flax"))
    on = module["mesh"]()
    state, _ = arguments()
    by_rules = module["logical_shardings"](state, "args[0]", on)
    by_paths = module["shardings"](state, "args[0]", on)
    same = jax.tree.map(lambda a, b: _trimmed(a.spec) == _trimmed(b.spec), by_rules, by_paths)
    assert all(jax.tree.leaves(same)) and len({name for name, _ in module["RULES"]}) == len(module["RULES"])


def test_equinox_modules() -> None:
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (16, 32))

    def step(model: Any, x: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    arrays, rest = eqx.partition(model, eqx.is_array)

    def of_arrays(arrays: Any, x: Any) -> Any:
        made, loss = step(eqx.combine(arrays, rest), x)
        return eqx.filter(made, eqx.is_array), loss

    options = {"cluster": "cpu:8", "mesh": (2, 4), "num_microbatches": 1, "batch_argnums": 1}
    plan = autopar.parallelize(of_arrays, **options).plan(arrays, x)
    module = loaded(plan.export("equinox"))
    on = module["mesh"]()
    expected = eqx.filter_jit(step)(model, x)
    got = module["filter_jit"](step, on)(model, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *(
        eqx.filter(tree, eqx.is_array) for tree in (got, expected)
    ))  # fmt: skip
    sharded = module["shard"](model, "args[0]", on)
    paths = {a.path: a.spec for a in plan.data.inputs}
    weight = sharded.layers[0].weight
    spec = paths["args[0].layers[0].weight"]
    assert weight.sharding.shard_shape(weight.shape) == _local(weight.shape, spec, plan.data)


def _local(shape: tuple[int, ...], spec: Any, plan: Plan) -> tuple[int, ...]:
    sizes = {axis.name: axis.size for axis in plan.meshes[0].axes}
    return tuple(n // int(np.prod([sizes[a] for a in axes])) for n, axes in zip(shape, spec.dims, strict=True))


# --- without devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_names_of_a_plan_cannot_leave_their_strings(style: str) -> None:
    hostile = '"""\nimport os\n"""\\'
    plan = handmade_plan()
    inputs = (replace(plan.inputs[0], path=f"args[0]['{hostile}']"), *plan.inputs[1:])
    bad = replace(plan, name=hostile, cluster=replace(plan.cluster, name=hostile), inputs=inputs)
    tree = ast.parse(exported(bad, style))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"re", "jax", "numpy", "flax.linen", "equinox"}
    assert f"args[0]['{hostile}']" in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_what_cannot_be_exported() -> None:
    with pytest.raises(OptionError, match=r"is a pipeline, whose stages are programs of their own\."):
        exported(handmade_pipeline())
    with pytest.raises(OptionError, match="'torch' is none of jit, flax, equinox"):
        exported(handmade_plan(), "torch")


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tmp_path / "plan.json"), tmp_path / "layout.py"
    save_plan(handmade_plan(), path)
    assert main(["export", path]) == 0
    assert capsys.readouterr().out == exported(handmade_plan())
    assert main(["export", path, "--for", "flax", "--out", str(out)]) == 0
    assert out.read_text() == exported(handmade_plan(), "flax")
    assert main(["export", path, "--out", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
