"""Users' kernels: the rule text, opaque calls on local shapes (pallas, ffi), and users' own shard_maps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.frontend.trace import trace
from autopar.frontend.user_rules import _FLOPS, registered_rules, sharding_rule
from autopar.ir.errors import RuleError
from autopar.ir.graph import Node, TensorType
from autopar.primitives import rule_for
from autopar.primitives.custom import parse_rule, rule_from_text
from tests.compare import assert_close
from tests.cpu8 import op_harness
from tests.cpu8.op_harness import check_case
from tests.op_case import case
from tests.planned import check_planned


def _matmul_kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] @ y_ref[...]


def _pallas_matmul(x: Any, y: Any) -> Any:
    b, m, k = x.shape
    n = y.shape[-1]
    return pl.pallas_call(
        _matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((b, m, n), x.dtype),
        grid=(b,),
        in_specs=[pl.BlockSpec((None, m, k), lambda i: (i, 0, 0)), pl.BlockSpec((None, k, n), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((None, m, n), lambda i: (i, 0, 0)),
        interpret=True,
    )(x, y)


@sharding_rule("bmm", "b m k+, b k n -> b m n")
def bmm(x: Any, y: Any) -> Any:
    return _pallas_matmul(x, y)


@sharding_rule("stats", "... _, () -> ..., ... _")
def stats(inputs: dict[str, Any], *, power: int = 1) -> tuple[Any, Any]:
    """A pytree in (a: rank n, b: scalar), a pytree out, and a static argument."""
    return inputs["a"].sum(-1) * inputs["b"], inputs["a"] ** power


def _node(operands: tuple[str, ...], results: tuple[str, ...], **fields: Any) -> Node:
    def types(texts: tuple[str, ...]) -> tuple[TensorType, ...]:
        split = [t[:-1].split("[") for t in texts]
        return tuple(TensorType(dtype=d, shape=tuple(int(n) for n in s.split(",") if n)) for d, s in split)

    count = len(operands)
    return Node(
        id=37,
        primitive=fields.pop("primitive", "flash"),
        params=fields,
        operands=tuple(range(count)),
        results=tuple(range(count, count + len(results))),
        operand_types=types(operands),
        result_types=types(results),
        source="model.py:88",
    )


# --- the text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operands", "results", "printed"),
    [
        (
            "b h s _, b h t _ -> b h s _",
            ("float32[2,4,8,16]", "float32[2,4,6,16]"),
            ("float32[2,4,8,16]",),
            "([b,h,s,_],[b,h,t,_])->([b,h,s,_]) {b=2,h=4,s=8,t=6} whole={t}",
        ),
        (
            "i k+, k j -> i j",
            ("float32[4,8]", "float32[8,2]"),
            ("float32[4,2]",),
            "([i,k],[k,j])->([i,j]) {i=4,k=8,j=2} reduction={k}",
        ),
        (
            "... d, d -> ... d",
            ("f[2,3,4]", "f[4]"),
            ("f[2,3,4]",),
            "([lead1,lead0,d],[d])->([lead1,lead0,d]) {lead1=2,lead0=3,d=4}",
        ),
        (
            "h ... d, ... -> h ...",
            ("f[2,3,4]", "f[3]"),
            ("f[2,3]",),
            "([h,lead0,d],[lead0])->([h,lead0]) {h=2,lead0=3,d=4} whole={d}",
        ),
        ("n, () -> n, ()", ("f[4]", "f[]"), ("f[4]", "f[]"), "([n],[])->([n],[]) {n=4}"),
        ("n, -> n", ("f[4]", "f[]"), ("f[4]",), "([n],[])->([n]) {n=4}"),
        (
            "_ -> _",
            ("f[4]",),
            ("f[4]",),
            "([_])->([_]) {} replicate: its sharding rule '_ -> _' keeps all dimensions whole",
        ),
    ],
)
def test_text_to_rule(text: str, operands: tuple[str, ...], results: tuple[str, ...], printed: str) -> None:
    node = _node(operands, results)
    rule = rule_from_text(text, node)
    rule.verify(tuple(t.shape for t in node.operand_types), tuple(t.shape for t in node.result_types))
    assert str(rule) == printed
    assert parse_rule(str(parse_rule(text))) == parse_rule(text)


def test_reduction_option_is_the_plus_sign() -> None:
    assert parse_rule("i k, k j -> i j", ["k"]) == parse_rule("i k+, k j -> i j")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b s, b s", "expected exactly one '->'"),
        ("b s -> b -> s", "expected exactly one '->'"),
        ("b (h d) -> b", "'(h' is not a dimension; expected a name, a name with '+', '_'"),
        ("b 3 -> b", "'3' is not a dimension"),
        ("b b -> b", "'b' occurs twice in 'b b'"),
        ("... x ... -> x", "'...' occurs twice"),
        ("b -> b t", "'t' stands in a result but in no operand"),
        ("b -> ...", "'...' stands in a result but in no operand"),
        ("b k+ -> b k", "'k' is a reduction but stands in every result"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


def test_reduction_of_an_unknown_name() -> None:
    with pytest.raises(RuleError, match="reduction 'z' is in no operand; it has b, k"):
        parse_rule("b k -> b", ["z"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b s -> b s", "flash (node 37, model.py:88): sharding rule 'b s -> b s' has 1 operands, the operator 2"),
        ("b s, s -> b s, b", "has 2 results, the operator 1"),
        ("b s d, s -> b s", "operand 0 is float32[4,8], rank 2, but the rule names 3 dimensions (b s d)"),
        ("... b s d, s -> b s", "operand 0 is float32[4,8], rank 2, but the rule names 3 dimensions (... b s d)"),
        ("b s, b -> b s", "'b' is 4 in operand 0 dimension 0 and 8 in operand 1 dimension 0"),
    ],
)
def test_text_that_does_not_fit(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        rule_from_text(text, _node(("float32[4,8]", "float32[8]"), ("float32[4,8]",)))
    assert message in str(error.value)


def test_key_dimensions_stay_whole() -> None:
    with pytest.raises(RuleError, match="PRNG key array, which stays whole"):
        rule_from_text("b, b -> b", _node(("key<fry>[4]", "float32[4]"), ("float32[4]",)))


# --- decorated functions ----------------------------------------------------------------------------------


def test_without_a_plan_a_kernel_is_its_function() -> None:
    x, y = np.ones((2, 4, 8), np.float32), np.full((2, 8, 3), 2.0, np.float32)
    np.testing.assert_array_equal(bmm(x, y), np.full((2, 4, 3), 16.0))
    np.testing.assert_array_equal(jax.jit(bmm)(x, y), np.full((2, 4, 3), 16.0))
    total, squares = stats({"a": x, "b": np.float32(3)}, power=2)
    np.testing.assert_array_equal(total, np.full((2, 4), 24.0))
    np.testing.assert_array_equal(squares, x)


def test_kernel_is_one_node_with_its_rule() -> None:
    graph = trace(bmm, jnp.zeros((2, 4, 8)), jnp.zeros((2, 8, 3))).graph
    (node,) = graph.nodes
    assert node.params == {"name": "bmm", "rule": "b m k+, b k+ n -> b m n"}
    assert str(rule_for(node)) == "([b,m,k],[b,k,n])->([b,m,n]) {b=2,m=4,k=8,n=3} reduction={k}"


@pytest.mark.parametrize(
    "c",
    [
        case("pallas kernel", bmm, "f32[4,8,8]", "f32[4,8,4]", limit=20),
        case("pallas kernel under vmap", jax.vmap(bmm, in_axes=(1, None)), "f32[4,8,8,2]", "f32[4,2,4]", limit=8),
        case("pytree kernel", lambda a, b: stats({"a": a, "b": b}, power=2), "f32[4,8,2]", "f32[]"),
    ],
    ids=lambda c: c.name,
)
def test_kernel_on_local_shapes(c: Any) -> None:
    assert check_case(c) > 2


def test_vmap_keeps_the_rule() -> None:
    graph = trace(jax.vmap(bmm, in_axes=(None, 0)), jnp.zeros((2, 4, 8)), jnp.zeros((5, 2, 8, 3))).graph
    assert [n.params["rule"] for n in graph.nodes] == ["b m k+, vmap0 b k+ n -> vmap0 b m n"]


def test_forward_and_backward_kernels_of_a_custom_vjp_stay_opaque() -> None:
    forward = sharding_rule("square", "b n -> b n")(lambda x: x * x)
    backward = sharding_rule("square_bwd", "b n, b n -> b n")(lambda x, g: 2 * x * g)
    square = jax.custom_vjp(forward)
    square.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.grad(lambda x: square(x).sum())(x), 2 * x)
    graph = trace(jax.value_and_grad(lambda x: square(x).sum()), x).graph
    assert [n.params["name"] for n in graph.nodes if n.primitive == "autopar_kernel"] == ["square", "square_bwd"]


def test_a_rule_covers_the_gradient() -> None:
    cube = sharding_rule("cube", "b n, () -> b n", flops=lambda x, k, out: 3.0 * x[0] * x[1])(lambda x, k: x**3 * k)
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.grad(lambda x: cube(x, 2).sum())(x), 6 * x**2)
    np.testing.assert_allclose(jax.jacfwd(lambda x: cube(x, 2).sum())(x), 6 * x**2)
    graph = trace(jax.grad(lambda x: cube(x, 2).sum()), x).graph
    forward, backward = [n for n in graph.nodes if n.primitive == "autopar_kernel"]
    assert (forward.params["name"], forward.params["rule"]) == (
        "cube",
        "b n, () -> b n, b n, ()",
    )  # 3 x² and k are kept
    assert (backward.params["name"], backward.params["rule"]) == ("cube (gradient)", "b n, (), b n -> b n")
    assert (forward.flops, backward.flops) == (18.0, 36.0)


def _norm(x: Any, w: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * w


norm = sharding_rule("norm", "... _, _ -> ... _")(_norm)
scaled = sharding_rule("scaled", "b s d, d -> b s d")(lambda x, w: jnp.sin(x) * w)
mixed = sharding_rule("mixed", "b m k+, k n -> b m n")(lambda x, y: jnp.sin(x) @ y)
merged = sharding_rule("merged", "b h s -> b h s")(lambda x: jnp.tanh(x.reshape(-1, x.shape[-1])).reshape(x.shape) ** 2)


@jax.custom_vjp
def _numbered(x: Any, w: Any) -> Any:
    """A kernel that looks at its number, and so has no rule of its own: rows are scaled."""

    def body(x: Any, w: Any, y: Any) -> None:
        y[...] = x[...] * w[...] * jnp.where(pl.program_id(0) >= 0, 1.0, 2.0)

    rows = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0],),
                          in_specs=[rows, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))], out_specs=rows,
                          interpret=True)(x, w[None])  # fmt: skip


_numbered.defvjp(lambda x, w: (_numbered(x, w), (x, w)), lambda kept, g: (_numbered(g, kept[1]), (g * kept[0]).sum(0)))
numbered = sharding_rule("numbered", "b n, n -> b n")(_numbered)

GRADIENTS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "sums where an operand lacks a name": (scaled, ((8, 4, 16), (16,))),
    "rows of a norm": (norm, ((8, 4, 16), (16,))),
    "a name that is summed over": (mixed, ((8, 4, 16), (16, 8))),
    "residuals of merged dimensions": (merged, ((4, 8, 16),)),
    "a kernel without a rule of its own": (numbered, ((8, 16), (16,))),
}
"""Name → decorated function, shapes of its operands."""


def _trained(fun: Any) -> Any:
    def step(*operands: Any) -> Any:
        value, grads = autopar.value_and_grad(lambda operands: jnp.mean(jnp.cos(fun(*operands)) ** 2))(operands)
        return [x - g for x, g in zip(operands, grads)], value

    return step


@pytest.mark.parametrize("seed", [None, 0, 1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_kernels_are_kernels_and_right(name: str, seed: int | None, float64: None) -> None:
    fun, shapes = GRADIENTS[name]
    rng = np.random.default_rng(0)
    args = tuple(rng.normal(size=s) for s in shapes)
    plan = check_planned(_trained(fun), args, seed=seed)
    assert plan.sharding.replicated == ()


@sharding_rule("largest", "b _ -> b, b")
def largest(x: Any) -> tuple[Any, Any]:
    return x.max(-1), x.argmax(-1)


def test_gradient_of_a_kernel_that_gives_integers_too(float64: None) -> None:
    """They have no tangents."""

    def fun(x: Any) -> Any:
        value, at = largest(x)
        return value * jnp.cos(at)

    check_planned(_trained(fun), (np.random.default_rng(0).normal(size=(8, 16)),))


def _under(transformation: str, fun: Any) -> Any:
    """Losses of a stack of operands' examples, the function transformed."""
    match transformation:
        case "vmap":
            return lambda xs, w: jax.vmap(fun, in_axes=(0, None))(xs, w).sum()
        case "vmap of both":
            return lambda xs, w: jax.vmap(lambda x: fun(x, w * x.mean()))(xs).sum()
        case "vmap twice":
            return lambda xs, w: jax.vmap(jax.vmap(fun, in_axes=(0, None)), in_axes=(1, None))(xs, w).sum()
        case "scan":
            return lambda xs, w: lax.scan(lambda c, x: (jnp.sin(fun(x, w)) + c, c), xs[0], xs)[0].sum()
        case "remat":
            return lambda xs, w: jax.checkpoint(lambda xs: jax.vmap(fun, in_axes=(0, None))(xs, w) ** 2)(xs).sum()
        case _:
            raise AssertionError(transformation)


