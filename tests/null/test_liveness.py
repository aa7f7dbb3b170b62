"""Peaks of small graphs, worked out by hand: one test for each thing that XLA's fusion and buffer assignment do.

All values are float32[16, 16], one unit each, unless a test says otherwise; nothing is sharded. The expected numbers
are from the rules at the top of `autopar.intra_op.liveness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.intra_op.decisions import Buffer
from autopar.intra_op.flatten import Flat, flatten
from autopar.intra_op.liveness import liveness
from autopar.intra_op.peak import buffer_spans
from autopar.intra_op.uses import uses_of
from autopar.ir.graph import Constant, Graph, Node, TensorType

UNIT = TensorType(shape=(16, 16), dtype="float32")
ROW = TensorType(shape=(16,), dtype="float32")
SCALAR = TensorType(shape=(), dtype="float32")
MATMUL = {"dimension_numbers": (((1,), (0,)), ((), ()))}
WEIGHT_GRADIENT = {"dimension_numbers": (((0,), (0,)), ((), ()))}


class Program:
    """Builds a Graph: values are ids."""

    def __init__(self, *inputs: TensorType) -> None:
        self.types = list(inputs)
        self.inputs = tuple(range(len(inputs)))
        self.nodes: list[Node] = []

    def op(self, primitive: str, *operands: Any, to: TensorType = UNIT, **params: Any) -> int:
        """A node with one result."""
        return self.ops(primitive, *operands, to=(to,), **params)[0]

    def ops(
        self, primitive: str, *operands: Any, to: tuple[TensorType, ...], bodies: tuple[Graph, ...] = (), **params: Any
    ) -> list[int]:
        """A node."""
        results = tuple(range(len(self.types), len(self.types) + len(to)))
        self.types += to
        self.nodes.append(
            Node(
                id=len(self.nodes),
                primitive=primitive,
                params=params,
                operands=operands,
                results=results,
                operand_types=tuple(self.types[o] if isinstance(o, int) else o.type for o in operands),
                result_types=to,
                bodies=bodies,
            )
        )
        return list(results)

    def dot(self, a: int, b: int, **params: Any) -> int:
        """A matrix product."""
        return self.op("dot_general", a, b, **(params or MATMUL))

    def graph(
        self, *outputs: int, donated: tuple[tuple[int, int], ...] = (), state: tuple[tuple[int, int], ...] = ()
    ) -> Graph:
        """The finished graph; ``donated`` and ``state`` are (input, output) pairs, the latter not donated."""
        return Graph(
            values=tuple(self.types),
            nodes=tuple(self.nodes),
            inputs=self.inputs,
            outputs=outputs,
            arg_paths=tuple(f"args[{i}]" for i in self.inputs),
            out_paths=tuple(f"out[{i}]" for i in range(len(outputs))),
            state=(*donated, *state),
            donated=tuple(i for i, _ in donated),
        )


def units(graph: Graph) -> list[float]:
    """Units live at the time of every planning node after the arguments, arguments left out; workspaces included."""
    flat = flatten(graph)
    live = liveness(flat)
    out = np.zeros(live.horizon)
    for n, types in enumerate(flat.result_types):
        for r, t in enumerate(types):
            if (span := live.interval(n, r)) is not None and flat.kind[n] != "arg":
                out[span[0] : span[1]] += t.size_bytes / UNIT.size_bytes
    for n, spaces in live.workspaces.items():
        types = (*flat.operand_types[n], *flat.result_types[n])
        for t, weight, end in spaces:
            out[n:end] += weight * types[t].size_bytes / UNIT.size_bytes
    return [float(x) for x in out[len(flat.args) :]]


def spans(graph: Graph, turn: int | None = None) -> dict[int, tuple[int, int] | None]:
    """Position of a node → its result's interval, counted in nodes; ``turn``: the position at which another program
    begins."""
    flat = flatten(graph)
    first = len(flat.args)
    live = liveness(flat, None if turn is None else first + turn)
    out: dict[int, tuple[int, int] | None] = {}
    for position, n in enumerate(flat.at[0]):
        if n >= 0:
            span = live.interval(n)
            out[position] = None if span is None else (span[0] - first, span[1] - first)
    return out


def buffer_span(
    flat: Flat, source: int, region: int, first: int, readers: Sequence[int] = (), passing: Sequence[int] = ()
) -> tuple[int, int]:
    """The time in memory of planning node ``source``'s result, resharded in ``region`` for node ``first``."""
    uses = uses_of(flat, np.arange(len(flat.kind)))
    found = [p for p, pattern in enumerate(uses.patterns) if (pattern.source, pattern.region) == ((source, 0), region)]
    users = [user for user, _ in uses.patterns[found[0]].readers]
    where = [[users.index(u) for u in some] for some in (readers, passing)]
    buffer = Buffer(1.0, 0.0, found[0], users.index(first), *where)
    start, stop = buffer_spans(flat, uses, liveness(flat), buffer)
    return int(start[0]), int(stop[0])


