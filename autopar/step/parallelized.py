"""A step that runs sharded over one mesh: `Parallelized`, what `autopar.parallelize` makes of a function.

A call → its key → the traced step, its plan and its compiled program (`_Entry`), made when the key is new: `trace`,
`planner.best_plan`, `lower`, compile; looked up afterwards.
"""

from __future__ import annotations

import functools
import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.frontend.arguments import (
    Args,
    Arguments,
    CallKey,
    Kwargs,
    argument_spans,
    deleted,
    filled,
    is_weak,
    within,
    without,
)
from autopar.frontend.gradient import expand_marker, grad_p
from autopar.frontend.microbatch import serial
from autopar.frontend.partitioning_metadata import metadata_pins
from autopar.frontend.trace import Traced, trace
from autopar.frontend.user_rules import registered_rules, with_flops
from autopar.intra_op.remat.choose import Kept
from autopar.ir.errors import ArgumentError, ClusterError, PlanMismatchError, TraceError
from autopar.ir.plan import Plan
from autopar.ir.presets import cluster_from_text
from autopar.jax_compat import (
    COMPILER_OPTIONS,
    FoundSpecial,
    JaxprEqn,
    at_top_level,
    embedded,
    is_described,
    is_staged,
    jax_version,
    looks_for_specials,
    trace_settings,
)
from autopar.planner import best_plan
from autopar.runtime.agreement import check_agreed
from autopar.runtime.local_devices import cluster_of, undoes_remat
from autopar.runtime.one_program.lower import LoweredStep, lower
from autopar.runtime.one_program.specials import first_special
from autopar.runtime.partition_specs import partition_spec
from autopar.step.followed import followed
from autopar.step.options import check_supported, given_plan, plan_config
from autopar.step.step_plan import StepPlan, check_same

log = logging.getLogger("autopar")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned call: ``leaves`` are its flat arguments, static ones left out."""

    traced: Traced
    plan: StepPlan
    mesh: Mesh
    leaves: tuple[Any, ...]


@dataclass
class _Entry:
    """What is known for one `Arguments.key`."""

    key: CallKey
    statics: tuple[tuple[int, Any], ...]
    traced: Traced
    plan: StepPlan
    lowered: LoweredStep
    compiled: Any = None
    """The step on flat arguments, compiled. A `jax.jit` itself would compile again in the second call, where the state
    is no longer made of NumPy arrays but of sharded ones."""
    nested: Any = None
    """The same as a `jax.jit`, for calls from under another, which takes no compiler options."""
    shardings: tuple[NamedSharding, ...] = ()

    def is_for(self, leaves: Sequence[Any], tree: Any, args: Args) -> bool:
        """True where it is compiled, and the call may be for it: what the compiled step does not look at is equal."""
        if self.compiled is None or tree != self.key.tree or self.key.settings != trace_settings():
            return False
        for i, value in self.statics:
            if type(args[i]) is not type(value) or args[i] != value:
                return False
        return tuple(map(is_weak, leaves)) == self.key.weak_types

    def results(self, outs: Sequence[Any]) -> Any:
        """Flat results as the step returns them."""
        return jax.tree_util.tree_unflatten(self.traced.out_tree, outs)

    def placed(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The flat arguments with arrays that lie elsewhere moved to where the plan wants them; None if none does."""
        out = list(leaves)
        moved = False
        for i, (x, sharding) in enumerate(zip(leaves, self.shardings, strict=True)):
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
                if not x.sharding.is_equivalent_to(sharding, x.ndim):
                    out[i], moved = jax.device_put(x, sharding), True
        return out if moved else None