@pytest.mark.parametrize("transformation", ["vmap", "vmap of both", "vmap twice", "scan", "remat"])
def test_gradients_of_kernels_under_transformations(transformation: str, float64: None) -> None:
    rng = np.random.default_rng(0)
    twice = transformation == "vmap twice"
    plain, kernel = (_norm, sharding_rule("rms", "b _, _ -> b _")(_norm)) if twice else (_scaled_plain, scaled)
    args = rng.normal(size=(4, 2, 8, 16) if twice else (4, 8, 2, 16)), rng.normal(size=16)
    want = jax.value_and_grad(_under(transformation, plain), argnums=(0, 1))(*args)
    assert_close(jax.value_and_grad(_under(transformation, kernel), argnums=(0, 1))(*args), want, 1e-12)
    if not twice:
        per_example = [jax.vmap(jax.grad(lambda x, w: f(x, w).sum(), 1), in_axes=(0, None)) for f in (kernel, plain)]  # noqa: B023
        assert_close(per_example[0](*args), per_example[1](*args), 1e-12)
    plan = check_planned(lambda *args: jax.value_and_grad(_under(transformation, kernel), argnums=(0, 1))(*args), args)
    assert plan.sharding.replicated == ()


def _scaled_plain(x: Any, w: Any) -> Any:
    return jnp.sin(x) * w


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_kernels_in_microbatches(num_microbatches: int, float64: None) -> None:
    """Eight microbatches hold one example each."""

    def step(w: Any, x: Any) -> Any:
        loss, grads = autopar.value_and_grad(lambda w: jnp.mean(numbered(norm(x @ w["in"], w["g"]), w["out"]) ** 2))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    rng = np.random.default_rng(0)
    w = {"in": rng.normal(size=(8, 16)), "g": rng.normal(size=16), "out": rng.normal(size=16)}
    x = rng.normal(size=(8, 8))
    mesh = (2, 2) if num_microbatches == 8 else (2, 4)
    parallel = autopar.parallelize(step, mesh=mesh, num_microbatches=num_microbatches)
    assert_close(parallel(w, x), jax.jit(step)(w, x), 1e-12)