def test_products_stand_until_their_last_reader() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.dot(a, 0)
    c = p.dot(a, b)
    p.op("reduce_sum", c, to=SCALAR)
    assert units(p.graph())[:3] == [1, 2, 3]


def test_cheap_operator_is_computed_in_its_readers_and_holds_what_it_reads() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.op("mul", a, Constant(type=SCALAR, value=2.0))
    p.op("tanh", b)
    d = p.dot(0, 0)
    p.op("add", b, d)
    found = spans(p.graph())
    assert found[1] is None  # b: both readers fuse it
    assert found[0] == (0, 5)  # a: read when the add computes b again


def test_what_another_program_reads_is_there_when_it_starts() -> None:
    """Its first operator may take the place of what it reads, then and not before."""
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.op("tanh", a)
    p.dot(b, 0)
    assert spans(p.graph())[0] == (0, 1), "one program: tanh takes its place"
    assert spans(p.graph(), turn=1)[0] == (0, 2)
    assert spans(p.graph(), turn=2)[0] == (0, 1)


def test_cheap_operator_is_computed_for_the_first_that_reads_it_from_memory() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.op("mul", a, Constant(type=SCALAR, value=2.0))
    p.op("tanh", b)
    p.dot(b, 0)
    assert spans(p.graph())[1] == (3, 4)


def test_operator_of_two_full_operands_is_not_computed_twice_if_it_stands() -> None:
    p = Program(UNIT, UNIT)
    a = p.dot(0, 0)
    b = p.dot(1, 1)
    c = p.op("add", a, b)
    p.dot(c, c)
    p.dot(0, 1)
    p.op("tanh", c)
    found = spans(p.graph())
    assert found[2] == (2, 5)  # until the tanh, which reads it from memory and takes its buffer
    assert found[0] == (0, 2)


def test_expensive_operator_stands_unless_one_reader_takes_it_in() -> None:
    p = Program(UNIT)
    alone = p.op("exp", 0)
    p.dot(p.op("neg", alone), 0)
    twice = p.op("exp", 0)
    p.dot(p.op("neg", twice), p.op("abs", twice))
    found = spans(p.graph())
    assert found[0] is None
    assert found[3] == (3, 7)


def test_elementwise_result_takes_the_buffer_of_an_operand_that_dies() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.op("tanh", a)
    p.dot(b, 0)
    assert spans(p.graph())[0] == (0, 1)
    assert units(p.graph())[:2] == [1, 1]


def test_transpose_takes_no_buffer() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    b = p.op("transpose", a, permutation=(1, 0))
    assert spans(p.graph(b, donated=((0, 0),)))[0] == (0, 2)


def test_reshape_is_the_same_buffer() -> None:
    p = Program(UNIT)
    a = p.op("exp", 0)
    b = p.op("reshape", a, to=TensorType(shape=(256,), dtype="float32"))
    p.dot(0, 0)
    p.op("sort", b, to=TensorType(shape=(256,), dtype="float32"))
    found = spans(p.graph())
    assert found[0] == (0, 4)  # as long as what reads the reshape needs it
    assert found[1] is None


def test_reduction_fuses_arithmetic_and_reads_its_operands_from_memory() -> None:
    p = Program(UNIT)
    a = p.op("abs", 0)
    square = p.op("square", a)
    p.op("reduce_sum", square, to=ROW)
    found = spans(p.graph())
    assert found[1] is None
    assert found[0] == (1, 3)


def test_reduction_of_a_cosine_reads_it_from_memory() -> None:
    p = Program(UNIT)
    p.op("reduce_sum", p.op("cos", 0), to=ROW)
    assert spans(p.graph())[0] == (0, 2)


def test_broadcast_in_what_a_reduction_fuses_is_materialised_in_full_size() -> None:
    p = Program(UNIT, TensorType(shape=(16, 1), dtype="float32"))
    p.op("reduce_sum", p.op("mul", 0, 1), to=ROW)
    assert units(p.graph())[1] == pytest.approx(1 + 1 / 16)


