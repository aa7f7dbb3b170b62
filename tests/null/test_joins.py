"""Sums, maxima and ands over what layers make, one contribution a layer; layers that the update tells apart no more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.frontend.layering import layered
from autopar.frontend.layering.joins import with_joins
from autopar.frontend.layering.surgery import soonest
from autopar.inter_op.layer_problems import Parts, distinct_layers, parts_of, told_apart
from autopar.inter_op.stage_graph import stage_graph
from autopar.ir.sharding import Pin
from autopar.jax_compat import Var
from benchmarks.optimizers import MODELS, OPTIMIZERS
from tests.optimizers import train_step
from tests.shares import each

LAYERS = 6


def parts(step: Any, *args: Any, **options: Any) -> Parts:
    return parts_of(layered(step, args, num_microbatches=2, layers=LAYERS, **options).graph, ("none",))


QUICK = ("clip_by_global_norm", "apply_if_finite", "noisy_sgd")


@pytest.mark.parametrize(
    "name", each(3, (pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS))
)
def test_equal_layers_stay_equal(name: str) -> None:
    """The embedding, what lies between and the head: three distinct ones, whatever joins them in the update."""
    step, state, batch = train_step(OPTIMIZERS[name], LAYERS)
    found = parts(step, state, batch)
    assert found.number == (0, *[1] * (LAYERS - 2), 2)
    counts = [len(found.graphs["none"][n].graph.nodes) for n in range(3)]
    assert min(counts) * 2 > max(counts), f"one layer has all of the update: {counts}"
    assert told_apart(found) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", each(3, ["adafactor", "multi_steps", "muon"]))
def test_the_layer_with_the_first_leaf_is_like_the_others(name: str) -> None:
    """What all layers read is made where the first of them is updated, and of a Llama that is one of the blocks."""
    step, args = MODELS["llama"](optimizer=OPTIMIZERS[name])
    found = parts_of(layered(step, args, num_microbatches=2).graph, ("none",))
    assert found.number == (0, *[1] * (len(found.number) - 2), 2)


def test_what_is_shared_comes_as_soon_as_it_can() -> None:
    def fun(x: Any, y: Any, z: Any) -> Any:
        one = x * 2
        jax.debug.callback(lambda _: None, one)
        shared = jnp.sin(z)
        jax.debug.callback(lambda _: None, y)
        two = one + shared
        return two, jnp.cos(two) * y, jnp.cos(shared)

    closed = jax.make_jaxpr(fun)(1.0, 2.0, 3.0)
    new = soonest(closed.jaxpr, lambda eqn: eqn.primitive.name in ("sin", "cos"))
    names = ["sin", "cos", "mul", "debug_callback", "debug_callback", "add", "cos", "mul"]
    assert [eqn.primitive.name for eqn in new.eqns] == names
    calls = [eqn.invars[0] for jaxpr in (new, closed.jaxpr) for eqn in jaxpr.eqns if eqn.effects]
    assert calls[:2] == calls[2:]
    assert jax.core.eval_jaxpr(new, [], 1.0, 2.0, 3.0) == jax.core.eval_jaxpr(closed.jaxpr, [], 1.0, 2.0, 3.0)
    assert soonest(new, lambda eqn: eqn.primitive.name in ("sin", "cos")) is new
    assert soonest(closed.jaxpr, lambda eqn: False) is closed.jaxpr


def decayed(*layers: int) -> Any:
    """A layered step that decays weights of these layers alone."""
    mask = jax.tree.map(lambda _: False, train_step(optax.sgd(1e-2), LAYERS)[1]["params"])
    for k in layers:
        mask["blocks"][k]["in"] = True
    step, state, batch = train_step(optax.chain(optax.add_decayed_weights(0.1, mask=mask), optax.sgd(1e-2)), LAYERS)
    return layered(step, (state, batch), num_microbatches=2, layers=LAYERS).graph


@pytest.mark.slow
def test_why_equal_layers_are_planned_apart() -> None:
    reason = "planned apart from layer 1, which has another update: 1 mul fewer, 1 add fewer"
    found = parts_of(decayed(2, 3), ("none",))
    assert distinct_layers(found) == ("6 layers, 4 distinct: 0; 1, 4; 2-3; 5", f"layers 2-3: {reason}")
    assert told_apart(parts_of(decayed(), ("none",))) == ()
    pinned = parts_of(decayed(), ("none",), [Pin(target="args[0]['params']['blocks'][3]['out']", dims=(("x",), None))])
    assert told_apart(pinned) == ("layer 3: planned apart from layer 1, which is pinned otherwise",)


def test_a_layer_of_equal_ones_is_its_numbers_with_its_own_arguments() -> None:
    graph = decayed(3)
    found = parts_of(graph)
    assert found.number == (0, 1, 1, 2, 1, 3)
    for k, remat in itertools.product(range(LAYERS), found.remats):
        one, other = found.apart(k, remat), stage_graph(graph, k, k + 1, [remat])
        assert without_digests(one) == without_digests(other)


def without_digests(stage: Any) -> Any:
    """A stage but for what tells its equations' texts apart, which no sharding depends on."""
    nodes = tuple(replace(node, digest="") for node in stage.graph.nodes)
    return replace(stage, graph=replace(stage.graph, nodes=nodes))


