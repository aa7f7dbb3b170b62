"""Pins: what they match, and every way in which one does not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import autopar
from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.trace import trace
from autopar.intra_op.pins import Pins, resolve_pins
from autopar.ir.errors import ShardingError
from autopar.ir.graph import Graph
from autopar.ir.presets import cluster_from_text
from autopar.ir.sharding import Pin

MESH = logical_mesh(cluster_from_text("cpu:8"), (2, 4))


def step(state: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return checkpoint_name(jnp.tanh(x @ w), "hidden"), None

    x, _ = jax.lax.scan(layer, batch, state["layers"])
    return {**state, "scale": checkpoint_name(state["scale"] + x.sum(), "total")}


def graph() -> Graph:
    shapes = {"layers": jnp.zeros((3, 16, 16)), "odd": jnp.zeros((50257, 6)), "scale": jnp.zeros(())}
    batch = jax.ShapeDtypeStruct((8, 16), "float32")
    return trace(step, jax.eval_shape(lambda: shapes), batch, donate_argnums=(0,)).graph


def resolve(*pins: tuple[str, tuple[Any, ...]]) -> Pins:
    return resolve_pins(graph(), MESH, [Pin(target=target, dims=dims) for target, dims in pins])


def test_paths_are_matched_with_brackets_as_they_are() -> None:
    found = resolve(("args[0]['layers']", ((), ("x",))), ("args[1]", (("x", "y"), None)))
    assert found.inputs == {0: ((), ("x",), ()), 3: (("x", "y"), None)}
    assert found.outputs == {} and found.names == {}


def test_wildcards_meet_arguments_and_results() -> None:
    found = resolve(("*['layers']", ((), (), ("y",))), ("out?'odd'?", ((), ("x",))))
    assert found.inputs == {0: ((), (), ("y",))}
    assert found.outputs == {0: ((), (), ("y",)), 1: ((), ("x",))}


def test_the_last_pin_holds() -> None:
    assert resolve(("args[0]['layers']", ((), ("x",))), ("args[0]*", ())).inputs[0] == ((), (), ())
    assert resolve(("args[0]*", ()), ("args[0]['layers']", ((), ("x",)))).inputs[0] == ((), ("x",), ())


def test_names_are_found_in_bodies() -> None:
    assert resolve(("name:hidden", (("x",),))).names == {"hidden": (("x",), ())}
    assert resolve(("name:total", ())).names == {"total": ()}


@pytest.mark.parametrize(
    ("target", "dims", "message"),
    [
        (
            "args[0]['odd']",
            (("x",), ()),
            "args[0]['odd']: cannot shard dimension 0 (size 50257) over mesh axis \"x\" (size 2), as pin "
            "\"args[0]['odd']\" "
            "says: not divisible. Pad to 50258, pin another dimension, or leave this one out",
        ),
        (
            "args[1]",
            ((), ("y", "x", "y")),
            "pin 'args[1]': PartitionSpec(None, ('y', 'x', 'y')) uses mesh axis 'y' twice. An axis can split one "
            "dimension "
            "only",
        ),
        (
            "*odd*",
            ((), ("x", "y")),
            'args[0][\'odd\']: cannot shard dimension 1 (size 6) over mesh axis "x" (size 2) × "y" (size 4), as pin '
            "'*odd*' says: not divisible. Pad to 8, pin another dimension, or leave this one out",
        ),
        (
            "args[1]",
            (("model",),),
            "pin 'args[1]': PartitionSpec('model') names axis 'model'; the mesh is 2x4 (x, y). Use its axis names, or "
            "give "
            "mesh= a jax.sharding.Mesh with names of your own",
        ),
        (
            "args[0]['layer']",
            (),
            "pin \"args[0]['layer']\" matches no argument or result: there are args[0]['layers'], ",
        ),
        (
            "args[0]['s*",
            (("x",),),
            "args[0]['scale']: pin \"args[0]['s*\" has 1 dimensions, PartitionSpec('x'), for a value of rank 0, "
            "float32[]. Leave "
            "out the last 1, or match fewer values",
        ),
        (
            "name:hiden",
            (("x",),),
            "pin 'name:hiden' matches no intermediate: the step names hidden, total. Name a value by "
            "jax.ad_checkpoint.checkpoint_name(x, 'hiden')",
        ),
        (
            "name:hidden",
            ((), ("y",), ()),
            ": pin 'name:hidden' has 3 dimensions, PartitionSpec(None, 'y', None), for a value of rank 2, "
            "float32[8,16]. ",
        ),
    ],
)
def test_pins_that_do_not_fit(target: str, dims: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ShardingError) as error:
        resolve((target, dims))
    assert message in str(error.value)


def test_a_donated_argument_and_its_result_pinned_apart() -> None:
    with pytest.raises(ShardingError) as error:
        resolve(("args[0]['layers']", ((), ("x",))), ("out['layers']", ((), ("y",))))
    assert str(error.value) == (
        "args[0]['layers'] is donated to out['layers'], so that both have one sharding, but they are pinned to "
        "PartitionSpec(None, 'x', None) and PartitionSpec(None, 'y', None). Pin one of them, or both alike"
    )


def test_one_name_for_values_of_different_rank() -> None:
    def two(x: Any) -> Any:
        return checkpoint_name(checkpoint_name(x * 2, "h").sum(0), "h")

    g = trace(two, jax.ShapeDtypeStruct((8, 16), "float32")).graph
    with pytest.raises(ShardingError) as error:
        resolve_pins(g, MESH, [Pin(target="name:h", dims=(("x",),))])
    assert "pin 'name:h' meets values of different rank: name (node 1, test_pins.py:" in str(error.value)
    assert "float32[8,16] and name (node 3" in str(error.value)


def test_a_pin_that_no_strategy_has_is_refused() -> None:
    def keyed(x: Any) -> Any:
        key = checkpoint_name(jax.random.split(jax.random.key(0), 8), "keys")[0]
        return x + jax.random.uniform(key, x.shape)

    step = autopar.parallelize(keyed, mesh=8, cluster="cpu:8", constraints={"name:keys": PartitionSpec("x")})
    with pytest.raises(ShardingError, match=r"name .*: cannot be sharded as it is pinned: keys are whole on every"):
        step.plan(jnp.ones(16))
