"""Nested cuts → groups: values that are recomputed all or none, each a yes-or-no of the joint problem.

From one price to the next the recomputed set grows; what it grows by falls into connected parts, mostly one per layer.
Each is a `Group`. One that reads what only another group's recomputation makes again needs that group
(``needs``). Groups' effects on memory are taken as additive; where two of them touch, ``beside`` says what holds only
if both are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.intra_op.flatten import CONSTANT, Flat
from autopar.intra_op.liveness import Interval, Liveness
from autopar.intra_op.remat.cuts import boundaries, cuts
from autopar.intra_op.remat.forward import ForwardNode
from autopar.ir.sharding_plan import Recompute

Held = tuple[int, int, Interval]
"""(planning node, result, interval)."""


@dataclass(slots=True)
class Group:
    """``nodes`` run again. ``freed`` are results that are then not held for an interval, ``extra`` those that are held
    longer; ``beside`` those of them that are not if another group is recomputed too. ``level``: in which cut the group
    is first."""

    region: int
    level: int
    nodes: tuple[int, ...]
    freed: list[Held] = field(default_factory=list)
    extra: list[Held] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    beside: dict[int, list[Held]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What may be recomputed in one region: ``free`` are the operators that are never materialised, which are computed
    again with what they read."""

    region: int
    found: dict[int, ForwardNode]
    free: frozenset[int]
    groups: tuple[Group, ...]


def choices(flat: Flat, live: Liveness, region: int, found: dict[int, ForwardNode], *, joins: bool) -> Choices:
    """The groups of one region's forward nodes, ``found`` by `forward.forward_nodes`; ``joins``: as `Fusion` has it."""
    sets = cuts(found, boundaries(found))
    groups: list[Group] = []
    group_of: dict[int, int] = {}
    free = sets[0] if sets else set[int]()
    times = [_times(found, chosen) for chosen in sets]
    for level in range(1, len(sets)):
        for part in _parts(found, sets[level] - sets[level - 1]):
            group_of.update(dict.fromkeys(part, len(groups)))
            groups.append(Group(region, level, tuple(sorted(part))))
    for k, group in enumerate(groups):
        _spans(flat, live, found, group, k, group_of, free, sets, times)
    if joins:
        _parted(flat, live, region, found, groups, group_of, free)
    return Choices(region=region, found=found, free=frozenset(free), groups=tuple(groups))


def _times(found: dict[int, ForwardNode], chosen: set[int]) -> dict[int, int]:
    """When each of ``chosen`` is first needed again, if all of them are recomputed."""
    times: dict[int, int] = {}
    for n in reversed(list(found)):
        if n in chosen:
            below = [times[w] for w in found[n].readers if w in times]
            times[n] = min([found[n].own_late, *below] if found[n].saved else below, default=found[n].late_at)
    return times


def _parts(found: dict[int, ForwardNode], nodes: set[int]) -> list[list[int]]:
    """Connected parts, in order."""
    seen: set[int] = set()
    parts: list[list[int]] = []
    for n in (n for n in found if n in nodes):
        if n in seen:
            continue
        stack, part = [n], [n]
        seen.add(n)
        while stack:
            this = found[stack.pop()]
            for w in (*this.reads, *this.readers):
                if w in nodes and w not in seen:
                    seen.add(w)
                    part.append(w)
                    stack.append(w)
        parts.append(part)
    return parts


def _spans(
    flat: Flat, live: Liveness, found: dict[int, ForwardNode], group: Group, index: int, group_of: dict[int, int],
    free: set[int], sets: list[set[int]], times: list[dict[int, int]],
) -> None:  # fmt: skip
    """Fills in what group ``index`` frees, holds and needs."""
    at, mine = times[group.level], set(group.nodes)
    for n in group.nodes:
        this = found[n]
        for r in this.stands:  # also what is held for operators alone that compute it anew
            span = live.interval(n, r)
            if span is not None and (start := max(span[0], this.early_end)) < (stop := min(span[1], at[n])):
                group.freed.append((n, r, (start, stop)))
    seen: set[int] = set()
    leads_to = _leads_to(flat, live, found, group)
    for n in group.nodes:
        for value in _operands(flat, n, free):
            m, r = flat.maker[value], value - flat.first_value[flat.maker[value]]
            if m in mine or value in seen:
                continue
            seen.add(value)
            if flat.kind[m] == "arg":
                copied = None if m in live.loose else live.copied(m, n, leads_to[n])
                group.extra += [] if copied is None else [(m, r, copied)]
                continue
            interval = live.interval(m, r)
            longer = (m, r, (interval[1], at[n])) if interval is not None and interval[1] < at[n] else None
            other = group_of.get(m, -1)
            if other >= 0 and m in sets[group.level]:  # a group of the same cut or an earlier one
                if not found[m].saved:
                    group.needs.add(other)
                continue
            if longer is not None:
                group.extra.append(longer)
                if other >= 0:
                    group.beside.setdefault(other, []).append(longer)


