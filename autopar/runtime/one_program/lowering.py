"""A plan and the jaxpr it was made for → one function on local shapes, ready for `jax.shard_map`.

Every equation runs on its shard; every resharding is the plan's chain of collectives, emitted where the plan's
accounting (`intra_op/decisions.py`) counts it. XLA is left nothing to decide about communication, so the
compiled program's collectives are the plan's (see docs/decisions/001-one-shard-map.md for why this is not
done with sharding constraints). Loop constants are resharded before their loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from autopar.inter_op.layer_tasks import body_wants, stacked
from autopar.intra_op.remat.rewrite import entries
from autopar.ir.errors import AutoparError, LoweringError
from autopar.ir.graph import Constant, Graph, Node, TensorType
from autopar.ir.layer_sharding import LayerSharding
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import RegionPlan, ShardingPlan
from autopar.ir.strategy import ReshardStep
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    bind,
    eqn_context,
    scan_counts,
    weakly_typed,
)
from autopar.primitives import rule_for
from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.local import LOCAL, NEVER_BOUND, lower_local
from autopar.runtime.one_program.local.context import LocalContext
from autopar.runtime.one_program.reductions import extreme, scattered_total, total

Steps = tuple[ReshardStep, ...]
Probe = Callable[[int, Sequence[tuple[ShardingSpec, Any]]], None]


def emit_step(step: ReshardStep, x: Any, axis_sizes: Mapping[str, int], platform: str) -> Any:
    """One step of a resharding chain on ``x``, this device's shard; ``axis_sizes``: mesh axis → its size."""
    match step.kind:
        case "all-reduce":
            return total(x, step.axes)
        case "reduce-scatter":
            parts = math.prod(axis_sizes[a] for a in step.axes)
            return scattered_total(x, step.axes, step.dst, parts if platform == "tpu" else None)
        case "all-gather":
            return lax.all_gather(x, step.axes, axis=step.src, tiled=True)
        case "all-to-all":
            return lax.all_to_all(x, step.axes, split_axis=step.dst, concat_axis=step.src, tiled=True)
        case "slice":
            size = x.shape[step.dst] // axis_sizes[step.axes[0]]
            return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axes[0]) * size, size, step.dst)
        case "mask":
            return jnp.where(lax.axis_index(step.axes[0]) == 0, x, jnp.zeros((), x.dtype))


@dataclass(frozen=True)
class Equations:
    """What is evaluated of a jaxpr: equations in the order of a graph's nodes, and the atoms of its results."""

    eqns: Sequence[JaxprEqn]
    outvars: Sequence[Any]


@dataclass
class Held:
    """A value's versions: by the steps that led to each. ``base`` is the spec it was made in."""

    base: ShardingSpec
    type: TensorType
    arrays: dict[Steps, Any]
    copies: list[ShardingSpec] = field(default_factory=list)
    constant: bool = False
    """True for literals: whole on every device, sliced where they are read."""
    fill: Any = None
    """The scalar of a uniform constant, of which ``arrays`` holds nothing."""
    dtype: Any = None
    inside: dict[tuple[int, ShardingSpec], Held] = field(default_factory=dict)
    """As a constant of loops: by the body's plan and the spec that its readers start from."""


