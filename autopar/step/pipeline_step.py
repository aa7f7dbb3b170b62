"""``autopar.parallelize(step, pipeline=True)``: a step that is planned as a pipeline and run on local devices."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from autopar.arrays import Array
from autopar.data import Loader
from autopar.frontend.arguments import Arguments, without
from autopar.ir.errors import OptionError, PlanMismatchError, TraceError
from autopar.runtime.batches import Argnums, StepSource
from autopar.runtime.compiled_pipeline import CompiledPipeline
from autopar.runtime.local_devices import cluster_of
from autopar.runtime.on_ray.ray_cluster import Cluster, named
from autopar.runtime.tracing import Traced
from autopar.step.planned_pipeline import PlannedPipeline, plan_pipeline

if TYPE_CHECKING:
    from autopar.runtime.on_ray.loader import RayLoader
    from autopar.runtime.on_ray.step import RayStep

    Compiled = CompiledPipeline | RayStep


class PipelineStep:
    """A step that runs as a pipeline, on this process's devices or on a Ray. Call it as the step; see `plan`, `init`.

    Args:
        options: `plan_pipeline`'s; as ``cluster`` also ``"ray"``, or what `autopar.init` returned.
        plan: run this plan instead of planning.
    """

    def __init__(
        self, fun: Callable[..., Any], options: Mapping[str, Any], plan: PlannedPipeline | None = None
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._options, self._given = fun, dict(options), plan
        self._name = getattr(fun, "__name__", type(fun).__name__)
        given = [self._options.pop(name, default) for name, default in
                 (("donate_argnums", ()), ("static_argnums", ()), ("batch_argnums", None))]  # fmt: skip
        self._arguments = Arguments(fun, self._name, *given)
        self._cluster: Cluster | str | None = None
        cluster = self._options.get("cluster")
        if cluster == "ray" or isinstance(cluster, Cluster):
            self._cluster = self._options.pop("cluster")
        self._entries: dict[Any, tuple[PlannedPipeline, Compiled | None]] = {}
        self._last: Any = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def arguments(self) -> Arguments:
        """Which of the step's arguments are donated, static, or carry the batch."""
        return self._arguments

    @property
    def last_plan(self) -> PlannedPipeline | None:
        """The plan that the last call, or `plan`, used."""
        return None if self._last is None else self._entries[self._last][0]

    def plan(self, *args: Any, **kwargs: Any) -> PlannedPipeline:
        """Plans for arrays or ShapeDtypeStructs, without compiling; equal shapes give the cached plan. Raises as
        `plan_pipeline` does."""
        return self._entries[self._key(*self._arguments.positional(args, kwargs))][0]

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``init_fn(*args, **kwargs)``, made where the planned step wants one of its arguments.

        Raises:
            PlanMismatchError: there is no plan yet, or no argument of that tree and those shapes.
        """
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.init needs a plan: call {self._name}.plan(*shapes) first")
        return self._compiled(self._last).init(init_fn, *args, **kwargs)

    def abstract(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `init` would return, with nothing made, as `autopar.restore` takes it. Raises as `init` does."""
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.abstract needs a plan: call {self._name}.plan(*shapes) first")
        return self._compiled(self._last).abstract(init_fn, *args, **kwargs)

    def loader(
        self, source: StepSource, argnums: Argnums = None, *, prefetch: int = 2, start: Any = 0,
        deadline_s: float | None = None,
    ) -> Loader | RayLoader:  # fmt: skip
        """Batches for the last plan's step, drawn where they are needed: on a Ray by each worker that reads some of the
        batch, on its own host, and the driver has handles only; else in this process. Either way in a thread, ahead::

            with step.loader(source, start=position) as batches:
                for batch in batches:
                    state, loss = step(state, batch)

        Each process draws whole batches, and keeps the leaves that its stages read (the first stage's inputs, the last
        one's labels), so a source has to give the same batches wherever it is called: read files, or seed by the
        number of the batch. Leaves that are not read there are not looked at: where they are costly, give views (a
        `numpy.memmap`'s slice), or objects whose ``__array__`` loads them.

        Args:
            source: a function of the number of batches to leave out, which returns an iterable of the batches from
                there on: pytrees of numpy arrays, of the shapes and dtypes that the step was planned for. To a Ray's
                workers it goes by cloudpickle.
            argnums: the arguments that it gives, by position or keyword: one by itself, several as a tuple; default:
                those that carry examples (``batch_argnums``).
            prefetch: so many batches are ready, in host memory, beside the one in use.
            start: what the loader's ``state()`` returned, or a number of batches.
            deadline_s: for a batch to be there; default: on a Ray the step's, else none.

        Raises:
            PlanMismatchError: there is no plan yet.
            DataError: the source cannot be sent; later, where a batch is taken, what is wrong with that. In this
                process what the source raises comes out as it is, from a worker as a DataError with its traceback.
            WorkerError: a worker died.
        """
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.loader needs a plan: call {self._name}.plan(*shapes) first")
        compiled = self._compiled(self._last)
        return compiled.loader(source, argnums, prefetch=prefetch, start=start, deadline_s=deadline_s)

    def trace(self, path: str | os.PathLike[str] | None = None, **options: Any) -> AbstractContextManager[Traced]:
        """Traces the steps of the last plan: see `CompiledPipeline.trace`.

        Raises:
            PlanMismatchError: there is no plan yet.
            OptionError: ``alone`` on a Ray.
        """
        if self._last is None:
            raise PlanMismatchError(f"{self._name}.trace needs a plan: call {self._name}.plan(*shapes) first")
        return self._compiled(self._last).trace(path, **options)

    def close(self) -> None:
        """Ends the workers that its plans have on a Ray, and what these hold; a later call starts them again."""
        for _, compiled in self._entries.values():
            if compiled is not None:
                compiled.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._arguments.positional(args, kwargs)
        key = self._key(args, kwargs)
        return self._compiled(key)(*without(args, self._arguments.split(args)[1]), **kwargs)

    def _key(self, args: Any, kwargs: Any) -> Any:
        """What the call's plan is kept under; it is made where there is none."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves((args, kwargs))):
            raise TraceError(
                f"{self._name} runs as a pipeline, which is no JAX program: it cannot be called under jax.jit, "
                "jax.grad or the like. Take gradients inside the step, by autopar.value_and_grad, and transform the "
                "step before autopar.parallelize"
            )
        shapes, keywords = _shapes(args), _shapes(kwargs)
        key = self._arguments.key(shapes, keywords)
        if key not in self._entries:
            argnums = self._arguments
            if self._given is not None:
                planned = self._given.bind(
                    self._fun, shapes, keywords, batch_argnums=argnums.batch_argnums,
                    static_argnums=argnums.static_argnums, donate_argnums=argnums.donate_argnums,
                )  # fmt: skip
            else:
                options = {"cluster": None, **self._options}
                if self._cluster is not None:
                    options["cluster"] = (
                        named(self._cluster) if isinstance(self._cluster, str) else self._cluster
                    ).spec
                options["cluster"] = options["cluster"] or cluster_of(None)
                planned = plan_pipeline(
                    self._fun, shapes, keywords, batch_argnums=argnums.batch_argnums,
                    static_argnums=argnums.static_argnums, donate_argnums=argnums.donate_argnums, **options,
                )  # fmt: skip
            self._entries[key] = planned, None
        self._last = key
        return key

    def _compiled(self, key: Any) -> Compiled:
        planned, compiled = self._entries[key]
        if compiled is None or compiled.closed:
            compiled = planned.compile(cluster=self._cluster)
            self._entries[key] = planned, compiled
        return compiled


def pipelined(fun: Callable[..., Any], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> PipelineStep:
    """The step of `autopar.parallelize` with ``pipeline`` or ``stages``.

    Raises OptionError for options that only plans of one mesh have.
    """
    more: Any = options["pipeline"]
    chosen: dict[str, Any] = dict(more) if isinstance(more, Mapping) else {}
    given, plan = dict(options), options["plan"]
    for name in ("pipeline", "stages", "plan"):
        given.pop(name)
    for name in ("cluster", "memory_bytes", "num_microbatches", "forbid", "on_unsupported", "donate_argnums",
                 "static_argnums", "batch_argnums"):  # fmt: skip
        chosen.setdefault(name, given.pop(name))
    for name, value in given.items():
        if value is not defaults[name] and value != defaults[name]:
            raise OptionError(f"{name}: only plans of one mesh take it; leave it out beside pipeline= or stages=")
    if options["stages"] is not None:
        chosen["num_stages"] = options["stages"]
    if plan is not None and not isinstance(plan, PlannedPipeline):
        raise OptionError(f"plan: beside pipeline= it is a PlannedPipeline (autopar.load_pipeline); got {plan!r}")
    return PipelineStep(fun, chosen, plan)


def _shapes(tree: Any) -> Any:
    """The tree with arrays as their shapes: what is planned and traced has no mesh yet."""
    return jax.tree_util.tree_map(_shape, tree)


def _shape(x: Any) -> Any:
    if not isinstance(x, jax.Array | Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
