"""Kinds through elementwise operations, reductions and changes of shape: one function per family, and the table.

Each takes a `View` and answers with the kind of the result (one kind, or a list of one per result).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.frontend.microbatch.kinds import Kind, Max, Min, Rows, Same, Sum
from autopar.frontend.microbatch.view import SliceBits, View, combinable, reshaped
from autopar.primitives.elementwise import LAYER_BOUNDARY

Rule = Callable[[View], "Kind | list[Kind]"]

LINEAR_ADD = {"add", "sub", "add_any"}
PASSES = {"copy", "copy_p", "stop_gradient", "real", "imag", "conj", "name", "sharding_constraint", "device_put",
          "reduce_precision", "optimization_barrier", "layer_boundary", "nonbatchable", "pvary", "reshard",
          "nondifferentiable_backward"}  # fmt: skip
"""Linear in their one operand, elementwise, and monotone."""


def elementwise(v: View) -> Kind:
    """One result element from the operands' elements at the same place."""
    if v.rows():
        merged = v.merged()
        if not isinstance(merged, Rows):
            return merged
        alone = all(k.uniform for k in v.rows()) and not any(
            isinstance(k, Same) and len(v.shape(i)) > merged.dim and v.shape(i)[merged.dim] != 1
            for i, k in enumerate(v.kinds)
        )
        return Rows(dim=merged.dim, pre=merged.pre, post=merged.post, uniform=alone)
    kind = combinable(v.kinds)
    if kind is Sum:
        return _of_sum(v)
    if kind is not None:
        return _of_extreme(v, kind)
    return v.fail("combines a sum over the batch with a maximum or minimum over it")


def _of_sum(v: View) -> Kind:
    primitive = v.full.primitive.name
    sums = [i for i, k in enumerate(v.kinds) if isinstance(k, Sum)]
    linear = False
    if primitive in LINEAR_ADD:
        v.mask_same()
        linear = True
    elif primitive == "mul":
        linear = len(sums) == 1
    elif primitive == "div":
        linear = sums == [0] and jax.dtypes.issubdtype(v.full.outvars[0].aval.dtype, np.inexact)
    elif primitive == "neg" or primitive in PASSES:
        linear = True
    elif primitive == "convert_element_type":
        old, new = v.full.invars[0].aval.dtype, v.full.outvars[0].aval.dtype
        linear = jax.dtypes.issubdtype(new, np.inexact) or (
            jax.dtypes.issubdtype(old, np.integer) and jax.dtypes.issubdtype(new, np.integer)
        )
    elif primitive == "select_n":
        linear = 0 not in sums
        if linear:
            v.mask_same(*range(1, len(v.kinds)))
    if linear:
        return Sum()
    return v.fail(
        "is not linear in a sum over the batch: the sum of the microbatches' results is not the batch's result"
    )


def _of_extreme(v: View, kind: type) -> Kind:
    primitive = v.full.primitive.name
    if primitive in PASSES or primitive == "convert_element_type":
        return kind()
    if primitive in ("neg", "not"):
        return Min() if kind is Max else Max()
    if primitive == ("max" if kind is Max else "min") or primitive == ("or" if kind is Max else "and"):
        return kind()
    return v.fail("uses a maximum or minimum over the batch, which one microbatch alone cannot know")


def passes(v: View) -> list[Kind]:
    """Results are the operands."""
    return list(v.kinds)


def same_dim(v: View) -> Kind | list[Kind]:
    """Every result has the batch where the operands have it (trailing dimensions may come or go)."""
    if not v.only(Rows, Same) or not v.rows():
        return v.fail("is not linear in a sum over the batch")
    merged = v.merged()
    return [merged] * len(v.full.outvars)


