"""Pins of what stages hold: by names of each stage's mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import autopar
from autopar.ir.errors import InfeasibleError, ShardingError
from tests.clusters import cluster

FAST = cluster(4, flops_per_s=1e12, memory_bytes_per_s=1e11, latency_s=1e-6, bytes_per_s=1e11)
LAYERS, WIDTH = 4, 64


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block(w: Any, x: Any) -> Any:
    return x + checkpoint_name(jnp.tanh(x @ w["up"]), "hidden") @ w["down"]


def step(params: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = block(w, x)
        return jnp.mean(x**2)

    value, grads = autopar.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def scanned(params: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, params)[0] ** 2)

    value, grads = autopar.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


ARGS = ([{"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)} for _ in range(LAYERS)], array(128, WIDTH))
STACKED = ({"up": array(LAYERS, WIDTH, 4 * WIDTH), "down": array(LAYERS, 4 * WIDTH, WIDTH)}, array(128, WIDTH))


def specs(constraints: Any, fun: Any = step, args: Any = ARGS, **options: Any) -> dict[str, list[str]]:
    """Path → the sharding of each place."""
    asked: dict[str, Any] = {"stages": 2, "num_microbatches": 2, "workers": 1, "donate_argnums": 0, **options}
    plan = autopar.parallelize(fun, cluster=FAST, constraints=constraints, **asked).plan(*args)
    plan.data.verify()
    return {a.path: [str(place.spec) for place in a.places] for a in plan.data.inputs}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["args[0][1]['up']", pytest.param("out[0][1]['up']", marks=pytest.mark.full)])
def test_one_argument_or_its_new_value(target: str) -> None:
    """Of equal layers one is pinned: it is another problem than the others."""
    free = specs(None)
    (other,) = {"[x,_]", "[_,x]"} - set(free["args[0][1]['up']"])
    dims = P("x", None) if other == "[x,_]" else P(None, "x")
    pinned = specs({target: dims})
    assert pinned["args[0][1]['up']"] == [other] and pinned["args[0][2]['up']"] == free["args[0][2]['up']"]


@pytest.mark.full
def test_all_that_match_and_the_last_holds() -> None:
    found = specs({"args[0]*": P(None, "x"), "args[0][3]*": P("x", P.UNCONSTRAINED)})
    assert {spec for path, mine in found.items() if path < "args[0][3]" for spec in mine} == {"[_,x]"}
    assert all(spec.startswith("[x") for spec in found["args[0][3]['up']"] + found["args[0][3]['down']"])


@pytest.mark.slow
def test_rows_of_what_a_scan_stacks() -> None:
    found = specs({"args[0]['up']": P(None, None, "x")}, scanned, STACKED)
    assert set(found["args[0]['up']"]) == {"[_,_,x]"} and len(found["args[0]['up']"]) >= 2


@pytest.mark.slow
def test_intermediates_by_name() -> None:
    plan = autopar.parallelize(
        step, cluster=FAST, stages=2, num_microbatches=2, workers=1, constraints={"name:hidden": P(None, "x")}
    ).plan(*ARGS)
    assert plan.data.config.pins == plan.data.config.stages.pins != ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "error", "text"),
    [
        ({"args[0][0]['u']": P("x")}, ShardingError, "matches no argument or result: there are args[0][0]['up']"),
        ({"args[0][0]['up']": P("z")}, ShardingError, "names axis 'z'; the mesh is"),
        ({"args[0][0]['up']": P("y")}, InfeasibleError, "Meshes are left out on which constraints cannot be: pin"),
        ({"out[1]": P()}, ShardingError, "out[1] is no argument's new value; in stages only arguments"),
        ({"name:hiden": P()}, ShardingError, "matches no intermediate of a layer: there are name:hidden"),
        ({"args[0][0]['up']": P(None, None, "x")}, ShardingError, "has 3 dimensions"),
    ],
)
def test_what_cannot_be_pinned(constraints: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        specs(constraints)
    assert text in str(caught.value)