class Parallelized:
    """A step that runs sharded as planned. Call it as the step; see `plan`, `lower`, `init`."""

    def __init__(
        self, fun: Callable[..., Any], options: Mapping[str, Any], parallelize: Callable[..., Parallelized]
    ) -> None:
        """``options`` are all of `autopar.parallelize`'s; ``parallelize`` makes other steps like this one."""
        functools.update_wrapper(self, fun)
        self._fun, self._parallelize = fun, parallelize
        self._options = dict(options)
        self._name: str = _name(fun)
        self._config = plan_config(options)
        self._given = given_plan(options["plan"])
        mesh, cluster = options["mesh"], options["cluster"]
        self._devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        self._cluster = cluster_from_text(cluster) if isinstance(cluster, str) else cluster
        self._arguments = Arguments(
            fun, self._name, options["donate_argnums"], options["static_argnums"], options["batch_argnums"]
        )
        serial(fun, self._config.num_microbatches, self._arguments.batch_argnums)  # refuses what no call can mend
        self._entries: dict[Any, _Entry] = {}
        self._last: _Entry | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def last_plan(self) -> StepPlan | None:
        """The plan that the last call, or `plan`, used."""
        return self._last.plan if self._last is not None else None

    @property
    def arguments(self) -> Arguments:
        """Which of the step's arguments are donated, static, or carry the batch."""
        return self._arguments

    def with_options(self, **settings: Any) -> Parallelized:
        """The same step with some of `parallelize`'s options replaced, and nothing planned yet. A plan that was given
        (``plan=``) is dropped unless ``settings`` give one."""
        return self._parallelize(self._fun, **{**self._options, "plan": None, **settings})

    def follow(
        self, fun: Callable[..., Any], *args: Any, follow_args: Mapping[str, str] | None = None, **options: Any
    ) -> Parallelized:
        """``fun`` (an evaluation, say) parallelized so that its arguments, all but the batch, lie where this step's
        last plan has them.

        Args:
            args: shapes of a call of ``fun``.
            follow_args: where this step has what ``fun`` takes, where names do not tell:
                ``{"args[0]": "args[0].params"}``.
            options: `parallelize`'s, for ``fun``.

        Raises:
            PlanMismatchError: there is no plan yet.
            OptionError: an argument cannot follow; says why.
        """
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.follow needs a plan: call {self._name}.plan(*shapes) first")
        plan, name = self._last.plan.data, _name(fun)
        given = (options.get("donate_argnums", ()), options.get("static_argnums", ()), options.get("batch_argnums"))
        pins = followed(plan, Arguments(fun, name, *given), args, {}, follow_args, name)
        mesh = self._options["mesh"] if self._devices is not None else plan.sharding.mesh.shape
        options["constraints"] = {**pins, **(options.get("constraints") or {})}
        return self._parallelize(fun, **{"mesh": mesh, "cluster": plan.cluster, **options})

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """Plans for arrays or ShapeDtypeStructs, without compiling; equal shapes give the cached plan.

        Raises:
            TraceError, MicrobatchError, ClusterError, ShardingError, InfeasibleError, SolverTimeoutError,
            PlanMismatchError, RuleError, LoweringError: see each.
        """
        return self._entry(*self._arguments.positional(args, kwargs)).plan

    def planned(self, *args: Any, **kwargs: Any) -> Planned:
        """The call as planned, its jaxpr and its mesh. Raises as `plan` does."""
        args, kwargs = self._arguments.positional(args, kwargs)
        entry = self._entry(args, kwargs)
        leaves = jax.tree_util.tree_leaves((self._arguments.split(args)[0], kwargs))
        return Planned(
            traced=entry.traced, plan=entry.plan, mesh=entry.plan.jax_mesh(self._devices), leaves=tuple(leaves)
        )

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the sharded step, for arrays or ShapeDtypeStructs. What it compiles to takes its
        arguments by position."""
        args, kwargs = self._arguments.positional(args, kwargs)
        return self._jitted_tree(self._entry(args, kwargs)).lower(*args, *_last(kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args, kwargs = self._arguments.positional(args, kwargs)
        leaves, tree = self._flat(args, kwargs)
        if not at_top_level():
            self._refuse_transformed((args, kwargs))
            entry = self._entry(args, kwargs)
            return entry.results(self._nested(entry)(*leaves))
        leaves = self._usable(leaves, args, kwargs)
        last = self._last
        if len(self._entries) == 1 and last is not None and last.is_for(leaves, tree, args):
            try:
                return last.results(last.compiled(*leaves))
            except (TypeError, ValueError):  # other shapes, or arrays that lie elsewhere
                if self._arguments.key(args, kwargs) == last.key and last.placed(leaves) is None:
                    raise
            except FoundSpecial as found:
                raise self._special(last, leaves, found) from None
        entry = self._entry(args, kwargs)
        compiled = self._compiled(entry)
        try:
            return entry.results(compiled(*(entry.placed(leaves) or leaves)))
        except FoundSpecial as found:
            raise self._special(entry, leaves, found) from None

    def _flat(self, args: Args, kwargs: Kwargs) -> tuple[list[Any], Any]:
        """The flat arguments, static ones left out, and their tree."""
        return jax.tree_util.tree_flatten((self._arguments.split(args)[0], kwargs))

    def _usable(self, leaves: list[Any], args: Args, kwargs: Kwargs) -> list[Any]:
        """The flat arguments, an array that is donated and comes twice copied, for its buffer goes once.

        Raises ArgumentError where an array is gone already: JAX would end the process on several CPU devices.
        """
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        if any(x.is_deleted() for x in arrays):
            raise self._deleted(args, kwargs)
        if not self._arguments.donate_argnums or len({id(x) for x in arrays}) == len(arrays):
            return leaves
        donated = set(within(self._arguments.donate_argnums, len(args)))
        paths = jax.tree_util.tree_flatten_with_path((self._arguments.split(args)[0], kwargs))[0]
        given = [path[0].idx == 0 and path[1].idx in donated for path, _ in paths]
        seen = {id(x) for x, gives in zip(leaves, given, strict=True) if not gives}
        out = list(leaves)
        for i, (x, gives) in enumerate(zip(leaves, given, strict=True)):
            if gives and isinstance(x, jax.Array):
                out[i] = jnp.copy(x) if id(x) in seen else x
                seen.add(id(x))
        return out

    def _deleted(self, args: Args, kwargs: Kwargs) -> ArgumentError:
        gone = next(
            path
            for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        )
        return deleted(self._name, ("args", "kwargs")[gone[0].idx] + jax.tree_util.keystr(gone[1:]))

    def _special(self, entry: _Entry, leaves: Sequence[Any], found: Exception) -> FloatingPointError:
        """What to raise where jax_debug_nans or jax_debug_infs has found something."""
        mesh, traced = entry.plan.jax_mesh(self._devices), entry.traced
        infinities = getattr(found, "ty", "nan") == "inf"
        inputs = [*traced.jaxpr.consts, *leaves]
        where = first_special(
            traced.graph, traced.jaxpr, entry.plan.sharding, mesh, registered_rules(), inputs, infinities
        )
        kind = "an infinity" if infinities else "a NaN"
        return FloatingPointError(f"{self._name}: a result holds {kind}: {where}")

    def _compiled(self, entry: _Entry) -> Any:
        """The entry's step on flat arguments, compiled for such as lie where the plan wants them."""
        if entry.compiled is None:
            self._refuse_described(entry)
            jitted = self._jitted(entry, top=True)
            shapes = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=getattr(a, "weak_type", False))
                for a, s in zip(entry.traced.jaxpr.in_avals, entry.shardings, strict=True)
            ]
            entry.compiled = jitted.lower(*shapes).compile()
        return entry.compiled

    def _nested(self, entry: _Entry) -> Any:
        """The entry's `jax.jit` on flat arguments, for calls from under another."""
        if entry.nested is None:
            entry.nested = self._jitted(entry, top=False)
        return entry.nested

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``init_fn(*args, **kwargs)``, created already sharded as the plan wants one of the step's arguments.

        No host or device ever holds the whole state. The step must have been planned (`plan`), so that its
        shardings are known; the argument whose tree, shapes and dtypes equal ``init_fn``'s result is meant.

        Raises:
            PlanMismatchError: there is no plan yet, or no argument of that shape.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract(init_fn, *args, **kwargs))
        assert self._last is not None  # `abstract` refuses
        self._refuse_described(self._last)
        return jax.jit(init_fn, out_shardings=shardings)(*args, **kwargs)

    def abstract(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `init` would return, with nothing made: `jax.ShapeDtypeStruct`s with shardings, as `autopar.restore`
        takes them. Raises as `init` does."""
        if self._last is None:
            raise PlanMismatchError(
                f"{self._name}.init needs a plan: call {self._name}.plan(*shapes) first, with "
                "jax.eval_shape(init_fn, …) for the state and jax.ShapeDtypeStruct for the batch"
            )
        leaves, wanted = jax.tree_util.tree_flatten(jax.eval_shape(init_fn, *args, **kwargs))
        for entry in reversed(self._entries.values()):
            mesh = entry.plan.jax_mesh(self._devices)
            planned = entry.plan.data.inputs[entry.plan.num_consts :]
            for tree, start, stop in argument_spans(entry.plan.in_tree):
                found = planned[start:stop]
                if tree == wanted and all(
                    a.type.shape == tuple(s.shape) and a.type.dtype == s.dtype.name
                    for a, s in zip(found, leaves, strict=True)
                ):
                    there = [
                        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, partition_spec(a.spec)))
                        for a, s in zip(found, leaves, strict=True)
                    ]
                    return jax.tree_util.tree_unflatten(tree, there)
        raise PlanMismatchError(
            f"{self._name}.init: no argument of the planned step has the tree, shapes and dtypes that "
            f"{_name(init_fn)} returns: {wanted}. Plan with the shapes of this state"
        )

    # --- planning ---------------------------------------------------------------------------------------------

    def _entry(self, args: Args, kwargs: Kwargs) -> _Entry:
        key = self._arguments.key(args, kwargs)
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = self._make(key, args, kwargs)
        self._entries[key] = self._last = entry  # the latest last
        return entry

    def _make(self, key: Any, args: Args, kwargs: Kwargs) -> _Entry:
        given = self._given
        cluster = given.cluster if given is not None else self._cluster or cluster_of(self._devices)
        started_s = time.perf_counter()
        log.info("tracing %s", self._name)
        dynamic, statics = self._arguments.split(args)
        step = serial(filled(self._fun, statics), self._config.num_microbatches, self._arguments.batch_argnums)
        traced = trace(
            step,
            *dynamic,
            donate_argnums=within(self._arguments.donate_argnums, len(args)),
            expand=_expand,
            keep_remat=not undoes_remat(cluster),
            platform=cluster.platform,
            **kwargs,
        )
        if len(traced.graph.inputs) != len(traced.graph.arg_paths):  # jax made the value an argument of its own
            raise TraceError(
                f"{self._name} closes over a value of the jax.jit (or other transformation) that calls it: pass that "
                "value as an argument"
            )
        in_tree = jax.tree_util.tree_structure((without(dynamic, statics), kwargs))
        trace_s = time.perf_counter() - started_s
        check_supported([traced.graph], self._options["on_unsupported"], self._name)
        same = [e.plan.data for e in self._entries.values() if e.plan.data.fingerprint == traced.graph.fingerprint]
        if given is not None:
            check_same(given, traced.graph, self._name)
            data = given
        elif same:
            data = same[0]
        else:
            log.info("planning %d operators for %s", len(traced.graph.nodes), cluster.name)
            dims = self._arguments.batch_dims(dynamic, kwargs)
            consts = len(traced.jaxpr.consts)
            data = best_plan(
                with_flops(traced.graph),
                cluster,
                self._config,
                name=self._name,
                user_rules=registered_rules(),
                batch_inputs={consts + i: dim for i, dim in enumerate(dims) if dim is not None},
                metadata=metadata_pins((dynamic, kwargs), traced.graph.arg_paths[consts:]),
                node_hashes=tuple(n.digest for n in traced.graph.nodes),
                notes=traced.notes,
                trace_s=trace_s,
                jax_version=jax_version(),
                kept=Kept(within=not undoes_remat(cluster)),
            )
        lowered = self._lowered(traced, data, cluster.platform)
        return _Entry(key, statics, traced, StepPlan(data, in_tree, traced.out_tree), lowered)

    def _lowered(self, traced: Traced, plan: Plan, platform: str) -> LoweredStep:
        """Raises LoweringError, RuleError."""
        return lower(traced.graph, traced.jaxpr, plan.sharding, platform, registered_rules(), traced.out_avals)

    # --- running ----------------------------------------------------------------------------------------------

    def _sharded(self, entry: _Entry) -> tuple[Callable[..., list[Any]], Mesh]:
        """The lowered step, closed-over constants put in place, as a function of its flat arguments; and its mesh."""
        plan, traced = entry.plan, entry.traced
        mesh = plan.jax_mesh(self._devices)
        if not entry.shardings:
            check_agreed(plan.data, mesh.devices.flat, self._name)
        platform = mesh.devices.flat[0].platform
        if entry.lowered.platform != platform:  # a plan for other devices, tried here
            entry.lowered = self._lowered(traced, plan.data, platform)
        ins, _ = plan.shardings(mesh)
        consts = traced.jaxpr.consts
        entry.shardings = tuple(ins[len(consts) :])
        if is_described(mesh.devices.flat[0]):
            held = [embedded(c) for c in consts]
            return (lambda *leaves: entry.lowered(*(c() for c in held), *leaves)), mesh
        with jax.ensure_compile_time_eval():
            placed = [jax.device_put(c, s) for c, s in zip(consts, ins, strict=False)]
        return functools.partial(entry.lowered, *placed), mesh

    def _jitted(self, entry: _Entry, top: bool) -> Any:
        """A `jax.jit` of the step on flat arguments; ``top``: it is compiled by itself, and may have options."""
        sharded, mesh = self._sharded(entry)
        donated = tuple(i for i, gives in enumerate(entry.traced.donated) if gives and not looks_for_specials())

        def run(*leaves: Any) -> list[Any]:
            return sharded(*leaves)

        run.__name__ = self._name
        return jax.jit(
            run,
            compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform) if top else None,
            in_shardings=entry.shardings,
            out_shardings=entry.plan.shardings(mesh)[1],
            donate_argnums=donated,
        )

    def _jitted_tree(self, entry: _Entry) -> Any:
        """A `jax.jit` of the step on arguments as the user has them: positional ones, static ones included, then the
        keyword arguments as one dictionary if there are any (jax.jit takes shardings for positional ones only)."""
        sharded, mesh = self._sharded(entry)
        args, kwargs = jax.tree_util.tree_unflatten(entry.plan.in_tree, entry.shardings)
        count = len(args) + len(entry.statics)

        def run(*args: Any) -> Any:
            args, kwargs = (args[:count], args[count]) if len(args) > count else (args, {})
            return entry.results(sharded(*self._flat(args, kwargs)[0]))

        run.__name__ = self._name
        return jax.jit(
            run,
            compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform),
            in_shardings=(*args, *_last(kwargs)),
            out_shardings=jax.tree_util.tree_unflatten(entry.traced.out_tree, entry.plan.shardings(mesh)[1]),
            static_argnums=within(self._arguments.static_argnums, count),
            donate_argnums=within(self._arguments.donate_argnums, count),
        )

    def _refuse_described(self, entry: _Entry) -> None:
        """Raises ClusterError where the mesh's devices are not there."""
        device = entry.plan.jax_mesh(self._devices).devices.flat[0]
        if is_described(device):
            raise ClusterError(
                f"{self._name}: the mesh is of devices that are only described ({device.device_kind}); nothing runs "
                "there. .plan(*shapes) and .lower(*shapes).compile() need no more"
            )

    def _refuse_transformed(self, call: tuple[Args, Kwargs]) -> None:
        """Raises TraceError under jax.grad, jax.vmap and the like; a surrounding jax.jit is fine."""
        for path, leaf in jax.tree_util.tree_flatten_with_path(call)[0]:
            if isinstance(leaf, jax.core.Tracer) and not is_staged(leaf):
                raise TraceError(
                    f"{self._name} is parallelized, and cannot be differentiated or batched as a whole "
                    f"({'args' if path[0].idx == 0 else 'kwargs'}{jax.tree_util.keystr(path[1:])} is a "
                    f"{type(leaf).__name__}): its plan holds for the step as it is. Take gradients inside the step, by "
                    "autopar.value_and_grad, or transform the step before autopar.parallelize"
                )


def _name(fun: Callable[..., Any]) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _last(kwargs: Kwargs) -> tuple[Kwargs, ...]:
    """Keyword arguments as a last positional one, if there are any."""
    return (kwargs,) if kwargs else ()


def _expand(eqn: JaxprEqn) -> Any:
    return expand_marker(eqn) if eqn.primitive is grad_p else None