def broadcast_in_dim(v: View) -> Kind:
    """Dimensions of the operand placed among new ones."""
    kind = v.kinds[0]
    dims = v.params["broadcast_dimensions"]
    if isinstance(kind, Rows):
        return kind.at(dims[kind.dim])
    changed = v.differing()
    if not changed:
        return kind
    if isinstance(kind, Same) and len(changed) == 1:
        d = changed[0]
        return Rows(dim=d, post=max(1, v.out_shape()[d] // v.batch), uniform=True)
    return v.fail(f"repeats a {'value' if isinstance(kind, Same) else 'sum over the batch'} for every example")


def reshape(v: View) -> Kind:
    """Row-major change of shape; the batch factor must stay whole."""
    kind = v.kinds[0]
    if not isinstance(kind, Rows):
        return kind
    if v.params.get("dimensions") is not None:
        return v.fail("reshapes in a permuted order")
    out = reshaped(kind, v.shape(0), v.out_shape(), v.batch)
    if out is not None:
        return out
    return v.fail(
        f"splits or groups the batch dimension, {v.shape(0)} to {v.out_shape()}: a microbatch must hold whole groups"
    )


def transpose(v: View) -> Kind:
    kind = v.kinds[0]
    return kind.at(v.params["permutation"].index(kind.dim)) if isinstance(kind, Rows) else kind


def squeeze(v: View) -> Kind:
    kind = v.kinds[0]
    return kind.at(kind.dim - sum(d < kind.dim for d in v.params["dimensions"])) if isinstance(kind, Rows) else kind


def reduction(over_batch: type | None) -> Rule:
    """A reduction over ``axes``; ``over_batch`` is what reducing the batch itself gives."""

    def rule(v: View) -> Kind | list[Kind]:
        axes = v.params["axes"]
        kind = v.kinds[0]
        if isinstance(kind, Rows):
            if kind.dim not in axes:
                return kind.at(kind.dim - sum(a < kind.dim for a in axes))
            if over_batch is not None:
                return over_batch()
            return v.fail("reduces over the batch in a way that microbatches do not add up to")
        if over_batch is not None and isinstance(kind, over_batch):
            return kind
        return v.fail("is not linear in a sum over the batch")

    return rule


def along(parameter: str, linear: bool = False) -> Rule:
    """Works along one dimension (cumulative sums, sorting), which must not be the batch."""

    def rule(v: View) -> Kind | list[Kind]:
        axis = v.params[parameter]
        if v.rows():
            merged = v.merged()
            if isinstance(merged, Rows) and merged.dim == axis:
                merged = v.fail("runs along the batch dimension, so that examples depend on one another")
            return [merged] * len(v.full.outvars)
        if linear and v.only(Sum):
            return Sum()
        return [v.fail("is not linear in a sum over the batch")] * len(v.full.outvars)

    return rule


def top_k(v: View) -> list[Kind]:
    kind = v.kinds[0]
    axis = v.params.get("axis", -1) % len(v.shape(0))
    if isinstance(kind, Rows) and kind.dim != axis:
        return [kind, kind]
    return [v.fail("ranks examples against one another or a sum over the batch")] * 2


def rev(v: View) -> Kind:
    kind = v.kinds[0]
    if isinstance(kind, Rows) and kind.dim in v.params["dimensions"]:
        return v.fail("reverses the order of the examples")
    return kind


def slice_(v: View) -> Kind:
    """A static slice: the whole batch, or whole blocks of it where batches were concatenated."""
    kind = v.kinds[0]
    own = kind.dim if isinstance(kind, Rows) else -1
    for key in ("start_indices", "limit_indices", "strides"):
        pairs = enumerate(zip(v.params[key] or (), v.small.params[key] or (), strict=True))
        if any(a != b and d != own for d, (a, b) in pairs):
            return v.fail("slices at a place that depends on the batch size")
    if not isinstance(kind, Rows):
        return kind
    d, size = kind.dim, v.shape(0)[kind.dim]
    start, limit = v.params["start_indices"][d], v.params["limit_indices"][d]
    stride = (v.params["strides"] or (1,) * len(v.shape(0)))[d]
    if (start, limit, stride) == (0, size, 1):
        return kind
    block = size // kind.pre
    same_place = v.small.params["start_indices"][d] * size == start * v.small_shape(0)[d]
    if stride == 1 and start % block == 0 and limit % block == 0 and same_place:
        return Rows(dim=d, pre=(limit - start) // block, post=kind.post, uniform=kind.uniform)
    return v.fail("picks examples by their position in the batch")


def pad(v: View) -> Kind:
    kind = v.kinds[0]
    if isinstance(kind, Rows):
        if not isinstance(v.kinds[1], Same):
            return v.fail("pads with a value that depends on the batch")
        if tuple(v.params["padding_config"][kind.dim]) == (0, 0, 0):
            return kind
        return v.fail("pads the batch dimension")
    if v.only(Sum, Same):
        v.mask_same()
        return Sum()
    return v.fail("pads a maximum or minimum over the batch")


def concatenate(v: View) -> Kind:
    if not v.rows():
        kind = combinable(v.kinds)
        if kind is Sum:
            v.mask_same()
        return kind() if kind is not None else v.fail("joins sums and extremes over the batch")
    merged = v.merged()
    axis = v.params["dimension"]
    rows = v.rows()
    if len(rows) == len(v.kinds) and all(r.dim == axis for r in rows):
        layouts = [r for r in rows if not r.uniform] or rows[:1]
        post, size = layouts[0].post, v.shape(v.kinds.index(layouts[0]))[axis]
        m = size // (layouts[0].pre * post)
        blocks = [v.shape(i)[axis] / (m * post) for i in range(len(rows))]
        if all(r.post == post for r in layouts) and all(b == int(b) for b in blocks):
            if all(r.uniform or r.pre == b for r, b in zip(rows, blocks, strict=True)):
                return Rows(dim=axis, pre=int(sum(blocks)), post=post)
        return v.fail("joins batches of different sizes or orders")
    if isinstance(merged, Rows) and merged.dim == axis:
        return v.fail("adds rows to the batch that are no examples")
    return merged


def split(v: View) -> list[Kind]:
    kind = v.kinds[0]
    if isinstance(kind, Rows) and kind.dim == v.params["axis"]:
        block = v.shape(0)[kind.dim] // kind.pre
        if all(s % block == 0 for s in v.params["sizes"]):
            return [Rows(dim=kind.dim, pre=s // block, post=kind.post, uniform=kind.uniform) for s in v.params["sizes"]]
        kind = v.fail("picks examples by their position in the batch")
    return [kind] * len(v.full.outvars)


def stack(v: View) -> Kind:
    if v.rows():
        merged = v.merged()
        return merged.at(merged.dim + (v.params["axis"] <= merged.dim)) if isinstance(merged, Rows) else merged
    kind = combinable(v.kinds)
    if kind is Sum:
        v.mask_same()
    return kind() if kind is not None else v.fail("joins sums and extremes over the batch")


def unstack(v: View) -> list[Kind]:
    kind, axis = v.kinds[0], v.params["axis"]
    if isinstance(kind, Rows):
        kind = v.fail("takes the batch apart") if kind.dim == axis else kind.at(kind.dim - (axis < kind.dim))
    return [kind] * len(v.full.outvars)


def tile(v: View) -> Kind:
    kind = v.kinds[0]
    if not isinstance(kind, Rows):
        return kind
    times = v.params["reps"][kind.dim] if "reps" in v.params else v.out_shape()[kind.dim] // v.shape(0)[kind.dim]
    return Rows(dim=kind.dim, pre=kind.pre * times, post=kind.post, uniform=kind.uniform)


def iota(v: View) -> Kind:
    changed = v.differing()
    if len(changed) != 1 or changed[0] == v.params["dimension"]:
        return v.fail("numbers the examples of the batch")
    return Rows(dim=changed[0], post=max(1, v.out_shape()[changed[0]] // v.batch), uniform=True)


def filled(v: View) -> Kind:
    """A new array of one value, or of none yet."""
    changed = v.differing()
    if len(changed) != 1:
        return v.fail("makes an array with several batch dimensions")
    return Rows(dim=changed[0], post=max(1, v.out_shape()[changed[0]] // v.batch), uniform=True)


def random_bits(v: View) -> Kind:
    """Bits of the microbatch's rows by position (partitionable threefry); other generators are hoisted."""
    key = v.kinds[0]
    rank = len(v.shape(0))
    if isinstance(key, Rows):
        return key
    changed = v.differing()
    implementation: Any = v.full.invars[0].aval.dtype._impl.name
    per_key = int(np.prod(v.out_shape()[rank:], dtype=np.int64))
    if (
        isinstance(key, Same)
        and len(changed) == 1
        and changed[0] >= rank
        and implementation == "threefry2x32"
        and jax.config.jax_threefry_partitionable
        and per_key < 2**32
    ):
        rows = v.default_layout(changed[0], v.out_shape()[changed[0]])
        v.action = SliceBits(rows=rows)
        return rows
    return v.fail("draws random numbers with a generator that cannot draw a slice")


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
convert_element_type copy copy_p cos cosh device_put digamma div empty_like eq eq_to erf erf_inv erfc exp exp2 expm1
floor ge gt igamma igammac igamma_grad_a imag integer_pow is_finite le layer_boundary le_to lgamma log log1p logistic lt
lt_to max min mul name ne neg nextafter nonbatchable nondifferentiable_backward not one_minus_square or polygamma
population_count pow pvary random_fold_in random_gamma real reduce_precision regularized_incomplete_beta rem reshard
round rsqrt select_n select_if_vmap shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin
sinh sqrt square stop_gradient sub tan tanh xor zeta
""".split()

SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "threefry2x32": same_dim,
    "bitcast_convert_type": same_dim,
    "random_wrap": same_dim,
    "random_unwrap": same_dim,
    "random_clone": same_dim,
    "random_seed": same_dim,
    "random_split": same_dim,
    "optimization_barrier": passes,
    LAYER_BOUNDARY: passes,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "reduce_sum": reduction(Sum),
    "reduce_max": reduction(Max),
    "reduce_min": reduction(Min),
    "reduce_or": reduction(Max),
    "reduce_and": reduction(Min),
    "reduce_prod": reduction(None),
    "reduce_xor": reduction(None),
    "argmax": reduction(None),
    "argmin": reduction(None),
    "cumsum": along("axis", linear=True),
    "cumprod": along("axis"),
    "cummax": along("axis"),
    "cummin": along("axis"),
    "cumlogsumexp": along("axis"),
    "sort": along("dimension"),
    "top_k": top_k,
    "rev": rev,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "iota": iota,
    "empty": filled,
    "empty2": filled,
    "random_bits": random_bits,
}
"""Primitive → rule. Operations on values that are the same in every microbatch need none."""
