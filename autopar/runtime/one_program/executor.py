"""A plan of one program that runs: `ProgramExecutor`. A step is one dispatch, and nests in ``jax.jit``."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding

from autopar.arrays import Array
from autopar.data import Loader, read_ahead
from autopar.frontend.trace import Traced as TracedStep
from autopar.frontend.user_rules import registered_rules
from autopar.inter_op.program.timeline import Event, Timeline, WorkerTimeline
from autopar.ir.errors import ClusterError
from autopar.ir.plan import Plan
from autopar.jax_compat import (
    Device,
    FoundSpecial,
    embedded,
    is_described,
    looks_for_specials,
)
from autopar.runtime import state
from autopar.runtime.agreement import check_agreed
from autopar.runtime.batches import Batch, StepSource
from autopar.runtime.compiling import compiler_options
from autopar.runtime.executor import Wanted
from autopar.runtime.meshes import mesh_of
from autopar.runtime.one_program.lower import LoweredStep, lower
from autopar.runtime.one_program.specials import first_special
from autopar.runtime.part import Leaf
from autopar.runtime.partition_specs import named_shardings
from autopar.runtime.pieces import put
from autopar.runtime.tracing import StepWatch, Traced, WorkerWatch, tracing

log = logging.getLogger("autopar")


class ProgramExecutor:
    """A step as one compiled program. Nothing is compiled, and no device looked for, before it is needed.

    Args:
        traced: the step that the plan is for.
        platform: of the devices that it is lowered for at first.
        devices: the mesh's device i is ``devices[i]``; None: all of this process's.
        options: compiler options, beside those that autopar needs.

    Raises:
        LoweringError, RuleError: see `lower`.
    """

    def __init__(
        self, traced: TracedStep, plan: Plan, platform: str, devices: Sequence[Device] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.traced, self.plan, self._devices, self._options = traced, plan, devices, dict(options or {})
        self._lowered = self._lower(platform)
        self._mesh: Mesh | None = None
        self._bound: Callable[..., list[Any]] | None = None
        self._compiled: Any = None
        """A compiled step. A `jax.jit` itself would compile again in the second call, where the state is no longer made
        of NumPy arrays but of sharded ones."""
        self._nested: Any = None
        self.observed: Traced | None = None

    @property
    def closed(self) -> bool:
        """False: it has no workers that may end."""
        return False

    def close(self) -> None:
        """Nothing: arrays are this process's, and go when nobody has them."""

    @property
    def mesh(self) -> Mesh:
        """The plan's mesh. Raises ClusterError where there are too few devices."""
        if self._mesh is None:
            self._mesh = mesh_of(self.plan.sharding.mesh, self.plan.cluster, self._devices)
        return self._mesh

    # --- running -----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """See `Executor`. Raises FloatingPointError where jax_debug_nans or jax_debug_infs has found something."""
        compiled = self._compiled or self.compile()
        if self.observed is not None:
            return self._traced(leaves, self.observed)
        try:
            return compiled(*leaves)
        except (TypeError, ValueError):  # other shapes, or arrays that lie elsewhere
            placed = self._placed(leaves)
            if placed is None:
                raise
            leaves = placed
        except FoundSpecial as found:
            raise self._special(leaves, found) from None
        try:
            return compiled(*leaves)
        except FoundSpecial as found:
            raise self._special(leaves, found) from None

    def nested(self, leaves: Sequence[Leaf]) -> list[Any]:
        """The step as a part of another ``jax.jit``, which takes no compiler options."""
        if self._nested is None:
            self._nested = self._jitted(top=False)
        return self._nested(*leaves)

    def sharded(self) -> Callable[..., list[Any]]:
        """The lowered step, closed-over constants put in place, as a function of its flat arguments."""
        if self._bound is None:
            mesh = self.mesh
            check_agreed(self.plan, mesh.devices.flat, self.plan.name)
            platform = mesh.devices.flat[0].platform
            if self._lowered.platform != platform:  # a plan for other devices, tried here
                self._lowered = self._lower(platform)
            consts = self.traced.jaxpr.consts
            if is_described(mesh.devices.flat[0]):
                held = [embedded(c) for c in consts]
                return lambda *leaves: self._lowered(*(c() for c in held), *leaves)
            with jax.ensure_compile_time_eval():
                placed = [jax.device_put(c, s) for c, s in zip(consts, self._inputs(), strict=False)]
            self._bound = functools.partial(self._lowered, *placed)
        return self._bound

    @functools.cached_property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        """Of the flat arguments, closed-over constants left out."""
        return tuple(self._inputs()[len(self.traced.jaxpr.consts) :])

    @functools.cached_property
    def out_shardings(self) -> list[NamedSharding]:
        """Of the flat results."""
        return named_shardings([a.spec for a in self.plan.outputs], self.mesh)

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """Of a program that is compiled by itself."""
        platform = self.mesh.devices.flat[0].platform
        return compiler_options(self.plan, platform, self._options) or None

    def _inputs(self) -> list[NamedSharding]:
        return named_shardings([a.spec for a in self.plan.inputs], self.mesh)

    def _lower(self, platform: str) -> LoweredStep:
        traced = self.traced
        return lower(traced.graph, traced.jaxpr, self.plan.sharding, platform, registered_rules(), traced.out_avals)

    def _jitted(self, top: bool) -> Any:
        """A `jax.jit` of the step on flat arguments; ``top``: it is compiled by itself, and may have options."""
        sharded = self.sharded()
        donated = tuple(i for i, gives in enumerate(self.traced.donated) if gives and not looks_for_specials())

        def run(*leaves: Any) -> list[Any]:
            return sharded(*leaves)

        run.__name__ = self.plan.name
        return jax.jit(
            run,
            compiler_options=self.compiler_options if top else None,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=donated,
        )

    def compile(self) -> Any:
        """The step on flat arguments, compiled for such as lie where the plan wants them."""
        self._refuse_described()
        log.info("compiling %s, one program for %d devices", self.plan.name, self.mesh.devices.size)
        self._compiled = self.lower().compile()
        return self._compiled

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the step on flat arguments that lie where the plan wants them, for devices that
        may only be described."""
        jitted = self._jitted(top=True)
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=getattr(a, "weak_type", False))
            for a, s in zip(self.traced.jaxpr.in_avals, self.in_shardings, strict=True)
        ]
        return jitted.lower(*shapes)

    def _placed(self, leaves: Sequence[Leaf]) -> list[Any] | None:
        """The flat arguments with arrays that lie elsewhere moved to where the plan wants them; None if none does."""
        out = list(leaves)
        moved = False
        for i, (x, sharding) in enumerate(zip(leaves, self.in_shardings, strict=True)):
            if isinstance(x, Array):  # of a pipeline
                out[i], moved = put(x.whole(), sharding), True
            elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
                if not x.sharding.is_equivalent_to(sharding, x.ndim):
                    out[i], moved = jax.device_put(x, sharding), True
        return out if moved else None

    def _special(self, leaves: Sequence[Any], found: Exception) -> FloatingPointError:
        """What to raise where jax_debug_nans or jax_debug_infs has found something."""
        traced = self.traced
        infinities = getattr(found, "ty", "nan") == "inf"
        inputs = [*traced.jaxpr.consts, *leaves]
        where = first_special(
            traced.graph, traced.jaxpr, self.plan.sharding, self.mesh, registered_rules(), inputs, infinities
        )
        kind = "an infinity" if infinities else "a NaN"
        return FloatingPointError(f"{self.plan.name}: a result holds {kind}: {where}")

    def _refuse_described(self) -> None:
        """Raises ClusterError where the mesh's devices are not there."""
        device = self.mesh.devices.flat[0]
        if is_described(device):
            raise ClusterError(
                f"{self.plan.name}: the mesh is of devices that are only described ({device.device_kind}); nothing "
                "runs there. .plan(*shapes) and .lower(*shapes).compile() need no more"
            )

    # --- state and batches -------------------------------------------------------------------------------------------

    def init(self, wanted: Wanted) -> list[Leaf]:
        """See `Executor`. Raises ClusterError where devices are only described."""
        self._refuse_described()
        return state.init(self.plan, [self.mesh], wanted)

    def abstract(self, wanted: Wanted) -> list[Any]:
        """See `Executor`: `jax.ShapeDtypeStruct`s with shardings."""
        return state.abstract(self.plan, [self.mesh], wanted)

    def loader(
        self, batch: Batch, source: StepSource, *, prefetch: int, start: Any, deadline_s: float | None
    ) -> Loader:
        """See `Executor`: each process puts what its devices read of a batch there, ahead of the step."""
        inputs = self._inputs()

        def read(given: Any, number: int) -> Any:
            found = batch.read(given, number, batch.numbers)
            return batch.of({a: put(x, inputs[a]) for a, x in found.items()})

        return read_ahead(source, read, prefetch=prefetch, start=start, deadline_s=deadline_s)

    # --- tracing -----------------------------------------------------------------------------------------------------

    def trace(
        self, path: str | os.PathLike[str] | None, *, memory: bool, alone: bool
    ) -> AbstractContextManager[Traced]:
        """See `Executor`: a step is one event."""
        return tracing(self, Traced(predicted(self.plan), memory, alone), path)

    def _traced(self, leaves: Sequence[Any], traced: Traced) -> list[Any]:
        watch = StepWatch([self.mesh.local_devices], traced.memory, traced.alone)
        made = self.watched(leaves, watch.workers[0])
        traced.steps.append(watch.timeline())
        return made

    def watched(self, leaves: Sequence[Any], watch: WorkerWatch) -> list[Any]:
        """A step that ``watch`` notes, on flat arguments."""
        compiled = self._compiled or self.compile()
        leaves = self._placed(leaves) or leaves
        jax.block_until_ready(list(leaves))
        watch.begun()
        used = compiled.memory_analysis()
        more = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
        return list(watch.call(_STEP, more, leaves, lambda: dict(enumerate(compiled(*leaves)))).values())


_STEP = "step"


def predicted(plan: Plan) -> Timeline:
    """The plan's step as a timeline."""
    p = plan.predictions
    event = Event(0.0, p.step_s, _STEP)
    worker = WorkerTimeline(
        events=(event,), busy_s=p.step_s, memory=((0.0, p.peak_memory_bytes),), peak_bytes=p.peak_memory_bytes
    )
    return Timeline(makespan_s=p.step_s, workers=(worker,), links=())
