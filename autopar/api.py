"""What users call: `parallelize` and its options.

``autopar.parallelize(step)`` looks like the step. Its first call for new shapes traces, plans, compiles and runs;
later ones go straight to the compiled program. ``.plan``, ``.lower`` and ``.init`` are the same steps one by one.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.gradient import expand_marker, grad_p
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import ClusterError, PlanMismatchError, ShardingError
from autopar.ir.plan import Pin, Plan, PlanConfig
from autopar.ir.presets import cluster_from_text, logical_mesh, mesh_shape_from_text
from autopar.jax_compat import JaxprEqn, jax_version, remat_is_undone
from autopar.microbatch import serial
from autopar.planner import candidate_shapes, plan_graph
from autopar.runtime.lower import lower
from autopar.sharding_rule import registered_rules
from autopar.step_plan import StepPlan
from autopar.trace import Traced, trace

log = logging.getLogger("autopar")


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Sequence[int] | str | Mesh | None = None,
    cluster: ClusterSpec | str | None = None,
    memory_bytes: int | None = None,
    num_microbatches: int = 1,
    constraints: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    batch_argnums: Any = None,
    method: str = "auto",
    forbid: Sequence[str] = (),
    batch_axis: str | None = None,
    plan: StepPlan | Plan | str | os.PathLike[str] | None = None,
    time_limit_s: float = 60.0,
    solver: str = "auto",
) -> Any:
    """Plans a train step and runs it sharded; use bare, ``@parallelize``, or with options.

    Args:
        fun: the step, ``step(state, batch, …)``, as it runs on one device.
        mesh: logical mesh shape, ``(2, 4)`` or ``"2x4"``, or a `jax.sharding.Mesh` whose axis names pins refer to.
            Default: the best of the shapes that fit the cluster.
        cluster: ClusterSpec, preset (``"dgx-h100:4"``) or file. Default: this process's devices.
        memory_bytes: limit per device. Default: the device's memory.
        num_microbatches: gradient accumulation; see `autopar.serial`.
        constraints: pins: argument path glob (``"args[0].params*"``), output path glob (``"out[0]*"``) or name of an
            intermediate (``"name:hidden"``, by `jax.ad_checkpoint.checkpoint_name`) → PartitionSpec. A dimension
            ``PartitionSpec.UNCONSTRAINED`` is left to the planner.
        donate_argnums, static_argnums: as in jax.jit.
        batch_argnums: which arguments carry the batch; default the second, dimension 0.
        method: ``auto``; or force ``data_parallel``, ``zero2``, ``zero3`` or ``tensor_parallel``.
        forbid: collectives not to use: ``all-gather``, ``all-to-all``, ``reduce-scatter``.
        batch_axis: force the batch dimension onto this mesh axis.
        plan: replay this plan instead of planning.
        time_limit_s: solver's limit, seconds.
        solver: ``auto``, ``highs`` or ``cbc``.

    Returns:
        A `Parallelized` step.
    """
    if fun is None:
        return functools.partial(
            parallelize, mesh=mesh, cluster=cluster, memory_bytes=memory_bytes, num_microbatches=num_microbatches,
            constraints=constraints, donate_argnums=donate_argnums, static_argnums=static_argnums,
            batch_argnums=batch_argnums, method=method, forbid=forbid, batch_axis=batch_axis, plan=plan,
            time_limit_s=time_limit_s, solver=solver,
        )  # fmt: skip
    names: tuple[str, ...] | None = None
    devices: Any = None
    if isinstance(mesh, Mesh):
        names, devices = tuple(map(str, mesh.axis_names)), list(mesh.devices.flat)
        shape: tuple[int, ...] | None = tuple(mesh.devices.shape)
    elif isinstance(mesh, str):
        shape = mesh_shape_from_text(mesh)
    else:
        shape = None if mesh is None else tuple(int(n) for n in mesh)
    config = PlanConfig(
        mesh_shape=shape,
        axis_names=names,
        memory_bytes=memory_bytes,
        num_microbatches=num_microbatches,
        method=method,
        forbid=tuple(forbid),
        batch_axis=batch_axis,
        pins=_pins(constraints or {}),
        solver=solver,
        time_limit_s=time_limit_s,
    )
    given = _given_plan(plan)
    return Parallelized(
        fun,
        config,
        cluster_from_text(cluster) if isinstance(cluster, str) else cluster,
        devices,
        _argnums(donate_argnums),
        _argnums(static_argnums),
        batch_argnums,
        given,
    )


def _argnums(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _given_plan(plan: Any) -> Plan | None:
    if plan is None:
        return None
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, StepPlan):
        return plan.data
    from autopar.step_plan import load_plan

    return load_plan(plan).data


def _pins(constraints: Mapping[str, Any]) -> tuple[Pin, ...]:
    out: list[Pin] = []
    for target, spec in constraints.items():
        entries = spec.spec if isinstance(spec, NamedSharding) else spec
        dims: list[tuple[str, ...] | None] = []
        for entry in entries:
            if entry is None:
                dims.append(())
            elif entry is PartitionSpec.UNCONSTRAINED:
                dims.append(None)
            elif isinstance(entry, str):
                dims.append((entry,))
            else:
                dims.append(tuple(entry))
        out.append(Pin(target=target, dims=tuple(dims)))
    return tuple(out)


@dataclass
class _Entry:
    """What is known for one signature of arguments."""

    traced: Traced
    plan: StepPlan
    jitted: Any = None
    shardings: Any = None


class _OtherShapesError(Exception):
    """The compiled step was called with other shapes: look for their own entry."""


class Parallelized:
    """A step that runs sharded as planned. Call it as the step; see `plan`, `lower`, `init`."""

    def __init__(
        self, fun: Callable[..., Any], config: PlanConfig, cluster: ClusterSpec | None, devices: Any,
        donate_argnums: tuple[int, ...], static_argnums: tuple[int, ...], batch_argnums: Any, given: Plan | None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._step = serial(fun, config.num_microbatches, batch_argnums)
        self._config = config
        self._cluster = cluster
        self._devices = devices
        self._donate = donate_argnums
        self._static = static_argnums
        self._batch_argnums = batch_argnums
        self._given = given
        self._entries: dict[Any, _Entry] = {}
        self._last: _Entry | None = None

    @property
    def last_plan(self) -> StepPlan | None:
        """The plan that the last call, or `plan`, used."""
        return self._last.plan if self._last is not None else None

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """Plans for arrays or ShapeDtypeStructs, without compiling; equal shapes give the cached plan.

        Raises:
            TraceError, MicrobatchError, ClusterError, ShardingError, InfeasibleError, SolverTimeoutError: see each.
        """
        return self._entry(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the sharded step, for arrays or ShapeDtypeStructs."""
        entry = self._entry(args, kwargs)
        return self._jitted(entry).lower(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self._last
        if entry is not None and entry.jitted is not None:
            try:
                return entry.jitted(*args, **kwargs)
            except _OtherShapesError:
                pass
            except ValueError:
                placed = self._placed(entry, args, kwargs)
                if placed is None:
                    raise
                return entry.jitted(*placed[0], **placed[1])
        entry = self._entry(args, kwargs)
        jitted = self._jitted(entry)
        placed = self._placed(entry, args, kwargs)
        if placed is not None:
            args, kwargs = placed
        return jitted(*args, **kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """``init_fn(*args)``, created already sharded as the plan wants one of the step's arguments.

        No host or device ever holds the whole state. The step must have been planned (`plan`), so that its
        shardings are known; the argument whose tree and shapes equal ``init_fn``'s result is meant.

        Raises:
            PlanMismatchError: there is no plan yet, or no argument of that shape.
        """
        if self._last is None:
            raise PlanMismatchError(
                f"{self._name}.init needs a plan: call {self._name}.plan(*shapes) first, with "
                "jax.eval_shape(init_fn, …) for the state and jax.ShapeDtypeStruct for the batch"
            )
        entry = self._last
        shapes = jax.eval_shape(init_fn, *args)
        mesh = entry.plan.jax_mesh(self._devices)
        dynamic, _ = jax.tree_util.tree_unflatten(entry.plan.in_tree, list(entry.plan.data.inputs[entry.plan.num_consts :]))
        wanted = jax.tree_util.tree_structure(shapes)
        for argument in dynamic:
            leaves, tree = jax.tree_util.tree_flatten(argument)
            if tree == wanted and all(
                a.type.shape == tuple(s.shape) for a, s in zip(leaves, jax.tree_util.tree_leaves(shapes), strict=True)
            ):
                specs = jax.tree_util.tree_unflatten(
                    tree, [NamedSharding(mesh, _spec(a)) for a in leaves]
                )
                return jax.jit(init_fn, out_shardings=specs)(*args)
        raise PlanMismatchError(
            f"{self._name}.init: no argument of the planned step has the tree and shapes that "
            f"{getattr(init_fn, '__name__', 'init_fn')} returns: {wanted}. Plan with the shapes of this state"
        )

    @property
    def _name(self) -> str:
        return getattr(self._fun, "__name__", type(self._fun).__name__)

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        key = self._key(args, kwargs)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._make(args, kwargs)
        self._last = entry
        return entry

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        static = {i % len(args) for i in self._static} if args else set()
        dynamic = tuple(None if i in static else a for i, a in enumerate(args))
        leaves, tree = jax.tree_util.tree_flatten((dynamic, kwargs))
        return tree, tuple(_aval(x) for x in leaves), tuple((i, args[i]) for i in sorted(static))

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
        cluster = self._cluster if self._cluster is not None else _this_cluster(self._devices)
        started = time.perf_counter()
        log.info("tracing %s", self._name)
        undone = remat_is_undone() and cluster.groups[0].device.name == "cpu"
        traced = trace(
            self._step,
            *args,
            static_argnums=self._static,
            donate_argnums=self._donate,
            expand=_expand,
            keep_remat=not undone,
            **kwargs,
        )
        seconds = time.perf_counter() - started
        data = self._given
        if data is not None:
            _check_same(data, traced, self._name)
        else:
            log.info("planning %d operators for %s", len(traced.graph.nodes), cluster.name)
            data = self._best_plan(traced, cluster, seconds)
        return _Entry(traced, StepPlan(data, traced.in_tree, traced.out_tree))

    def _best_plan(self, traced: Traced, cluster: ClusterSpec, trace_s: float) -> Plan:
        config = self._config
        shapes = [config.mesh_shape] if config.mesh_shape is not None else candidate_shapes(cluster)
        plans: list[Plan] = []
        for shape in shapes:
            logical: LogicalMesh = logical_mesh(cluster, shape, config.axis_names)
            log.info("solving for mesh %s", logical)
            plans.append(
                plan_graph(
                    traced.graph,
                    cluster,
                    logical,
                    replace(config, mesh_shape=config.mesh_shape),
                    name=self._name,
                    user_rules=registered_rules(),
                    batch_inputs=_batch_inputs(traced, self._batch_argnums),
                    node_hashes=tuple(n.digest for n in traced.graph.nodes),
                    trace_s=trace_s,
                    jax_version=jax_version(),
                )
            )
        return min(plans, key=lambda p: p.predictions.step_s)

    def _jitted(self, entry: _Entry) -> Any:
        if entry.jitted is not None:
            return entry.jitted
        plan, traced = entry.plan, entry.traced
        mesh = plan.jax_mesh(self._devices)
        sharded = lower(traced.graph, traced.jaxpr, plan.sharding, mesh, registered_rules())
        ins, outs = plan.shardings(mesh)
        consts = [jax.device_put(c, s) for c, s in zip(traced.jaxpr.consts, ins, strict=False)]
        ins = ins[len(consts) :]
        expected = tuple((a.type.shape, a.type.dtype) for a in plan.data.inputs[len(consts) :])

        def run(*args: Any, **kwargs: Any) -> Any:
            static = {i % len(args) for i in self._static} if args else set()
            dynamic = tuple(a for i, a in enumerate(args) if i not in static)
            leaves, tree = jax.tree_util.tree_flatten((dynamic, kwargs))
            if tree != traced.in_tree or tuple(_aval(x) for x in leaves) != expected:
                raise _OtherShapesError
            if tuple((i, args[i]) for i in sorted(static)) != statics:
                raise _OtherShapesError
            return jax.tree_util.tree_unflatten(traced.out_tree, sharded(*consts, *leaves))

        statics = next(k[2] for k, e in self._entries.items() if e is entry)
        arg_shardings, kwarg_shardings = jax.tree_util.tree_unflatten(traced.in_tree, ins)
        entry.shardings = (arg_shardings, kwarg_shardings)
        if kwarg_shardings:
            in_shardings = None  # jax.jit takes shardings for positional arguments only; shard_map's specs hold
            entry.jitted = jax.jit(run, static_argnums=self._static, donate_argnums=self._donate)
        else:
            in_shardings = tuple(arg_shardings)
            entry.jitted = jax.jit(
                run,
                in_shardings=in_shardings,
                out_shardings=jax.tree_util.tree_unflatten(traced.out_tree, outs),
                static_argnums=self._static,
                donate_argnums=self._donate,
            )
        functools.update_wrapper(run, self._fun, assigned=("__name__",), updated=())
        return entry.jitted

    def _placed(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with arrays that lie elsewhere moved to where the plan wants them; None if none did."""
        static = {i % len(args) for i in self._static} if args else set()
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, kwargs))
        wanted = jax.tree_util.tree_leaves(entry.shardings)
        moved = False
        for i, (x, s) in enumerate(zip(leaves, wanted, strict=True)):
            if isinstance(x, jax.Array) and x.committed and not x.sharding.is_equivalent_to(s, x.ndim):
                leaves[i], moved = jax.device_put(x, s), True
        if not moved:
            return None
        args_out, kwargs_out = jax.tree_util.tree_unflatten(tree, leaves)
        given = iter(args_out)
        return tuple(a if i in static else next(given) for i, a in enumerate(args)), kwargs_out


def _spec(argument: Any) -> PartitionSpec:
    from autopar.step_plan import partition_spec

    return partition_spec(argument.spec)


def _aval(x: Any) -> Any:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True).name
    return (), jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(x)).name


def _expand(eqn: JaxprEqn) -> Any:
    return expand_marker(eqn) if eqn.primitive is grad_p else None


def _batch_inputs(traced: Traced, batch_argnums: Any) -> dict[int, int]:
    """Graph input position → batch dimension, for the seeds and the forced plans."""
    consts = len(traced.jaxpr.consts)
    wanted: Mapping[Any, Any]
    if batch_argnums is None:
        wanted = {1: 0}
    elif isinstance(batch_argnums, Mapping):
        wanted = batch_argnums
    else:
        wanted = {a: 0 for a in _argnums(batch_argnums)}
    out: dict[int, int] = {}
    for i, position in enumerate(traced.arg_positions):
        dim = wanted.get(position)
        dim = dim if isinstance(dim, int) else 0 if dim is not None else None
        if dim is not None and len(traced.graph.values[traced.graph.inputs[consts + i]].shape) > dim:
            out[consts + i] = dim
    return out


def _this_cluster(devices: Any) -> ClusterSpec:
    """The cluster of this process's devices, by their kind.

    Raises:
        ClusterError: the kind is not among the presets.
    """
    devices = jax.devices() if devices is None else devices
    kind = devices[0].device_kind.lower()
    if devices[0].platform == "cpu":
        return cluster_from_text(f"cpu:{len(devices)}")
    for word, preset in (("v100", "p3.16xlarge"), ("a100", "dgx-a100"), ("h100", "dgx-h100"), ("h200", "dgx-h200"),
                         ("b200", "dgx-b200"), ("v4", "v4-8"), ("v5 lite", "v5e-8"), ("v5", "v5p-8")):  # fmt: skip
        if word in kind:
            cluster = cluster_from_text(preset)
            (group,) = cluster.groups
            hosts = max(1, len({d.process_index for d in devices}))
            per_host = max(1, len(devices) // hosts)
            return replace(cluster, groups=(replace(group, hosts=hosts, devices_per_host=per_host),), torus=None)
    raise ClusterError(
        f"no preset describes this device, {devices[0].device_kind!r}: pass cluster= a preset or a ClusterSpec file"
    )


def _check_same(plan: Plan, traced: Traced, name: str) -> None:
    """Raises PlanMismatchError naming the first argument or node in which plan and step differ."""
    if plan.fingerprint == traced.graph.fingerprint:
        return
    graph = traced.graph
    for i, (have, path) in enumerate(zip(plan.inputs, graph.arg_paths, strict=False)):
        t = graph.values[graph.inputs[i]]
        if have.path != path or have.type != t:
            raise PlanMismatchError(
                f"the plan was made for other arguments: plan has {have.path}: {have.type}, {name} got {path}: {t}. "
                "Plan again for these shapes"
            )
    if len(plan.inputs) != len(graph.inputs):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.inputs)} argument leaves; {name} got {len(graph.inputs)}. Plan again"
        )
    for node, wanted in zip(graph.nodes, plan.node_hashes, strict=False):
        if node.digest != wanted:
            raise PlanMismatchError(
                f"the plan was made for another function (planned {plan.name!r}, given {name!r}): the first operator that "
                f"differs is {node}. Plan again, or load the plan of this function"
            )
    raise PlanMismatchError(
        f"the plan was made for another function: it has {len(plan.node_hashes)} operators, {name} has {len(graph.nodes)}. "
        "Plan again, or load the plan of this function"
    )


__all__ = ["Parallelized", "ShardingError", "parallelize"]
