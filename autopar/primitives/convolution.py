"""Convolutions, in every layout: forward, input gradient and weight gradient are one primitive.

In: a `conv_general_dilated` Node. Out: factors n (batch), o (output feature), c (input feature, contracted),
g (feature or batch groups), and per spatial dimension one of

  output sharded:  out[y] = sum_k lhs[y*stride + k*rhs_dilation - pad] rhs[k], y split with lhs.
  window sharded:  the same, k split with lhs: the weight gradient, whose window is the output's gradient. The results
                   are partial sums.

Either needs the sharded steps to cover lhs exactly (steps * step = size * lhs_dilation), and rows of both neighbours:
the halo, computed by `spatial`. Elsewhere the dimension stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from autopar.ir.graph import Node
from autopar.ir.sharding import Factor, Halo, OpShardingRule
from autopar.primitives.notation import build, sum_kind
from autopar.primitives.record import EITHER, Primitive, Traits, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Spatial:
    """How one spatial dimension can be sharded.

    Each shard needs ``low`` rows of lhs before its own and ``high`` after; the local convolution then pads by
    ``padding`` (negative: crops), whatever the number of shards. ``lhs_inner`` / ``out_inner``: rows of lhs and of the
    sharded tensor (output or window) per step of the factor.
    """

    mode: Literal["output", "window"]
    steps: int
    lhs_inner: int
    other_inner: int
    low: int
    high: int
    padding: tuple[int, int]


def spatial(params: dict[str, Any], d: int, lhs: int, rhs: int, out: int) -> Spatial | None:
    """Spatial dimension ``d`` of a convolution, of so many rows in ``lhs``, ``rhs`` (the window) and ``out``; None: it
    stays whole. ``params`` are those of `conv_general_dilated`.

    Either loop may be the sharded one, if it covers lhs exactly; the larger is preferred.
    """
    stride, rhs_dilation = params["window_strides"][d], params["rhs_dilation"][d]
    dilation, pad = params["lhs_dilation"][d], params["padding"][d][0]
    output = covering("output", lhs, out, step=stride, reach=(rhs - 1) * rhs_dilation, dilation=dilation, pad=pad)
    window = covering("window", lhs, rhs, step=rhs_dilation, reach=(out - 1) * stride, dilation=dilation, pad=pad)
    return (output or window) if out >= rhs else (window or output)


def covering(
    mode: Literal["output", "window"], lhs: int, size: int, *, step: int, reach: int, dilation: int, pad: int
) -> Spatial | None:
    """The loop over ``size`` iterations, sharded with lhs; None where it does not cover lhs exactly.

    On the dilated lhs, ``step`` is the distance between two iterations and ``reach`` the distance that the other
    loop spans; the shard of rows [a, b) reads positions a*dilation - pad … b*dilation - step + reach - pad.
    """
    steps = min(size, lhs)
    if size * step != lhs * dilation or steps <= 1 or size % steps or lhs % steps:
        return None
    low = max(0, pad // dilation)
    high = max(0, (reach - pad - step) // dilation + 1)
    padding = (pad - low * dilation, dilation - high * dilation - step + reach - pad)
    return Spatial(
        mode=mode, steps=steps, lhs_inner=lhs // steps, other_inner=size // steps, low=low, high=high, padding=padding
    )


def _conv_general_dilated(node: Node) -> OpShardingRule:
    params = node.params
    numbers = params["dimension_numbers"]
    lhs_spec: tuple[int, ...] = numbers["lhs_spec"]
    rhs_spec: tuple[int, ...] = numbers["rhs_spec"]
    out_spec: tuple[int, ...] = numbers["out_spec"]
    lhs, rhs = (t.shape for t in node.operand_types)
    out = node.result_types[0].shape
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    groups = feature_groups * batch_groups  # one of them is 1
    features_in = rhs[rhs_spec[1]]
    summed = sum_kind(node.result_types[0].dtype)
    factors = [
        Factor(name="g", size=groups),
        Factor(name="n", size=out[out_spec[0]]),
        Factor(name="c", size=features_in, kind=summed),
        Factor(name="o", size=out[out_spec[1]] // groups),
    ]
    operand: list[list[tuple[str, ...]]] = [[()] * len(lhs), [()] * len(rhs)]
    result: list[tuple[str, ...]] = [()] * len(out)
    operand[0][lhs_spec[0]] = ("g", "n") if batch_groups > 1 else ("n",)
    operand[0][lhs_spec[1]] = ("g", "c") if feature_groups > 1 else ("c",)
    operand[1][rhs_spec[0]] = ("g", "o")
    operand[1][rhs_spec[1]] = ("c",)
    result[out_spec[0]] = ("n",)
    result[out_spec[1]] = ("g", "o")
    halos: list[Halo] = []
    for d, (at_lhs, at_rhs, at_out) in enumerate(zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)):
        sizes = lhs[at_lhs], rhs[at_rhs], out[at_out]
        found = spatial(params, d, *sizes)
        if found is None:
            continue
        name = spatial_factor(d)
        inner = f"{name}s"
        factors.append(Factor(name=name, size=found.steps, kind="pass" if found.mode == "output" else summed))
        factors.append(Factor(name=inner, size=max(found.lhs_inner, found.other_inner), kind="whole"))
        operand[0][at_lhs] = (name, inner) if found.lhs_inner > 1 else (name,)
        other = (name, inner) if found.other_inner > 1 else (name,)
        if found.mode == "output":
            result[at_out] = other
        else:
            operand[1][at_rhs] = other
        if found.low or found.high:
            halos.append(Halo(factor=name, operand=0, dim=at_lhs, low=found.low, high=found.high))
    return build(
        factors,
        tuple(tuple(t) for t in operand),
        (tuple(result),),
        halos=halos,
    )


def spatial_factor(d: int) -> str:
    """The name of the factor of spatial dimension ``d``, of at most eight."""
    return "hwdabefi"[d]


def convolution_flops(node: Node) -> float:
    """2 FLOPs for each element of the result and each of the operand in the window that makes it: what padding and
    dilation put there is left out."""
    params, numbers = node.params, node.params["dimension_numbers"]
    spec: tuple[int, ...] = numbers["out_spec"]
    of_lhs: tuple[int, ...] = numbers["lhs_spec"]
    of_rhs: tuple[int, ...] = numbers["rhs_spec"]
    lhs, rhs = (t.shape for t in node.operand_types[:2])
    out = node.result_types[0].shape
    total = 2.0 * out[spec[0]] * out[spec[1]] * rhs[of_rhs[1]]
    for d, (i, k, o) in enumerate(zip(of_lhs[2:], of_rhs[2:], spec[2:], strict=True)):
        stride, low = int(params["window_strides"][d]), int(params["padding"][d][0])
        dilation, window_dilation = int(params["lhs_dilation"][d]), int(params["rhs_dilation"][d])
        total *= float(_met(lhs[i], rhs[k], out[o], stride, low, dilation, window_dilation))
    return total


@cache
def _met(size: int, window: int, places: int, stride: int, low: int, dilation: int, window_dilation: int) -> int:
    """How many pairs of a place of the result and one of the window meet an element of the operand."""
    met = 0
    for k in range(window):
        first = k * window_dilation - low
        for place in range(first, first + places * stride, stride):
            met += 0 <= place <= (size - 1) * dilation and place % dilation == 0
    return met


def convolution_workspace(node: Node) -> Weights:
    """Operands that are not in the layout of the library are copied: batch, space, feature; kernel: space, input,
    output. A gradient towards the kernel has batch and feature swapped, so both of its operands are copied."""
    numbers, rank = node.params["dimension_numbers"], len(node.result_types[0].shape)
    space = tuple(range(1, rank - 1))
    copied: list[tuple[int, float]] = []
    if tuple(numbers["lhs_spec"]) != (0, rank - 1, *space):
        copied.append((0, 1.0))
    if tuple(numbers["rhs_spec"]) != (rank - 1, rank - 2, *range(rank - 2)):
        copied.append((1, 1.0))
    return tuple(copied)


PRIMITIVES: tuple[Primitive, ...] = (
    Primitive(
        name="conv_general_dilated", rule=_conv_general_dilated, flops=convolution_flops,
        traits=Traits(contraction=True), linear=EITHER, workspace=convolution_workspace,
    ),
)  # fmt: skip