def _parted(
    flat: Flat, live: Liveness, region: int, found: dict[int, ForwardNode], groups: list[Group],
    group_of: dict[int, int], free: set[int],
) -> None:  # fmt: skip
    """Adds what is materialised only then: operators that are computed again with what they read were parts of the
    kernels of their late readers, and are results of a block. One that reads several groups counts with the first. What
    nothing else reads is held until they are computed, no longer until those kernels are done."""
    of: dict[int, int] = {}
    for n, this in found.items():
        known = [k for m in this.reads if (k := of.get(m, group_of.get(m, -1))) >= 0] if n in free else []
        if known:
            of[n] = min(known, key=lambda k: groups[k].level)
            for r in this.late if not this.stands else ():
                if this.own_late < (stop := _read_until(flat, live, region, this, r)):
                    groups[of[n]].extra.append((n, r, (this.own_late, stop)))
    needed: dict[int, int] = {}
    for n in reversed(list(of)):
        this = found[n]
        needed[n] = this.own_late if this.saved else max((needed.get(w, live.horizon) for w in this.readers), default=0)
    for n, k in group_of.items():
        this = found[n]
        again = [w for w in this.readers if w in needed]
        for r in range(len(flat.result_types[n])) if again else ():
            start = max(_read_until(flat, live, region, this, r), *(needed[w] for w in again))
            span = live.interval(n, r)
            if span is not None and this.late_at <= start < span[1]:
                groups[k].freed.append((n, r, (start, span[1])))


def _read_until(flat: Flat, live: Liveness, region: int, this: ForwardNode, r: int) -> int:
    """When the last kernel of result r's own late readers is done; 0 where it has none."""
    readers = (flat.at[region][p] for p in this.late.get(r, ()))
    return max((int(live.ends[u]) for u in readers if u >= 0), default=0)


def _leads_to(flat: Flat, live: Liveness, found: dict[int, ForwardNode], group: Group) -> dict[int, int]:
    """Node of the group → the arguments whose new values depend on what it is repeated for, as `Liveness.leads_to`."""
    out: dict[int, int] = {}
    for n in reversed(group.nodes):
        out[n] = 0
        for p in {p for positions in found[n].late.values() for p in positions}:
            if (reader := flat.at[group.region][p]) >= 0:
                out[n] |= live.leads_to[reader]
        for w in found[n].readers:
            out[n] |= out.get(w, 0)
    return out


def _operands(flat: Flat, n: int, free: set[int]) -> Iterable[int]:
    """The values that node n is made from, those that are never materialised replaced by what they are made from."""
    stack, seen = [n], {n}
    while stack:
        node = stack.pop()
        for value in flat.source[flat.first_edge[node] : flat.first_edge[node + 1]]:
            if value == CONSTANT:
                continue
            maker = flat.maker[value]
            if maker in free:
                if maker not in seen:
                    seen.add(maker)
                    stack.append(maker)
            else:
                yield value


def entries(flat: Flat, choices: Choices, chosen: Iterable[int]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """(planning node, result, positions of consumers) of all that is recomputed where the groups ``chosen`` are: with
    them, the operators that are never materialised and read what is recomputed."""
    again = {n for k in chosen for n in choices.groups[k].nodes}
    for n, this in choices.found.items():
        if n in choices.free and any(m in again for m in this.reads):
            again.add(n)
    rows: list[tuple[int, int, tuple[int, ...]]] = []
    wanted: set[int] = set()
    for n in reversed(list(choices.found)):
        if n not in again:
            continue
        this, first = choices.found[n], flat.first_value[n]
        results = [r for r in range(len(flat.result_types[n])) if r in this.late or first + r in wanted]
        if results:
            rows += [(n, r, this.late.get(r, ())) for r in results]
            wanted.update(flat.source[flat.first_edge[n] : flat.first_edge[n + 1]])
            wanted.update(_through(flat, choices, n, again))
    return tuple(reversed(rows))


def _through(flat: Flat, choices: Choices, n: int, again: set[int]) -> Iterable[int]:
    """What operators that are never materialised are made from, where those are computed again for node n."""
    for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]:
        if value != CONSTANT and flat.maker[value] in choices.free:
            again.add(flat.maker[value])
            yield value


def path_of(flat: Flat, region: int) -> tuple[int, ...]:
    """Positions of the nodes inside whose bodies a region is, from the step inwards."""
    path: list[int] = []
    at = flat.regions[region]
    while at.parent >= 0:
        path.insert(0, at.position)
        at = flat.regions[at.parent]
    return tuple(path)


def named_by_path(flat: Flat, region: int) -> bool:
    """True where `Recompute.path` can lead to a region: no while loop and no branch is on the way."""
    while (this := flat.regions[region]).parent >= 0:
        if this.kind not in ("scan", "remat"):
            return False
        region = this.parent
    return True


def named(flat: Flat, region: int, rows: Iterable[tuple[int, int, tuple[int, ...]]]) -> tuple[Recompute, ...]:
    """``rows`` of `entries`, of one region, as a plan has them: values of its graph instead of planning nodes."""
    path = path_of(flat, region)
    out: list[Recompute] = []
    for n, r, consumers in rows:
        node = flat.node[n]
        if node is None:
            i, graph = flat.args.index(n), flat.regions[0].graph
            out.append(Recompute(value=graph.inputs[i], consumers=consumers, what=f"gather of {graph.arg_paths[i]}"))
            continue
        what = f"{node.called} ({node.source})" if node.source else node.called
        out.append(Recompute(path=path, value=node.results[r], consumers=consumers, what=what))
    return tuple(out)
