"""Cases of operators on dense arrays: elementwise, products, convolutions, reductions, shapes, opaque calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.op_case import Case, case

_REAL = "f64[4,8]"

_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": lax.abs, "neg": lax.neg, "sign": lax.sign, "square": lax.square, "floor": lax.floor, "ceil": lax.ceil,
    "round": lax.round, "exp": lax.exp, "exp2": lax.exp2, "expm1": lax.expm1, "tanh": lax.tanh,
    "logistic": lax.logistic,
    "sin": lax.sin, "cos": lax.cos, "tan": lax.tan, "sinh": lax.sinh, "cosh": lax.cosh, "asinh": lax.asinh,
    "atan": lax.atan, "cbrt": lax.cbrt, "erf": lax.erf, "erfc": lax.erfc, "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e, "is_finite": lax.is_finite, "stop_gradient": lax.stop_gradient,
    "integer_pow": lambda x: lax.integer_pow(x, 3), "reduce_precision": lambda x: lax.reduce_precision(x, 5, 7),
}  # fmt: skip
_UNARY_POSITIVE: dict[str, Callable[[Any], Any]] = {
    "log": lax.log, "log1p": lax.log1p, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "lgamma": lax.lgamma,
    "digamma": lax.digamma, "acosh": lambda x: lax.acosh(x + 1), "erf_inv": lambda x: lax.erf_inv(x / 2.5),
    "acos": lambda x: lax.acos(x / 2.5), "asin": lambda x: lax.asin(x / 2.5), "atanh": lambda x: lax.atanh(x / 2.5),
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "rem": lax.rem, "max": lax.max, "min": lax.min,
    "atan2": lax.atan2, "nextafter": lax.nextafter, "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le,
    "gt": lax.gt, "ge": lax.ge, "complex": lax.complex,
}  # fmt: skip
_INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical, "shift_right_arithmetic": lax.shift_right_arithmetic,
    "add": lax.add, "mul": lax.mul, "div": lambda a, b: lax.div(a, b + 20),
}  # fmt: skip

ELEMENTWISE: tuple[Case, ...] = (
    *(case(n, f, _REAL, primitive=n, limit=3) for n, f in _UNARY.items() if n != "stop_gradient"),
    *(case(n, f, _REAL, primitive=n, limit=3, positive=True) for n, f in _UNARY_POSITIVE.items()),
    *(case(n, f, _REAL, _REAL, primitive=n, limit=5) for n, f in _BINARY.items()),
    *(case(f"{n} int", f, "i32[4,8]", "i32[4,8]", primitive=n, limit=5) for n, f in _INTEGER.items()),
    case("pow", lax.pow, _REAL, _REAL, primitive="pow", positive=True, limit=3),
    case("pow by int", lambda x: lax.pow(x, 3), _REAL, primitive="pow", limit=3),
    case("igamma", lax.igamma, _REAL, _REAL, primitive="igamma", positive=True, limit=2, rtol=1e-9),
    case("zeta", lambda a, b: lax.zeta(a + 1, b), _REAL, _REAL, primitive="zeta", positive=True, limit=2, rtol=1e-9),
    case("not", lax.bitwise_not, "bool[4,8]", primitive="not", limit=3),
    case("clz", lax.clz, "u32[4,8]", limit=3),
    case("population_count", lax.population_count, "u32[4,8]", limit=3),
    case("mul literal", lambda x: x * 2.0, _REAL),
    case("literal div", lambda x: 2.0 / x, _REAL, positive=True, limit=3),
    case("add literal", lambda x: x + 2.0, _REAL, limit=3),
    case("add scalar", lambda x, s: lax.add_p.bind(x, s), "f64[4,8]", "f64[4,8]", primitive="add"),
    case("mul rank 3", lax.mul, "f64[4,8,2]", "f64[4,8,2]"),
    case("mul size 1", lax.mul, "f64[1,8]", "f64[1,8]"),
    case("mul bf16", lax.mul, "bf16[4,8]", "bf16[4,8]"),
    case("add rank 0", lax.add, "f64[]", "f64[]"),
    case("convert f32 f64", lambda x, _: x.astype(jnp.float64), "f32[4,8]", "f64[]", rtol=1e-5),
    case("convert f32 bf16", lambda x: x.astype(jnp.bfloat16), "f32[4,8]"),
    case("convert bf16 f32", lambda x: x.astype(jnp.float32), "bf16[4,8]", rtol=3e-2),
    case("convert bf16 f16", lambda x: x.astype(jnp.float16), "bf16[4,8]"),
    case("convert i32 i8", lambda x: x.astype(jnp.int8), "i32[4,8]"),
    case("convert i8 i32", lambda x: x.astype(jnp.int32), "i8[4,8]"),
    case("convert i32 f32", lambda x: x.astype(jnp.float32), "i32[4,8]"),
    case("convert bool f32", lambda x: x.astype(jnp.float32), "bool[4,8]"),
    case("bitcast same width", lambda x: lax.bitcast_convert_type(x, jnp.int32), "f32[4,8]"),
    case("bitcast to bytes", lambda x: lax.bitcast_convert_type(x, jnp.uint8), "f32[4,8]"),
    case("bitcast from bytes", lambda x: lax.bitcast_convert_type(x, jnp.int32), "u8[4,8,4]"),
    case("real", lax.real, "c128[4,8]"),
    case("imag", lax.imag, "c128[4,8]"),
    case("conj", lax.conj, "c128[4,8]", primitive="conj"),
    case("mul complex", lax.mul, "c128[4,8]", "c128[4,8]"),
    case("select_n", lax.select, "bool[4,8]", _REAL, _REAL),
    case("select_n scalar predicate", lax.select_n, "bool[]", _REAL, _REAL),
    case("select_n of three", lax.select_n, "i32[4,8]<3", "f32[4,8]", "f32[4,8]", "f32[4,8]"),
    case("select_n bool", lax.select, "bool[4,8]", "bool[4,8]", "bool[4,8]"),
    case("clamp", lax.clamp, _REAL, _REAL, _REAL),
    case("clamp scalar bounds", lambda x: lax.clamp(-0.5, x, 0.5), _REAL),
    case("add_any", jax.grad(lambda x: (lax.sin(x) * x).sum()), _REAL, primitive="add_any"),
    case("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), "f64[4,8]", "f64[8]"),
    case("optimization_barrier of one", lambda x: lax.optimization_barrier(x), "f64[4,8]"),
    case("device_put", lambda x: jax.device_put(x), _REAL),
    case("checkpoint_name", lambda x: checkpoint_name(x, "kept"), _REAL),
)  # fmt: skip


def _dot(dims: Any, preferred: Any = None) -> Callable[[Any, Any], Any]:
    return lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=preferred)


def _ragged_grads(a: Any, b: Any, sizes: Any) -> Any:
    return jax.grad(lambda a, b: (lax.ragged_dot(a, b, sizes) ** 2).sum(), (0, 1))(a, b)


CONTRACTION: tuple[Case, ...] = (
    case("matmul", _dot((((1,), (0,)), ((), ()))), "f64[16,8]", "f64[8,24]"),
    case("matmul transposed", _dot((((0,), (1,)), ((), ()))), "f64[16,8]", "f64[24,16]"),
    case("matvec", _dot((((1,), (0,)), ((), ()))), "f64[16,8]", "f64[8]"),
    case("inner product", _dot((((0,), (0,)), ((), ()))), "f64[16]", "f64[16]"),
    case("outer product", _dot((((), ()), ((), ()))), "f64[8]", "f64[16]"),
    case("batched matmul", _dot((((3,), (3,)), ((0, 1), (0, 1)))), "f64[2,4,8,16]", "f64[2,4,4,16]", limit=18),
    case("batch in the middle", _dot((((0,), (2,)), ((1,), (0,)))), "f64[16,4,8]", "f64[4,8,16]"),
    case("two contracted", _dot((((0, 1), (1, 0)), ((), ()))), "f64[4,8,16]", "f64[8,4,2]"),
    case("matmul bf16 to f32", _dot((((1,), (0,)), ((), ())), jnp.float32), "bf16[16,8]", "bf16[8,24]", rtol=3e-2),
    case("matmul bf16", _dot((((1,), (0,)), ((), ()))), "bf16[16,8]", "bf16[8,24]", rtol=6e-2),
    case("matmul i8 to i32", _dot((((1,), (0,)), ((), ())), jnp.int32), "i8[16,8]", "i8[8,24]"),
    case("matmul odd", _dot((((1,), (0,)), ((), ()))), "f64[6,3]", "f64[3,1]"),
    case("ragged rows", lax.ragged_dot, "f32[8,16]", "f32[2,16,4]", "i32[2]",
         values=lambda r: (r.normal(size=(8, 16)).astype(np.float32), r.normal(size=(2, 16, 4)).astype(np.float32),
                           np.array([3, 5], np.int32))),
    case("ragged contraction", lambda a, b, g: lax.ragged_dot_general(a, b, g, lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), [0], [])), "f32[8,16]", "f32[8,4]", "i32[2]",
         values=lambda r: (r.normal(size=(8, 16)).astype(np.float32), r.normal(size=(8, 4)).astype(np.float32),
                           np.array([3, 5], np.int32))),
    case("ragged rows, some of no group", lax.ragged_dot, "f32[16,8]", "f32[4,8,8]", "i32[4]", limit=40,
         values=lambda r: (r.normal(size=(16, 8)).astype(np.float32), r.normal(size=(4, 8, 8)).astype(np.float32),
                           np.array([5, 0, 6, 1], np.int32))),
    case("ragged gradients", _ragged_grads, "f32[16,8]", "f32[4,8,8]", "i32[4]", primitive="ragged_dot_general",
         limit=40,
         values=lambda r: (r.normal(size=(16, 8)).astype(np.float32), r.normal(size=(4, 8, 8)).astype(np.float32),
                           np.array([1, 9, 0, 5], np.int32))),
    case("ragged rows in the middle", lambda a, b, g: lax.ragged_dot_general(a, b, g, lax.RaggedDotDimensionNumbers(
        (((2,), (1,)), ((0,), (0,))), [1], [3])), "f32[2,8,4]", "f32[2,4,8,4]", "i32[4]", limit=40,
         values=lambda r: (r.normal(size=(2, 8, 4)).astype(np.float32), r.normal(size=(2, 4, 8, 4)).astype(np.float32),
                           np.array([1, 4, 0, 3], np.int32))),
)  # fmt: skip


def _conv(spec: tuple[str, str, str], padding: Any = "SAME", strides: Sequence[int] = (1, 1), **options: Any) -> Any:
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=spec, **options)


def _conv_grads(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Input and weight gradients alone."""

    def grads(x: Any, w: Any, ct: Any) -> Any:
        return jax.vjp(f, x, w)[1](ct)

    return grads


