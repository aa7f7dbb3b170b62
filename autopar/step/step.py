"""`Step`: what `autopar.parallelize` makes of a function. It looks like the function, and runs as planned.

A call → its key → the planned step and what runs it (`Entry`), made when the key is new (`step.planning`,
`runtime.executor`); looked up afterwards. Whether the plan is of one program or of stages, here or on a Ray, all
methods mean the same; what one cannot do says so.
"""

from __future__ import annotations

import functools
import html
import logging
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import jax
import jax.core
from jax.sharding import Mesh

from autopar.data import Loader
from autopar.frontend.arguments import Args, Arguments, CallKey, Kwargs, within
from autopar.frontend.layering.layers import Layered
from autopar.frontend.microbatch import serial
from autopar.frontend.trace import Traced as TracedStep
from autopar.frontend.user_rules import registered_rules
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import DataError, LoweringError, OptionError, PlanMismatchError, TraceError
from autopar.ir.options import FOLLOWED, is_given, settled
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.presets import cluster_from_text
from autopar.ir.progress import Watch
from autopar.jax_compat import at_top_level, jax_version
from autopar.runtime import state
from autopar.runtime.batches import Argnums, Signature, StepSource, batch_of, checked
from autopar.runtime.executor import Executor, Wanted
from autopar.runtime.in_process import PipelineExecutor
from autopar.runtime.local_devices import cluster_of, in_order
from autopar.runtime.meshes import mesh_of
from autopar.runtime.on_ray.ray_cluster import Cluster, named
from autopar.runtime.one_program.executor import ProgramExecutor
from autopar.runtime.tracing import Traced
from autopar.step.asked import Asked, check_given, of_plan
from autopar.step.choice import plan_step
from autopar.step.entry import Entry, ordinal
from autopar.step.followed import Followed
from autopar.step.options import asked, given_plan, of_their_types
from autopar.step.planning import Bound, Request
from autopar.step.step_plan import StepPlan

if TYPE_CHECKING:
    from autopar.runtime.on_ray.loader import RayLoader