def joined(fun: Callable[..., Any], owners: dict[int, int | None], *args: Any) -> tuple[Any, int]:
    """The jaxpr of ``fun`` with joins, argument i being layer ``owners[i]``'s, and how many it has; it gives the
    function's results."""
    closed = jax.make_jaxpr(fun)(*args)
    owner = {v: owners.get(i) for i, v in enumerate(closed.jaxpr.invars)}
    for eqn in closed.jaxpr.eqns:  # what is made of one layer's alone is its own
        read = {owner[v] for v in eqn.invars if isinstance(v, Var)}
        owner.update((v, next(iter(read)) if len(read) == 1 else None) for v in eqn.outvars)
    new = with_joins(closed.jaxpr, lambda v: owner[v])
    want = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
    got = jax.core.eval_jaxpr(new, closed.consts, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    return new, sum(eqn.primitive.name == "autopar_join" for eqn in new.eqns)


S = tuple(jnp.float32(x) for x in (3.0, -1.0, 4.0, 1.5, 9.0, 2.0))
TWO_EACH: dict[int, int | None] = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}


@pytest.mark.parametrize(
    "fun",
    [
        lambda *x: sum(x),  # from 0 on, as Python does
        lambda *x: (x[0] + x[3]) + ((x[1] + x[4]) + (x[2] + x[5])),
        lambda *x: jnp.stack(x).sum(),
        lambda *x: jnp.max(jnp.array(x)) + 1.0,
        lambda *x: jnp.minimum(jnp.minimum(x[0], x[2]), jnp.min(jnp.stack(x[3:]))),
        lambda *x: jnp.all(jnp.stack([jnp.isfinite(y) for y in x])),
        lambda *x: (x[0] > 1) & (x[2] > 1) & (x[4] > 1) | (x[1] > 0),
        lambda *x: jnp.sqrt(sum(y * y for y in x)),
        lambda *x: sum(x) / len(x) + jnp.float32(1),
        lambda *x: jnp.sum(jnp.array([x[i % 6] for i in range(40)])),  # sixteen at a time
    ],
)
def test_a_tree_is_one_join(fun: Callable[..., Any]) -> None:
    new, count = joined(fun, TWO_EACH, *S)
    assert count == 1
    (join,) = [eqn for eqn in new.eqns if eqn.primitive.name == "autopar_join"]
    assert join.params["owners"] == tuple(sorted(join.params["owners"])) and len(join.invars) >= 2


def test_what_is_read_elsewhere_is_still_there() -> None:
    """A sum up to here that is a result, or that another operator reads, ends a tree; what was stacked stays for its
    other reader."""

    def fun(*x: Any) -> Any:
        some = x[0] + x[2]
        placed = [jnp.reshape(y, (1,)) for y in x]
        return some + x[4], some, jnp.concatenate(placed).sum(), placed[0] * 2

    new, count = joined(fun, TWO_EACH, *S)
    assert count == 2, new  # the third sum has one layer's, and what all have


@pytest.mark.parametrize(
    ("fun", "owners"),
    [
        (lambda *x: sum(x), dict.fromkeys(range(6), 1)),  # all of one layer
        (lambda *x: sum(x), {0: 0}),  # one layer's and nobody's
        (lambda *x: x[0] - x[2] * x[4], TWO_EACH),  # no operator that joins
        (lambda *x: jnp.stack(x)[::2], TWO_EACH),
        (lambda *x: jnp.prod(jnp.stack(x)), TWO_EACH),
    ],
)
def test_other_things_stay_as_they_are(fun: Callable[..., Any], owners: dict[int, int | None]) -> None:
    closed = jax.make_jaxpr(fun)(*S)
    assert with_joins(closed.jaxpr, lambda v: owners.get(list(closed.jaxpr.invars).index(v)) if v in
                      closed.jaxpr.invars else None) is closed.jaxpr  # fmt: skip


def test_what_is_nobodys_comes_behind() -> None:
    new, count = joined(lambda *x: sum(x), {**TWO_EACH, 5: None}, *S)
    assert count == 1
    assert new.eqns[-1].primitive.name == "add" and new.eqns[-1].invars[1] is new.invars[5]


def test_integers_and_vectors() -> None:
    new, count = joined(lambda *x: sum(x), TWO_EACH, *(jnp.int32(i) for i in range(6)))
    assert count == 1 and new.eqns[-1].outvars[0].aval.dtype == jnp.int32
    assert joined(lambda *x: sum(x), TWO_EACH, *(jnp.arange(3.0) for _ in range(6)))[1] == 0


def test_a_cond_that_clips_takes_the_norm_from_outside() -> None:
    """`apply_if_finite` around a clip: each layer keeps its own part of the branch."""
    optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 5)
    step, state, batch = train_step(optimizer, LAYERS)
    graph = layered(step, (state, batch), num_microbatches=2, layers=LAYERS).graph
    conds = [where for n, where in zip(graph.update.nodes, graph.update_layers, strict=True) if n.primitive == "cond"]
    assert {len(where) for where in conds} <= {1, LAYERS} and len({w for w in conds if len(w) == 1}) == LAYERS
