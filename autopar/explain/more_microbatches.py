"""A plan's step with a batch of another number of microbatches, each of the size that it has: `in_microbatches`.

From the graph alone, for one program's microbatches are the turns of a loop (`frontend.microbatch.accumulate`), and
around it the batch is only split into what the turns take: types along the way are counted anew. A step that was traced
in one microbatch has no such loop. A pipeline's layers are of one microbatch, and stay as they are.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

from autopar.intra_op.degrees import microbatch_loop
from autopar.ir.errors import OptionError
from autopar.ir.graph import Graph, Node, TensorType
from autopar.ir.layers import LayeredGraph
from autopar.ir.plan import Plan


def in_microbatches(plan: Plan, count: int) -> Plan:
    """``plan`` with the step in ``count`` microbatches, not yet planned. Raises OptionError where the plan alone cannot
    say what such a step is."""
    now, step = plan.config.num_microbatches, plan.step
    if count == now:
        return plan
    if count < 1:
        raise OptionError(f"microbatches: {count} is not above 0")
    if step is None:
        raise OptionError("microbatches: the plan was saved without its graph: plan from the step")
    match step.graph:
        case LayeredGraph() as layered:
            graph = _layers(layered, count)
        case Graph() as whole:
            graph = _Program(whole, dict(step.batch_inputs), now, count).graph()
    config = replace(plan.config, num_microbatches=count)
    return replace(plan, config=config, step=replace(step, graph=graph), fingerprint=graph.fingerprint)


def _mark(fingerprint: str, count: int) -> str:
    return hashlib.sha256(f"{fingerprint} in {count} microbatches".encode()).hexdigest()


# --- stages ----------------------------------------------------------------------------------------------------------


def _layers(layered: LayeredGraph, count: int) -> LayeredGraph:
    if any(layered.before_per_microbatch):
        raise OptionError(
            "microbatches: what layers take of the batch is computed from all of it before they run: plan from the step"
        )
    types, first = list(layered.argument_types), len(layered.trained) + len(layered.combined)
    values, values_before = list(layered.update.values), list(layered.before.values) if layered.before else []
    for a, split in enumerate(layered.per_microbatch):
        if split:
            types[a] = _times(layered.argument_types[a], layered, a, count)
            values[layered.update.inputs[first + a]] = types[a]
            if layered.before is not None:
                values_before[layered.before.inputs[a]] = types[a]
    before: Graph | None = layered.before
    return replace(
        layered,
        num_microbatches=count,
        argument_types=tuple(types),
        update=replace(layered.update, values=tuple(values)),
        before=None if before is None else replace(before, values=tuple(values_before)),
        fingerprint=_mark(layered.fingerprint, count),
    )


def _times(whole: TensorType, layered: LayeredGraph, a: int, count: int) -> TensorType:
    """The type of argument ``a`` with so many microbatches."""
    value = layered.arguments[a]
    if value < 0:
        raise OptionError(f"microbatches: no layer reads {layered.arg_paths[a]}, whose examples are split")
    one = layered.values[value].shape
    dims = tuple(n if n == k else k * count for n, k in zip(whole.shape, one, strict=True))
    return replace(whole, shape=dims)


# --- one program -----------------------------------------------------------------------------------------------------


class _Program:
    """One program's graph, whose loop over ``now`` microbatches is to have ``count`` turns: what the loop scans and
    stacks is followed, back to the ``batch`` (input → its dimension) and on to the results."""

    def __init__(self, graph: Graph, batch: dict[int, int], now: int, count: int) -> None:
        self.whole, self.now, self.count = graph, now, count
        self.loop = microbatch_loop(graph, now)
        if self.loop < 0:
            raise OptionError(
                "microbatches: the plan holds the step as it was traced, in one microbatch, without a loop over more: "
                "plan from the step"
            )
        if count == 1:
            raise OptionError(
                f"microbatches: the plan holds a loop over {now} microbatches: for one, plan from the step"
            )
        self.values = list(graph.values)
        self.maker = {r: p for p, node in enumerate(graph.nodes) for r in node.results}
        self.input = {value: i for i, value in enumerate(graph.inputs)}
        self.batch = batch
        self.changed: dict[int, dict[str, Any]] = {self.loop: {"length": count}}
        """Position of a node → parameters that it has otherwise."""

    def graph(self) -> Graph:
        """The graph in ``count`` microbatches."""
        whole, loop = self.whole, self.whole.nodes[self.loop]
        num_consts, num_carry = loop.params["num_consts"], loop.params["num_carry"]
        for value in dict.fromkeys(loop.operands[num_consts + num_carry :]):
            if not isinstance(value, int):
                raise _refused(loop)
            self._back(value, 0)
        for value in loop.results[num_carry:]:
            self._forward(value, 0)
        longer = {value for value, t in enumerate(whole.values) if self.values[value] is not t}
        for position, node in enumerate(whole.nodes):
            reads = () if position in self.changed else node.operands
            reads = node.operands[: num_consts + num_carry] if node is loop else reads
            if any(isinstance(o, int) and o in longer for o in reads):
                raise _refused(node)
        nodes = tuple(self._node(p, n) if p in self.changed else n for p, n in enumerate(whole.nodes))
        mark = _mark(whole.fingerprint, self.count)
        return replace(whole, values=tuple(self.values), nodes=nodes, fingerprint=mark)

    def _node(self, position: int, node: Node) -> Node:
        operands = tuple(
            self.values[o] if isinstance(o, int) else t for o, t in zip(node.operands, node.operand_types, strict=True)
        )
        return replace(
            node,
            params={**node.params, **self.changed[position]},
            operand_types=operands,
            result_types=tuple(self.values[r] for r in node.results),
            digest=_mark(node.digest, self.count)[: len(node.digest)],
        )

    def _back(self, value: int, dim: int) -> None:
        """Makes dimension ``dim`` of ``value`` longer, and what it is made from."""
        if self.values[value] is not self.whole.values[value]:
            return
        shape = self._longer(value, dim)
        if (position := self.maker.get(value, -1)) < 0:
            if self.batch.get(at := self.input[value]) != dim:
                raise OptionError(f"microbatches: {self.whole.arg_paths[at]} is split, and its examples are not")
            return
        node = self.whole.nodes[position]
        match node.primitive, node.operands:
            case "iota", ():
                self.changed[position] = {"shape": shape}
            case "transpose", (int() as of,):
                self.changed[position] = {}
                self._back(of, node.params["permutation"][dim])
            case "reshape", (int() as of,):
                self.changed[position] = {"new_sizes": shape}
                self._back(of, _same_place(self.whole.values[value].shape, dim, self.whole.values[of].shape))
            case _:
                raise _refused(node)

    def _forward(self, value: int, dim: int) -> None:
        """Makes dimension ``dim`` of ``value`` longer, and what is made from it."""
        self._longer(value, dim)
        for position, node in enumerate(self.whole.nodes):
            if value not in node.operands:
                continue
            match node.primitive:
                case "transpose":
                    self.changed[position] = {}
                    self._forward(node.results[0], node.params["permutation"].index(dim))
                case "reshape":
                    at = _same_place(self.whole.values[value].shape, dim, node.result_types[0].shape)
                    self._forward(node.results[0], at)
                    self.changed[position] = {"new_sizes": self.values[node.results[0]].shape}
                case _:
                    raise _refused(node)

    def _longer(self, value: int, dim: int) -> tuple[int, ...]:
        """Makes it so; the new shape."""
        t = self.whole.values[value]
        if t.shape[dim] % self.now:
            raise OptionError(f"microbatches: a dimension of {t} is not {self.now} parts")
        shape = (*t.shape[:dim], t.shape[dim] // self.now * self.count, *t.shape[dim + 1 :])
        self.values[value] = replace(t, shape=shape)
        return shape


def _refused(node: Node) -> OptionError:
    return OptionError(f"microbatches: {node} is about the whole batch, not about one microbatch: plan from the step")


def _same_place(shape: tuple[int, ...], dim: int, other: tuple[int, ...]) -> int:
    """The dimension of ``other``, of as many elements, in which dimension ``dim`` of ``shape`` lies."""
    before, known = math.prod(shape[:dim]), 1
    for d, size in enumerate(other):
        known *= size
        if known > before and size > 1:
            return d
    raise OptionError(f"microbatches: dimension {dim} of {shape} is none of {other}")
