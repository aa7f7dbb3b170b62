"""reduce_window and its relatives, select_and_scatter and select_and_gather.

A dimension can be split where no window crosses the border of two shards: a dimension that is not windowed
(window 1, stride 1), or one cut into tiles (no padding or dilation of the base, a window no longer than its
stride, a size that is a multiple of it). A tiled dimension is two factors, tile and row within the
tile, and the major one is split. Overlapping and padded windows of sums, maxima and minima fetch rows of their
neighbours, as convolutions do; those of other operators stay whole.
Semantics: https://openxla.org/stablehlo/spec#reduce_window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.graph import Node
from autopar.ir.sharding import OpShardingRule
from autopar.primitives.convolution import Spatial, covering
from autopar.primitives.factors import RuleBuilder
from autopar.primitives.record import FIRST, NONLINEAR, Linear, Primitive, Rule, Traits, Weights, no_workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """Positions of tensors of one shape among a node's operands and results."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    def shape(self, node: Node) -> tuple[int, ...]:
        if self.operands:
            return node.operand_types[self.operands[0]].shape
        return node.result_types[self.results[0]].shape

    def at(self, d: int) -> tuple[dict[int, int], dict[int, int]]:
        return dict.fromkeys(self.operands, d), dict.fromkeys(self.results, d)


def overlapping(node: Node, d: int) -> Spatial | None:
    """How dimension ``d`` of a reduce_window is split where its windows overlap, or it is padded or dilated; None where
    none of these holds, or where it stays whole."""
    params = node.params
    reach = (params["window_dimensions"][d] - 1) * params["window_dilation"][d]
    low, high = params["padding"][d]
    dilation, stride = params["base_dilation"][d], params["window_strides"][d]
    if not (low or high or dilation > 1 or reach >= stride):
        return None
    sizes = node.operand_types[0].shape[d], node.result_types[0].shape[d]
    found = covering("output", *sizes, step=stride, reach=reach, dilation=dilation, pad=low)
    return found if low >= 0 else None


def _add_windows(node: Node, build: RuleBuilder, big: _Tensors, small: _Tensors, halos: bool = False) -> None:
    """Adds the factors of a windowed operator; ``big`` are its tensors at full size, ``small`` one row a window.
    ``halos``: overlapping windows may fetch rows of the first of ``big``."""
    big_shape, small_shape = big.shape(node), small.shape(node)
    both = _Tensors(operands=big.operands + small.operands, results=big.results + small.results)
    params, rank = node.params, len(big_shape)
    ones = (1,) * rank
    columns = zip(
        big_shape,
        small_shape,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", ones),
        params.get("window_dilation", ones),
        strict=True,
    )
    for d, (n, out, window, stride, padding, base_dilation, window_dilation) in enumerate(columns):
        found = overlapping(node, d) if halos else None
        if found is not None:
            build.add(found.steps, *both.at(d), halo=(found.low, found.high))
            build.add(found.lhs_inner, *big.at(d), kind="whole")
            build.add(found.other_inner, *small.at(d), kind="whole")
            continue
        if tuple(padding) != (0, 0) or base_dilation != 1:
            continue
        if window == 1 and stride == 1:
            build.add(n, *both.at(d))
        elif window_dilation * (window - 1) + 1 <= stride and n == out * stride:
            build.add(out, *both.at(d))
            build.add(stride, *big.at(d), kind="whole")


def _reduce_window(halos: bool) -> Rule:
    def rule(node: Node) -> OpShardingRule:
        count = len(node.result_types)  # the generic form: count operands, then count initial values
        build = RuleBuilder(node)
        big, small = _Tensors(operands=tuple(range(count))), _Tensors(results=tuple(range(count)))
        _add_windows(node, build, big, small, halos)
        return build.rule(why=_WHY)

    return rule


def _select_and_scatter_add(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)  # operands: source (windowed size), operand
    _add_windows(node, build, _Tensors(operands=(1,), results=(0,)), _Tensors(operands=(0,)))
    return build.rule(why=_WHY)


def _select_and_scatter(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)  # operands: operand, source (windowed size), initial value
    _add_windows(node, build, _Tensors(operands=(0,), results=(0,)), _Tensors(operands=(1,)))
    return build.rule(why=_WHY)


def _select_and_gather_add(node: Node) -> OpShardingRule:
    build = RuleBuilder(node)  # operands: tangents, operand
    _add_windows(node, build, _Tensors(operands=(0, 1)), _Tensors(results=(0,)))
    return build.rule(why=_WHY)


_WHY = "every dimension has overlapping or padded windows, which cross the border of two shards"

INDEX_BYTES = 4
"""Of an index that the windowed reduction of `scatter_workspace` carries: an int32."""


def windows_flops(node: Node) -> float:
    """FLOPs: the elements of a window for each element of the largest of the results and the first operand."""
    window = math.prod(node.params["window_dimensions"])
    return float(max(t.size for t in (*node.result_types, node.operand_types[0])) * window)


def scatter_workspace(node: Node) -> Weights:
    """Expanded into a windowed reduction that carries the index of the chosen element in each dimension, and a scatter
    to those: an int32 per dimension for every element of the operand and for every window. The result takes the place
    of one of the former."""
    rank = len(node.result_types[0].shape)
    source, operand = (t.size_bytes / max(1, t.size) for t in node.operand_types[:2])
    return ((0, 1 + rank * INDEX_BYTES / source), (1, max(0.0, rank * INDEX_BYTES / operand - 1)))


def _windowed(
    name: str, rule: Rule, linear: Linear = NONLINEAR, workspace: Callable[[Node], Weights] = no_workspace
) -> Primitive:
    return Primitive(name=name, rule=rule, flops=windows_flops, traits=Traits(), linear=linear, workspace=workspace)


PRIMITIVES: tuple[Primitive, ...] = (
    _windowed("reduce_window", _reduce_window(halos=False)),
    _windowed("reduce_window_sum", _reduce_window(halos=True), FIRST),
    _windowed("reduce_window_max", _reduce_window(halos=True)),
    _windowed("reduce_window_min", _reduce_window(halos=True)),
    _windowed("select_and_scatter", _select_and_scatter),
    _windowed("select_and_scatter_add", _select_and_scatter_add, FIRST, scatter_workspace),
    _windowed("select_and_gather_add", _select_and_gather_add, FIRST),
)