def test_array_as_keyword() -> None:
    with pytest.raises(RuleError, match=r"kernel 'stats' \(test_user_kernels.py:\d+\): keyword argument 'power' is a"):
        stats({"a": jnp.zeros((2, 3)), "b": 1.0}, power=jnp.ones(3))


def test_kernel_with_fixed_sizes_is_named() -> None:
    fixed = sharding_rule("fixed", "b n -> b n")(lambda x: jnp.broadcast_to(x[:1], (8, 4)))
    with pytest.raises(
        RuleError, match=r"'fixed': on local operands \(.*\) the kernel gave result 0 as float32\(8, 4\)"
    ):
        check_case(case("fixed", fixed, "f32[8,4]"))


# --- rules by name ----------------------------------------------------------------------------------------


def test_named_rules_come_first() -> None:
    sharding_rule("my_target", "b n+ -> b")
    rules = registered_rules()
    assert rules["my_target"] == "b n+ -> b"
    call = _node(("float32[4,8]",), ("float32[4]",), primitive="ffi_call", target_name="my_target")
    assert str(rule_for(call, rules)) == "([b,n])->([b]) {b=4,n=8} reduction={n}"
    assert rule_for(call).why == (
        "the ffi call 'my_target' is opaque; give it a rule with autopar.sharding_rule('my_target', '… -> …') "
        "to split it"
    )
    named = _node(("float32[4,8]",), ("float32[4,8]",), primitive="sort", dimension=1)
    assert str(rule_for(named, {"sort": "b n -> b n"})) == "([b,n])->([b,n]) {b=4,n=8}"


