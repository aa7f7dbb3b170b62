"""Instances of Google's contest on intra-operator parallelism (ASPLOS/EuroSys 2025): a file → `Problem`, and a judge.

A file is JSON, gzipped where its name ends in ``.gz``, all numbers integers (github.com/google/iopddl):

    {"problem": {"nodes": {"intervals": [[start, stop], …], "costs": [[…], …], "usages": [[…], …]},
                 "edges": {"nodes": [[u, v], …], "costs": [[…], …]},
                 "usage_limit": L}}

An edge's costs are row-major over (strategy of u, strategy of v). Intervals are half-open; one that stops where it
starts, or before, holds nothing. Costs of 10**17 and more mean forbidden. A pair of nodes may have several edges, in
either order: their costs add up. Seconds and bytes of `Problem` are here the contest's own units.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.ir.errors import AutoparError
from autopar.ir.strategy import Problem, ProblemEdge, ProblemNode

FORBIDDEN = 10**17
"""Costs from here on forbid a choice (files have 10**18)."""


class InstanceError(AutoparError, ValueError):
    """An instance file, or a choice of strategies for one, is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a choice costs and holds at most, exactly. Forbidden where it takes a cost of at least `FORBIDDEN`."""

    cost: int
    peak: int
    limit: int | None
    forbidden: bool

    @property
    def feasible(self) -> bool:
        """Nothing forbidden, and the limit kept."""
        return not self.forbidden and (self.limit is None or self.peak <= self.limit)


def load(path: Path) -> dict[str, Any]:
    """The file's ``problem`` as Python's own lists and integers, its outer form checked.

    Raises:
        InstanceError: no such file, no JSON, or a part is missing or no list.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(text)
    except (OSError, EOFError, zlib.error) as error:
        raise InstanceError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise InstanceError(f"{path}: is no JSON: {error}") from error
    problem = document.get("problem", document) if isinstance(document, dict) else document
    for part, names in (("nodes", ("intervals", "costs", "usages")), ("edges", ("nodes", "costs"))):
        group = problem.get(part) if isinstance(problem, dict) else None
        if not isinstance(group, dict):
            raise InstanceError(f"{path}: {part} is {_kind(group)}; expected an object with {', '.join(names)}")
        for name in names:
            if not isinstance(group.get(name), list):
                raise InstanceError(f"{path}: {part}.{name} is {_kind(group.get(name))}; expected a list")
            if len(group[name]) != len(group[names[0]]):
                raise InstanceError(
                    f"{path}: {part}.{name} has {len(group[name])} entries; expected {len(group[names[0]])}, "
                    f"as {part}.{names[0]}"
                )
    limit = problem.get("usage_limit")
    if limit is not None and not _is_integer(limit):
        raise InstanceError(f"{path}: usage_limit is {limit!r}; expected an integer, or null for none")
    return problem


def read(path: Path) -> Problem:
    """The instance as the solver's problem: usages as bytes, costs as seconds, +inf where forbidden.

    Rows and columns of edges are not grouped. The parsed lists are dropped as arrays are made of them.

    Raises:
        InstanceError: the file is malformed; says where, what it has and what was expected.
    """
    document = load(path)
    nodes = _nodes(path, document["nodes"])
    edges = _edges(path, document["edges"], [len(n.costs_s) for n in nodes])
    horizon = max((int(spans[-1, 1]) for n in nodes for _, spans in n.usages), default=0)
    limit = document.get("usage_limit")
    return Problem(
        nodes=nodes, edges=edges, fixed_bytes=np.zeros(horizon), limit_bytes=None if limit is None else float(limit)
    )


def judge(document: dict[str, Any], choice: Sequence[int]) -> Verdict:
    """Cost and peak of a choice in exact integers, from what `load` gave.

    Raises:
        InstanceError: the choice has not one strategy for each node.
    """
    nodes, edges = document["nodes"], document["edges"]
    costs: list[list[int]] = nodes["costs"]
    if len(choice) != len(costs):
        raise InstanceError(f"the solution has {len(choice)} strategies; expected {len(costs)}, one per node")
    for v, (s, own) in enumerate(zip(choice, costs, strict=True)):
        if not 0 <= s < len(own):
            raise InstanceError(f"node {v}: the solution has strategy {s}; expected 0 to {len(own) - 1}")
    taken = [own[s] for own, s in zip(costs, choice, strict=True)]
    taken += [
        matrix[choice[u] * len(costs[v]) + choice[v]]
        for (u, v), matrix in zip(edges["nodes"], edges["costs"], strict=True)
    ]
    changes: list[tuple[int, int]] = []
    for (start, stop), usage, s in zip(nodes["intervals"], nodes["usages"], choice, strict=True):
        if start < stop:
            changes += [(start, usage[s]), (stop, -usage[s])]
    live = peak = 0
    for _, change in sorted(changes):  # at one time what ends comes before what starts
        live += change
        peak = max(peak, live)
    return Verdict(
        cost=sum(taken), peak=peak, limit=document.get("usage_limit"), forbidden=any(c >= FORBIDDEN for c in taken)
    )


