"""From a graph to the rewritten one: which planning nodes repeat which, what their shardings start as, what is saved.

In: the problems of a graph and of the same graph with recomputation written into it. Out: a choice of the first as one
of the second (`carried_over`); each `Recompute` with its bytes and seconds (`measured`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.intra_op.decisions import Decisions
from autopar.intra_op.flatten import Flat
from autopar.intra_op.mesh_problem import Candidate, MeshProblem
from autopar.intra_op.remat.forward import Readers, resharded_s
from autopar.intra_op.remat.joint_groups import path_of
from autopar.intra_op.remat.rewrite import blocks_of
from autopar.ir.sharding_plan import Recompute


def origins(before: Flat, after: Flat, recompute: Sequence[Recompute]) -> list[tuple[int, bool]]:
    """For each planning node of the rewritten graph: the one that it is, or repeats, in the first graph; and whether it
    repeats it."""
    region_of: dict[int, int] = {}
    blocks: dict[int, list[int]] = {}
    """Region of a block → the planning nodes that it repeats."""
    originals = iter(range(len(before.regions)))
    for region in after.regions:
        parent = after.regions[region.parent] if region.parent >= 0 else None
        if parent is None or "after" not in parent.graph.nodes[region.position].params:
            region_of[region.id] = next(originals)
            continue
        home = region_of[parent.id]
        blocks[region.id] = []
    for home_after, home in region_of.items():
        mine = [r for r in after.regions if r.id in blocks and r.parent == home_after]
        if mine:
            path = path_of(before, home)
            here = [replace(e, path=()) for e in recompute if e.path == path]
            for region, block in zip(mine, blocks_of(before.regions[home].graph, here), strict=True):
                handed_on = [before.maker[before.env[home][v]] for v in block.copies]
                blocks[region.id] = [*handed_on, *(before.at[home][p] for p in block.nodes)]
    rest = iter(range(len(before.kind)))
    taken = dict.fromkeys(blocks, 0)
    out: list[tuple[int, bool]] = []
    for n in range(len(after.kind)):
        region = after.region[n]
        if region in blocks:
            out.append((blocks[region][taken[region]], True))
            taken[region] += 1
        else:
            out.append((next(rest), False))
    return out


def carried_over(before: MeshProblem, after: MeshProblem, choice: Sequence[int]) -> tuple[int, ...]:
    """The states of the rewritten graph's clusters in which everything, what is repeated included, is sharded as under
    ``choice`` of the first graph's, or, where a forced method does not allow that, as it does."""
    old, new = before.graph, after.graph
    origin = origins(old.flat, new.flat, after.recompute)
    copies = {this.copy_of: c for c, this in enumerate(old.classes) if this.copy_of is not None}
    out: list[int] = []
    for root in new.roots:
        this = new.classes[root]
        if this.copy_of is None:
            n = origin[this.members[0]][0]
            state = old.strategy(old.class_of[n], choice)
            was = old.classes[old.class_of[n]].signature
            mine = this.signature.results
            if mine and not np.array_equal(mine[0], was.results[0]):
                # an argument's copy, an operator; or one of another type, as a product reads it: strategies of its own
                state = int(next(iter(np.flatnonzero(mine[0] == was.results[0][state])), 0))
            out.append(state)
            continue
        maker, r = this.copy_of
        was = old.class_of[origin[new.classes[maker].members[0]][0]]
        copy = copies.get((was, r))
        wanted = [old.classes[was].signature.results[r][old.strategy(was, choice)]]
        if copy is not None:
            wanted.insert(0, old.classes[copy].signature.results[0][old.strategy(copy, choice)])
        same = [int(s) for code in wanted for s in np.flatnonzero(this.signature.results[0][this.follow] == code)]
        out.append(next(iter(same), 0))
    for k, allowed in after.masks.items():
        if not allowed[out[k]]:
            out[k] = int(np.flatnonzero(allowed)[0])
    return tuple(out)


def measured(before: MeshProblem, candidate: Candidate) -> tuple[Recompute, ...]:
    """What ``candidate`` recomputes, with the bytes that this saves and the seconds that it takes under its plan."""
    after, out = candidate.posed, candidate.out
    if not after.recompute:
        return ()
    old, new = before.graph.flat, after.graph.flat
    again: dict[int, int] = {}
    for n, (origin, repeated) in enumerate(origins(old, new, after.recompute)):
        if repeated:
            again[origin] = n
    readers = Readers(new)
    rows: list[Recompute] = []
    spent: set[int] = set()
    for entry in after.recompute:
        region = next(r.id for r in old.regions if path_of(old, r.id) == entry.path)
        value = old.env[region][entry.value]
        n = old.maker[value]
        r = value - old.first_value[n]
        repeat = again[n]
        value_type, c = old.result_types[n][r], after.graph.class_of[repeat]
        have, codes = out.result_code(c, r), _read_as(readers, out, repeat, r)
        sizes = value_type.size_bytes / after.graph.mesh.space(value_type).shards
        saved = 0.0
        if entry.consumers and before.live.interval(n, r) is not None:
            kept = codes - {have} if old.kind[n] == "arg" else codes or {have}
            saved = max((float(sizes[code]) for code in kept), default=0.0)
        trips = new.regions[new.region[repeat]].trips
        cost = trips * sum(float(after.graph.mesh.costs(value_type)[have, code]) for code in codes)
        if n not in spent:
            cost += trips * (float(after.graph.classes[c].cost_s[out.strategy[c]]) + resharded_s(out, repeat))
        spent.add(n)
        rows.append(replace(entry, saved_bytes=saved, cost_s=cost))
    return tuple(rows)


def _read_as(readers: Readers, out: Decisions, n: int, r: int) -> set[int]:
    """The codes in which operators want result r of planning node n."""
    flat, graph, codes = out.graph.flat, out.graph, set[int]()
    for e in readers.edges(flat.first_value[n] + r):
        u = readers.user[e]
        c, i = graph.class_of[u], e - flat.first_edge[u]
        if flat.kind[u] == "op" and graph.classes[c].signature.operands[i] is not None:
            codes.add(out.operand_code(c, i))
    return codes