def test_a_decorated_function_s_rule_is_not_that_of_a_primitive_of_its_name() -> None:
    """A function named as a primitive is: the primitive's rule, and what the user gave for it, stay."""
    sharding_rule("square", "b n -> b n", flops=1.0)(lambda x: x * x)
    assert "square" not in registered_rules()
    graph = trace(lambda x: jnp.square(x), np.ones((2, 3, 4), np.float32)).graph
    assert str(rule_for(graph.nodes[0], registered_rules())).startswith("([i,j,k])->([i,j,k])")
    sharding_rule("my_primitive", "b n -> b n", flops=5.0)
    sharding_rule("my_primitive", "b n -> b n, b n", flops=1.0)(lambda x: (x, x))
    assert registered_rules()["my_primitive"] == "b n -> b n" and _FLOPS["my_primitive"] == 5.0


def test_ffi_call_gets_local_result_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK's Cholesky factor, which jaxlib registers, called as a user would call a target of their own."""
    np.testing.assert_allclose(jnp.linalg.cholesky(np.eye(2, dtype=np.float32)), np.eye(2))  # loads LAPACK
    monkeypatch.setattr(op_harness, "rule_for", lambda node: rule_for(node, {"lapack_spotrf_ffi": "b _ _ -> b _ _, b"}))

    def potrf(x: Any) -> Any:
        out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], np.int32))
        layout = (0, 2, 1)
        options = {"input_layouts": [layout], "output_layouts": [layout, None], "input_output_aliases": {0: 0}}
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", out, **options)
        return call(x, uplo=np.uint8(ord("L")))

    def spd(rng: np.random.Generator) -> tuple[Any, ...]:
        x = rng.normal(size=(8, 3, 3)).astype(np.float32)
        return (x @ x.swapaxes(1, 2) + 4 * np.eye(3, dtype=np.float32),)

    assert check_case(case("ffi", potrf, "f32[8,3,3]", values=spd, primitive="ffi_call")) > 2


