"""When each planning node's results are live, and which of them stand in memory at all.

Time is the position in the flat list of planning nodes (bodies inlined, so a loop's body is one stretch of
time). The model is of what XLA's buffer assignment does with a step in program order:

- arguments are live throughout; a donated argument's new value takes its buffer;
- a value that its only users fuse into themselves never stands in memory;
- a loop's carry is one buffer for the whole loop; its new value takes it unless the old one is still needed;
- a stacked result is live from its loop's start; a scanned input and a loop constant until its end;
- an elementwise result may take the buffer of an operand that dies there.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.roofline import is_fusible
from autopar.intra_op.flatten import Flat

Interval = tuple[int, int]

_DATA_MOVEMENT = frozenset("transpose concatenate pad rev sort split stack unstack".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod".split())
_GENERATORS = frozenset("iota broadcast_in_dim random_bits".split())
_ALIASES = frozenset(
    "reshape squeeze expand_dims bitcast_convert_type copy stop_gradient name optimization_barrier".split()
)
"""Primitives whose result is its operand's buffer under another shape."""


@dataclass(slots=True)
class Liveness:
    """``intervals[n][r]`` is result r's time in memory, None where it never stands there by itself."""

    horizon: int
    intervals: list[list[Interval | None]]
    ends: list[int]
    """Last time that a region of the node is running: for buffers that must survive a loop."""


def liveness(flat: Flat) -> Liveness:
    """Intervals of every planning node's results, which do not depend on the choice of strategies."""
    count = len(flat.kind)
    users: list[list[list[tuple[int, int]]]] = [[[] for _ in types] for types in flat.result_types]
    for n, links in enumerate(flat.links):
        for i, link in enumerate(links):
            if link is not None:
                users[link[0]][link[1]].append((n, i))
    last: list[list[int]] = [[n] * len(types) for n, types in enumerate(flat.result_types)]
    for n in reversed(range(count)):
        for r, readers in enumerate(users[n]):
            for user, i in readers:
                last[n][r] = max(last[n][r], _until(flat, n, user, i, last))
    intervals: list[list[Interval | None]] = []
    for n in range(count):
        intervals.append([_interval(flat, n, r, users[n][r], last[n][r], count) for r in range(len(users[n]))])
    return Liveness(count, intervals, [count] * count)


def _loop_end(flat: Flat, n: int) -> int:
    """End of the loop that entry node n belongs to; n itself outside loops."""
    return flat.span.get(flat.region[n], (n, n))[1]


def _until(flat: Flat, n: int, user: int, i: int, last: list[list[int]]) -> int:
    """The time until which ``user`` needs its operand i, made by n."""
    kind = flat.kind[user]
    if kind in ("const_in", "xs"):
        return _loop_end(flat, user)
    if kind == "branch_in":
        return max(last[user][0], user)
    if kind == "carry" and i == 1:
        return n + 1
    if kind == "ys":
        return n + 1
    if kind == "arg":
        return n
    if kind == "op" and flat.node[user].primitive in _ALIASES and last[user]:  # type: ignore[union-attr]
        return max(last[user][0], user)
    in_place = kind == "op" and _elementwise(flat, user)
    return user if in_place else user + 1


def _elementwise(flat: Flat, n: int) -> bool:
    node = flat.node[n]
    return node is not None and is_fusible(node.primitive) and node.primitive not in _DATA_MOVEMENT | _GENERATORS


def _interval(flat: Flat, n: int, r: int, readers: list[tuple[int, int]], last: int, horizon: int) -> Interval | None:
    kind = flat.kind[n]
    if kind == "arg":
        return (0, horizon)
    if kind in ("const_in", "branch_in", "loop_out"):
        if kind != "loop_out":
            return None
        return (n, max(last, n + 1))
    if kind == "carry":
        return (n, _loop_end(flat, n))
    if kind == "ys":
        carried = flat.links[n][0]
        start = n if carried is None else _start_of_loop(flat, n)
        return (start, max(last, n + 1))
    if kind in ("out", "pred"):
        return None
    if kind in ("xs", "branch_out"):
        return (n, max(last, n + 1))
    return _op_interval(flat, n, readers, last, horizon)


def _start_of_loop(flat: Flat, n: int) -> int:
    region = flat.exec_region[n][0]
    return flat.span.get(region, (n, n))[0]


def _op_interval(flat: Flat, n: int, readers: list[tuple[int, int]], last: int, horizon: int) -> Interval | None:
    node = flat.node[n]
    assert node is not None
    if not readers:
        return (n, n + 1)
    kinds = {flat.kind[u] for u, _ in readers}
    if "out" in kinds:
        return (n, horizon)
    if node.primitive in _ALIASES and node.operands and isinstance(node.operands[0], int):
        return None
    others = [(u, i) for u, i in readers if flat.kind[u] != "arg" and flat.kind[u] not in ("carry", "ys")]
    if not others:
        carry = [u for u, i in readers if flat.kind[u] == "carry" and i == 1]
        still = any(_last_in_body(flat, u) > n for u in carry)
        return (
            (n, _loop_end(flat, carry[0]))
            if carry and still
            else None
            if is_fusible(node.primitive) or not carry
            else (n, n + 1)
        )
    if is_fusible(node.primitive) and all(_fuses(flat, u) for u, _ in others):
        if node.primitive in _GENERATORS or (len(others) == 1 and node.primitive not in _REDUCTIONS):
            return None
    return (n, max(last, n + 1))


def _last_in_body(flat: Flat, carry: int) -> int:
    last = carry
    for n in range(carry, _loop_end(flat, carry)):
        for link in flat.links[n]:
            if link == (carry, 0) and flat.kind[n] != "loop_out":
                last = max(last, n)
    return last


def _fuses(flat: Flat, user: int) -> bool:
    """True for users that compute their operands on the fly."""
    node = flat.node[user]
    return (
        node is not None
        and is_fusible(node.primitive)
        and node.primitive not in ("concatenate", "optimization_barrier")
    )
