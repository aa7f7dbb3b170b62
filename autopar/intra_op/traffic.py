"""What each operator reads from a device's memory and writes to it, where compilers fuse operators.

In: kernels and what they write (`fusion`). Out: weights: how often an operator reads each of its operands, and writes
each of its results (`Traffic`). They do not depend on how anything is sharded: seconds follow from the bytes of
operands and results on a device (`strategy_graph.Class.moved_s`).

A kernel reads a value once, however often its operators do, and nothing that it makes itself; what several kernels
compute on the fly, each of them reads the operands of. Products, attention and opaque calls are kernels of their own,
whose seconds count their bytes already (`cost.kernels`). All else reads its operands and writes its results, or the
parts of them that `Primitive.touches` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.intra_op.flatten import CONSTANT
from autopar.intra_op.fusion import Fused, Fusion
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """``reads`` is float64[edges], how often each operand is read; ``writes`` float64[values], how often each result is
    written; ``kernels`` float64[planning nodes], how many kernels are counted there. ``passing`` is bool[edges] and
    bool[values]: what operators hand to each other, no state of the step."""

    reads: Any
    writes: Any
    kernels: Any
    passing: tuple[Any, Any]
    fusion: Fusion


def traffic(of: Fused) -> Traffic:
    """How often each operand is read from memory, and each result written, in one execution of its operator."""
    flat = of.flat
    reads, writes, kernels = np.zeros(len(flat.source)), np.zeros(len(flat.maker)), np.zeros(len(flat.kind))
    seen, counted = set(of.of_products), set[int]()
    """(kernel, value) that are read already; products that have read an operand's worth, which their own bytes are."""
    for n in range(len(flat.kind)):
        node = flat.node[n]
        record = None if node is None else record_of(node.primitive)
        if record is None or node is None or record.traits.aliases or of.heavy[n] or record.traits.opaque:
            continue
        parts, edges = dict(record.touches(node)), range(flat.first_edge[n], flat.first_edge[n + 1])
        elements = max((t.size for t in (*node.operand_types[:1], *node.result_types)), default=0)
        for i, e in enumerate(edges):
            value = of.base[e]
            made = flat.maker[value] if value != CONSTANT else -1
            if made < 0 or (of.fuses[n] and (of.filled[made] or of.on_the_fly(made))):
                continue
            if not of.fuses[n]:
                reads[e] = parts.get(i, 1.0) + of.filled[made]
                continue
            mine = of.makers[made] if of.fuses[made] else frozenset[int]()
            fresh = {(k, value) for k in of.makers[n] if k not in mine} - seen
            seen |= fresh
            whole = flat.operand_types[n][i].size >= elements
            first = {k for k, _ in fresh if of.heavy[k] and whole and k not in counted}
            counted |= first
            reads[e] = (len(fresh) - len(first)) * parts.get(i, 1.0)
        for r, value in enumerate(range(flat.first_value[n], flat.first_value[n + 1])):
            if not of.fuses[n] or of.written[value]:
                writes[value] = parts.get(len(edges) + r, 1.0)
        kernels[n] = not of.fuses[n] or n in of.makers[n]
    made = np.array([flat.kind[n] == "op" for n in flat.maker], bool)
    base = np.array(of.base, int)
    new = np.array([kind == "arg" for kind in flat.kind], bool)[flat.columns().user]  # values of the state
    made[base[new & (base >= 0)]] = False
    return Traffic(reads, writes, kernels, ((base >= 0) & made[base], made), of.fusion)
