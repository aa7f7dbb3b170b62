"""Train steps in layers: where they are cut, which layers are equal, whose stage runs the update."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

import autopar
from autopar.frontend.gradient import value_and_grad
from autopar.frontend.layering import layered
from autopar.frontend.layering.layer_cuts import balanced, crossing, named_blocks, repeated
from autopar.frontend.traced_apart import traced_apart
from autopar.ir.errors import MicrobatchError, OptionError, TraceError
from autopar.ir.layers import LayeredGraph
from autopar.jax_compat import backend_started
from benchmarks.large_models import moe, u_transformer
from benchmarks.models import gpt
from tests.shares import each

TINY = dict[str, Any](hidden=16, heads=4, seq=8, vocab=64, batch=8)
WIDTH = 8


def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(step: Any, args: Any, **options: Any) -> LayeredGraph:
    return layered(step, args, **{"donate_argnums": (0,), **options}).graph


def step_of(loss: Any, has_aux: bool = False) -> Any:
    def step(params: Any, batch: Any, *rest: Any) -> Any:
        value, grads = value_and_grad(loss, has_aux=has_aux)(params, batch, *rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def dense(count: int) -> list[Any]:
    return [struct(WIDTH, WIDTH) for _ in range(count)]


X = struct(4, WIDTH)


# --- a GPT -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"scan": True}, {"scan": True, "remat": True}])
@pytest.mark.parametrize("n", each(2, [2, 1]))
def test_the_blocks_of_a_gpt(options: dict[str, bool], n: int) -> None:
    graph = graph_of(*gpt(layers=4, **TINY, **options), num_microbatches=n)
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 1, 2]  # embedding, blocks, head
    assert graph.values[graph.loss].shape == () and graph.makers[graph.loss] == 5
    for layer in graph.layers[:-1]:  # the residual stream crosses, nothing else
        (out,) = layer.results
        assert str(graph.values[out]) == f"bfloat16[{8 // n},8,16]"
    kind = graph.kinds[1]
    assert kind.seeds == (0,) and len(kind.wrt) == len(kind.forward.inputs) == 13  # x and twelve parameters
    assert {n.phase for n in kind.joint[0].nodes} == {"forward", "backward"}
    assert not backend_started() or jax.default_backend() == "cpu"


@pytest.mark.slow
def test_recomputing_keeps_less_and_computes_more() -> None:
    graph = graph_of(*gpt(layers=2, **TINY))
    kept: list[int] = []
    for joint in graph.kinds[1].joint:
        made = {v for node in joint.nodes if node.phase == "forward" for v in node.results}
        used = {v for node in joint.nodes if node.phase == "backward" for v in node.operands if isinstance(v, int)}
        kept.append(sum(joint.values[v].size_bytes for v in made & used))
    none, dots, full = kept
    assert none > dots > full == 0
    products = [sum(n.primitive == "dot_general" for n in j.nodes) for j in graph.kinds[1].joint]
    assert products[0] < products[1] < products[2]  # attention again; all again
    assert products[0] == 3 * sum(n.primitive == "dot_general" for n in graph.kinds[1].forward.nodes)


def test_under_dots_attention_makes_nothing_again_but_of_each_score() -> None:
    """Kept are a softmax's maxima and sums, and what is gathered by it; the scores are 128 · 128."""

    def loss(params: Any, batch: Any) -> Any:
        query, key, value = (batch["x"] @ params[name] for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bsk,btk->bst", query, key))
        return jnp.mean((jnp.einsum("bst,btk->bsk", weights, value) @ params["out"]) ** 2)

    params = {name: struct(16, 16) for name in ("query", "key", "value", "out")}
    graph = graph_of(step_of(loss), (params, {"x": struct(4, 128, 16)}), layers=1, num_microbatches=1)
    none, dots, full = (Counter(n.primitive for n in joint.nodes) for joint in graph.kinds[0].joint)
    for name in ("reduce_max", "reduce_sum"):
        assert none[name] == dots[name] < full[name]
    assert dots["dot_general"] == none["dot_general"] + 1
    assert dots["exp"] == none["exp"] + 1


@pytest.mark.slow
def test_casts_of_weights_are_made_again_not_kept() -> None:
    graph = graph_of(*gpt(layers=2, **TINY))
    (joint, *_), forward = graph.kinds[1].joint, graph.kinds[1].forward
    weights = {joint.values[v].shape for v in joint.inputs[1:13] if len(joint.values[v].shape) > 1}
    made = {v for node in joint.nodes if node.phase == "forward" for v in node.results}
    used = {v for node in joint.nodes if node.phase == "backward" for v in node.operands if isinstance(v, int)}
    casts = [v for v in made & used if joint.values[v].shape in weights and joint.values[v].dtype == "bfloat16"]
    assert not casts and any(n.primitive == "convert_element_type" for n in forward.nodes)


def test_arithmetic_on_what_is_kept_anyway_is_made_again() -> None:
    """Of tanh its result alone is kept, not 1 − tanh² beside it; of a square its operand. Exponentials stay."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["in"])
        hidden = jnp.exp(hidden @ params["square"]) ** 2
        return jnp.mean((hidden @ params["out"]) ** 2)

    params = {"in": struct(WIDTH, 24), "square": struct(24, 40), "out": struct(40, WIDTH)}
    graph = graph_of(step_of(loss), (params, {"x": struct(16, WIDTH)}), layers=1, num_microbatches=1)
    [kind] = graph.kinds
    joint = kind.joint[0]
    backward = {v for n in joint.nodes if n.phase == "backward" for v in n.operands if isinstance(v, int)}
    kept = [(n.primitive, t.shape) for n in joint.nodes if n.phase == "forward"
            for v, t in zip(n.results, n.result_types, strict=True) if v in backward and t.size > 16]  # fmt: skip
    assert sorted(kept) == [("exp", (16, 40)), ("mul", (16, WIDTH)), ("tanh", (16, 24))]


@pytest.mark.slow
def test_a_tied_embedding_is_read_twice_and_updated_first() -> None:
    graph = graph_of(*gpt(layers=2, **TINY))
    (embed,) = (
        v for v, path in zip(graph.arguments, graph.arg_paths, strict=True) if path == "args[0].params['embed']"
    )
    assert graph.users[embed] == (0, 3) and embed in graph.trained
    (gradient,) = (g for g, v in zip(graph.update.inputs, graph.trained, strict=False) if v == embed)
    readers = [w for n, w in zip(graph.update.nodes, graph.update_layers, strict=True) if gradient in n.operands]
    assert set(readers) == {(0,)}


@pytest.mark.slow
def test_a_scan_reads_rows() -> None:
    graph = graph_of(*gpt(layers=3, scan=True, **TINY))
    assert len(graph.slices) == 3 * 12
    stacked = {s.argument for s in graph.slices}
    assert all(graph.arguments[a] in graph.trained for a in stacked)
    assert [graph.users[s.value] for s in graph.slices if s.argument == min(stacked)] == [(1,), (2,), (3,)]
    for s in graph.slices:
        assert graph.values[s.value].shape == (1, *graph.argument_types[s.argument].shape[1:])
        assert (s.start, s.stop) == (graph.users[s.value][0] - 1, graph.users[s.value][0])
    assert graph.update_layers.count((1, 2, 3)) > 12  # every layer updates its rows


@pytest.mark.slow
def test_layers_by_number() -> None:
    step, args = gpt(layers=6, **TINY)
    graph = graph_of(step, args, layers=3)
    assert len(graph.layers) == 3 and [len(v.operands) for v in graph.layers] == [2 * 12 + 3, 2 * 12 + 1, 2 * 12 + 5]
    assert all(len(layer.operands) % 12 == 1 for layer in graph_of(step, args, layers=4).layers[1:-1])  # whole blocks
    assert len(graph_of(step, args, layers=1).layers) == 1
    assert len(graph_of(step, args, layers=8).kinds) == 3
    with pytest.raises(OptionError, match="neither a number of layers"):
        graph_of(step, args, layers=0)


@pytest.mark.slow
def test_shape_structs_of_deep_models_are_fast_to_cut() -> None:
    graph = graph_of(*gpt(layers=24, **TINY), num_microbatches=2)
    assert len(graph.kinds) == 3 and len(graph.layers) == 26


@pytest.mark.slow
def test_keys_of_dropout_are_split_before_the_layers() -> None:
    from examples.gpt import model

    for scan in (False, True):
        config = model.GPTConfig(layers=3, hidden=16, heads=4, seq=8, vocab=64, dropout=0.1, scan=scan)
        graph = graph_of(model.make_train_step(config), model.train_step_args(config, 8), num_microbatches=2)
        assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]
        assert graph.before is not None and any(n.primitive == "random_fold_in" for n in graph.before.nodes)
        assert all(t.size <= 2 for t in (graph.values[v] for v in graph.before_values))
        assert graph.index >= 0 and graph.users[graph.index] == (0, 1, 2, 3)  # each draws its part of the bits
        for kind in graph.kinds:
            assert not any(n.primitive == "random_fold_in" for n in kind.forward.nodes)


# --- other models ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_alternating_layers_repeat_in_pairs() -> None:
    step, args = moe(layers=6, hidden=16, heads=4, experts=4, group=16, seq=16, vocab=64, batch=4, mlp_factor=2)
    graph = graph_of(step, args)
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]


@pytest.mark.slow
def test_skips_of_a_u_net_cross_several_layers() -> None:
    graph = graph_of(*u_transformer(channels=32, multipliers=(1, 2), image=8, batch=2, heads=4), layers=4)
    assert len(graph.layers) == 4
    far = [v for v, users in graph.users.items() if v in graph.makers and max(users) > graph.makers[v] + 1]
    assert far
    assert graph.loss in graph.layers[-1].results and len(graph.layers[-1].operands) > 3


def test_a_skip_over_two_layers_keeps_equal_blocks_apart_from_the_others() -> None:
    def loss(params: Any, x: Any) -> Any:
        h, kept = x, x
        for k, w in enumerate(params):
            h = jnp.tanh(h @ w)
            kept = h if k == 1 else kept
            h = h + kept if k == 3 else h
        return jnp.mean(h)

    graph = graph_of(step_of(loss), (dense(6), X), layers=6)
    (skip,) = (v for v, users in graph.users.items() if v in graph.makers and len(users) == 2)
    assert graph.makers[skip] == 1 and graph.users[skip] == (2, 3)


def test_heavy_functions_of_weights_go_to_their_user() -> None:
    def loss(params: Any, x: Any) -> Any:
        merged = [a @ b for a, b in params]  # all at the front
        for w in merged:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    graph = graph_of(step_of(loss), ([(struct(WIDTH, 2), struct(2, WIDTH)) for _ in range(4)], X))
    assert [len(layer.operands) for layer in graph.layers] == [3, 3, 3, 3]
    assert len({layer.kind for layer in graph.layers[1:-1]}) == 1


def test_custom_rules_that_differ_are_other_kinds() -> None:
    def scaled(factor: float) -> Any:
        @jax.custom_vjp
        def f(x: Any) -> Any:
            return x

        f.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
        return f

    def loss(params: Any, x: Any, factors: Any) -> Any:
        for w, factor in zip(params, factors, strict=True):
            x = scaled(factor)(jnp.tanh(x @ w))
        return jnp.mean(x)

    def kinds(*factors: float) -> list[int]:
        step = step_of(lambda p, x: loss(p, x, factors))
        return [layer.kind for layer in graph_of(step, (dense(5), X), layers=5).layers]

    assert kinds(2, 2, 2, 2, 2) == [0, 1, 1, 1, 2]  # the first one needs no cotangent of x; the last has the mean
    assert kinds(2, 2, 3, 2, 2) == [0, 1, 1, 2, 3]  # cut before the rule, that of layer 2 is in layer 3


def test_custom_rules_of_one_function_that_differ_are_other_kinds() -> None:
    def same(x: Any) -> Any:
        return x

    def scaled(factor: float) -> Any:
        f = jax.custom_vjp(same)
        f.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
        return jax.jit(lambda w, x: f(jnp.tanh(x @ w)))

    def kinds(*blocks: Any) -> list[int]:
        def loss(params: Any, x: Any) -> Any:
            for w, block in zip(params, blocks, strict=True):
                x = block(w, x)
            return jnp.mean(x)

        return [layer.kind for layer in graph_of(step_of(loss), (dense(5), X), layers=5).layers]

    two, other, three = scaled(2), scaled(2), scaled(3)
    assert kinds(two, two, two, two, two) == kinds(two, other, two, other, two) == [0, 1, 1, 1, 2]
    assert kinds(two, two, three, two, two) == [0, 1, 1, 2, 3]


def test_layers_with_a_kernel_are_one_kind() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = 2 * x_ref[...]

        block = pl.BlockSpec((2, WIDTH), lambda i: (i, 0))  # made anew by each call, as what it maps to is
        return pl.pallas_call(
            kernel, grid=(2,), in_specs=[block], out_specs=block, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=True,
        )(x)  # fmt: skip

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (doubled(g),))

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = doubled(jnp.tanh(x @ w))
        return jnp.mean(x)

    graph = graph_of(step_of(loss), (dense(5), X), layers=5)
    assert any(node.primitive == "pallas_call" for kind in graph.kinds for node in kind.forward.nodes)
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]


# --- the user's cuts -------------------------------------------------------------------------------------------


def test_boundaries_are_the_cuts() -> None:
    def loss(params: Any, x: Any) -> Any:
        for k, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = autopar.layer_boundary({"x": x})["x"] if k in (1, 2) else x
        return jnp.mean(x)

    for options in ({}, {"layers": 4}, {"layers": "names"}, {"num_microbatches": 2}):
        graph = graph_of(step_of(loss), (dense(5), X), **options)
        assert [len(layer.operands) - 1 for layer in graph.layers] == [2, 1, 2]
        assert not any(n.primitive == "autopar_layer_boundary" for k in graph.kinds for n in k.forward.nodes)


def test_boundaries_in_the_body_of_a_scan_count_in_every_turn() -> None:
    def loss(params: Any, x: Any) -> Any:
        def turn(x: Any, w: Any) -> Any:
            return autopar.layer_boundary(jnp.tanh(x @ w)), None

        return jnp.mean(lax.scan(turn, x, params)[0])

    graph = graph_of(step_of(loss), (struct(4, WIDTH, WIDTH), X))
    assert len(graph.layers) == 5 and len(graph.slices) == 4


@pytest.mark.slow
def test_a_boundary_is_the_identity() -> None:
    f = lambda x: jnp.sum(jnp.sin(autopar.layer_boundary(x)) ** 2)
    g = lambda x: jnp.sum(jnp.sin(x) ** 2)
    x = jnp.arange(6.0).reshape(2, 3)
    for transform in (jax.jit, jax.grad, lambda h: jax.vmap(jax.grad(h)), jax.hessian, lambda h: jax.jit(jax.grad(h))):
        np.testing.assert_allclose(transform(f)(x), transform(g)(x), rtol=1e-6)
    linear = jax.linear_transpose(lambda x: 2 * autopar.layer_boundary(x), x)
    np.testing.assert_allclose(linear(x)[0], 2 * x)
    assert autopar.layer_boundary(()) == ()
    key = jax.random.key(0)
    assert jax.jit(autopar.layer_boundary)(key) == key


def test_named_blocks() -> None:
    def loss(params: Any, x: Any) -> Any:
        with jax.named_scope("net"):
            for k, w in enumerate(params):
                with jax.named_scope(f"block{k // 2}"):
                    x = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jnp.mean(x)

    graph = graph_of(step_of(loss), (dense(6), X), layers="names")
    assert [len(layer.operands) for layer in graph.layers] == [3, 3, 3]
    assert named_blocks([(), ("a",), (), ("a", "x"), ("b",), ()]) == (4,)
    assert named_blocks([("n",), ("n", "a"), ("n", "b"), ("n",)]) == (2,)
    assert named_blocks([(), ()]) == ()


# --- the update, and what is around ----------------------------------------------------------------------------


def clipped(params: Any, batch: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    value, grads = value_and_grad(loss)(params["w"], batch)
    norm = optax.tree.norm(grads)
    rate = 0.1 * jnp.minimum(1.0, 1.0 / norm) * 0.99 ** params["count"]
    w = [p - jnp.full_like(g, rate) * g for p, g in zip(params["w"], grads, strict=True)]
    return {"w": w, "count": params["count"] + 1}, {"loss": value, "norm": norm}


def test_a_global_norm_is_exchanged_as_scalars() -> None:
    graph = graph_of(clipped, ({"w": dense(4), "count": struct(dtype=jnp.int32)}, X))
    assert len(graph.layers) == 4 and any(n.primitive == "broadcast_in_dim" for n in graph.update.nodes)
    for node, layers in zip(graph.update.nodes, graph.update_layers, strict=True):
        large = any(t.size > 1 for t in (*node.operand_types, *node.result_types))
        if node.primitive == "broadcast_in_dim":
            assert layers == (0, 1, 2, 3)  # made of the rate alone, by all of them
        elif large:
            assert len(layers) == 1, str(node)
        elif node.primitive in ("sqrt", "pow", "add"):
            assert layers == (0, 1, 2, 3), str(node)
    partial = [w for n, w in zip(graph.update.nodes, graph.update_layers, strict=True) if n.primitive == "reduce_sum"]
    assert partial == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_an_update_mixes_are_kept_whole(whole: bool) -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

        value, grad = value_and_grad(loss)(params, x)
        norm = jnp.linalg.norm(grad, axis=0 if whole else 1, keepdims=True)
        return params - grad / norm, value

    graph = graph_of(step, (struct(4, WIDTH, WIDTH), X))
    assert len(graph.slices) == 4
    assert set(graph.update_layers) == ({(0,)} if whole else {(0, 1, 2, 3)})


def test_parameters_that_the_loss_does_not_read_get_zeros() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["a"]))

    graph = graph_of(step_of(loss), ({"a": struct(WIDTH, WIDTH), "b": struct(3)}, X))
    assert len(graph.trained) == 1 and len(graph.update.outputs) == 3


def test_a_checkpoint_around_the_whole_loss_is_opened() -> None:
    @jax.checkpoint
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    for n in (1, 2):
        graph = graph_of(step_of(loss), (dense(5), X), num_microbatches=n)
        assert len(graph.layers) == 5


def test_what_microbatches_take_from_the_full_batch_comes_before() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, mask = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x * mask) / jnp.sum(mask), jnp.max(x)

    step = step_of(loss, has_aux=True)
    graph = graph_of(step, (dense(3), (X, X)), num_microbatches=2)
    assert graph.before is not None and [n.primitive for n in graph.before.nodes] == ["reduce_sum"]
    assert graph.values[graph.before_values[0]].shape == ()
    assert len(graph.combined) == 2 and graph.combined[0] == graph.loss
    assert not graph_of(step, (dense(3), (X, X))).before_values


def test_inference_has_layers_and_no_backward_pass() -> None:
    def forward(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    graph = layered(forward, (dense(4), X)).graph
    assert graph.loss == -1 and graph.trained == () and len(graph.layers) == 4
    assert all(kind.joint == () and kind.wrt == () for kind in graph.kinds)
    assert len(graph.update.nodes) == 0 and len({layer.kind for layer in graph.layers}) == 1


def test_a_count_that_is_returned_and_used_is_of_a_layer() -> None:
    """Adam's: gradients that are not `autopar.value_and_grad`'s are layers like any others."""
    optimizer = optax.adam(0.1)

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        grads = jax.grad(lambda p: jnp.mean((x @ p[0] @ p[1]) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = dense(2)
    graph = layered(step, ((params, jax.eval_shape(optimizer.init, params)), X)).graph
    assert graph.loss == -1 and len(graph.layers) > 1


# --- errors ----------------------------------------------------------------------------------------------------


def test_errors() -> None:
    one = lambda p, x: jnp.mean(jnp.tanh(x @ p))
    w = struct(WIDTH, WIDTH)

    def twice(p: Any, x: Any) -> Any:
        return value_and_grad(one)(p, x), value_and_grad(one)(p, 2 * x)

    def looped(p: Any, x: Any) -> Any:
        return lax.scan(lambda p, _: (p - value_and_grad(one)(p, x)[1], None), p, None, length=3)[0]

    def direct(p: Any, x: Any) -> Any:
        return value_and_grad(lambda p, x: p)(p, x)

    for step, options, kind, message in (
        (twice, {}, TraceError, "has 2 autopar.value_and_grad; a pipeline runs the layers of one loss"),
        (looped, {}, TraceError, "inside a loop or branch"),
        (lambda p, x: jax.grad(one)(p, x), {"num_microbatches": 2}, MicrobatchError, "by autopar.value_and_grad (same"),
        (step_of(one), {"num_microbatches": 3}, MicrobatchError, "num_microbatches=3 does not divide"),
        (step_of(lambda p, x: jnp.std(x @ p)), {"num_microbatches": 2}, MicrobatchError, "exactly"),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            layered(step, (w, X), **options)
    with pytest.raises(TraceError, match="nothing to cut into layers"):
        layered(direct, (struct(), X))


# --- where to cut ----------------------------------------------------------------------------------------------


def test_what_crosses() -> None:
    # equation 0 makes 10 bytes for equation 2, equation 1 makes 7 for equation 2, equation 2's 5 are a result
    assert crossing([0, 1, 2], [2, 2, 3], [10, 7, 5], 3).tolist() == [0, 10, 17, 5]


def test_repetition_begins_where_least_crosses() -> None:
    tokens = np.array([9, *[1, 2, 3, 4] * 5, 1, 2, 8])
    cross = np.array([0, 4, *[1, 5, 6, 5] * 5, 7, 7, 7.0])
    blocks = repeated(tokens, np.ones(len(tokens)), cross)
    assert blocks is not None and blocks.cuts == (2, 6, 10, 14, 18, 22)
    assert repeated(np.arange(20), np.ones(20), np.ones(21)) is None


def test_the_dynamic_program_equals_brute_force() -> None:
    import itertools

    rng = np.random.default_rng(0)
    for _ in range(20):
        work, cross = rng.uniform(0.5, 1.5, 9), rng.integers(1, 50, 10).astype(float)
        total = work.sum()

        def allowed(cuts: tuple[int, ...]) -> bool:
            parts = [work[a:b].sum() * 3 / total for a, b in itertools.pairwise((0, *cuts, 9))]  # noqa: B023
            return all(0.25 <= p <= 1.5 for p in parts)

        best = min(sum(cross[list(c)]) for c in itertools.combinations(range(1, 9), 2) if allowed(c))
        found = balanced(work, cross, 3)
        assert allowed(found) and sum(cross[list(found)]) <= best + 1


def large_values_that_move(graph: LayeredGraph) -> list[str]:
    """Nodes of the update that read something large which was made at a layer where they do not run."""
    made: dict[int, tuple[int, ...]] = {}
    found: list[str] = []
    for node, layers in zip(graph.update.nodes, graph.update_layers, strict=True):
        for v in node.operands:
            if isinstance(v, int) and v in made and graph.update.values[v].size > 1 and not set(layers) <= set(made[v]):
                found.append(str(node))
        made.update(dict.fromkeys(node.results, layers))
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))),
        lambda: optax.adafactor(1e-3),
        lambda: optax.lion(1e-3, weight_decay=0.1),
        lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2, momentum=0.9)),
        lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.ema(0.9), optax.lamb(1e-3)),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
        lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    ],
    ids=["clip_adamw", "adafactor", "lion", "adaptive", "noise_ema_lamb", "injected", "finite", "multi"],
)
def test_an_update_moves_scalars_only(make: Any) -> None:
    optimizer = make()

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean(x @ params[0]["w"])

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        value, grads = value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = [{"w": struct(WIDTH, WIDTH), "b": struct(WIDTH)} for _ in range(4)]
    graph = graph_of(step, ((params, jax.eval_shape(optimizer.init, params)), X), layers=4)
    assert large_values_that_move(graph) == []
    homes = {w[0] for n, w in zip(graph.update.nodes, graph.update_layers, strict=True) if n.result_types[0].size > 1}
    assert homes == {0, 1, 2, 3}


@jax.custom_jvp
def scaled_by(x: Any, scale: Any) -> Any:
    """A product by what is never differentiated."""
    return x * scale


@functools.partial(scaled_by.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    (x, scale), (tangent, other) = primals, tangents
    assert isinstance(other, SymbolicZero)
    return scaled_by(x, scale), tangent * scale


def test_a_rule_may_assert_what_is_not_differentiated() -> None:
    def loss(w: Any, x: Any) -> Any:
        for v in w:
            x = scaled_by(jnp.tanh(x @ v), 2.0 + jnp.zeros(()))
        return jnp.mean(x**2)

    def step(w: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(w, x)
        return [v - g for v, g in zip(w, grads, strict=True)], value

    weights, x = [jax.ShapeDtypeStruct((8, 8), "float32")] * 4, jax.ShapeDtypeStruct((16, 8), "float32")
    assert len(layered(step, (weights, x), num_microbatches=2).graph.layers) > 1


def test_what_cannot_be_traced_apart_says_why() -> None:
    def wrong(x: Any) -> Any:
        raise AssertionError("not this operand")

    with pytest.raises(TraceError, match=r"apart from the step: AssertionError: not this operand$"):
        traced_apart(wrong, jax.ShapeDtypeStruct((), "float32"))