def test_product_transposes_operands_whose_batch_dimension_does_not_lead_once() -> None:
    cube = TensorType(shape=(4, 4, 16), dtype="float32")
    batched = {"dimension_numbers": (((2,), (2,)), ((1,), (1,)))}
    p = Program(cube, cube)
    a = p.op("dot_general", 0, 1, to=cube, **batched)
    b = p.op("tanh", a, to=cube)
    p.op("dot_general", 0, b, to=cube, **batched)
    # First product: result and both operands' copies, of which the first is kept for the second product: that makes a
    # copy of the tanh of a, and a result.
    assert units(p.graph()) == [3, 2, 4]


def test_convolution_copies_operands_in_another_layout() -> None:
    image = TensorType(shape=(4, 4, 4, 4), dtype="float32")
    swapped = {"lhs_spec": (3, 0, 1, 2), "rhs_spec": (3, 0, 1, 2), "out_spec": (2, 3, 0, 1)}
    straight = {"lhs_spec": (0, 3, 1, 2), "rhs_spec": (3, 2, 0, 1), "out_spec": (0, 3, 1, 2)}
    p = Program(image, image)
    p.op("conv_general_dilated", 0, 1, to=image, dimension_numbers=swapped)
    p.op("conv_general_dilated", 0, 1, to=image, dimension_numbers=straight)
    assert units(p.graph()) == [3, 1]


def test_copy_for_a_convolution_fuses_what_makes_the_operand() -> None:
    image = TensorType(shape=(4, 4, 4, 4), dtype="float32")
    swapped = {"lhs_spec": (3, 0, 1, 2), "rhs_spec": (3, 0, 1, 2), "out_spec": (2, 3, 0, 1)}
    p = Program(image, image)
    relu = p.op("max", 0, Constant(type=SCALAR, value=0.0), to=image)
    p.op("conv_general_dilated", relu, 1, to=image, dimension_numbers=swapped)
    assert spans(p.graph())[0] is None


def test_pooling_gradient_carries_indices() -> None:
    pooled = TensorType(shape=(4, 2, 2, 4), dtype="float32")
    image = TensorType(shape=(4, 4, 4, 4), dtype="float32")
    p = Program(pooled, image)
    p.op("select_and_scatter_add", 0, 1, to=image)
    # Result; an int32 for each of 4 dimensions, one of them in the result's place; 4 and the value per window.
    assert units(p.graph()) == [1 + 3 + 5 / 4]


def test_random_bits_keep_their_state() -> None:
    p = Program(TensorType(shape=(), dtype="key<fry>"))
    p.op("random_bits", 0, to=TensorType(shape=(16, 16), dtype="uint32"))
    assert units(p.graph()) == [5]


def test_gradients_towards_input_and_weight_may_run_in_either_order() -> None:
    p = Program(UNIT, UNIT)
    h = p.op("exp", 0)
    g = p.dot(h, 1)
    weight = p.dot(h, g, **WEIGHT_GRADIENT)
    assert weight
    p.dot(g, 1)
    assert spans(p.graph())[0] == (0, 4)  # h is read by the third node, and needed until the fourth has run


@pytest.mark.parametrize(("remat", "until"), [(False, 6), (True, 4)])
def test_a_product_behind_a_barrier_does_not_run_with_one_before(remat: bool, until: int) -> None:
    p = Program(UNIT, UNIT)
    h = p.op("tanh", 0)
    first = p.dot(h, 1)
    p.op("sort", first)
    if remat:
        body = Program(UNIT, UNIT)
        p.ops("remat2", h, 1, to=(UNIT,), bodies=(body.graph(body.dot(0, 1)),))
    else:
        p.dot(h, 1)
    ends = liveness(flatten(p.graph())).ends  # arguments, tanh, the first product, sort, the other product
    assert int(ends[3]) == until


def _scan(p: Program, carry: int, xs: int, body: Program, *outputs: int, length: int = 4) -> list[int]:
    stacked = TensorType(shape=(length, 16, 16), dtype="float32")
    inner = body.graph(*outputs)
    to = (UNIT, *(stacked,) * (len(outputs) - 1))
    return p.ops("scan", carry, xs, to=to, bodies=(inner,), num_consts=0, num_carry=1, length=length)


def _loop(*, extra: bool = False) -> tuple[Graph, Flat]:
    """A step with a scan over xs[4]: carry ← carry·x, stacking exp(x)."""
    body = Program(UNIT, UNIT)
    new = body.dot(0, 1)
    out = body.op("exp", 1)
    p = Program(UNIT, TensorType(shape=(4, 16, 16), dtype="float32"))
    before = p.dot(0, 0)
    other = p.dot(before, before) if extra else before
    carry, ys = _scan(p, before, 1, body, new, out)
    p.op("tanh", other if extra else carry)
    p.op("sort", ys, to=TensorType(shape=(4, 16, 16), dtype="float32"))
    graph = p.graph()
    return graph, flatten(graph)