class Lowering:
    """Evaluates a jaxpr under its plan inside shard_map. ``probe`` is called with the position and the results of each
    equation of the step itself (of a loop, those that leave it). On CPUs collectives run one after the other
    (`collective_order`), with an ``order`` behind those that it has seen.
    """

    def __init__(
        self,
        plan: ShardingPlan | LayerSharding,
        user_rules: Mapping[str, str],
        platform: str,
        probe: Probe | None = None,
        order: Order | None = None,
    ) -> None:
        self.plan = plan
        self.platform = platform
        self.user_rules = user_rules
        self.probe = probe
        self.axis_sizes = {a.name: a.size for a in plan.axes}
        axis = next((a.name for a in plan.axes if a.size > 1), None) if plan.collectives else None
        self.order = Order.on(platform, axis) if order is None else order
        self.chains = {(c.type, c.src, c.dst): c.steps for c in plan.chains}

    def run(
        self,
        graph: Graph,
        jaxpr: Jaxpr | Equations,
        region: RegionPlan,
        inputs: Sequence[Held | Any],
        env: dict[int, Held] | None = None,
    ) -> list[Any]:
        """Evaluates one region on this device's shards; returns its outputs in the specs ``region.outputs``.

        Args:
            graph, jaxpr: the region's, whose nodes and equations correspond.
            inputs: shards of the graph's inputs in the specs ``region.inputs``, or values with the versions that are
                there.
            env: learns value → versions.

        Raises:
            AutoparError: what a user's kernel or a platform's lowering raises, as it is.
            LoweringError: an operator cannot run on its shards; names it, its source line and what to try.
        """
        env = {} if env is None else env
        copies: dict[int, list[ShardingSpec]] = {}
        for value, spec in region.copies:
            copies.setdefault(value, []).append(spec)
        rebased = dict(region.rebased)

        def define(value: int, spec: ShardingSpec, x: Any) -> None:
            t = graph.values[value]
            if value in rebased:
                x = self.read(Held(spec, t, {(): x}), rebased[value])
                spec = rebased[value]
            env[value] = Held(spec, t, {(): x}, copies.get(value, []))

        for value, spec, x in zip(graph.inputs, region.inputs, inputs, strict=True):
            if isinstance(x, Held):
                env[value] = x
            else:
                define(value, spec, x)
        bodies = dict(region.bodies)
        for position, (node, eqn) in enumerate(zip(graph.nodes, jaxpr.eqns, strict=True)):
            used = any(r in graph.last_use for r in node.results)
            if not used and node.results and not node.bodies and not eqn.effects:
                continue  # its readers make their own part (a broadcast scalar)
            operands = [
                env[o] if isinstance(o, int) else self._constant(o, v)
                for o, v in zip(node.operands, eqn.invars, strict=True)
            ]
            try:
                with eqn_context(eqn):
                    if position in bodies:
                        results = self._with_bodies(node, eqn, bodies[position], operands)
                    else:
                        results = self._node(node, eqn, region.nodes[position], operands)
            except AutoparError:
                raise
            except Exception as error:
                raise cannot_run(str(node), error, self._why_whole(node)) from error
            if self.probe is not None and region is self.plan.root:
                self.probe(position, results)
            for value, (spec, x) in zip(node.results, results, strict=True):
                define(value, spec, x)
        outs = [
            env[o] if isinstance(o, int) else self._constant(o, v)
            for o, v in zip(graph.outputs, jaxpr.outvars, strict=True)
        ]
        return [self.read(v, spec) for v, spec in zip(outs, region.outputs, strict=True)]

    def _why_whole(self, node: Node) -> str:
        """Why the plan has it run whole on every device, if it does."""
        if node.bodies:
            return ""
        found = (row.why for row in self.plan.replicated if (row.primitive, row.source) == (node.called, node.source))
        return next(found, rule_for(node, self.user_rules).why)

    def _constant(self, constant: Constant, atom: Any) -> Held:
        """A literal, or (``atom`` a variable) a scalar that was broadcast to ``constant.type``."""
        whole = ShardingSpec(dims=((),) * len(constant.type.shape))
        if isinstance(atom, Literal):
            return Held(whole, constant.type, {(): atom.val}, constant=True)
        return Held(whole, constant.type, {(): None}, constant=True, fill=constant.value, dtype=atom.aval.dtype)

    def read(self, value: Held, want: ShardingSpec) -> Any:
        """The shard of a value in spec ``want``: a version that has it, else made by the chain from the last on the
        way; ``value`` learns those."""
        if value.fill is not None:
            shape = tuple(
                n // math.prod(self.axis_sizes[a] for a in axes)
                for n, axes in zip(value.type.shape, want.dims, strict=True)
            )
            return self._once(lax.full(shape, value.fill, value.dtype), want if value.fill else value.base)
        if want == value.base:
            return value.arrays[()]
        if value.constant:
            return self._shard_constant(value.arrays[()], want)
        path: Steps = ()
        at = value.base
        for copy in value.copies:
            path, at = self._move(value, path, at, copy)
            if at == want:
                return value.arrays[path]
        path, _ = self._move(value, path, at, want)
        return value.arrays[path]

    def _move(self, value: Held, path: Steps, src: ShardingSpec, dst: ShardingSpec) -> tuple[Steps, ShardingSpec]:
        if src == dst:
            return path, dst
        for step in self.chains[value.type, src, dst]:
            longer = (*path, step)
            if longer not in value.arrays and path in value.arrays:
                value.arrays[longer] = self.emit(step, value.arrays[path])
            path = longer
        return path, dst

    def emit(self, step: ReshardStep, x: Any) -> Any:
        """One step of a chain on shard ``x``, in its place among the collectives."""
        if step.kind in ("slice", "mask"):
            return emit_step(step, x, self.axis_sizes, self.platform)
        out = emit_step(step, self.order.after_loop(x), self.axis_sizes, self.platform)
        self.order.communicated(out)
        return out

    def _body(self, graph: Graph, jaxpr: Jaxpr, region: RegionPlan, inputs: Sequence[Held | Any]) -> list[Any]:
        """As `run`, of a body that has an order of its own."""
        outer, self.order = self.order, self.order.body()
        outs = self.run(graph, jaxpr, region, inputs)
        self.order = outer
        return outs

    def _shard_constant(self, x: Any, want: ShardingSpec) -> Any:
        """A literal is whole on every device: slice it, and count it once where it stands for partial sums."""
        x = jnp.asarray(x)
        for d, axes in enumerate(want.dims):
            for axis in axes:
                x = emit_step(ReshardStep(kind="slice", axes=(axis,), dst=d), x, self.axis_sizes, self.platform)
        return self._once(x, want)

    def _once(self, x: Any, want: ShardingSpec) -> Any:
        """Counts a constant once where it stands for partial sums."""
        for axis in want.unreduced:
            x = emit_step(ReshardStep(kind="mask", axes=(axis,)), x, self.axis_sizes, self.platform)
        return x

    def _node(self, node: Node, eqn: JaxprEqn, index: int, values: Sequence[Held]) -> list[tuple[ShardingSpec, Any]]:
        strategy = self.plan.strategies[index]
        operands = [self.read(v, spec) for v, spec in zip(values, strategy.operands, strict=True)]
        whole = not strategy.factor_axes and node.primitive not in NEVER_BOUND
        if whole or node.primitive not in LOCAL:
            results = bind(eqn, *operands)
        else:
            rule = rule_for(node, self.user_rules)
            split = dict(strategy.factor_axes)
            ctx = LocalContext(
                axis_sizes=self.axis_sizes,
                factor_axes=split,
                operand_specs=strategy.operands,
                result_specs=strategy.results,
                rule=rule,
                node=node,
                threads=self.order.axis is not None,
            )
            own = node.hidden if node.primitive == "shard_map" else None
            loops = own is not None and any(n.bodies for n in own.nodes)
            communicates = own is not None or any(h.factor in split for h in rule.halos)
            if loops:
                operands = self.order.enter(operands, apart=True)
            elif communicates and operands:
                operands[0] = self.order.after_loop(operands[0])
            results = list(lower_local(ctx, eqn, *operands))
            if loops:
                self.order.leave(results, apart=True)
            elif communicates and results:
                self.order.communicated(results[0])
        for kind, axes in strategy.combine:
            results = [extreme(kind, self.order.after_loop(r), axes) for r in results]
            for r in results:
                self.order.communicated(r)
        return list(zip(strategy.results, results, strict=True))

    def _with_bodies(
        self, node: Node, eqn: JaxprEqn, bodies: tuple[RegionPlan, ...], values: Sequence[Held]
    ) -> list[tuple[ShardingSpec, Any]]:
        match node.primitive:
            case "scan":
                return self._scan(node, eqn, bodies[0], values)
            case "while":
                return self._while(node, eqn, bodies, values)
            case "cond":
                return self._cond(node, eqn, bodies, values)
            case "remat2" | "checkpoint":
                return self._remat(node, eqn, bodies[0], values)
            case _:
                raise NotImplementedError(f"{node}: no lowering for a primitive with bodies")

    def _enter(self, values: Sequence[Held], graph: Graph, body: RegionPlan, count: int) -> dict[int, Held]:
        """Loop constants, the first ``count`` inputs of the body, resharded as it wants to start with them."""
        return {
            v: self._constant_of(value, graph.values[v], body, spec)
            for value, v, spec in zip(values[:count], graph.inputs, body.inputs, strict=False)
        }

    def _constant_of(self, value: Held, t: TensorType, body: RegionPlan, spec: ShardingSpec) -> Held:
        key = id(body), spec
        if key not in value.inside:
            value.inside[key] = Held(spec, t, {(): self.read(value, spec)})
        return value.inside[key]

    def _scan(
        self, node: Node, eqn: JaxprEqn, body: RegionPlan, values: Sequence[Held]
    ) -> list[tuple[ShardingSpec, Any]]:
        graph, inner = node.bodies[0], eqn.params["jaxpr"].jaxpr
        consts, carry = scan_counts(eqn)
        fixed = self._enter(values, graph, body, consts)
        self._hoist(graph, body, fixed)
        init = [self.read(v, s) for v, s in zip(values[consts : consts + carry], body.inputs[consts:], strict=False)]
        xs = [
            self.read(v, stacked(s))
            for v, s in zip(values[consts + carry :], body.inputs[consts + carry :], strict=True)
        ]
        avals = [v.aval for v in inner.invars[consts : consts + carry]]
        constants = [fixed[v] for v in graph.inputs[:consts]]

        def step(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self._body(graph, inner, body, [*constants, *state, *x])
            return [like(o, a) for o, a in zip(outs[:carry], avals, strict=True)], outs[carry:]

        entered = self.order.enter([*(like(x, a) for x, a in zip(init, avals, strict=True)), *xs])
        final, ys = lax.scan(
            step,
            entered[:carry],
            entered[carry:],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        self.order.leave([*final, *ys])
        specs = [*body.inputs[consts : consts + carry], *(stacked(s) for s in body.outputs[carry:])]
        return list(zip(specs, [*final, *ys], strict=True))

    def _hoist(self, graph: Graph, body: RegionPlan, fixed: dict[int, Held]) -> None:
        """Reshards loop constants, before the loop, into every spec that a reader inside wants, in inner loops too."""
        bodies = dict(body.bodies)
        for position, node in enumerate(graph.nodes):
            if position in bodies:
                wants = body_wants(node, bodies[position])
                self._hoist_inner(node, bodies[position], fixed)
            else:
                wants = list(self.plan.strategies[body.nodes[position]].operands)
            for operand, want in zip(node.operands, wants, strict=True):
                if isinstance(operand, int) and operand in fixed and want is not None:
                    self.read(fixed[operand], want)
        for operand, want in zip(graph.outputs, body.outputs, strict=True):
            if isinstance(operand, int) and operand in fixed:
                self.read(fixed[operand], want)

    def _hoist_inner(self, node: Node, bodies: tuple[RegionPlan, ...], fixed: dict[int, Held]) -> None:
        """The same for constants of a loop in the body that are constants of the loop around it."""
        match node.primitive:
            case "scan":
                counts = [node.params["num_consts"]]
            case "while":
                counts = [node.params["cond_nconsts"], node.params["body_nconsts"]]
            case _:
                return
        first = 0
        for graph, body, count in zip(node.bodies, bodies, counts, strict=True):
            inner: dict[int, Held] = {}
            for operand, v, spec in zip(node.operands[first : first + count], graph.inputs, body.inputs, strict=False):
                if isinstance(operand, int) and operand in fixed:
                    inner[v] = self._constant_of(fixed[operand], graph.values[v], body, spec)
            self._hoist(graph, body, inner)
            first += count

    def _while(
        self, node: Node, eqn: JaxprEqn, bodies: tuple[RegionPlan, ...], values: Sequence[Held]
    ) -> list[tuple[ShardingSpec, Any]]:
        test, body = bodies
        test_graph, body_graph = node.bodies
        test_jaxpr, body_jaxpr = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        fixed_test = self._enter(values, test_graph, test, n_test)
        fixed_body = self._enter(values[n_test:], body_graph, body, n_body)
        self._hoist(test_graph, test, fixed_test)
        self._hoist(body_graph, body, fixed_body)
        for_test = [fixed_test[v] for v in test_graph.inputs[:n_test]]
        for_body = [fixed_body[v] for v in body_graph.inputs[:n_body]]
        carried = body.inputs[n_body:]
        types = [body_graph.values[v] for v in body_graph.inputs[n_body:]]
        avals = [v.aval for v in body_jaxpr.invars[n_body:]]
        init = [self.read(v, s) for v, s in zip(values[n_test + n_body :], carried, strict=True)]

        def cond_fun(state: list[Any]) -> Any:
            held = [Held(s, t, {(): x}) for s, t, x in zip(carried, types, state, strict=True)]
            outer, self.order = self.order, self.order.body()
            wanted = [self.read(v, s) for v, s in zip(held, test.inputs[n_test:], strict=True)]
            self.order = outer
            return self._body(test_graph, test_jaxpr, test, [*for_test, *wanted])[0]

        def body_fun(state: list[Any]) -> list[Any]:
            outs = self._body(body_graph, body_jaxpr, body, [*for_body, *state])
            return [like(o, a) for o, a in zip(outs, avals, strict=True)]

        entered = self.order.enter([like(x, a) for x, a in zip(init, avals, strict=True)])
        final = lax.while_loop(cond_fun, body_fun, entered)
        self.order.leave(final)
        return list(zip(carried, final, strict=True))

    def _cond(
        self, node: Node, eqn: JaxprEqn, bodies: tuple[RegionPlan, ...], values: Sequence[Held]
    ) -> list[tuple[ShardingSpec, Any]]:
        index = self.read(values[0], ShardingSpec(dims=((),) * len(node.operand_types[0].shape)))
        operands = [self.read(v, s) for v, s in zip(values[1:], bodies[0].inputs, strict=True)]
        avals = [v.aval for v in eqn.outvars]

        def branch(graph: Graph, closed: ClosedJaxpr, plan: RegionPlan) -> Callable[..., list[Any]]:
            def run(*inputs: Any) -> list[Any]:
                outs = self._body(graph, closed.jaxpr, plan, inputs)
                return [like(o, a) for o, a in zip(outs, avals, strict=True)]

            return run

        branches = [branch(g, b, p) for g, b, p in zip(node.bodies, eqn.params["branches"], bodies, strict=True)]
        index, *operands = self.order.enter([index, *operands])
        results = lax.switch(index, branches, *operands)
        self.order.leave(results)
        return list(zip(bodies[0].outputs, results, strict=True))

    def _remat(
        self, node: Node, eqn: JaxprEqn, body: RegionPlan, values: Sequence[Held]
    ) -> list[tuple[ShardingSpec, Any]]:
        graph, inner = node.bodies[0], eqn.params["jaxpr"]
        loops = any(n.bodies for n in graph.nodes)
        outer, inside = self.order, self.order.body() if loops else self.order.inline()

        def run(*inputs: Any) -> list[Any]:
            self.order = inside
            outs = self.run(graph, inner, body, inputs)
            self.order = outer
            return outs

        operands = [jnp.asarray(self.read(v, v.base)) if v.constant else v.arrays[()] for v in values]
        operands = outer.enter(operands) if loops else operands
        count = len(operands) - node.params.get("after", 0)
        operands = [*outer.after(operands[:count], entries(graph, count), operands[count:], inside), *operands[count:]]
        local = jax.make_jaxpr(run)(*operands)
        jaxpr = local.jaxpr
        if local.consts:
            jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        results = bind(eqn, *local.consts, *operands, jaxpr=jaxpr)
        if loops:
            outer.leave(results)
        else:
            outer.ran(inside, results)
        return list(zip(body.outputs, results, strict=True))


def like(x: Any, aval: Any) -> Any:
    """``x`` with the dtype and weak type that a loop's carry must have."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return x
    x = jnp.asarray(x) if not hasattr(x, "dtype") else x
    weak = bool(getattr(aval, "weak_type", False))
    if x.dtype == aval.dtype and bool(getattr(jax.typeof(x), "weak_type", False)) == weak:
        return x
    if not weak:
        return lax.convert_element_type(x, aval.dtype)
    return weakly_typed(x, aval.dtype)


def cannot_run(where: str, error: Exception, why_whole: str = "") -> LoweringError:
    """The LoweringError to raise for ``error`` in the operator or stage ``where``; ``why_whole``: why it runs whole, if
    it does."""
    how = f"whole on every device ({why_whole})" if why_whole else "on its shards"
    first = next(iter(str(error).splitlines()), "")
    return LoweringError(
        f"{where} cannot run {how}: {type(error).__name__}: {first}\n"
        "Keep it whole by decorating the function that calls it with @autopar.sharding_rule('name', '_ _ -> _ _'), one "
        "'_' for each dimension of its operands and results, or write it with other operators. It is a fault of "
        "autopar if the operator is one of JAX's own: please report it with the step"
    )
