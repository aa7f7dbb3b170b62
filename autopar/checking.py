"""`autopar.check`: is what a plan computes what the step computes? And if not, where does it begin to differ?

The planned step and the plain one (the same jaxpr, on one device) run on the same arguments and are compared result by
result. If one differs, both run again with every intermediate value kept, and each operator is evaluated once more,
unsharded, on the operands that the planned run had: so the operator at fault is told from those that it misled. Of
steps in stages, and on a Ray, results alone are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.frontend.microbatch import serial
from autopar.frontend.user_rules import registered_rules
from autopar.ir.errors import CheckError, OptionError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.sharding_plan import RegionPlan, ShardingPlan
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal, bind, eqn_context
from autopar.runtime.one_program.lower import lower, lower_probed
from autopar.runtime.one_program.recompute import recomputed
from autopar.runtime.one_program.specials import first_special
from autopar.runtime.partition_specs import named_shardings
from autopar.step.step import Planned, Step

TOLERANCES = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-5,
    "complex64": 1e-5,
    "bfloat16": 2e-2,
}
"""Largest difference allowed by dtype, in units of the value's max-norm; it leaves room for sums in another order."""
_EPS_ALLOWED = 2.5
"""The same for floating types not listed, in units of their epsilon."""
_SHOWN = 40
_GROWN = (
    "Every operator, evaluated unsharded on the operands that it had, gives the same up to rounding: what differs is "
    "rounding that grew along the way (Adam makes whole steps of gradients that are zero but for rounding). Compare in "
    "float64 to see it go."
)
_PLACED = ("sharding_constraint", "shard_map")
"""Primitives that name a mesh: a jaxpr that holds them cannot run on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCheck:
    """One value of the planned run beside the same of the plain one.

    Attributes:
        path: of the result, ``out[0]['w']``.
        type: its dtype and shape.
        difference: the largest absolute difference.
        norm: the plain value's max-norm.
        tolerance: the largest difference allowed, in units of ``norm``; 0 for exact.
        index: where the largest difference is.
        got: the planned run's number there.
        expected: the plain run's.
    """

    path: str
    type: str
    difference: float
    norm: float
    tolerance: float
    index: tuple[int, ...] = ()
    got: str = ""
    expected: str = ""
    has_nan: bool = False
    """True where the plain value holds a NaN."""
    rounding: float = 0.0
    """What the rounding of its operands may add to the difference, where it is a sum that cancels out, say."""

    @property
    def relative(self) -> float:
        """The difference in units of the max-norm."""
        return 0.0 if self.difference == 0 else self.difference / self.norm if self.norm else math.inf

    @property
    def agrees(self) -> bool:
        """True where the difference is within the tolerance and what rounding may add to it."""
        return self.relative <= self.tolerance or self.difference <= self.tolerance * self.norm + self.rounding

    @property
    def excess(self) -> float:
        """The difference in tolerances, at most 1 where it agrees; infinite for exact values that differ."""
        if self.agrees:
            return min(1.0, self.relative / self.tolerance if self.tolerance else 0.0)
        return self.relative / self.tolerance if self.tolerance else math.inf if self.relative else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `autopar.check` compared; ``print`` shows it.

    Attributes:
        name: of the step.
        mesh: of the plan, of stages all of theirs.
        num_steps: how many steps were compared.
        leaves: a `LeafCheck` for each result, its worst over the steps.
        note: not empty where results differ though every operator by itself agrees, or where they hold NaN: says which
            operator made it.
    """

    name: str
    mesh: str
    num_steps: int
    leaves: tuple[LeafCheck, ...]
    note: str = ""

    @property
    def agrees(self) -> bool:
        """True where every result agrees."""
        return all(leaf.agrees for leaf in self.leaves)

    def __str__(self) -> str:
        worst = sorted(self.leaves, key=lambda leaf: -leaf.excess)
        bad = sum(not leaf.agrees for leaf in worst)
        nan = sum(leaf.has_nan for leaf in worst)
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        verdict = f"{bad} of {len(worst)} results differ" if bad else f"all {len(worst)} results agree"
        verdict += f", {nan} of them {'holds' if nan == 1 else 'hold'} NaN" if nan else ""
        lines = [f"check of {self.name} on mesh {self.mesh}, {steps}: {verdict}"]
        rows = [("result", "type", "difference", "of max-norm", "allowed")]
        for leaf in worst[:_SHOWN]:
            rows.append((leaf.path, leaf.type, f"{leaf.difference:.3g}", f"{leaf.relative:.2g}", f"{leaf.tolerance:g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(worst) > _SHOWN:
            lines.append(f"  … and {len(worst) - _SHOWN} more, which differ less")
        return "\n".join([*lines, self.note] if self.note else lines)


def check(
    step: Callable[..., Any],
    plan: Any = None,
    args: Sequence[Any] = (),
    *,
    rtol: float | None = None,
    num_steps: int = 1,
    **options: Any,
) -> CheckReport:
    """Runs ``step`` as planned and as it is, on the same arguments, and compares every result.

    Nothing is donated, so ``args`` stay usable. Values differ by the order in which sums are taken; allowed are
    `TOLERANCES`, in units of each value's max-norm; integers, booleans and keys must be equal. NaN equals NaN. Where a
    result differs by more though every operator by itself agrees, rounding grew along the way: the report says so.

    Args:
        step: a train step, or one that is parallelized already.
        plan: a plan to check (or a saved one's path); default: what `parallelize` plans.
        args: arguments, with values.
        rtol: tolerance for all floating types instead of `TOLERANCES`, in units of each value's max-norm.
        num_steps: how many steps, each from the plain one's new state.
        options: of `parallelize`.

    Returns:
        A `CheckReport`.

    Raises:
        CheckError: a result differs. The message names the first operator at fault, with its source line, how it was
            sharded, and the values; of steps in stages, and on a Ray, the results. Or: ``args`` hold no values, or the
            step returns no next state.
        OptionError: ``num_steps`` is below 1, or an option is none.
        AutoparError: what else `parallelize` and `Step.plan` raise.
    """
    if num_steps < 1:
        raise OptionError(f"num_steps must be at least 1, got {num_steps}")
    options = options if plan is None else {**options, "plan": plan}
    parallelized: Step[..., Any]
    if not isinstance(step, Step):
        parallelized = Step(step, options)
    else:
        parallelized = step.with_options(**options) if options else step
    args = tuple(args)
    if parallelized.on_ray or not isinstance(parallelized.plan(*args).data.body, OneProgram):
        return _check_results(parallelized, args, rtol, num_steps)
    call = parallelized.planned(*args)
    worst: dict[str, LeafCheck] = {}
    note = ""
    for number in range(1, num_steps + 1):
        runs = _Runs(call)
        planned, plain = runs.planned(), runs.plain()
        paths = call.traced.graph.out_paths
        found = [_compare(p, g, w, _tolerance(w.dtype, rtol)) for p, g, w in zip(paths, planned, plain, strict=True)]
        differs = not all(leaf.agrees for leaf in found)
        fault, rounding = _first_fault(runs, rtol) if differs else ("", {})
        found = [replace(leaf, rounding=rounding.get(leaf.path, 0.0)) for leaf in found]
        for leaf in found:
            if leaf.path not in worst or leaf.excess > worst[leaf.path].excess:
                worst[leaf.path] = leaf
        if fault:
            raise CheckError(f"{_report(call, number, worst, '')}\n{fault}")
        if not all(leaf.agrees for leaf in found):
            note = _GROWN
        elif any(leaf.has_nan for leaf in found) and not note:
            note = runs.first_nan()
        if number < num_steps:
            args = _next_args(call, args, plain)
            call = parallelized.planned(*args)
    return _report(call, num_steps, worst, note)


def _check_results(step: Step[..., Any], args: tuple[Any, ...], rtol: float | None, num_steps: int) -> CheckReport:
    """Results of a step in stages, or on a Ray, beside those of the plain one: which differ, and on which stages they
    lie."""
    arguments, worst = step.arguments, dict[str, LeafCheck]()
    plan = step.plan(*args).data
    alone = serial(step.fun, plan.config.num_microbatches, arguments.batch_argnums)
    plain = jax.jit(alone, static_argnums=arguments.static_argnums)
    dynamic = [i for i, x in enumerate(arguments.split(args)[0]) if i not in dict(arguments.split(args)[1])]
    for path, leaf in jax.tree_util.tree_flatten_with_path(arguments.split(args)[0])[0]:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckError(
                f"args{jax.tree_util.keystr(path)} is a ShapeDtypeStruct: check runs the step, so give it arrays"
            )
    report = CheckReport(name=plan.name, mesh="", num_steps=0, leaves=())
    for number in range(1, num_steps + 1):
        expected = jax.tree_util.tree_leaves(plain(*args))
        copies = [jax.tree.map(jnp.copy, x) if i in dynamic else x for i, x in enumerate(args)]  # some are donated
        got = jax.tree_util.tree_leaves(step(*copies))
        for out, mine, theirs in zip(plan.outputs, got, expected, strict=True):
            leaf = _compare(out.path, mine, theirs, _tolerance(theirs.dtype, rtol))
            if leaf.path not in worst or leaf.excess > worst[leaf.path].excess:
                worst[leaf.path] = leaf
        report = CheckReport(
            name=plan.name, mesh=" + ".join(map(str, plan.meshes)), num_steps=number, leaves=tuple(worst.values())
        )
        if not report.agrees:
            places = {out.path: sorted({p.stage for p in out.places}) for out in plan.outputs}
            wrong = [f"{x.path} (stages {places[x.path]})" for x in report.leaves if not x.agrees]
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise CheckError(f"{report}\ndiffer: {', '.join(wrong[:_SHOWN])}{more}")
        if number < num_steps:
            args = _next_of(plan, step, args, expected)
    return report


def _next_of(plan: Plan, step: Step[..., Any], args: tuple[Any, ...], results: Sequence[Any]) -> tuple[Any, ...]:
    """``args`` with new values among the flat results in their places."""
    dynamic, statics = step.arguments.split(args)
    leaves, tree = jax.tree_util.tree_flatten(dynamic)
    inputs = [a for a in plan.inputs if not a.path.startswith("const[")]
    if all(a.becomes < 0 for a in inputs):
        raise CheckError(_NO_STATE)
    leaves = [x if a.becomes < 0 else results[a.becomes] for a, x in zip(inputs, leaves, strict=True)]
    known = dict(statics)
    return tuple(known.get(i, x) for i, x in enumerate(jax.tree_util.tree_unflatten(tree, leaves)))


_ARRAYS = "check runs the step, so give it arrays"
_NO_STATE = (
    "num_steps above 1 needs a step that returns its new state: no result has the tree, shapes and dtypes of an "
    "argument. Use num_steps=1"
)


def _report(call: Planned, num_steps: int, worst: Mapping[str, LeafCheck], note: str) -> CheckReport:
    return CheckReport(
        name=call.plan.data.name,
        mesh=str(call.plan.sharding.mesh),
        num_steps=num_steps,
        leaves=tuple(worst.values()),
        note=note,
    )


def _next_args(call: Planned, args: tuple[Any, ...], results: Sequence[Any]) -> tuple[Any, ...]:
    """``args`` with new values among the flat results in their places."""
    if not call.traced.graph.state:
        raise CheckError(_NO_STATE)
    leaves = list(call.leaves)
    for i, j in call.traced.graph.state:
        leaves[i - call.plan.num_consts] = results[j]
    new, _ = jax.tree_util.tree_unflatten(call.traced.in_tree, leaves)
    return tuple(old if x is None else x for old, x in zip(args, new, strict=True))  # static ones have no leaves


class _Runs:
    """The ways to run one planned call."""

    def __init__(self, call: Planned) -> None:
        for leaf, path in zip(call.leaves, call.traced.graph.arg_paths[call.plan.num_consts :], strict=True):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise CheckError(f"{path} is a ShapeDtypeStruct: {_ARRAYS}")
        self.call = call
        self.graph: Graph = call.traced.graph
        self.jaxpr: Jaxpr = call.traced.jaxpr.jaxpr
        self.sharding: ShardingPlan = call.plan.sharding
        self.run_graph, run = recomputed(self.graph, call.traced.jaxpr, self.sharding.recompute)
        """What runs, of which `lower_probed` tells the nodes' results."""
        self.run_jaxpr: Jaxpr = run.jaxpr
        placed = _holds(self.graph, _PLACED)
        self.home: Any = (
            NamedSharding(call.mesh, PartitionSpec()) if placed else SingleDeviceSharding(call.mesh.devices.flat[0])
        )
        self.inputs = [*call.traced.jaxpr.consts, *call.leaves]

    def planned(self) -> list[Any]:
        """Results of the planned step."""
        platform = self.call.mesh.devices.flat[0].platform
        traced = self.call.traced
        step = lower(self.graph, traced.jaxpr, self.sharding, platform, registered_rules(), traced.out_avals)
        return self._run(step)

    def probed(self) -> tuple[list[Any], dict[int, list[Any]]]:
        """Results of the planned step, and of every node of it."""
        jaxpr = self.call.traced.jaxpr
        return self._run(lower_probed(self.graph, jaxpr, self.sharding, self.call.mesh, registered_rules()))

    def _run(self, fun: Callable[..., Any]) -> Any:
        ins = named_shardings([a.spec for a in self.call.plan.data.inputs], self.call.mesh)
        return jax.jit(fun)(*jax.device_put(self.inputs, ins))

    def first_nan(self) -> str:
        """Which operator of the planned step made the first NaN, in words."""
        jaxpr, mesh = self.call.traced.jaxpr, self.call.mesh
        return first_special(self.graph, jaxpr, self.sharding, mesh, registered_rules(), self.inputs)

    def plain(self) -> list[Any]:
        """Results of the plain step."""
        return jax.jit(lambda *inputs: self._evaluate(self.jaxpr, inputs, {})[0])(
            *jax.device_put(self.inputs, self.home)
        )

    def replayed(self, seen: Mapping[int, list[Any]], noise: Mapping[int, float] | None = None) -> list[list[Any]]:
        """Results of every node, unsharded, on operands as the planned run had them; with ``noise`` those of nodes at
        these positions alone, on operands that are off by so much of themselves."""
        inputs, seen = jax.device_put((self.inputs, seen), self.home)
        return jax.jit(lambda inputs, seen: self._evaluate(self.run_jaxpr, inputs, seen, noise)[1])(inputs, seen)

    def _evaluate(
        self, jaxpr: Jaxpr, inputs: Sequence[Any], seen: Mapping[int, list[Any]],
        noise: Mapping[int, float] | None = None,
    ) -> tuple[list[Any], list[list[Any]]]:  # fmt: skip
        """Results of the step and of each node; ``seen`` replaces the nodes' results for those that read them, and
        ``noise`` is as `replayed` has it."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        made: list[list[Any]] = []
        for position, eqn in enumerate(jaxpr.eqns):
            if jaxpr is self.run_jaxpr and "after" in self.run_graph.nodes[position].params:
                made.append(_block(eqn, env))
            else:
                with eqn_context(eqn):
                    operands = [read(v) for v in eqn.invars]
                    if noise is not None and position in noise:
                        operands = [_noisy(x, noise[position], i) for i, x in enumerate(operands)]
                    made.append(bind(eqn, *operands))
            env.update(zip(eqn.outvars, seen.get(position, made[-1]), strict=True))
        return [jnp.asarray(read(v)) for v in jaxpr.outvars], made


def _noisy(x: Any, amount: float, seed: int) -> Any:
    """Floats off by ``amount`` of themselves, up or down at random; anything else as it is."""
    if not hasattr(x, "shape") or not jax.dtypes.issubdtype(x.dtype, np.inexact):
        return x
    signs = jax.random.rademacher(jax.random.key(seed), x.shape, jnp.float32)
    return (x * (1 + amount * signs)).astype(x.dtype)


def _node_tolerance(node: Node, rtol: float | None) -> float:
    """That of the least precise float in an operator, its bodies included; 0 where there is none."""
    types = [*node.operand_types, *node.result_types, *(t for b in node.bodies for t in b.values)]
    inner = (_node_tolerance(n, rtol) for b in node.bodies for n in b.nodes)
    floats = {t.dtype for t in types if t.dtype.startswith(("float", "bfloat", "complex")) and t.dtype != "float0"}
    return max((*(_tolerance(jnp.dtype(d), rtol) for d in floats), *inner), default=0.0)


def _block(eqn: JaxprEqn, outside: Mapping[Any, Any]) -> list[Any]:
    """Results of a recomputed block, whose equations may read constants made outside it."""
    inner = eqn.params["jaxpr"]
    env = {**outside, **{v: outside[o] for v, o in zip(inner.invars, eqn.invars, strict=True)}}
    for e in inner.eqns:
        with eqn_context(e):
            results = bind(e, *(v.val if isinstance(v, Literal) else env[v] for v in e.invars))
        env.update(zip(e.outvars, results, strict=True))
    return [env[v] for v in inner.outvars]


def _holds(graph: Graph, primitives: Sequence[str]) -> bool:
    return any(n.primitive in primitives or any(_holds(b, primitives) for b in n.bodies) for n in graph.nodes)


def _first_fault(runs: _Runs, rtol: float | None) -> tuple[str, dict[str, float]]:
    """Which operator's result is the first that differs from its unsharded evaluation, in words, empty if none does;
    and by how much results of the step may differ as their operators round.

    Allowed is what rounding may do to an operator: where operands cancel out, or a loop lets rounding grow, its result
    is another one already if operands are off by their tolerance.
    """
    graph = runs.run_graph
    outs, seen = runs.probed()
    replayed = runs.replayed(seen)
    values = dict(zip(graph.inputs, runs.inputs, strict=True))
    for position, results in enumerate(replayed):
        values.update(zip(graph.nodes[position].results, seen.get(position, results), strict=True))
    suspects: list[tuple[int, int, LeafCheck]] = []
    for position, results in sorted(seen.items()):
        tolerance = _node_tolerance(graph.nodes[position], rtol)
        for i, (got, want) in enumerate(zip(results, replayed[position], strict=True)):
            leaf = _compare(f"result {i}", got, want, tolerance if _tolerance(want.dtype, rtol) else 0.0)
            if not leaf.agrees:
                suspects.append((position, i, leaf))
    outputs = {o: path for path, o in zip(graph.out_paths, graph.outputs, strict=True) if isinstance(o, int)}
    made = {p: _node_tolerance(n, rtol) for p, n in enumerate(graph.nodes) if not outputs.keys().isdisjoint(n.results)}
    shaken = runs.replayed(seen, {**made, **{p: _node_tolerance(graph.nodes[p], rtol) for p, _, _ in suspects}})

    def spread(position: int, i: int) -> float:
        return 2 * _compare("", shaken[position][i], replayed[position][i], 0.0).difference

    for position, i, leaf in suspects:
        hangs = not leaf.tolerance and spread(position, i) > 0  # an integer that hangs on rounding
        if not hangs and not replace(leaf, rounding=spread(position, i)).agrees:
            return _describe(runs, position, leaf), {}
    for path, operand, got in zip(graph.out_paths, graph.outputs, outs, strict=True):
        want = jnp.asarray(values[operand]) if isinstance(operand, int) else None
        if want is not None and not _compare(path, got, want, _tolerance(want.dtype, rtol)).agrees:
            return (
                f"every operator's result agrees, but {path} differs from the value that it returns: the fault lies in "
                "how that value is resharded"
            ), {}
    places = ((p, i, v) for p in made for i, v in enumerate(graph.nodes[p].results) if v in outputs)
    return "", {outputs[v]: spread(p, i) for p, i, v in places}


def _describe(runs: _Runs, position: int, leaf: LeafCheck) -> str:
    node, plan = runs.run_graph.nodes[position], runs.sharding
    return (
        f"first value that differs: {node}, {leaf.path} of {len(node.results)}, {leaf.type}: max difference "
        f"{leaf.difference:.3g} ({leaf.relative:.2g} of max-norm {leaf.norm:.3g}, allowed {leaf.tolerance:g}); at "
        f"{list(leaf.index)} got {leaf.got}, expected {leaf.expected}\nits strategy: "
        f"{_strategy(node, position, plan)}\n"
        "Evaluated unsharded on the same operands it gives the expected value: the fault lies in how this operator "
        "runs on its shards, or in the resharding of one of its operands."
    )


def _strategy(node: Node, position: int, plan: ShardingPlan) -> str:
    bodies: dict[int, tuple[RegionPlan, ...]] = dict(plan.root.bodies)
    if position in bodies:
        sides = (f"({_specs(b.inputs)}) -> ({_specs(b.outputs)})" for b in bodies[position])
        return f"{node.primitive} with {len(node.bodies)} bodies: {'; '.join(sides)}"
    strategy = plan.strategies[plan.root.nodes[position]]
    factors = ", ".join(f"{name} over {'·'.join(axes)}" for name, axes in strategy.factor_axes if axes)
    return f"{factors or 'not sharded'}: ({_specs(strategy.operands)}) -> ({_specs(strategy.results)})"


def _specs(specs: Sequence[Any]) -> str:
    return ", ".join(map(str, specs))


def _compare(path: str, got: Any, want: Any, tolerance: float) -> LeafCheck:
    """``tolerance``: of the max-norm."""
    if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    kind = f"{want.dtype.name}[{','.join(map(str, want.shape))}]"
    got, want = np.asarray(got), np.asarray(want)
    a, b = _wide(got), _wide(want)
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)
    off = np.where(np.isnan(off), np.inf, off)
    off = np.where((got == want) | (np.isnan(a) & np.isnan(b)), 0.0, np.maximum(off, np.finfo(np.float64).tiny))
    difference = float(off.max(initial=0.0))
    index = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape)) if off.size else ()
    return LeafCheck(
        path=path, type=kind, difference=difference, norm=_norm(want), tolerance=tolerance, index=index,
        got=f"{got[index]}" if off.size else "", expected=f"{want[index]}" if off.size else "",
        has_nan=bool(np.isnan(b).any()),
    )  # fmt: skip


def _tolerance(dtype: Any, rtol: float | None) -> float:
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return 0.0
    if rtol is not None:
        return rtol
    return TOLERANCES.get(dtype.name) or _EPS_ALLOWED * float(jnp.finfo(dtype).eps)


def _wide(x: Any) -> np.ndarray:
    """``x`` as float64 or complex128."""
    array = np.asarray(x)
    if array.dtype == jax.dtypes.float0:
        return np.zeros(array.shape)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _norm(x: Any) -> float:
    """Max-norm of the finite elements."""
    if jax.dtypes.issubdtype(x.dtype if hasattr(x, "dtype") else np.result_type(x), jax.dtypes.prng_key):
        return 0.0
    size = np.abs(_wide(x))
    return float(size[np.isfinite(size)].max(initial=0.0))
