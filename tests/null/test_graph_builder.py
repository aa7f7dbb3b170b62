"""Graphs that are made of equal ones: what is equal is made once, and nothing else is."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from autopar.garbage import collection_paused
from autopar.inter_op.graph_builder import Alike, GraphBuilder
from autopar.ir.graph import Constant, Graph, Node, TensorType

SCALAR = TensorType(shape=(), dtype="float32")
ROWS = TensorType(shape=(4, 2), dtype="float32")


def node(*operands: Any, of: TensorType = SCALAR, **more: Any) -> Node:
    types = tuple(of if isinstance(o, int) else o.type for o in operands)
    given: dict[str, Any] = {"primitive": "mul", "params": {}} | more
    return Node(id=0, operands=operands, results=(9,), operand_types=types, result_types=(of,), **given)


SQUARE = node(0, 0)


def made(alike: Alike, *nodes: Node, of: TensorType = SCALAR, types: Any = None) -> Graph:
    builder = GraphBuilder(alike)
    names: dict[int, Any] = {0: builder.input(of)}
    for each in nodes:
        builder.copy(each, names, types)
    return builder.done([names[9]])


def test_equal_graphs_are_one() -> None:
    alike = Alike()
    one, other = (made(alike, node(0, 0)) for _ in range(2))
    assert one is other
    assert one.fingerprint == made(Alike(), node(0, 0)).fingerprint
    one.verify()
    assert [n.id for n in one.nodes] == [0] and one.nodes[0].operands == (0, 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (node(0, Constant(type=SCALAR, value=0.0)), node(0, Constant(type=SCALAR, value=-0.0))),
        (node(0, Constant(type=SCALAR, value=1)), node(0, Constant(type=SCALAR, value=True))),
        (SQUARE, replace(SQUARE, primitive="add")),
        (node(0, 0, params={"axes": (0,)}), node(0, 0, params={"axes": (1,)})),
        (SQUARE, replace(SQUARE, phase="update")),
        (SQUARE, replace(SQUARE, flops=3.0)),
    ],
)
def test_what_computes_something_else_is_another(one: Node, other: Node) -> None:
    alike = Alike()
    first, second = made(alike, one), made(alike, other)
    assert first.nodes != second.nodes or first.nodes[0].operands is not second.nodes[0].operands
    assert first.fingerprint != second.fingerprint
    assert [repr(n.operands[1]) for n in (*first.nodes, *second.nodes)] == [repr(n.operands[1]) for n in (one, other)]


def test_opaque_calls_of_other_bodies_are_others() -> None:
    bodies = [made(Alike(), node(0, 0, primitive=name)) for name in ("mul", "add")]
    alike = Alike()
    one, other = (made(alike, node(0, 0, primitive="pallas_call", hidden=body)) for body in bodies)
    assert one.fingerprint != other.fingerprint and other.nodes[0].hidden is bodies[1]
    more = made(alike, node(0, 0, primitive="pallas_call", hidden=bodies[0], hidden_runs=2))
    assert more.fingerprint != one.fingerprint


def test_rows_of_another_length_are_others() -> None:
    alike = Alike()

    def shortened(rows: int) -> Any:
        return lambda t: replace(t, shape=(rows, *t.shape[1:]))

    whole = node(0, of=ROWS, primitive="broadcast_in_dim", params={"shape": (4, 2)})
    one, two, again = (made(alike, whole, of=ROWS, types=shortened(rows)) for rows in (1, 2, 1))
    assert one.fingerprint != two.fingerprint and again.fingerprint == one.fingerprint
    assert [g.nodes[0].params["shape"] for g in (one, two, again)] == [(1, 2), (2, 2), (1, 2)]


def test_the_same_copied_to_the_same_place_after_other_constants() -> None:
    alike = Alike()
    for value in (0.0, -0.0):
        builder = GraphBuilder(alike)
        names: dict[int, Any] = {0: builder.input(SCALAR), 1: Constant(type=SCALAR, value=value)}
        builder.copy_all([node(0, 1)], names, 0, "kind", [names[0], names[1]])
        assert repr(builder.done([names[9]]).nodes[0].operands[1].value) == repr(value)


def test_collection_is_paused_and_what_was_frozen_stays_so() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    mine: list[int] = []
    gc.freeze()
    try:
        with collection_paused():
            pass
        assert gc.get_freeze_count() and not any(found is mine for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_garbage_that_was_made_meanwhile_is_found_later() -> None:
    class Cycle:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Cycle.alive += 1

        def __del__(self) -> None:
            Cycle.alive -= 1

    with collection_paused():
        for _ in range(10):
            Cycle()
    gc.collect()
    assert Cycle.alive == 0