_NHWC, _NCHW, _CHWN = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "IHWO", "HWNC")
_P = "conv_general_dilated"

CONVOLUTION: tuple[Case, ...] = (
    case("conv NHWC same", _conv(_NHWC), "f64[2,16,8,4]", "f64[3,3,4,8]", limit=18),
    case("conv NCHW same", _conv(_NCHW), "f64[2,4,16,8]", "f64[8,4,3,3]"),
    case("conv mixed layouts", _conv(_CHWN), "f64[4,16,8,2]", "f64[4,3,5,8]"),
    case("conv valid", _conv(_NHWC, "VALID"), "f64[2,10,8,4]", "f64[3,3,4,8]"),
    case("conv 1x1", _conv(_NHWC), "f64[2,16,8,4]", "f64[1,1,4,8]"),
    case("conv 1x1 stride 2", _conv(_NHWC, "SAME", (2, 2)), "f64[2,16,8,4]", "f64[1,1,4,8]"),
    case("conv stride 2 same", _conv(_NHWC, "SAME", (2, 2)), "f64[2,16,16,4]", "f64[3,3,4,8]"),
    case("conv stride 2 explicit", _conv(_NHWC, ((1, 1), (3, 3)), (2, 2)), "f64[2,16,16,4]", "f64[3,7,4,8]"),
    case("conv patches", _conv(_NHWC, "VALID", (4, 4)), "f64[2,16,16,3]", "f64[4,4,3,8]"),
    case("conv further than it is long", _conv(_NHWC, ((8, 8), (0, 0)), (4, 1)), "f64[2,12,4,4]", "f64[17,1,4,8]"),
    case("conv dilated window", _conv(_NHWC, "SAME", rhs_dilation=(2, 3)), "f64[2,16,16,4]", "f64[3,3,4,8]"),
    case("conv transposed stride 2", _conv(_NHWC, ((1, 2), (2, 1)), lhs_dilation=(2, 2)), "f64[2,8,8,4]",
         "f64[3,3,4,8]"),
    case("conv lhs dilation 3 stride 2", _conv(_NHWC, ((1, 2), (1, 2)), (2, 2), lhs_dilation=(3, 3)), "f64[2,8,8,4]",
         "f64[3,3,4,8]"),
    case("conv causal 1d", _conv(("NWC", "WIO", "NWC"), ((6, 0),), (1,), rhs_dilation=(3,)), "f64[2,16,4]",
         "f64[3,4,8]"),
    case("conv halo beyond one neighbour", _conv(("NWC", "WIO", "NWC"), "SAME", (1,)), "f64[2,8,4]", "f64[7,4,8]"),
    case("conv cropping", _conv(("NWC", "WIO", "NWC"), ((-1, 3),), (1,)), "f64[2,8,4]", "f64[3,4,8]"),
    case("conv 3d", _conv(("NDHWC", "DHWIO", "NDHWC"), "SAME", (1, 1, 1)), "f64[2,4,4,4,2]", "f64[3,1,3,2,4]"),
    case("conv grouped", _conv(_NHWC, feature_group_count=4), "f64[2,8,8,8]", "f64[3,3,2,16]"),
    case("conv depthwise", _conv(_NHWC, feature_group_count=8), "f64[2,8,8,8]", "f64[3,3,1,8]"),
    case("conv batch groups", _conv(_NHWC, batch_group_count=4), "f64[8,8,8,4]", "f64[3,3,4,8]"),
    case("conv gradients same", _conv_grads(_conv(_NHWC)), "f64[2,16,8,4]", "f64[3,3,4,8]", "f64[2,16,8,8]",
         primitive=_P, limit=14),
    case("conv gradients stride 2", _conv_grads(_conv(_NHWC, "SAME", (2, 2))), "f64[2,16,16,4]", "f64[3,3,4,8]",
         "f64[2,8,8,8]", primitive=_P),
    case("conv gradients NCHW even window", _conv_grads(_conv(_NCHW, "SAME", (2, 1))), "f64[2,4,16,8]", "f64[8,4,4,2]",
         "f64[2,8,8,8]", primitive=_P),
    case("conv gradients grouped", _conv_grads(_conv(_NHWC, feature_group_count=4)), "f64[2,8,8,8]", "f64[3,3,2,16]",
         "f64[2,8,8,16]", primitive=_P),
    case("conv gradients depthwise", _conv_grads(_conv(_NHWC, feature_group_count=8)), "f64[2,8,8,8]", "f64[3,3,1,8]",
         "f64[2,8,8,8]", primitive=_P),
    case("conv gradients dilated", _conv_grads(_conv(_NHWC, "SAME", rhs_dilation=(2, 1))), "f64[2,16,8,4]",
         "f64[3,3,4,8]", "f64[2,16,8,8]", primitive=_P),
    case("conv gradients patches", _conv_grads(_conv(_NHWC, "VALID", (4, 4))), "f64[2,16,16,4]", "f64[4,4,4,8]",
         "f64[2,4,4,8]", primitive=_P),
    case("conv gradients large patches", _conv_grads(_conv(_NHWC, "VALID", (8, 8))), "f64[2,16,16,4]", "f64[8,8,4,8]",
         "f64[2,2,2,8]", primitive=_P),
    case("conv bf16 to f32", lambda x, w: lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), preferred_element_type=jnp.float32),
        "bf16[2,8,4]", "bf16[3,4,8]", rtol=3e-2),
)  # fmt: skip