def _nodes(path: Path, group: dict[str, Any]) -> tuple[ProblemNode, ...]:
    intervals, costs, usages = group["intervals"], group["costs"], group["usages"]
    out: list[ProblemNode] = []
    for v, interval in enumerate(intervals):
        own = _array(path, f"nodes.costs[{v}]", costs[v])
        if not own.size:
            raise InstanceError(f"{path}: nodes.costs[{v}] is empty; expected a cost for each strategy, at least one")
        start, stop = _pair(path, f"nodes.intervals[{v}]", interval)
        if start < 0:
            raise InstanceError(f"{path}: nodes.intervals[{v}] starts at {start}; expected 0 or later")
        held = _array(path, f"nodes.usages[{v}]", usages[v])
        if held.size != own.size:
            raise InstanceError(
                f"{path}: nodes.usages[{v}] has {held.size} entries; expected {own.size}, one per strategy, "
                f"as nodes.costs[{v}]"
            )
        spans = np.array([[start, stop]], np.int64)
        out.append(ProblemNode(costs_s=_costs(own), usages=((held, spans),) if start < stop else ()))
        costs[v] = usages[v] = None
    return tuple(out)


def _edges(path: Path, group: dict[str, Any], sizes: list[int]) -> tuple[ProblemEdge, ...]:
    ends, costs = group["nodes"], group["costs"]
    all_of = {n: np.arange(n) for n in set(sizes)}
    matrices: dict[tuple[int, int], Any] = {}
    for k, pair in enumerate(ends):
        u, v = _pair(path, f"edges.nodes[{k}]", pair)
        if u == v or not (0 <= u < len(sizes) and 0 <= v < len(sizes)):
            raise InstanceError(
                f"{path}: edges.nodes[{k}] is [{u}, {v}]; expected two different nodes of 0 to {len(sizes) - 1}"
            )
        flat = _array(path, f"edges.costs[{k}]", costs[k])
        if flat.size != sizes[u] * sizes[v]:
            raise InstanceError(
                f"{path}: edges.costs[{k}] has {flat.size} entries; expected {sizes[u]} × {sizes[v]} = "
                f"{sizes[u] * sizes[v]}, the strategies of nodes {u} and {v}"
            )
        matrix = _costs(flat).reshape(sizes[u], sizes[v])
        if u > v:
            u, v, matrix = v, u, matrix.T
        before = matrices.get((u, v))
        matrices[u, v] = np.ascontiguousarray(matrix) if before is None else before + matrix
        costs[k] = None
    return tuple(
        ProblemEdge(a=a, b=b, rows=all_of[sizes[a]], cols=all_of[sizes[b]], costs_s=matrix)
        for (a, b), matrix in sorted(matrices.items())
    )


def _costs(values: Any) -> Any:
    values[values >= FORBIDDEN] = np.inf
    return values


def _array(path: Path, where: str, values: Any) -> Any:
    """float64[…] of a list of integers."""
    if not isinstance(values, list):
        raise InstanceError(f"{path}: {where} is {_kind(values)}; expected a list of integers")
    if not values:
        return np.zeros(0)
    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths inside
        array = np.zeros(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        for i, value in enumerate(values):
            if not _is_integer(value):
                raise InstanceError(f"{path}: {where}[{i}] is {_kind(value)}; expected an integer")
    return array.astype(np.float64)


def _pair(path: Path, where: str, values: Any) -> tuple[int, int]:
    if not isinstance(values, list) or len(values) != 2 or not all(map(_is_integer, values)):
        raise InstanceError(f"{path}: {where} is {json.dumps(values)}; expected a list of two integers")
    return values[0], values[1]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "missing or null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return json.dumps(value)
