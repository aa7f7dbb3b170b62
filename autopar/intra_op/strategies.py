"""The strategies of one planning node: every assignment of mesh axes to its rule's factors.

In comes an operator with its rule (``([i,k],[k,j])->([i,j]) reduction={k}``), out goes a `Signature`: arrays with one
row per strategy, shared by all nodes of equal key. A strategy s gives each mesh axis one of the rule's factors, one of
its linear groups of operands, or nothing                                                                    `_options`

    s : axes → factors ∪ groups ∪ {""},     p_f(s) = Π_{a : s(a) = f} |a|  divides the size of f         `op_signature`

and means, for each operand and result (as spec codes of `specs.Mesh`): a dimension is sharded over the axes whose
factor it has; a result without a summed factor is unreduced along that factor's axes; along a linear group's axes its
operands and the results are unreduced. Per execution and device it costs

    c(s) = work(s)                                                                                           `_compute`
         + Σ all-reduces over the axes of max and min factors                                              `_combine_s`
         + Σ halos of the dimensions that windows go along                                  `halo_exchanges`, `_halo_s`

where work(s) is, with p(s) the product of all p_f(s), but 1 for what every device makes whole (`Primitive.divides`): of
products the time of a product of the local sizes (`cost.products`), of attention and opaque kernels that of their FLOPs
or their bytes (`cost.kernels`), of all else flops / (p(s) float32's rate). What these others read from memory and write
to it hangs on what is fused with them, and is added where that is known (`strategy_graph.Class.moved_s`): c(s) has only
`IN_PASSING` of it. Sums cost nothing here: an unreduced result is summed by a resharding, on an edge. Inputs, outputs,
copies and ends of loops have every spec of their value, for nothing (`spec_signature`; unreduced ones only for what
leaves a loop or stays in it, and copies); a user's shard_map has one strategy, its own (`_fixed_signature`). A pin
leaves of these the strategies whose result lies as it says (`pinned`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost import kernels, roofline
from autopar.intra_op.specs import REPLICATED, UNREDUCED, Mesh
from autopar.intra_op.user_shard_map import FixedSpecs, body_collectives, fixed_specs
from autopar.ir.errors import ShardingError
from autopar.ir.graph import Constant, Node, TensorType
from autopar.ir.sharding import OpShardingRule
from autopar.primitives import record_of
from autopar.primitives.indexing import whole_rows
from autopar.primitives.random import THREEFRY_WORDS

MAX_OPTIONS = 11
"""Factors and linear groups considered per operator; beyond it the smallest factors are left out."""


@dataclass(slots=True)
class Signature:
    """The strategies s of a planning node, as arrays with a row each.

    ``operands[i]`` (None for a constant) and ``results[r]`` are int64[strategies], codes of `specs.Mesh`. ``cost_s`` is
    float64[strategies], seconds per execution, of them ``compute_s`` without collectives; ``flops`` float64[strategies]
    per execution and device; ``usage[r]`` float64[strategies], bytes of result r on a device. ``options`` is
    int64[strategies, axes] into ``names``: '' (unused), names of factors, or '+g' for linear group g.
    """

    kind: str
    node: Node | None
    rule: OpShardingRule | None
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    operands: list[Any]
    results: list[Any]
    cost_s: Any
    compute_s: Any
    flops: Any
    usage: list[Any]
    options: Any
    names: tuple[str, ...]
    fixed: bool = False
    """True for a user's shard_map that runs on its own specs."""
    workspace: Any = None
    """float64[strategies]: bytes of workspace on a device, where they are no multiple of those of an operand or
    result."""

    @property
    def name(self) -> str:
        """The operator's primitive, else the kind of planning node."""
        return self.kind if self.node is None else self.node.primitive

    @property
    def size(self) -> int:
        """Number of strategies."""
        return len(self.cost_s)