REDUCTION: tuple[Case, ...] = (
    case("reduce_sum", lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), "f64[8,16,4]"),
    case("reduce_sum all", lambda x: x.sum(), "f64[8,16]", primitive="reduce_sum"),
    case("reduce_sum int", lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), "i32[8,16]"),
    case("reduce_max", lambda x: x.max(1), "f64[8,16]", primitive="reduce_max"),
    case("reduce_max int", lambda x: x.max((0, 1)), "i32[8,16]", primitive="reduce_max"),
    case("reduce_min", lambda x: x.min(0), "f64[8,16]", primitive="reduce_min"),
    case("reduce_prod", lambda x: x.prod(0), "f64[8,16]", primitive="reduce_prod"),
    case("reduce_and", lambda x: x.all(0), "bool[8,16]", primitive="reduce_and"),
    case("reduce_or", lambda x: x.any(1), "bool[8,16]", primitive="reduce_or"),
    case("reduce_xor", lambda x: lax.reduce_xor(x, (1,)), "i32[8,16]"),
    case("reduce_and int", lambda x: lax.reduce_and(x, (1,)), "i32[8,16]"),
    case("argmax", lambda x: lax.argmax(x, 1, jnp.int32), "f64[8,16]"),
    case("argmin", lambda x: lax.argmin(x, 0, jnp.int32), "f64[8,16]"),
    case("reduce by a function", lambda x: lax.reduce(x, np.float64(1), lambda a, b: a * b + a + b, (0,)),
         "f64[8,16]", primitive="reduce", positive=True),
    case("cumsum", lambda x: lax.cumsum(x, 1), "f64[8,16]"),
    case("cumsum reverse", lambda x: lax.cumsum(x, 0, reverse=True), "f64[8,16]"),
    case("cumprod", lambda x: lax.cumprod(x, 1), "f64[8,16]"),
    case("cummax", lambda x: lax.cummax(x, 1), "f64[8,16]"),
    case("cummin", lambda x: lax.cummin(x, 0), "f64[8,16]"),
    case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), "f64[8,16]"),
    case("psum under vmap", jax.vmap(lambda x: lax.psum(x, "b"), axis_name="b"), "f64[8,16]", primitive="psum"),
    case("pmax under vmap", jax.vmap(lambda x: lax.pmax(x, "b"), axis_name="b"), "f64[8,16]", primitive="pmax"),
)  # fmt: skip