# --- opaque without a rule --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("a", "b"), ("x", "y")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_users_shard_map_runs_whole(names: tuple[str, str], check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), names)
    a, b = names

    def body(x: Any, y: Any, z: Any) -> Any:
        shifted = lax.ppermute(x, b, [(k, (k + 1) % 4) for k in range(4)])
        mean = jax.nn.relu(lax.pmean(x.sum(), (a, b)))
        return lax.psum(x, a) + z.sum(), shifted + lax.axis_index(b) / 2, lax.psum(y.sum(), (b, a)), mean

    f = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(a, b), P((b, a)), P()),
        out_specs=(P(None, b), P(a, b), P(), P()),
        check_vma=check_vma,
    )
    assert check_case(case("shard_map", f, "f32[4,8]", "f32[16]", "f32[3]", primitive="shard_map")) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_users_shard_map_with_loops_and_branches(check_vma: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))

    def body(x: Any) -> Any:
        total = lax.fori_loop(0, 3, lambda _, c: c * lax.psum(x.sum(), "a"), jnp.float32(1))
        _, sums = lax.scan(lambda c, v: (c, lax.psum(v * c, "a")), jnp.float32(2), x)
        branch = lax.cond(total > 0, lambda: lax.psum(2 * x, "a"), lambda: lax.psum(x, "a"))
        return lax.while_loop(lambda c: c < 9, lambda c: c + lax.psum(1.0, "a"), total), sums, branch

    f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=check_vma)
    assert check_case(case("loops", f, "f32[24]", primitive="shard_map")) == 1
