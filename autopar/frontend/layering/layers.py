"""A train step → `LayeredGraph` and the jaxprs behind it: `layered`; without the update, its `outline`.

split_step   what runs before, the loss of one microbatch, the update
order        the loss's equations in the order in which they are cut
Cutting      where they are cut
make_kind    equal layers once: forward, and forward with backward per choice of what is kept
update_layers  whose stage runs what of the update
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from autopar.frontend.layering.conds import split_conds
from autopar.frontend.layering.cutting import Cutting
from autopar.frontend.layering.inputs import FROM_ARGUMENT, FROM_BEFORE, FROM_INDEX, FROM_ROW
from autopar.frontend.layering.joins import with_joins
from autopar.frontend.layering.layer_graphs import KindCode, make_kind
from autopar.frontend.layering.ownership import origins, update_layers
from autopar.frontend.layering.phases import Inlined, Parts, inlined, split_step
from autopar.frontend.layering.rows import grouped
from autopar.frontend.layering.scans import opened, unroll
from autopar.frontend.layering.sequence import Ordered, order
from autopar.frontend.layering.source import Source, shapes_of
from autopar.frontend.layering.surgery import Env, plain, renamed, soonest, without_constants
from autopar.frontend.layering.tokens import Tokens
from autopar.frontend.microbatch.batch_args import BatchArgnums
from autopar.frontend.normalise import normalise
from autopar.frontend.opened_calls import planned_for
from autopar.frontend.state import with_state
from autopar.frontend.to_graph import tensor_type, to_graph
from autopar.frontend.trace import Call
from autopar.garbage import collection_paused
from autopar.ir.errors import OptionError
from autopar.ir.graph import Graph, TensorType
from autopar.ir.layers import Layer, LayeredGraph, LayerKind, Outline, Slice, layered_fingerprint
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, dce, source_line
from autopar.primitives.kinds import Kind, Rows


@dataclass(frozen=True, kw_only=True)
class Layered:
    """A step in layers, and what runs it.

    Attributes:
        graph: what planning sees.
        kinds: jaxprs of ``graph.kinds``.
        update: ``update.eqns[i]`` is node i of ``graph.update``.
        before: likewise of ``graph.before``.
        rows: how each argument carries the batch; None where every microbatch has all of it.
        before_rows: likewise of before's results.
        combine: how each of ``graph.combined`` is combined over microbatches.
        consts: values of the first arguments, which the step closed over.
        call: how arguments and outputs relate to the call.
        source: what it was made from.
        notes: on what could be the new value of another argument.
    """

    graph: LayeredGraph
    kinds: tuple[KindCode, ...]
    update: Jaxpr
    before: Jaxpr
    rows: tuple[Rows | None, ...]
    before_rows: tuple[Rows | None, ...]
    combine: tuple[Kind, ...]
    consts: tuple[Any, ...]
    call: Call
    source: Source
    notes: tuple[str, ...]

    @property
    def closed_over(self) -> Sequence[Any]:
        """Arrays that the step closed over."""
        return self.consts


@collection_paused()
def layered(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    num_microbatches: int = 1,
    batch_argnums: BatchArgnums = None,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    layers: int | str | None = None,
    platform: str | None = None,
    whole: Inlined | None = None,
) -> Layered:
    """Cuts a step into layers.

    Args:
        step: a train step that takes its gradients by one `autopar.value_and_grad` (or none: inference).
        args, kwargs: its arguments, arrays or ShapeDtypeStructs.
        num_microbatches, batch_argnums: as `autopar.serial` takes them.
        static_argnums, donate_argnums: as in jax.jit.
        layers: how many; ``"names"``: one per block that the user named (`jax.named_scope`, module names); None: the
            repeated blocks, or else `cutting.DEFAULT_LAYERS`. The user's `autopar.layer_boundary` go before all of
            these.
        platform: as `trace.trace` takes it.
        whole: the step's trace, where it is there.

    Raises:
        TraceError: the step cannot be traced or has more than one gradient marker.
        MicrobatchError: it is not exact in microbatches.
        OptionError: ``layers`` is none of these.
    """
    if layers is not None and layers != "names" and (not isinstance(layers, int) or layers < 1):
        raise OptionError(f'layers: {layers!r} is neither a number of layers, nor "names", nor None')
    source = Source(
        step=step, args=shapes_of(args, static_argnums), kwargs=shapes_of([kwargs or {}])[0],
        num_microbatches=num_microbatches, batch_argnums=batch_argnums, static_argnums=tuple(static_argnums),
        donate_argnums=tuple(donate_argnums), layers=layers, platform=platform,
    )  # fmt: skip
    if whole is None:
        whole = inlined(step, args, kwargs or {}, static_argnums, donate_argnums, platform)
    with planned_for(platform):
        parts = split_step(
            step,
            args,
            kwargs or {},
            whole,
            num_microbatches=num_microbatches,
            batch_argnums=batch_argnums,
            static_argnums=static_argnums,
        )
        return _Builder(parts, num_microbatches).build(layers, source)


@collection_paused()
def outline(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    whole: Inlined,
    *,
    batch_argnums: BatchArgnums = None,
    static_argnums: Sequence[int] = (),
    layers: int | str | None = None,
    platform: str | None = None,
) -> Outline:
    """A step's layers, each with all examples; arguments as `layered` takes them. Raises as that."""
    with planned_for(platform):
        parts = split_step(
            step, args, kwargs, whole, num_microbatches=1, batch_argnums=batch_argnums, static_argnums=static_argnums
        )
        return _Builder(parts, 1).outline(layers)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Layers while they are made; ``ids`` has the number of each of ``values``."""

    layers: list[Layer] = field(default_factory=list[Layer])
    kinds: list[LayerKind] = field(default_factory=list[LayerKind])
    codes: list[KindCode] = field(default_factory=list[KindCode])
    values: list[TensorType] = field(default_factory=list[TensorType])
    ids: dict[Any, int] = field(default_factory=dict[Any, int])

    def define(self, v: Any) -> int:
        """The number of a variable's value."""
        if v not in self.ids:
            self.ids[v] = len(self.values)
            self.values.append(tensor_type(v.aval))
        return self.ids[v]