SHAPE: tuple[Case, ...] = (
    case("reshape split", lambda x: lax.reshape(x, (8, 4, 6)), "f64[8,24]"),
    case("reshape merge", lambda x: lax.reshape(x, (32, 6)), "f64[8,4,6]"),
    case("reshape split and merge", lambda x: lax.reshape(x, (8, 12)), "f64[2,4,3,4]"),
    case("reshape flatten", lambda x: lax.reshape(x, (64,)), "f64[8,8]"),
    case("reshape from flat", lambda x: lax.reshape(x, (8, 8)), "f64[64]"),
    case("reshape no common loop", lambda x: lax.reshape(x, (32, 6, 4)), "f64[8,24,4]"),
    case("reshape partly common", lambda x: lax.reshape(x, (12, 8, 5)), "f64[8,12,5]"),
    case("reshape coprime", lambda x: lax.reshape(x, (9, 4)), "f64[4,9]"),
    case("reshape ones", lambda x: lax.reshape(x, (8, 1, 4)), "f64[1,8,4,1]"),
    case("reshape scalar", lambda x: lax.reshape(x, (1, 1)), "f64[]"),
    case("reshape empty", lambda x: lax.reshape(x, (4, 0)), "f64[0,3]"),
    case("reshape permuted", lambda x: lax.reshape(x, (4, 2, 8), dimensions=(1, 0)), "f64[8,8]", primitive="reshape"),
    case("transpose", lambda x: lax.transpose(x, (2, 0, 1)), "f64[4,8,2]"),
    case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2, 8), (0, 2)), "f64[4,1]"),
    case("broadcast scalar", lambda x: lax.broadcast(x, (4, 8)), "f64[]"),
    case("broadcast zero", lambda: jnp.zeros((4, 8)), primitive="broadcast_in_dim"),
    case("broadcast one", lambda: jnp.ones((4, 8)), primitive="broadcast_in_dim"),
    case("squeeze", lambda x: lax.squeeze(x, (1,)), "f64[4,1,8]"),
    case("expand_dims", lambda x: lax.expand_dims(x, (1,)), "f64[4,8]"),
    case("slice", lambda x: lax.slice(x, (0, 2), (8, 6)), "f64[8,8]"),
    case("slice even steps", lambda x: lax.slice(x, (1, 0, 0), (8, 16, 5), (2, 4, 2)), "f64[8,16,6]"),
    case("pad zeros", lambda x: lax.pad(x, np.float64(0), ((0, 0, 0), (1, 2, 0))), "f64[8,8]"),
    case("pad ones", lambda x: lax.pad(x, np.float64(1), ((0, 0, 0), (1, 2, 0))), "f64[8,8]"),
    case("pad value", lambda x, v: lax.pad(x, v, ((0, 0, 0), (-1, 2, 1))), "f64[8,8]", "f64[]"),
    case("pad blocks", lambda x: lax.pad(x, np.float64(0), ((1, 0, 1), (0, 2, 2))), "f64[8,8]"),
    case("concatenate", lambda x, y: lax.concatenate([x, y], 1), "f64[8,8]", "f64[8,3]"),
    case("concatenate three", lambda x, y, z: lax.concatenate([x, y, z], 0), "f64[2,8]", "f64[4,8]", "f64[2,8]"),
    case("rev", lambda x: lax.rev(x, (1,)), "f64[8,8]"),
    case("split", lambda x: lax.split(x, (2, 6), 0), "f64[8,8]"),
    case("stack", lambda x, y: jnp.stack([x, y], 1), "f64[8,4]", "f64[8,4]"),
    case("unstack", lambda x: jnp.unstack(x, axis=1), "f64[8,2,4]"),
    case("tile", lambda x: lax.tile(x, (4, 1, 8)), "f64[2,8,3]"),
    case("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1)),
    case("iota float", lambda: lax.broadcasted_iota(jnp.float32, (8, 16), 0)),
    case("iota bf16", lambda: lax.iota(jnp.bfloat16, 16)),
    case("broadcast keys", lambda k: lax.broadcast_in_dim(k, (8, 4), (0,)), "key[8]"),
    case("slice keys", lambda k: lax.slice(k, (0, 1), (8, 2)), "key[8,4]"),
    case("reshape keys", lambda k: lax.reshape(k, (16,)), "key[8,2]"),
    case("sharding_constraint", lambda x: lax.with_sharding_constraint(x, _replicated()), "f64[8,8]"),
)  # fmt: skip


