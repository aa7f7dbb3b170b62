"""Operator cases: gather, scatter, slices at run-time indices, windows, random bits, linear algebra, fft, sorting.

One line per form of a primitive; see `tests/op_case.py`. Indices run past the end on purpose wherever the mode says
what happens there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.op_case import Case, case


def _take(mode: str, axis: int = 0, **options: Any) -> Any:
    return lambda x, i: jnp.take(x, i, axis=axis, mode=mode, **options)


def _gather(
    mode: str, offset: Any, collapsed: Any, index_map: Any, sizes: Any, batching: Any = ((), ()), fill: Any = None
):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offset,
        collapsed_slice_dims=collapsed,
        start_index_map=index_map,
        operand_batching_dims=batching[0],
        start_indices_batching_dims=batching[1],
    )
    return lambda x, i: lax.gather(x, i, numbers, sizes, mode=mode, fill_value=fill)


def _scatter(op: str, mode: str, window: Any, inserted: Any, index_map: Any, batching: Any = ((), ())) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window,
        inserted_window_dims=inserted,
        scatter_dims_to_operand_dims=index_map,
        operand_batching_dims=batching[0],
        scatter_indices_batching_dims=batching[1],
    )
    fun = {"set": lax.scatter, "add": lax.scatter_add, "sub": lax.scatter_sub}.get(op) or getattr(lax, f"scatter_{op}")
    return lambda x, i, u: fun(x, i, u, numbers, mode=mode)


def _wild(*args: str, high: int, low: int = -9) -> Any:
    """Arguments drawn as usual, but integers from [low, high): indices out of bounds on both sides."""

    def values(rng: np.random.Generator) -> tuple[Any, ...]:
        out = []
        for text in args:
            dtype, shape = text[:-1].split("[")
            dims = tuple(int(d) for d in shape.split(",") if d)
            name = {
                "f64": "float64",
                "f32": "float32",
                "i32": "int32",
                "i8": "int8",
                "u8": "uint8",
                "u32": "uint32",
                "i64": "int64",
            }
            kind = np.dtype(name[dtype])
            if kind.kind == "u":
                out.append(rng.integers(0, high, dims).astype(kind))
            elif kind.kind == "i":
                out.append(rng.integers(low, high, dims).astype(kind))
            else:
                out.append(rng.normal(size=dims).astype(kind))
        return tuple(out)

    return values


def _wild_case(name: str, fun: Any, *args: str, high: int, low: int = -9, **options: Any) -> Case:
    return case(name, fun, *args, values=_wild(*args, high=high, low=low), **options)


def _pool(window: Any, strides: Any, padding: Any, op: Any = lax.max, init: Any = -np.inf) -> Any:
    return lambda x: lax.reduce_window(x, init, op, window, strides, padding)


def _generic_window(x: Any) -> Any:
    def combine(a: Any, b: Any) -> Any:
        return a[0] + b[0], jnp.maximum(a[1], b[1])

    return lax.reduce_window((x, 2 * x), (0.0, -np.inf), combine, (1, 2), (1, 2), "VALID")


def _spd(x: Any) -> Any:
    return x @ jnp.swapaxes(x, -1, -2) + 4.0 * jnp.eye(x.shape[-1], dtype=x.dtype)


def _bits(shape: tuple[int, ...], dtype: str) -> Any:
    return lambda key: jax.random.bits(key, shape, dtype)


_G: dict[str, Any] = {"primitive": "gather"}

CASES: tuple[Case, ...] = (
    # gather
    case("gather embedding", _take("clip"), "f64[16,8]", "i32[4,6]<16", **_G),
    _wild_case("gather embedding, clip", _take("clip"), "f64[16,8]", "i32[4,6]", high=25, **_G),
    _wild_case("gather embedding, fill nan", _take("fill"), "f64[16,8]", "i32[4,6]", high=25, **_G),
    _wild_case("gather embedding, fill 7", _take("fill", fill_value=7.0), "f64[16,8]", "i32[4,6]", high=25, **_G),
    _wild_case("gather of integers, fill", _take("fill"), "i32[16,8]", "i32[4,6]", high=25, **_G),
    _wild_case("gather by int8, fill", _take("fill"), "f64[16,8]", "i8[4,6]", high=25, **_G),
    _wild_case("gather by uint8, clip", _take("clip"), "f64[16,8]", "u8[4,6]", high=25, **_G),
    _wild_case("gather by int64, fill", _take("fill"), "f64[16,8]", "i64[4,6]", high=25, **_G),
    case("gather of booleans", _take("clip"), "bool[16,8]", "i32[4,6]<16", **_G),
    case("gather columns", _take("clip", axis=1), "f64[4,16,2]", "i32[8]<16", **_G),
    case("gather in bounds", lambda x, i: x.at[i].get(mode="promise_in_bounds"), "f32[16,4]", "i32[8]<16", **_G),
    case("gather labels", lambda x, i: jnp.take_along_axis(x, i[..., None], -1), "f64[4,8,16]", "i32[4,8]<16", **_G),
    _wild_case(
        "gather labels, fill",
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1, mode="fill"),
        "f64[4,8,16]",
        "i32[4,8]",
        high=25,
        **_G,
    ),
    case("gather two dimensions", lambda x, i, j: x[i, :, j], "f64[8,4,16]", "i32[6]<8", "i32[6]<16", **_G),
    _wild_case(
        "gather two dimensions, fill",
        lambda x, i, j: x.at[i, :, j].get(mode="fill"),
        "f64[8,4,16]",
        "i32[8]",
        "i32[8]",
        high=18,
        **_G,
    ),
    _wild_case(
        "gather two dimensions, clip",
        lambda x, i, j: x.at[i, :, j].get(mode="clip"),
        "f64[8,4,16]",
        "i32[8]",
        "i32[8]",
        high=18,
        **_G,
    ),
    _wild_case(
        "gather full window, fill",
        _gather("fill", (1, 2), (), (0, 1), (1, 8)),
        "f64[16,8]",
        "i32[4,2]",
        high=17,
        low=-1,
        **_G,
    ),
    _wild_case(
        "gather partial window, clip",
        _gather("clip", (1, 2), (), (0, 1), (3, 1)),
        "f64[16,8]",
        "i32[4,2]",
        high=17,
        **_G,
    ),
    _wild_case(
        "gather partial window, fill",
        _gather("fill", (0,), (1,), (1, 0), (3, 1)),
        "f64[16,8]",
        "i32[4,2]",
        high=17,
        **_G,
    ),
    _wild_case(
        "gather batched, fill",
        _gather("fill", (1,), (2,), (2,), (1, 4, 1), ((0,), (1,))),
        "f64[8,4,16]",
        "i32[6,8,1]",
        high=25,
        **_G,
    ),
    _wild_case(
        "gather batched twice, clip",
        _gather("clip", (), (2,), (2,), (1, 1, 1), ((0, 1), (1, 0))),
        "f64[8,4,16]",
        "i32[4,8,2,1]",
        high=25,
        **_G,
    ),
    # scatter
    case(
        "scatter-add embedding",
        lambda x, i, u: x.at[i].add(u),
        "f64[16,8]",
        "i32[4,6]<16",
        "f64[4,6,8]",
        primitive="scatter-add",
    ),
    *(
        _wild_case(
            f"scatter-{op} rows, {mode}",
            _scatter(op, mode, (1,), (0,), (0,)),
            "f64[16,8]",
            "i32[4,1]" if op == "set" else "i32[12,1]",
            "f64[4,8]" if op == "set" else "f64[12,8]",
            high=25,
        )
        for op in ("add", "sub", "mul", "min", "max")
        for mode in ("clip", "drop")
    ),
    _wild_case(
        "scatter-add of integers",
        _scatter("add", "drop", (1,), (0,), (0,)),
        "i32[16,8]",
        "i32[4,1]",
        "i32[4,8]",
        high=25,
    ),
    _wild_case(
        "scatter-add by int8", _scatter("add", "clip", (1,), (0,), (0,)), "f64[16,8]", "i8[4,1]", "f64[4,8]", high=25
    ),
    _wild_case(
        "scatter-add by uint32",
        _scatter("add", "drop", (1,), (0,), (0,)),
        "f64[16,8]",
        "u32[4,1]",
        "f64[4,8]",
        high=2**32 - 1,
    ),
    _wild_case(
        "scatter-add two dimensions",
        _scatter("add", "drop", (1,), (0, 2), (0, 2)),
        "f64[8,4,16]",
        "i32[8,2]",
        "f64[8,4]",
        high=18,
    ),
    _wild_case(
        "scatter-add window of one",
        _scatter("add", "clip", (1, 2), (), (0, 1)),
        "f64[16,8]",
        "i32[4,2]",
        "f64[4,1,8]",
        high=18,
    ),
    _wild_case(
        "scatter-add partial window",
        _scatter("add", "drop", (1, 2), (), (0, 1)),
        "f64[16,8]",
        "i32[4,2]",
        "f64[4,3,1]",
        high=18,
    ),
    _wild_case(
        "scatter-add batched",
        _scatter("add", "drop", (2,), (2,), (2,), ((0,), (1,))),
        "f64[8,4,16]",
        "i32[6,8,1]",
        "f64[6,8,4]",
        high=25,
    ),
    case(
        "scatter rows", lambda x, u: x.at[jnp.array([3, 11, 0, 7])].set(u), "f64[16,8]", "f64[4,8]", primitive="scatter"
    ),
    case(
        "scatter rows, dropped",
        lambda x, u: x.at[jnp.array([3, 99, 0, -40])].set(u, mode="drop"),
        "f64[16,8]",
        "f64[4,8]",
        primitive="scatter",
    ),
    case(
        "scatter rows, clipped",
        lambda x, u: x.at[jnp.array([3, 99, 5, 7])].set(u, mode="clip"),
        "f64[16,8]",
        "f64[4,8]",
        primitive="scatter",
    ),
    case(
        "scatter batched",
        lambda x, i, u: jax.vmap(lambda a, b, c: a.at[b].set(c))(x, i, u),
        "f64[8,16]",
        "i32[8]<16",
        "f64[8]",
        primitive="scatter",
    ),
    case(
        "gradient of take",
        jax.grad(lambda x, i: jnp.sum(jnp.sin(jnp.take(x, i, axis=0)))),
        "f64[16,8]",
        "i32[4,6]<16",
        primitive="scatter-add",
    ),
    # dynamic slices
    case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (np.int32(0), i), (8, 3)), "f64[8,16]", "i32[]<14"),
    case(
        "dynamic_slice of one row", lambda x, i: lax.dynamic_slice(x, (i, np.int32(0)), (1, 16)), "f64[8,16]", "i32[]<8"
    ),
    case("dynamic_slice past the end", lambda x: lax.dynamic_slice(x, (99, -3), (1, 1)), "f64[8,16]"),
    case("dynamic_slice, int8", lambda x, i: lax.dynamic_slice(x, (i, i), (1, 16)), "f64[8,16]", "i8[]<8"),
    case(
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (np.int32(0), i)),
        "f64[8,16]",
        "f64[8,3]",
        "i32[]<14",
    ),
    case(
        "dynamic_update_slice, one row",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        "f64[8,16]",
        "f64[1,16]",
        "i32[]<8",
    ),
    case(
        "dynamic_update_slice past the end",
        lambda x, u: lax.dynamic_update_slice(x, u, (99, -3)),
        "f64[8,16]",
        "f64[1,1]",
    ),
    # windows
    case(
        "reduce_window max, tiled",
        _pool((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        "f64[4,8,8,2]",
        primitive="reduce_window_max",
    ),
    case(
        "reduce_window max, overlapping",
        _pool((1, 3, 2, 1), (1, 2, 2, 1), "SAME"),
        "f64[4,8,8,2]",
        primitive="reduce_window_max",
    ),
    case("reduce_window max, strided", _pool((1, 1), (1, 4), "VALID"), "f64[4,16]", primitive="reduce_window_max"),
    case(
        "reduce_window min, ragged",
        _pool((1, 2), (1, 2), "VALID", lax.min, np.inf),
        "f64[4,9]",
        primitive="reduce_window_min",
    ),
    case(
        "reduce_window sum",
        _pool((1, 2, 1), (1, 2, 1), "VALID", lax.add, 0.0),
        "f64[4,8,2]",
        primitive="reduce_window_sum",
    ),
    case(
        "reduce_window max, same",
        _pool((1, 3, 3, 1), (1, 2, 1, 1), ((0, 0), (1, 0), (1, 1), (0, 0))),
        "f64[2,16,16,4]",
        primitive="reduce_window_max",
    ),
    case(
        "reduce_window min of integers, far",
        _pool((1, 5), (1, 1), ((0, 0), (2, 2)), lax.min, np.iinfo(np.int32).max),
        "i32[4,16]",
        primitive="reduce_window_min",
    ),
    case(
        "reduce_window sum, further than it is long",
        _pool((1, 13), (1, 4), ((0, 0), (6, 6)), lax.add, 0.0),
        "f64[4,12]",
        primitive="reduce_window_sum",
    ),
    case(
        "reduce_window sum, same",
        _pool((1, 3, 5, 1), (1, 1, 2, 1), "SAME", lax.add, 0.0),
        "f64[2,16,32,4]",
        primitive="reduce_window_sum",
    ),
    case(
        "reduce_window sum, its gradient",
        jax.grad(lambda x: jnp.sum(jnp.sin(_pool((1, 3, 1), (1, 2, 1), ((0, 0), (1, 0), (0, 0)), lax.add, 0.0)(x)))),
        "f64[2,32,4]",
        primitive="reduce_window_sum",
    ),
    case("reduce_window, generic", _generic_window, "f64[4,8]", primitive="reduce_window"),
    case(
        "select_and_scatter_add",
        jax.grad(lambda x: jnp.sum(jnp.sin(_pool((1, 2, 3), (1, 2, 1), "VALID")(x)))),
        "f64[4,8,6]",
        primitive="select_and_scatter_add",
    ),
    case(
        "select_and_gather_add",
        lambda x, t: jax.jvp(_pool((1, 2, 3), (1, 2, 1), "VALID"), (x,), (t,))[1],
        "f64[4,8,6]",
        "f64[4,8,6]",
        primitive="select_and_gather_add",
    ),
    # random
    *(
        case(f"random_bits uint{w}", _bits((4, 8, 2), f"uint{w}"), "key[]", primitive="random_bits")
        for w in (8, 16, 32)
    ),
    case(
        "random_bits uint64", lambda k, wide: _bits((4, 8, 2), "uint64")(k), "key[]", "u64[]", primitive="random_bits"
    ),
    case("random_bits, one dimension", _bits((16,), "uint32"), "key[]", primitive="random_bits"),
    case("random_bits, odd sizes", _bits((3, 8, 5), "uint32"), "key[]", primitive="random_bits"),
    case("random_bits, a batch of keys", jax.vmap(_bits((4, 2), "uint32")), "key[8]", primitive="random_bits"),
    case("random_bits, a draw per key", jax.vmap(_bits((), "uint32")), "key[8]", primitive="random_bits"),
    case("random_bits rbg", lambda: jax.random.bits(jax.random.key(3, impl="rbg"), (8, 4)), primitive="random_bits"),
    case(
        "random_gamma", lambda k, a: jax.random.gamma(k, a), "key[]", "f32[8]", positive=True, primitive="random_gamma"
    ),
    case(
        "random_gamma, a batch of keys",
        jax.vmap(lambda k, a: jax.random.gamma(k, a)),
        "key[8]",
        "f32[8,2]",
        positive=True,
        limit=3,
        primitive="random_gamma",
    ),
    case("random_split", lambda k: jax.random.key_data(jax.random.split(k, 4)), "key[]"),
    case("random_fold_in", lambda k, i: jax.random.key_data(jax.random.fold_in(k, i)), "key[]", "i32[]<9"),
    case("random_seed", lambda i: jax.random.key_data(jax.random.key(i)), "i32[]<9"),
    case(
        "random_wrap",
        lambda: jax.random.key_data(jax.random.clone(jax.random.wrap_key_data(jnp.arange(2, dtype="uint32")))),
    ),
    case(
        "threefry2x32",
        lambda a, b: jax.extend.random.threefry2x32_p.bind(jnp.uint32(1), jnp.uint32(2), a, b),
        "u32[8,4]",
        "u32[8,4]",
    ),
    case("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 4)), "u32[4]", primitive="rng_bit_generator"),
    # linear algebra
    case("cholesky", lambda x: lax.linalg.cholesky(_spd(x)), "f64[8,3,3]", primitive="cholesky"),
    case("cholesky of one", lambda x: lax.linalg.cholesky(_spd(x)), "f64[4,4]", primitive="cholesky"),
    case("eigh", lambda x: lax.linalg.eigh(_spd(x)), "f64[8,3,3]", primitive="eigh"),
    case("eig", lambda x: lax.linalg.eig(_spd(x)), "f64[8,3,3]", primitive="eig"),
    case("svd", lambda x: lax.linalg.svd(x), "f64[8,3,2]", primitive="svd"),
    case("svd, values only", lambda x: lax.linalg.svd(x, compute_uv=False), "f64[2,4,3,2]", primitive="svd"),
    case("qr", lambda x: lax.linalg.qr(x), "f64[8,3,2]", primitive="qr"),
    case("lu", lambda x: lax.linalg.lu(x), "f64[8,3,3]", primitive="lu"),
    case("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), "i32[8,2]<2"),
    case("schur", lambda x: lax.linalg.schur(x), "f64[8,3,3]", primitive="schur"),
    case("hessenberg", lambda x: lax.linalg.hessenberg(x), "f64[8,3,3]", primitive="hessenberg"),
    case("tridiagonal", lambda x: lax.linalg.tridiagonal(_spd(x)), "f64[8,3,3]", primitive="tridiagonal"),
    case("householder_product", lambda a, t: lax.linalg.householder_product(a, t), "f64[8,3,3]", "f64[8,3]"),
    *(
        case(
            f"triangular_solve, {'left' if left else 'right'}",
            lambda a, b, left=left: lax.linalg.triangular_solve(_spd(a), b, left_side=left, lower=True),
            "f64[4,3,3]",
            "f64[4,3,8]" if left else "f64[4,8,3]",
            primitive="triangular_solve",
        )
        for left in (True, False)
    ),
    case(
        "tridiagonal_solve",
        lambda d, b: lax.linalg.tridiagonal_solve(0.1 * d, d + 3.0, 0.1 * d, b),
        "f64[4,6]",
        "f64[4,6,8]",
        positive=True,
        primitive="tridiagonal_solve",
    ),
    case("fft", lambda x: lax.fft(x, "FFT", (8,)), "c128[4,8]"),
    case("rfft", lambda x: lax.fft(x, "RFFT", (8,)), "f64[4,2,8]"),
    case("irfft in two dimensions", lambda x: lax.fft(x, "IRFFT", (4, 8)), "c128[8,4,5]"),
    # sorting
    case("sort", lambda x: lax.sort(x, dimension=0), "f64[8,4]"),
    case("sort of one dimension", lambda x: lax.sort(x), "f64[16]"),
    case(
        "sort by two keys",
        lambda a, b, c: lax.sort((a, b, c), dimension=1, num_keys=2),
        "i32[4,8]<3",
        "i32[4,8]<3",
        "f64[4,8]",
    ),
    case("argsort", lambda x: jnp.argsort(x, axis=-1), "f64[4,8]", primitive="sort"),
    case("top_k", lambda x: lax.top_k(x, 3), "f64[4,8]"),
    case("approx_top_k", lambda x: lax.approx_max_k(x, 3), "f32[4,8]"),
)