class _Builder:
    """The layers of one step while they are made."""

    def __init__(self, parts: Parts, n: int) -> None:
        parts = replace(parts, forward=opened(parts.forward))
        unrolled = unroll(parts.forward, parts.inputs)
        whole = dict(zip(parts.forward.invars, parts.inputs, strict=True))
        rows = tuple(replace(whole[r.of], source=FROM_ROW, at=r.at) for r in unrolled.rows)
        self.parts = parts = replace(parts, forward=unrolled.forward, inputs=(*parts.inputs, *rows))
        self.n = n
        self.inputs = dict(zip(parts.forward.invars, parts.inputs, strict=True))
        self.sequence: Ordered = order(parts.forward, parts.inputs, unrolled.numbering)
        self.tokens = Tokens()
        self.cutting = Cutting(parts.forward, self.sequence, self.inputs, self.tokens)

    def outline(self, layers: int | str | None) -> Outline:
        """`outline`."""
        made = self._cut(layers)
        return Outline(
            layers=tuple(made.kinds[layer.kind] for layer in made.layers),
            arguments=tuple(tensor_type(v.aval) for v in self.parts.before.invars),
            trained=tuple(tensor_type(v.aval) for v in self._trained),
            trains=self.parts.differentiated,
        )

    @property
    def _trained(self) -> list[Any]:
        return [v for v, s in self.inputs.items() if s.trained and s.source != FROM_ROW]

    def _cut(self, layers: int | str | None) -> _Cut:
        bounds = [0, *self.cutting.cuts(layers), len(self.sequence.eqns)]
        bodies, together = grouped([self.cutting.layer(a, b) for a, b in itertools.pairwise(bounds)], self.inputs)
        self.inputs |= together
        numbers = self.cutting.numbers
        numbers |= {id(e): self.tokens.eqn(e) for body in bodies for e in body.eqns if id(e) not in numbers}
        needs = self.sequence.needs | {v for v, s in together.items() if s.trained}
        cut, known = _Cut(), dict[Any, int]()
        used_later = self._users(bodies)
        for number, body in enumerate(bodies):
            loss = self.parts.forward.outvars[0] if self.parts.differentiated else None
            seeds = tuple(i for i, v in enumerate(body.outvars) if v in needs and (v in used_later or v is loss))
            wrt = tuple(i for i, v in enumerate(body.invars) if v in needs)
            seeds, wrt = (seeds, wrt) if self.parts.differentiated else ((), ())
            weights = tuple(v in self.inputs and self.inputs[v].rows is None and self.inputs[v].source != FROM_INDEX
                            for v in body.invars)  # fmt: skip
            key = (self.tokens.jaxpr(body.invars, body.eqns, body.outvars, numbers), weights, seeds, wrt)
            if key not in known:
                known[key] = len(cut.kinds)
                kind, code = make_kind(body, weights, seeds, wrt, self.parts.differentiated)
                cut.kinds.append(kind)
                cut.codes.append(code)
            operands = tuple(cut.define(v) for v in body.invars)
            mine = self.sequence.eqns[bounds[number] : bounds[number + 1]]
            sources = tuple(s for s in map(source_line, (*mine[:1], *mine[-1:])) if s)
            cut.layers.append(
                Layer(
                    kind=known[key],
                    operands=operands,
                    results=tuple(cut.define(v) for v in body.outvars),
                    name=f"layer {number}",
                    sources=sources,
                )
            )
        return cut

    def _users(self, bodies: Sequence[Jaxpr]) -> set[Any]:
        return {v for body in bodies for v in body.invars}

    # --- the whole ---------------------------------------------------------------------------------------------

    def build(self, layers: int | str | None, asked: Source) -> Layered:
        """`layered`."""
        parts, cut = self.parts, self._cut(layers)
        ids = cut.ids
        num_consts = len(parts.consts)
        arguments = [-1] * len(parts.before.invars)
        rows: list[Rows | None] = [None] * len(arguments)
        before_vars: list[Any] = []
        before_rows: list[Rows | None] = []
        before_outs: list[Any] = []
        slices: list[Slice] = []
        index = -1
        for v, source in self.inputs.items():
            if v not in ids and (not source.trained or source.source == FROM_ROW):
                continue
            value = cut.define(v)
            if source.source == FROM_INDEX:
                index = value
            elif source.source == FROM_ARGUMENT:
                arguments[source.which], rows[source.which] = value, source.rows
            elif source.source == FROM_ROW:
                slices.append(Slice(value=value, argument=source.which, start=source.at, stop=source.at + source.count))
            else:
                before_vars.append(v)
                before_rows.append(source.rows)
                before_outs.append(parts.before.outvars[source.which])
        before = self._before(before_outs, before_vars, before_rows, ids)
        trained_ids = tuple(ids[v] for v in self._trained)
        paths = tuple(f"const[{i}]" for i in range(num_consts)) + parts.call.arg_paths
        update, update_jaxpr, notes = self._update(
            paths, num_consts, lambda graph: self._places(graph, cut, arguments, slices, trained_ids)
        )
        where = update_layers(update, *self._places(update, cut, arguments, slices, trained_ids))
        before_graph = to_graph(before, arg_paths=paths)
        graph = LayeredGraph(
            name=parts.name,
            num_microbatches=self.n,
            values=tuple(cut.values),
            arguments=tuple(arguments),
            argument_types=tuple(tensor_type(v.aval) for v in parts.before.invars),
            arg_paths=paths,
            per_microbatch=tuple(r is not None for r in rows),
            slices=tuple(slices),
            kinds=tuple(cut.kinds),
            layers=tuple(cut.layers),
            loss=ids[parts.forward.outvars[0]] if parts.differentiated else -1,
            trained=trained_ids,
            combined=tuple(ids[v] for v in parts.forward.outvars),
            update=update,
            update_layers=where,
            fingerprint="",
            before=before_graph,
            before_values=tuple(ids[v] for v in before_vars),
            before_per_microbatch=tuple(r is not None for r in before_rows),
            index=index,
            examples=tuple(
                (value, found.dim)
                for value, found in (
                    *zip(arguments, rows, strict=True),
                    *((ids[v], r) for v, r in zip(before_vars, before_rows, strict=True)),
                )
                if found is not None and value >= 0
            ),
        )
        graph = replace(graph, fingerprint=layered_fingerprint(graph))
        graph.verify()
        return Layered(
            graph=graph,
            kinds=tuple(cut.codes),
            update=update_jaxpr,
            before=before,
            rows=tuple(rows),
            before_rows=tuple(before_rows),
            combine=parts.combine,
            consts=parts.consts,
            call=parts.call,
            source=asked,
            notes=notes,
        )

    def _places(
        self,
        update: Graph,
        cut: _Cut,
        arguments: Sequence[int],
        slices: Sequence[Slice],
        trained: Sequence[int],
    ) -> _Places:
        """Of the update's inputs, the layers of gradients, those of others, and the last layer: a value belongs to the
        first layer that reads it; what is read by rows, to the first layer of each row."""
        first: dict[int, int] = {}
        for k, layer in enumerate(cut.layers):
            for v in layer.operands:
                first.setdefault(v, k)
        places: dict[int, tuple[int, ...]] = {v: (k,) for v, k in first.items()}
        for a in dict.fromkeys(s.argument for s in slices):
            owners = sorted({first[s.value] for s in slices if s.argument == a and s.value in first})
            if arguments[a] >= 0 and owners:
                places[arguments[a]] = tuple(owners)
        makers = {v: k for k, layer in enumerate(cut.layers) for v in layer.results}
        count, combined = len(trained), [cut.ids[v] for v in self.parts.forward.outvars]
        after = count + len(combined)
        known: dict[int, tuple[int, ...]] = {update.inputs[count + i]: (makers[v],) for i, v in enumerate(combined)}
        known.update((update.inputs[after + a], places[v]) for a, v in enumerate(arguments) if v in places)
        gradients = {x: places.get(v, (0,)) for x, v in zip(update.inputs, trained, strict=False)}
        return gradients, known, max(0, len(cut.layers) - 1)

    def _before(self, outs: list[Any], variables: list[Any], rows: list[Rows | None], ids: dict[Any, int]) -> Jaxpr:
        """What runs once before the layers, the forward's early equations at its end; lists learn their results."""
        parts = self.parts
        arguments = list(parts.before.invars)
        env: Env = {}
        for v, source in self.inputs.items():
            if source.source == FROM_ARGUMENT:
                env[v] = arguments[source.which]
            elif source.source == FROM_BEFORE:
                env[v] = parts.before.outvars[source.which]
        early = renamed(self.sequence.early, env)
        for v in self.sequence.early_results:
            if v in ids:
                variables.append(v)
                rows.append(None)
                outs.append(env[v])
        jaxpr = dce(plain(parts.before, arguments, outs, [*parts.before.eqns, *early]))
        return _normalised(jaxpr)

    def _update(
        self, paths: tuple[str, ...], num_consts: int, places: Callable[[Graph], _Places]
    ) -> tuple[Graph, Jaxpr, tuple[str, ...]]:
        """Its graph, with what is whose new value, its jaxpr, and notes on that; ``places``: `_places` of a graph."""
        parts = self.parts
        jaxpr = _normalised(split_conds(parts.update))
        ahead = len(jaxpr.invars) - len(paths)
        names = tuple(f"gradient[{i}]" for i in range(ahead - len(parts.combine)))
        names += tuple(f"combined[{i}]" for i in range(len(parts.combine)))
        all_names, out_paths = (*names, *paths), parts.call.out_paths
        graph = to_graph(jaxpr, arg_paths=all_names, out_paths=out_paths)
        gradients, known, last = places(graph)
        nobody = -1
        made = origins(graph, gradients, known, nobody)
        of = dict(zip(jaxpr.invars, graph.inputs, strict=True))
        for eqn, node in zip(jaxpr.eqns, graph.nodes, strict=True):
            of.update(zip(eqn.outvars, node.results, strict=True))

        def owner(v: Any) -> int | None:
            layers = {last if k == nobody else k for k in made[of[v]]}
            return next(iter(layers)) if len(layers) == 1 else None

        def shared(eqn: JaxprEqn) -> bool:
            return all(nobody in made[of[v]] or owner(v) is None for v in eqn.outvars)

        # so that what many layers read is at the same place among each one's operators
        joined = with_joins(soonest(jaxpr, shared), owner)
        if joined is not jaxpr:
            jaxpr, graph = joined, to_graph(joined, arg_paths=all_names, out_paths=out_paths)
        graph = replace(
            graph, nodes=tuple(n if n.phase == "update" else replace(n, phase="update") for n in graph.nodes)
        )
        call = parts.call
        graph, notes = with_state(graph, ahead + num_consts, call.given, call.made, call.donated)
        return graph, jaxpr, notes


_Places: TypeAlias = "tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]], int]"
"""Of inputs of the update: gradients → their layers, others → theirs; and the last layer (`ownership`)."""


def _normalised(jaxpr: Jaxpr) -> Jaxpr:
    closed, values = normalise(ClosedJaxpr(jaxpr, []), None, False)
    return without_constants(closed.jaxpr, values)