def _replicated() -> Any:
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _equinox(build: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        import equinox.internal

        return build(equinox.internal)(*args)

    return run


def _buffer_set(eqxi: Any) -> Callable[..., Any]:
    def run(pred: Any, xs: Any, x: Any, i: Any) -> Any:
        from equinox.internal._loop.common import _maybe_set

        return _maybe_set(pred, xs, x, i, kwargs={}, makes_false_steps=False)

    return run


LIBRARY: tuple[Case, ...] = (
    case("equinox unvmap_any", _equinox(lambda e: lambda x: e.unvmap_any(x)), "bool[8,4]"),
    case("equinox unvmap_all", _equinox(lambda e: lambda x: e.unvmap_all(x)), "bool[8,4]"),
    case("equinox unvmap_max", _equinox(lambda e: lambda x: e.unvmap_max(x)), "i32[8,4]"),
    case("equinox maybe_set", _equinox(_buffer_set), "bool[]", "f64[6,8,4]", "f64[8,4]", "i32[]<6"),
    case("equinox maybe_set ambiguous", _equinox(_buffer_set), "bool[]", "f64[4,4]", "f64[4]", "i32[]<4"),
    case("equinox vprim", jax.vmap(_equinox(_buffer_set), in_axes=(0, 0, 0, 0)), "bool[2]", "f64[2,4,8]", "f64[2,8]",
         "i32[2]<4"),
)  # fmt: skip

OPAQUE: tuple[Case, ...] = (
    case("custom_linear_solve", lambda a, b: lax.custom_linear_solve(
        lambda x: a * x, b, lambda _, y: y / a, symmetric=True), "f64[8]", "f64[8]", positive=True),
    case("platform_index", lambda x: lax.platform_dependent(x, cpu=lambda a: a, default=lambda a: a + 1), "f32[4]",
         primitive="platform_index"),
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *ELEMENTWISE,
    *CONTRACTION,
    *CONVOLUTION,
    *REDUCTION,
    *SHAPE,
    *LIBRARY,
    *OPAQUE,
)
