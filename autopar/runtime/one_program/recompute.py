"""A traced step and what its plan recomputes → the graph and the jaxpr that run (see `intra_op.remat.rewrite`).

A block becomes a ``remat2`` equation whose body is the original equations, on their own variables: the lowering
evaluates them on what the block reads, and jax puts an optimisation barrier before that. A copied input is a ``copy``
equation there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.intra_op.remat.rewrite import Block, blocks_of, rewritten
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import Recompute
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, copy, fresh_var, rematerialised


def recomputed(graph: Graph, closed: ClosedJaxpr, entries: Sequence[Recompute]) -> tuple[Graph, ClosedJaxpr]:
    """Graph and jaxpr with all blocks in place; the same objects where there are none. Raises VerifyError where an
    entry does not fit the graph."""
    if not entries:
        return graph, closed
    return rewritten(graph, entries), ClosedJaxpr(_rewritten(graph, closed.jaxpr, entries), closed.consts)


def _rewritten(graph: Graph, jaxpr: Jaxpr, entries: Sequence[Recompute]) -> Jaxpr:
    inner: dict[int, list[Recompute]] = {}
    for e in entries:
        if e.path:
            inner.setdefault(e.path[0], []).append(replace(e, path=e.path[1:]))
    here = [e for e in entries if not e.path]
    consumers = {e.value: e.consumers for e in here}
    var_of: list[Any] = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    value_of = {v: i for i, v in enumerate(var_of)}
    waiting = list(blocks_of(graph, here))
    again: dict[int, Var] = {}
    eqns: list[JaxprEqn] = []
    for position, eqn in enumerate(jaxpr.eqns):
        if position in inner:
            body = eqn.params["jaxpr"]
            new = _rewritten(graph.nodes[position].bodies[0], getattr(body, "jaxpr", body), inner[position])
            closed = ClosedJaxpr(new, body.consts) if isinstance(body, ClosedJaxpr) else new
            eqn = eqn.replace(params={**eqn.params, "jaxpr": closed})
        if waiting and waiting[0].before == position:
            eqns.append(_block_eqn(jaxpr, waiting.pop(0), var_of, again))
        invars = [
            again[value_of[v]] if isinstance(v, Var) and position in consumers.get(value_of[v], ()) else v
            for v in eqn.invars
        ]
        eqns.append(eqn.replace(invars=invars))
    return jaxpr.replace(eqns=eqns)


def _block_eqn(jaxpr: Jaxpr, block: Block, var_of: Sequence[Any], again: dict[int, Var]) -> JaxprEqn:
    reads = [*block.inputs, *block.after]
    inner = [var_of[v] for v in reads]
    outer = [again[v] if v in again else var_of[v] for v in reads]
    results = [fresh_var(var_of[v]) for v in block.outputs]
    copied = {v: fresh_var(var_of[v]) for v in block.copies}
    eqns = [copy(var_of[v], new, jaxpr.eqns[block.before]) for v, new in copied.items()]
    eqns += [jaxpr.eqns[p] for p in block.nodes]
    again.update(zip(block.outputs, results, strict=True))
    return rematerialised(
        jaxpr, eqns, inner, [copied[v] if v in copied else var_of[v] for v in block.outputs], outer, results
    )