def test_stack_and_carry_live_through_the_loop() -> None:
    _, flat = _loop()
    live = liveness(flat)
    at = {kind: n for n, kind in enumerate(flat.kind)}
    start, end = flat.span[1]
    assert live.interval(at["carry"]) == (start, end)
    assert live.interval(at["ys"]) == (start, len(flat.kind))
    # the slice is read by the product; exp takes it in
    assert live.interval(at["xs"]) == (at["xs"], flat.at[1][0] + 1)
    # the new carry is ready when the old one is no longer read: it needs a moment beside it
    assert live.interval(flat.at[1][0]) == (flat.at[1][0], flat.at[1][0] + 1)
    # exp goes straight into the stack
    assert live.interval(flat.at[1][1]) is None


def test_carry_read_after_its_new_value_needs_two_buffers() -> None:
    body = Program(UNIT, UNIT)
    new = body.dot(0, 1)
    out = body.op("add", new, 0)
    p = Program(UNIT, TensorType(shape=(4, 16, 16), dtype="float32"))
    _scan(p, 0, 1, body, new, out)
    flat = flatten(p.graph())
    assert liveness(flat).interval(flat.at[1][0]) == (flat.at[1][0], flat.span[1][1])


def test_product_read_only_after_a_loop_may_run_after_it() -> None:
    _, flat = _loop(extra=True)
    product, end = flat.at[0][1], flat.span[1][1]
    live = liveness(flat)
    assert live.ends[product] == end
    span = live.interval(flat.at[0][0])
    assert span is not None and span[1] == end


def test_resharded_scanned_input_lives_until_the_loop_ends() -> None:
    _, flat = _loop()
    at = {kind: n for n, kind in enumerate(flat.kind)}
    assert buffer_span(flat, 1, 0, at["xs"], readers=[at["xs"]]) == (at["xs"], flat.span[1][1])


def test_resharding_on_the_way_to_another_is_brief() -> None:
    p = Program(UNIT)
    a = p.dot(0, 0)
    p.dot(a, a)
    flat = flatten(p.graph())
    assert buffer_span(flat, 1, 0, 2, passing=[2]) == (2, 3)


def test_resharding_for_a_loops_end_is_made_where_the_value_is() -> None:
    _, flat = _loop()
    carry, new = flat.kind.index("carry"), flat.at[1][0]
    assert buffer_span(flat, new, 1, carry, readers=[carry]) == (new, new + 1)


def test_new_value_of_a_donated_argument_takes_its_buffer() -> None:
    p = Program(UNIT, UNIT)
    new = p.op("add", 0, 1)
    p.dot(new, new)
    assert spans(p.graph(new, donated=((0, 0),)))[0] is None


def test_new_value_of_an_argument_that_is_not_donated_stays() -> None:
    p = Program(UNIT, UNIT)
    new = p.op("add", 0, 1)
    p.dot(new, new)
    graph = p.graph(new, state=((0, 0),))
    assert spans(graph)[0] == (0, 2)  # the end
    assert liveness(flatten(graph)).loose == {}


def test_state_that_is_resharded_stays_as_it_goes_out() -> None:
    p = Program(UNIT, UNIT)
    new = p.op("add", 0, 1)
    p.dot(new, new)
    flat = flatten(p.graph(new, state=((0, 0),)))
    made, last = flat.at[0][0], len(flat.kind)
    assert buffer_span(flat, made, 0, flat.args[0], readers=[flat.args[0]]) == (made, last)


def test_donated_argument_read_by_what_its_new_value_does_not_depend_on() -> None:
    p = Program(UNIT, UNIT)
    gradient = p.dot(1, 1)
    loose = p.dot(0, 1)
    new = p.op("add", 0, gradient)
    assert loose
    flat = flatten(p.graph(new, donated=((0, 0),)))
    assert liveness(flat).loose == {0: (flat.at[0][2], flat.at[0][1], [(flat.at[0][1], 0)])}


def test_donated_argument_read_only_on_the_way_to_its_new_value() -> None:
    p = Program(UNIT, UNIT)
    gradient = p.dot(0, 1)
    new = p.op("add", 0, gradient)
    assert liveness(flatten(p.graph(new, donated=((0, 0),)))).loose == {}