def spec_signature(mesh: Mesh, kind: str, key: Any, operand_types: Any, result_types: Any) -> Signature:
    """The strategies of an input, output or copy: the codes of its value, shifted where it is stacked. ``key`` is that
    of `Flat.keys`, (kind, type, …), or ("copy", type, True where copies may be unreduced)."""
    inner: TensorType = key[1]
    space = mesh.space(inner)
    keep = np.ones(len(space.codes), bool)
    if not (kind in ("carry", "ys", "loop_out") or (kind == "copy" and key[2])) or not _sums(inner):
        keep &= ~space.has_unreduced
    if kind == "pred":
        keep &= np.arange(len(space.codes)) == 0
    codes = np.flatnonzero(keep)
    pin = key[3] if kind == "arg" else key[2] if kind == "out" else None
    if pin is not None:
        codes = pinned(mesh, inner, pin, codes)
    operands: list[Any] = [codes] * len(operand_types)
    results: list[Any] = [codes] * len(result_types)
    if kind == "xs":
        operands = [mesh.lead_shift(inner, key[2])[codes]]
    if kind == "ys":
        results = [mesh.lead_shift(inner, key[2])[codes]]
    usage = [mesh.stored_bytes(t, c) for t, c in zip(result_types, results, strict=True)]
    zeros = np.zeros(len(codes))
    return Signature(
        kind=kind,
        node=None,
        rule=None,
        operand_types=operand_types,
        result_types=result_types,
        operands=operands,
        results=results,
        cost_s=zeros,
        compute_s=zeros,
        flops=zeros,
        usage=usage,
        options=np.zeros((len(codes), mesh.rank), int),
        names=("",),
    )


def pinned(mesh: Mesh, value_type: TensorType, pin: Any, codes: Any) -> Any:
    """int64[…]: those of ``codes`` (int64) that ``pin`` allows: per dimension the names of its axes, or None for any.
    None that is unreduced."""
    space = mesh.space(value_type)

    def allowed(code: tuple[int, ...]) -> bool:
        for d, axes in enumerate(pin):
            if axes is not None:
                have = {mesh.names[a] for a in range(mesh.rank) if code[a] == d}
                if have != {a for a in axes if a in mesh.names}:
                    return False
        return UNREDUCED not in code

    return np.array([c for c in codes if allowed(space.codes[c])], np.int64)