log = logging.getLogger("autopar")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned call of one program.

    Attributes:
        traced: its jaxpr, and the graph that was planned.
        plan: the plan.
        mesh: the devices that it runs on.
        leaves: its flat arguments, static ones left out.
    """

    traced: TracedStep
    plan: StepPlan
    mesh: Mesh
    leaves: tuple[Any, ...]


class Step(Generic[P, R]):
    """A step that runs as planned: call it as the function. `autopar.parallelize` makes one.

    The first call with arguments of new shapes traces, plans, compiles and runs; later ones go to what was compiled.
    `plan`, `init`, `lower`, `loader` and `trace` are the same, one by one. A call raises what `plan` raises;
    ClusterError where the plan's devices are not there; ArgumentError for an argument that was donated or deleted; on a
    Ray WorkerError where a worker died, failed or did not answer by the deadline.
    """

    def __init__(self, fun: Callable[P, R], options: Mapping[str, Any], follow: Followed | None = None) -> None:
        """`autopar.parallelize` calls it.

        Args:
            fun: the step as it runs on one device.
            options: of `autopar.parallelize`, by name.
            follow: the plan of another step, where this one's arguments are to lie; see `follow`.

        Raises:
            OptionError: an option's value is not one, or cannot be together with another.
            ClusterError: ``cluster`` names none, or ``mesh`` is no shape.
            PlanFormatError: the file of ``plan`` cannot be read, is damaged, or of another schema version; the plan
                contradicts itself, or its schedule cannot be run.
        """
        functools.update_wrapper(self, fun)
        self._fun, self._follow, self._name = fun, follow, _name(fun)
        self._options = of_their_types(settled(options))
        self._given = given_plan(self._options["plan"])
        self._asked = asked(self._options)
        if self._given is not None:
            check_given(self._given, self._asked)
            self._asked = of_plan(self._given.config)
        if self._given is not None and self._given.provenance.jax_version not in ("", jax_version()):
            made = self._given.provenance.jax_version
            log.warning("%s: the plan was made with jax %s, this is %s", self._name, made, jax_version())
        mesh, cluster = self._options["mesh"], self._options["cluster"]
        self._devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        self._ray: Cluster | str | None = None
        self._cluster: ClusterSpec | None = None
        if cluster == "ray" or isinstance(cluster, Cluster):
            self._ray = cluster
            if self._devices is not None:
                raise OptionError("mesh: a jax.sharding.Mesh has devices of this process; on a Ray give its shape")
        else:
            self._cluster = cluster_from_text(cluster) if isinstance(cluster, str) else cluster
            if self._cluster is not None:
                self._cluster.verify()
            if self._given is not None and self._cluster not in (None, self._given.cluster):
                raise OptionError(f"cluster: the plan that is given is for {self._given.cluster.name}; leave it out")
            if self._options["deadline_s"] is not None:
                raise OptionError("deadline_s: only steps on a Ray have one; give cluster= what autopar.init returned")
        self._arrange()
        self._arguments = Arguments(
            fun, self._name, *(self._options[f"{which}_argnums"] for which in ("donate", "static", "batch"))
        )
        serial(fun, self._asked.config.num_microbatches, self._arguments.batch_argnums)  # refuses what no call can mend
        self._planning = threading.RLock()
        """Threads that call one step plan it once."""
        self._entries: dict[Any, Entry] = {}
        self._last: Entry | None = None
        self._steady = True
        """The last calls were of one kind: the next may be tried as that without a look at its key."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        planned = "not planned yet" if self._last is None else repr(self._last.plan)
        return f"<step {self._name}: {planned}>"

    def _repr_html_(self) -> str:
        """What notebooks show: its last plan."""
        return html.escape(repr(self)) if self._last is None else self._last.plan._repr_html_()

    @property
    def fun(self) -> Callable[P, R]:
        """The function, as it was given."""
        return self._fun

    @property
    def on_ray(self) -> bool:
        """True where it runs on the workers of a Ray cluster."""
        return self._ray is not None

    @property
    def last_plan(self) -> StepPlan | None:
        """The plan that the last call, or `plan`, used; None where nothing was planned yet."""
        return self._last.plan if self._last is not None else None

    @property
    def arguments(self) -> Arguments:
        """Which of the step's arguments are donated, static, or carry the batch."""
        return self._arguments

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """XLA's options that the user gave, by name."""
        return dict(self._options["compiler_options"] or {})

    # --- plans -------------------------------------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """Plans for a call, without compiling. Equal shapes give the plan that is there.

        Args:
            args: of the call: arrays or `jax.ShapeDtypeStruct`; static ones with their values.
            kwargs: likewise.

        Returns:
            The plan, with the step's trees.

        Raises:
            TraceError: the step cannot be traced, or an argument is no array.
            MicrobatchError: it cannot be split into so many microbatches exactly.
            OptionError: an option does not fit this step, or this cluster.
            ClusterError: no preset describes this process's devices, a mesh does not fit the cluster, or ``"ray"`` is
                meant and `autopar.init` was not called.
            ShardingError: a pin does not fit its value or its mesh, or nothing has its path.
            RuleError: a sharding rule does not fit its operator.
            InfeasibleError: no plan exists within the limits; says which limit, and by how much.
            SolverTimeoutError: the time limit passed before any plan was found.
            PlanMismatchError: the plan that was given is of another step, of other shapes or of other devices.
            LoweringError: an operator cannot run on its shards, or is unknown where ``on_unsupported="error"``.
        """
        return self._entry(*self._arguments.positional(args, kwargs)).plan

    def planned(self, *args: Any, **kwargs: Any) -> Planned:
        """For tools: the call as planned, its jaxpr and its mesh. Raises as `plan` does, and PlanMismatchError where
        it has stages."""
        args, kwargs = self._arguments.positional(args, kwargs)
        entry = self._entry(args, kwargs)
        if entry.program is None:
            raise PlanMismatchError(f"{self._name} is planned in stages, which have no one jaxpr; .bound has them")
        leaves = self._flat(args, kwargs)[0]
        return Planned(traced=entry.bound.traced, plan=entry.plan, mesh=entry.program.mesh, leaves=tuple(leaves))

    def bound(self, *args: Any, **kwargs: Any) -> Bound[Any]:
        """For tools: the call's plan, and what was traced of it, one program's jaxpr or a step in layers. Raises as
        `plan` does."""
        return self._entry(*self._arguments.positional(args, kwargs)).bound

    def with_options(self, **settings: Any) -> Step[P, R]:
        """The same step with some of `parallelize`'s options replaced, and nothing planned yet. A plan that was given
        (``plan=``) is dropped unless ``settings`` give one.

        Args:
            settings: options of `autopar.parallelize`.

        Returns:
            Another `Step`; this one stays as it is.

        Raises:
            OptionError: an option's value is not one, or cannot be together with another.
            ClusterError: ``cluster`` names none, or ``mesh`` is no shape.
            PlanFormatError: the file of ``plan`` cannot be read, is damaged, or of another schema version; the plan
                contradicts itself, or its schedule cannot be run.
        """
        return Step(self._fun, {**self._options, "plan": None, **settings}, self._follow)

    def follow(
        self, fun: Callable[..., Any], *args: Any, follow_args: Mapping[str, str] | None = None, **options: Any
    ) -> Step[..., Any]:
        """``fun`` (an evaluation, say) parallelized so that its arguments, all but the batch, lie where this step's
        last plan has them: on the same stages and meshes, in the same shardings.

        Args:
            fun: the function, as it runs on one device.
            args: shapes of a call of ``fun``, to plan it now; without, it is planned when it is first needed.
            follow_args: where this step has what ``fun`` takes, where names do not tell: ``{"args[0]":
                "args[0].params"}``.
            options: `parallelize`'s, for ``fun``: what this step's plan does not decide.

        Returns:
            The `Step` of ``fun``.

        Raises:
            PlanMismatchError: there is no plan yet.
            OptionError: an argument cannot follow (says why), or an option says what the plan that is followed says.
        """
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.follow needs a plan: call {self._name}.plan(*shapes) first")
        plan = self._last.plan.data
        asked = settled(options)
        in_stages = not isinstance(plan.body, OneProgram)
        on_ray = asked["cluster"] == "ray" or isinstance(asked["cluster"], Cluster)
        for name in (*(FOLLOWED if in_stages else ()), *(() if on_ray else ("cluster",))):
            if is_given(name, asked):
                raise OptionError(f"{name}: the plan that is followed says that; leave it out")
        known: dict[str, Any] = {"cluster": self._ray or plan.cluster}
        if in_stages:
            known |= {"stages": (1, None), "layers": plan.config.layers}
        else:
            known |= {"mesh": self._options["mesh"] if self._devices is not None else plan.sharding.mesh.shape}
        options = {**known, **options}
        step = Step(fun, options, Followed(plan=plan, paths=follow_args))
        if args:
            step.plan(*args)
        return step

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the sharded step. What it compiles to takes its arguments by position.

        Args:
            args: of the call: arrays or `jax.ShapeDtypeStruct`.
            kwargs: likewise.

        Raises:
            LoweringError: the step is planned in stages, which are many programs; or as `plan`, which raises its other
                errors here too.
        """
        args, kwargs = self._arguments.positional(args, kwargs)
        return self._jitted_tree(self._entry(args, kwargs)).lower(*args, *_last(kwargs))

    # --- calls -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        given, keywords = (args, kwargs) if not kwargs else self._arguments.positional(args, kwargs)
        leaves, tree = self._flat(given, keywords)
        if not at_top_level():
            return self._inside(leaves, given, keywords)
        leaves = self._arguments.usable(leaves, given, keywords)
        last = self._last
        if self._steady and last is not None and last.is_for(leaves, tree, given):
            executor = last.executor
            assert executor is not None
            if not executor.closed:
                try:
                    return last.results(executor(leaves))
                except (TypeError, ValueError):  # other shapes
                    if self._arguments.key(given, keywords) == last.key:
                        raise
        entry = self._entry(given, keywords)
        self._steady = len(self._entries) == 1 or entry is last
        return entry.results(self._executor(entry)(leaves))

    def _inside(self, leaves: Sequence[Any], args: Args, kwargs: Kwargs) -> Any:
        """The call from under another jax.jit, or Python's own while JAX traces."""
        self._arguments.refuse_transformed((args, kwargs))
        entry = self._entry(args, kwargs, nested=self._ray is None)
        if entry.program is not None and self._ray is None:
            return entry.results(entry.program.nested(leaves))
        runs = "on a Ray" if entry.program is not None else "as a pipeline"
        raise TraceError(
            f"{self._name} runs {runs}, which is no JAX program: it cannot be called under jax.jit, jax.grad or the "
            "like. Take gradients inside the step, by autopar.value_and_grad, and transform the step before "
            "autopar.parallelize; stages=1 makes it one program"
        )

    def _flat(self, args: Args, kwargs: Kwargs) -> tuple[list[Any], Any]:
        """The flat arguments, static ones left out, and their tree."""
        return jax.tree_util.tree_flatten((self._arguments.split(args)[0], kwargs))

    # --- state, batches, traces --------------------------------------------------------------------------------------

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``init_fn(*args, **kwargs)``, every part of it made where the planned step wants one of its arguments.

        No host or device ever holds the whole state. The step must have been planned (`plan`), so that its shardings
        are known; the argument whose tree, shapes and dtypes equal ``init_fn``'s result is meant.

        Args:
            init_fn: makes the state; it is traced by JAX.
            args: of ``init_fn``, a random key say.
            kwargs: likewise.

        Returns:
            A pytree, the state, of `jax.Array`; of stages with an `autopar.Array` where several hold a leaf, on Ray of
            `autopar.Array`.

        Raises:
            PlanMismatchError: there is no plan yet, or no argument of that tree, shapes and dtypes.
            ClusterError: the plan's devices are not there.
            WorkerError: a worker of the step died.
        """
        where, wanted, tree = self._wanted("init", init_fn, args, kwargs)
        log.info("%s.init: compiling what makes %d arrays", self._name, len(wanted.leaves))
        leaves = state.init(where, self._meshes(where), wanted) if isinstance(where, Plan) else where.init(wanted)
        return jax.tree_util.tree_unflatten(tree, leaves)

    def abstract(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `init` would return, with nothing made, as `autopar.restore` takes it.

        Args:
            init_fn: makes the state; it is traced by JAX, and not run.
            args: of ``init_fn``.
            kwargs: likewise.

        Returns:
            The state's tree of `jax.ShapeDtypeStruct` with shardings, or what stands for arrays of stages and workers.

        Raises:
            PlanMismatchError: there is no plan yet, or no argument of that tree, shapes and dtypes.
            ClusterError: the plan's devices are not there.
            WorkerError: a worker of the step died.
        """
        where, wanted, tree = self._wanted("abstract", init_fn, args, kwargs)
        leaves = (
            state.abstract(where, self._meshes(where), wanted) if isinstance(where, Plan) else where.abstract(wanted)
        )
        return jax.tree_util.tree_unflatten(tree, leaves)

    def _meshes(self, plan: Plan) -> list[Mesh]:
        return [mesh_of(logical, plan.cluster, self._devices) for logical in plan.meshes]

    def _wanted(
        self, method: str, init_fn: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> tuple[Executor | Plan, Wanted, Any]:
        """What has an argument like what ``init_fn`` returns: the latest call that was planned so, or the plan that was
        given, where nothing was planned yet; which argument, and its tree."""
        given = None if self._ray is not None else self._given
        if self._last is None and given is None:
            raise PlanMismatchError(
                f"{self._name}.{method} needs a plan: call {self._name}.plan(*shapes) first, with "
                "jax.eval_shape(init_fn, …) for the state and jax.ShapeDtypeStruct for the batch"
            )
        made = jax.eval_shape(init_fn, *args, **kwargs)
        leaves, tree = jax.tree_util.tree_flatten(made)
        plans: list[tuple[Entry | Plan, StepPlan]] = [(e, e.plan) for e in reversed(self._entries.values())]
        if not plans and given is not None:
            plans = [(given, StepPlan(given))]
        for where, plan in plans:
            numbers = plan.argument_like(made)
            if numbers is not None:
                wanted = Wanted(function=init_fn, args=args, kwargs=kwargs, numbers=numbers, leaves=tuple(leaves))
                return (where if isinstance(where, Plan) else self._executor(where)), wanted, tree
        raise PlanMismatchError(
            f"{self._name}.{method}: no argument of the planned step has the tree, shapes and dtypes that "
            f"{_name(init_fn)} returns: {plans[0][1].unlike(made)}. Plan with the shapes of this state"
        )

    def loader(
        self, source: StepSource, argnums: Argnums = None, *, prefetch: int = 2, start: Any = 0,
        deadline_s: float | None = None,
    ) -> Loader | RayLoader:  # fmt: skip
        """Batches for the last plan's step, drawn where they are needed: on a Ray by each worker that reads some of the
        batch, on its own host, and the driver has handles only; else in this process. Either way in a thread, ahead::

            with step.loader(source, start=position) as batches:
                for batch in batches:
                    state, loss = step(state, batch)

        Each process draws whole batches, and keeps what its devices or stages read (the first stage's inputs, the last
        one's labels), so a source has to give the same batches wherever it is called: read files, or seed by the number
        of the batch. Leaves that are not read there are not looked at: where they are costly, give views (a
        `numpy.memmap`'s slice), or objects whose ``__array__`` loads them.

        Args:
            source: a function of the number of batches to leave out, which returns an iterable of the batches from
                there on: pytrees of numpy arrays, of the shapes and dtypes that the step was planned for. To a Ray's
                workers it goes by cloudpickle.
            argnums: the arguments that it gives, by position or keyword: one by itself, several as a tuple; default:
                those that carry examples (``batch_argnums``).
            prefetch: so many batches are ready beside the one in use: of one program on its devices, else in host
                memory.
            start: what the loader's ``state()`` returned, or a number of batches.
            deadline_s: seconds for a batch to be there; default: on a Ray the step's, else none.

        Returns:
            An iterator of batches, as the step takes them.

        Raises:
            PlanMismatchError: there is no plan yet.
            DataError: the source cannot be sent; later, where a batch is taken, what is wrong with that. In this
                process what the source raises comes out as it is, from a worker as a DataError with its traceback.
            WorkerError: a worker died.
        """
        entry = self._planned_entry("loader")
        data, consts = entry.plan.data, entry.plan.num_consts
        signature = Signature(
            num_args=entry.num_args, static_argnums=self._arguments.static_argnums,
            batch_argnums=self._arguments.batch_argnums, in_tree=entry.plan.in_tree,
            paths=tuple(a.path for a in data.inputs), types=tuple(a.type for a in data.inputs), consts=consts,
        )  # fmt: skip
        batch = batch_of(signature, argnums)
        if prefetch < 1:
            raise DataError(f"prefetch={prefetch}: expected 1 or more")
        executor = self._executor(entry)
        return executor.loader(batch, checked(source), prefetch=prefetch, start=start, deadline_s=deadline_s)

    def trace(
        self, path: str | os.PathLike[str] | None = None, *, memory: bool = True, alone: bool = False
    ) -> AbstractContextManager[Traced]:
        """Within it, steps of the last plan note what runs when: ``with step.trace("trace.json") as traced``.

        ``print(traced)`` shows the last step beside the predicted one: seconds, and of each worker how long it was
        busy, its bubble and its devices' peak memory; of each two meshes the time of their transfers. ``traced.steps``
        has the timelines. A step of one program is one event. Traced steps wait for every task and so take a little
        longer.

        Args:
            path: all of them are written there for Perfetto (ui.perfetto.dev), when the block ends.
            memory: look at live arrays before and after each task, some 0.1 ms each where there are a hundred.
            alone: one task at a time, which has the machine to itself: what it takes, for the simulator.

        Returns:
            A context manager that gives the `Traced`.

        Raises:
            PlanMismatchError: there is no plan yet.
            OptionError: ``alone`` on a Ray.
            PlanFormatError: ``path`` cannot be written, when the block ends.
        """
        return self._executor(self._planned_entry("trace")).trace(path, memory=memory, alone=alone)

    def close(self) -> None:
        """Ends the workers that its plans have on a Ray, and what these hold; a later call starts them again."""
        for entry in self._entries.values():
            if entry.executor is not None:
                entry.executor.close()

    def compiled(self) -> Executor:
        """What runs the last plan's step, on flat arguments; it is compiled, or its workers are started, where that has
        not been; for tools.

        Raises:
            PlanMismatchError: there is no plan yet.
            ClusterError: as a call does: the plan's devices are not there.
            WorkerError: as a call does: a worker died.
        """
        return self._executor(self._planned_entry("compiled"))

    def _planned_entry(self, method: str) -> Entry:
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.{method} needs a plan: call {self._name}.plan(*shapes) first")
        return self._last

    # --- what calls are kept under -----------------------------------------------------------------------------------

    def _entry(self, args: Args, kwargs: Kwargs, *, nested: bool = False) -> Entry:
        """What is known of a call; ``nested``: of one under another jax.jit, which one program alone can be."""
        key, asked = self._arguments.key(args, kwargs), self._asked
        with self._planning:
            entry = self._entries.get(key)
            if nested and asked.program is not None and (entry is None or entry.program is None):
                asked = replace(asked, stages=None, no_stages="the step is called under another jax.jit")
                entry = self._entries.get((key, asked)) if entry is not None else None
            if entry is None:
                entry = self._make(key, asked, args, kwargs)
            at = key if self._entries.get(key, entry) is entry else (key, asked)
            self._entries.pop(at, None)
            self._entries[at] = self._last = entry  # the latest last
        return entry

    def _make(self, key: CallKey, asked: Asked, args: Args, kwargs: Kwargs) -> Entry:
        request = Request(
            fun=self._fun, name=self._name, arguments=self._arguments, asked=asked,
            cluster=self._planned_cluster(), given=self._given, follow=self._follow,
            known=[entry.plan.data for entry in self._entries.values()],
            on_unsupported=self._options["on_unsupported"], workers=self._options["workers"],
            cache=self._options["cache"],
            watch=Watch(self._options["time_limit_s"], self._options["progress"]),
        )  # fmt: skip
        statics = self._arguments.split(args)[1]
        bound, options = plan_step(request, args, kwargs), self._options["compiler_options"]
        if isinstance(bound.traced, Layered):
            return self._noted(Entry(key, statics, len(args), bound))
        program = ProgramExecutor(bound.traced, bound.plan.data, request.cluster.platform, self._devices, options)
        return self._noted(Entry(key, statics, len(args), bound, program, program if self._ray is None else None))

    def _noted(self, entry: Entry) -> Entry:
        """The entry, which runs what another does if it may; else a word on that the step was planned again."""
        for other in self._entries.values():
            if entry.runs_as(other):
                entry.program, entry.executor = other.program, other.executor
                return entry
        known = self._last
        if known is not None and known.plan.data is not entry.plan.data:
            count, what = ordinal(len(self._entries) + 1), entry.differs(known)
            log.warning("%s is planned for the %s time: %s", self._name, count, what)
        return entry

    def _arrange(self) -> None:
        """Has a plan for a mesh of devices keep its order, where the cluster numbers them otherwise (TPU slices)."""
        program = self._asked.program
        if self._devices is None or program is None or self._devices[0].platform != "tpu":
            return
        numbers = {device: i for i, device in enumerate(in_order(self._devices, self._planned_cluster()))}
        order = tuple(numbers[device] for device in self._devices)
        if self._given is None:
            self._asked = replace(self._asked, program=replace(program, devices=order))

    def _planned_cluster(self) -> ClusterSpec:
        if self._given is not None:
            return self._given.cluster
        if self._follow is not None:
            return self._follow.plan.cluster
        if self._ray is not None:
            return (named(self._ray) if isinstance(self._ray, str) else self._ray).spec
        return self._cluster or cluster_of(self._devices)

    def _executor(self, entry: Entry) -> Executor:
        """What runs an entry; of a pipeline compiled now, and again where its workers have ended."""
        with self._planning:
            if entry.executor is None or entry.executor.closed:
                entry.executor = self._compiled(entry)
            return entry.executor

    def _compiled(self, entry: Entry) -> Executor:
        options, rules, plan = self._options["compiler_options"], registered_rules(), entry.plan.data
        if self._ray is None:
            return PipelineExecutor(entry.bound.traced, plan, in_order(jax.devices(), plan.cluster), rules, options)
        ray = named(self._ray) if isinstance(self._ray, str) else self._ray
        bound, deadline_s = entry.bound, self._options["deadline_s"]
        return ray.compile(bound.traced, bound.source, plan, rules=rules, options=options, deadline_s=deadline_s)

    def _jitted_tree(self, entry: Entry) -> Any:
        """A `jax.jit` of the step on arguments as the user has them: positional ones, static ones included, then the
        keyword arguments as one dictionary if there are any (jax.jit takes shardings for positional ones only)."""
        executor = entry.program
        if executor is None:
            raise LoweringError(
                f"{self._name} is planned in {len(entry.plan.data.meshes)} stages, which are many programs: there is "
                "no one to lower. .compiled() has what runs; stages=1 makes it one program"
            )
        args, kwargs = jax.tree_util.tree_unflatten(entry.plan.in_tree, executor.in_shardings)
        count, sharded = entry.num_args, executor.sharded()

        def run(*args: Any) -> Any:
            args, kwargs = (args[:count], args[count]) if len(args) > count else (args, {})
            return entry.results(sharded(*self._flat(args, kwargs)[0]))

        run.__name__ = self._name
        return jax.jit(
            run,
            compiler_options=executor.compiler_options,
            in_shardings=(*args, *_last(kwargs)),
            out_shardings=jax.tree_util.tree_unflatten(entry.plan.out_tree, executor.out_shardings),
            static_argnums=within(self._arguments.static_argnums, count),
            donate_argnums=within(self._arguments.donate_argnums, count),
        )


def _name(fun: Callable[..., Any]) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _last(kwargs: Kwargs) -> tuple[Kwargs, ...]:
    """Keyword arguments as a last positional one, if there are any."""
    return (kwargs,) if kwargs else ()