def op_signature(mesh: Mesh, node: Node, rule: OpShardingRule, pin: Any = None) -> Signature:
    """Enumerates an operator's strategies from its rule; a user's shard_map has one, its own, where the plan's mesh has
    the same axes. ``pin`` (as in `pinned`) holds for the first result.

    Raises:
        ShardingError: no strategy has what ``pin`` says.
    """
    if node.primitive == "shard_map":
        fixed = fixed_specs(node, {a.name: a.size for a in mesh.logical.axes})
        if isinstance(fixed, FixedSpecs):
            return _fixed_signature(mesh, node, replace(rule, why=""), fixed)
        rule = replace(rule, why=f"a user's shard_map runs whole on every device: {fixed}")
    options = _options(mesh, node, rule)
    names = tuple(name for name, _, _ in options)
    grid = np.array(list(itertools.product(range(len(options)), repeat=mesh.rank)), np.int64)  # rank 0: one row
    sizes = np.array(mesh.sizes, float)
    keep = np.ones(len(grid), bool)
    split = np.ones(len(grid))
    parts_of: dict[str, Any] = {}
    factor_size = {f.name: f.size for f in rule.factors}
    halo = {h.factor: h for h in rule.halos}
    for n, (name, _, _) in enumerate(options):
        if name in factor_size:
            parts = np.prod(np.where(grid == n, sizes, 1.0), axis=1)
            keep &= factor_size[name] % parts == 0
            if name in halo:
                reach = max(halo[name].low, halo[name].high, 1)
                keep &= (parts == 1) | (factor_size[name] // parts >= reach)  # whole, however far windows reach
                keep &= (grid == n).sum(axis=1) <= 1
            split = split * parts
            parts_of[name] = parts
    shapes = (*node.operand_types, *node.result_types)
    columns: list[Any] = []
    for t, value_type in enumerate(shapes):
        if t < len(node.operands) and isinstance(node.operands[t], Constant) and not value_type.shape:
            columns.append(None)
            continue
        table = np.array([codes[t] for _, codes, _ in options])
        base = len(value_type.shape) + 2
        radix = np.zeros(len(grid), np.int64)
        for axis in range(mesh.rank):
            radix = radix * base + table[grid[:, axis]] + 2
        column = mesh.space(value_type).dense[radix]
        keep &= column >= 0
        columns.append(column)
    rows = np.flatnonzero(keep)
    operands = [None if c is None else c[rows] for c in columns[: len(node.operands)]]
    results = [c[rows] for c in columns[len(node.operands) :]]
    if pin is not None:
        fits = np.isin(results[0], pinned(mesh, node.result_types[0], pin, np.unique(results[0])))
        if not fits.any():
            why = "keys are whole on every device" if node.result_types[0].is_key else "no strategy of it has that"
            raise ShardingError(f"{node}: cannot be sharded as it is pinned: {why}. Leave the pin out")
        rows = rows[fits]
        operands = [None if c is None else c[fits] for c in operands]
        results = [c[fits] for c in results]
    grid, split = grid[rows], split[rows]
    made_bytes = [_local(mesh, t, c) for t, c in zip(node.result_types, results, strict=True)]
    moved = sum((_local(mesh, t, c) for t, c in zip(node.operand_types, operands, strict=True) if c is not None), 0.0)
    made: Any = moved + sum(made_bytes, np.zeros(len(rows)))
    workspace, whole, part = None, 0.0, 0.0
    if not record_of(node.primitive).divides(node):  # every device draws all, and keeps its part
        whole, part = float(sum(t.size_bytes for t in node.result_types)), split > 1
        made, workspace = made + 4 * whole * part, THREEFRY_WORDS * whole + whole * part
        split = np.ones(len(rows))
    parts_of = {name: parts[rows] for name, parts in parts_of.items()}
    compute_s, flops = _compute(mesh, node, rule, parts_of, split, made)
    if not record_of(node.primitive).divides(node):
        compute_s = compute_s + (1 - IN_PASSING) * 4 * whole * part / kernels.memory_bytes_per_s(mesh.logical.device)
    if whole_rows(node):
        gathers = node.primitive == "gather"
        into, codes = (node.operand_types, operands[0]) if gathers else (node.result_types, results[0])
        if codes is not None:
            compute_s = compute_s + _laid_out_s(mesh, into[0], codes, _LOOKED_UP if gathers else _SCATTERED)
    comm_s = np.zeros(len(rows))
    for n, (_, _, kind) in enumerate(options):
        if kind in ("max", "min"):
            comm_s += _combine_s(mesh, grid == n, sum(made_bytes))
    if rule.halos:
        comm_s += _halo_s(mesh, node, rule, operands, grid, names)
    usage = [mesh.stored_bytes(t, c) for t, c in zip(node.result_types, results, strict=True)]
    made_of = (operands, results, usage, compute_s, comm_s, flops)
    return _operator(node, rule, *made_of, options=grid, names=names, workspace=workspace)


def _operator(
    node: Node, rule: OpShardingRule, operands: Any, results: Any, usage: Any, compute_s: Any, comm_s: Any, flops: Any,
    **more: Any,
) -> Signature:  # fmt: skip
    return Signature(
        kind="op",
        node=node,
        rule=rule,
        operand_types=node.operand_types,
        result_types=node.result_types,
        operands=operands,
        results=results,
        cost_s=compute_s + comm_s,
        compute_s=compute_s,
        flops=flops,
        usage=usage,
        **more,
    )


def _fixed_signature(mesh: Mesh, node: Node, rule: OpShardingRule, fixed: FixedSpecs) -> Signature:
    """The one strategy of a user's shard_map: its body on local shapes, its collectives included."""
    types = (*node.operand_types, *node.result_types)
    codes = [
        np.array([mesh.code_of(t, spec)]) for t, spec in zip(types, (*fixed.operands, *fixed.results), strict=True)
    ]
    operands, results = codes[: len(node.operand_types)], codes[len(node.operand_types) :]
    made_bytes = [_local(mesh, t, c) for t, c in zip(node.result_types, results, strict=True)]
    moved = sum((_local(mesh, t, c) for t, c in zip(node.operand_types, operands, strict=True)), np.zeros(1))
    runs = np.array([float(node.hidden_runs)])
    compute_s, flops = _compute(mesh, node, rule, {}, runs, moved + sum(made_bytes, np.zeros(1)))
    comm_s = 0.0
    for c in body_collectives(node):
        axes = mesh.indices(c.axes)
        comm_s += float(mesh.collective_s(c.kind, axes, c.operand_bytes)) * c.trips if axes else 0.0
    usage = [mesh.stored_bytes(t, c) for t, c in zip(node.result_types, results, strict=True)]
    made_of = (operands, results, usage, compute_s, comm_s, flops)
    return _operator(node, rule, *made_of, options=np.zeros((1, mesh.rank), int), names=("",), fixed=True)


def _options(mesh: Mesh, node: Node, rule: OpShardingRule) -> list[tuple[str, list[int], str]]:
    """(name, code of each operand and result, kind) of each thing that a mesh axis can be given to."""
    tensors = (*rule.operands, *rule.results)
    count = len(rule.operands)
    idle = [REPLICATED] * len(tensors)
    factors: list[tuple[int, tuple[str, list[int], str]]] = []
    for factor in rule.factors:
        if factor.kind == "whole" or factor.size == 1 or not shardable(rule, factor.name):
            continue
        codes = list(idle)
        for t, dims in enumerate(tensors):
            for d, names in enumerate(dims):
                if factor.name in names:
                    codes[t] = d
            if t >= count and factor.kind == "sum" and codes[t] == REPLICATED:
                codes[t] = UNREDUCED  # what has the factor is split
        factors.append((factor.size, (factor.name, codes, factor.kind)))
    groups: list[tuple[str, list[int], str]] = []
    if not record_of(node.primitive).traits.contraction and all(_sums(t) for t in node.result_types):
        for g, group in enumerate(rule.linear):
            constants = [node.operands[i] for i in group if isinstance(node.operands[i], Constant)]
            if any(c.value != 0 for c in constants if isinstance(c, Constant)):
                continue
            codes = list(idle)
            for i in group:
                codes[i] = UNREDUCED
            for t in range(count, len(tensors)):
                codes[t] = UNREDUCED
            groups.append((f"+{g}", codes, "linear"))
    room = max(1, MAX_OPTIONS - 1 - len(groups))
    if len(factors) > room:
        floor = sorted((size for size, _ in factors), reverse=True)[room - 1]
        factors = [f for f in factors if f[0] >= floor][:room]
    return [("", idle, "idle"), *(f for _, f in factors), *groups]


def shardable(rule: OpShardingRule, name: str) -> bool:
    """True where factor ``name`` is the major factor of every dimension that it is part of."""
    sizes = {f.name: f.size for f in rule.factors}
    for dims in (*rule.operands, *rule.results):
        for names in dims:
            if name in names and any(sizes[n] > 1 for n in names[: names.index(name)]):
                return False
    return True


def _sums(value_type: TensorType) -> bool:
    """True for types whose values can be sums of partial values."""
    return value_type.dtype.startswith(("float", "bfloat", "complex", "int", "uint")) and value_type.dtype != "float0"


def _local(mesh: Mesh, value_type: TensorType, codes: Any) -> Any:
    return value_type.size_bytes / mesh.space(value_type).shards[codes]


IN_PASSING = 0.02
"""The part of the time to read its operands and to write its results that an operator takes which others fuse
(guessed): little, and not nothing, so that not every device makes all of it."""


def _compute(
    mesh: Mesh, node: Node, rule: OpShardingRule, parts: Mapping[str, Any], split: Any, moved_bytes: Any
) -> tuple[Any, Any]:
    """(seconds, FLOPs) per device; ``parts``: factor → in how many parts it is, ``split``: all of them together."""
    device = mesh.logical.device
    flops = roofline.flops(node) / split
    traits = record_of(node.primitive).traits
    if traits.contraction or traits.opaque:
        return kernels.kernel_s(device, node, flops, _sizes(rule, parts), moved_bytes), flops
    moved_s = IN_PASSING * moved_bytes / kernels.memory_bytes_per_s(device)
    return flops / device.peak_flops_per_s("float32") + moved_s, flops


def _sizes(rule: OpShardingRule, parts: Mapping[str, Any]) -> kernels.ProductSizes | None:
    """The sizes of the products that a contraction is on a device: a factor of both operands and the result numbers
    them, others of the result are rows of the left or columns of the right; None where there are no two operands."""
    if len(rule.operands) < 2 or len(rule.results) != 1:
        return None
    left, right, result = ({f for dims in t for f in dims} for t in (*rule.operands[:2], rule.results[0]))
    batch = rows = columns = np.ones(())
    for factor in rule.factors:
        local = factor.size / parts.get(factor.name, 1.0)
        if factor.name not in result:
            continue
        if factor.name in left and factor.name in right:
            batch = batch * local
        elif factor.name in right:
            columns = columns * local
        else:
            rows = rows * local
    return kernels.ProductSizes(batch, rows, columns)


_SCATTERED, _LOOKED_UP = 4, 2
"""How often memory moves what is laid out by rows: filled, read, written and copied; copied, and partly read."""


def _laid_out_s(mesh: Mesh, value_type: TensorType, codes: Any, times: int) -> Any:
    """Seconds that it takes to move, so often, what a layout by rows pads more than the value's own."""
    more = mesh.by_rows_bytes(value_type, codes) - mesh.stored_bytes(value_type, codes)
    return times * np.maximum(0.0, more) / kernels.memory_bytes_per_s(mesh.logical.device)


def _combine_s(mesh: Mesh, used: Any, result_bytes: Any) -> Any:
    out = np.zeros(len(used))
    for pattern in {tuple(row) for row in used.tolist()}:
        axes = tuple(a for a, on in enumerate(pattern) if on)
        if axes:
            rows = (used == np.array(pattern)).all(axis=1)
            out[rows] = mesh.collective_s("all-reduce", axes, result_bytes[rows])
    return out


def halo_exchanges(
    mesh: Mesh, signature_node: Node, rule: OpShardingRule, operands: list[Any], s: int, split: dict[str, int]
) -> list[tuple[int, int]]:
    """(axis, bytes per device) of every halo that strategy ``s`` fetches; ``split`` maps factors to their axis.

    Halos are exchanged one dimension after the other, in the rule's order: later ones carry the rows that earlier
    ones have added (the corners).
    """
    out: list[tuple[int, int]] = []
    grown: dict[int, float] = {}
    for halo in rule.halos:
        if halo.factor not in split:
            continue
        value_type = signature_node.operand_types[halo.operand]
        space = mesh.space(value_type)
        code = space.codes[int(operands[halo.operand][s])]
        rows = value_type.shape[halo.dim] / math.prod(mesh.sizes[a] for a, d in enumerate(code) if d == halo.dim)
        local = value_type.size_bytes / space.shards[int(operands[halo.operand][s])] * grown.get(halo.operand, 1.0)
        for count in (halo.low, halo.high):
            if count > 0:
                out.append((split[halo.factor], round(local * count / rows)))
        grown[halo.operand] = grown.get(halo.operand, 1.0) * (rows + max(0, halo.low) + max(0, halo.high)) / rows
    return out


def _halo_s(
    mesh: Mesh, node: Node, rule: OpShardingRule, operands: list[Any], options: Any, names: tuple[str, ...]
) -> Any:
    factors = {h.factor for h in rule.halos}
    out = np.zeros(len(options))
    for s, row in enumerate(options):
        split = {names[o]: axis for axis, o in enumerate(row) if names[o] in factors}
        for axis, size in halo_exchanges(mesh, node, rule, operands, s, split) if split else ():
            out[s] += mesh.collective_s("collective-permute", (axis,), size)
    return out
