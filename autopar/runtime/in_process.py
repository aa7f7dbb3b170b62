"""A pipeline on this process's devices: `PipelineExecutor`.

One thread dispatches for all workers of the plan's program, each to a mesh of its own, a task of each in turn; arrays
are real ones of JAX, and nothing waits for numbers inside a step. Each worker has a thread where tasks are waited for:
while a step is traced, and where it calls the host. See docs/decisions/017.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.arrays import Array, Piece
from autopar.data import Loader, read_ahead
from autopar.frontend.layering.layers import Layered
from autopar.inter_op.program.simulate import simulate
from autopar.ir.graph import Constant, TensorType
from autopar.ir.plan import Plan
from autopar.jax_compat import Device, calls_host, has_x64
from autopar.runtime import state
from autopar.runtime.batches import Batch, StepSource
from autopar.runtime.executor import Wanted
from autopar.runtime.feeds import Feed
from autopar.runtime.interpreter import Arrays, Interpreter, Steps, in_turn
from autopar.runtime.meshes import MeshTransport, Stopped
from autopar.runtime.part import Begin, Leaf, Part, Values, check_types, outputs, typed
from autopar.runtime.tape import Call, Tape, at_once
from autopar.runtime.tracing import StepWatch, Traced, tracing


class PipelineExecutor:
    """A step on ``devices``, the plan's device i being ``devices[i]``. Results are `jax.Array`s on the mesh of the
    stage that made them, or `autopar.Array`s where several stages have the value; either goes back in without moving.

    Args:
        layered: the step in layers that the plan is for.
        options: compiler options.

    Raises PlanMismatchError where there are too few devices.
    """

    def __init__(
        self, layered: Layered, planned: Plan, devices: Sequence[Device],
        user_rules: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        pipelined = planned.pipelined
        self.layered, self.graph, self.planned, self.plan = layered, layered.graph, planned, pipelined.plan
        self.x64 = has_x64()
        known = dict(enumerate(devices))
        self.part = part = Part(layered, planned, known, range(len(self.plan.stages)), user_rules, options)
        self.schedule, self.program = part.schedule, part.program
        self.stages = list(part.stages.values())
        exchanges = part.exchanges(part.crossing_types())
        self.transport = MeshTransport(self.plan, part.meshes, known, part.cuts, exchanges)
        self.executables = [part.executables(w) for w in range(len(self.program.workers))]
        self.interpreters = [
            Interpreter(self.program, w, mine, self.transport) for w, mine in enumerate(self.executables)
        ]
        self._tape: Tape | None = None
        self._turn = threading.Lock()
        """Steps are dispatched one after the other, whichever threads call."""
        self.observed: Traced | None = None
        codes = (layered.update, *(c for kind in layered.kinds for c in (kind.forward, *kind.joint)))
        self.waits = any(map(calls_host, codes))
        """Dispatching a task may take as long as the task."""

    @property
    def closed(self) -> bool:
        """False: it has no workers that may end."""
        return False

    def close(self) -> None:
        """Nothing: arrays are this process's, and go when nobody has them."""

    # --- a step ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """See `Executor`."""
        graph, consts = self.graph, len(self.layered.consts)
        check_types(graph.name, graph.arg_paths[consts:], graph.argument_types[consts:], leaves)
        values = dict(enumerate([*self.layered.consts, *leaves]))
        with self._turn:
            return self._outputs(values, self._found(values))

    def _found(self, values: Values) -> dict[int, Arrays]:
        if self.observed is not None:
            return self._watched(values, self.observed)
        begin = self.part.begin(values)
        return self._in_threads(begin) if self.waits else self._played(begin)

    def trace(
        self, path: str | os.PathLike[str] | None, *, memory: bool, alone: bool
    ) -> AbstractContextManager[Traced]:
        """See `Executor`."""
        return tracing(self, Traced(simulate(self.program), memory, alone), path)

    def _played(self, begin: Begin) -> dict[int, Arrays]:
        """All workers in this thread; their calls are noted in the first step, in the order of `in_turn`."""
        with jax.enable_x64(self.x64):
            if self._tape is None:
                self._tape = Tape(begin.initial, partial(self._noted, begin.feeds))
            for executables, feeds in zip(self.executables, self._feeds(begin), strict=True):
                executables.start(feeds)
            try:
                return self._tape.play(begin.initial)
            finally:
                self._ended()

    def _noted(self, feeds: Mapping[int, Feed], initial: dict[int, Arrays], tape: Tape) -> dict[int, Arrays]:
        runs = self._started(Begin(initial=initial, feeds=feeds), tape.call)
        try:
            return _together(in_turn(runs))
        finally:
            self._ended()

    def _in_threads(self, begin: Begin) -> dict[int, Arrays]:
        """Each worker in a thread of its own."""
        runs = self._started(begin)
        try:
            with ThreadPoolExecutor(len(runs), thread_name_prefix="autopar worker") as threads:
                futures = [threads.submit(self._worker, run) for run in runs]
                errors = [e for e in (f.exception() for f in futures) if e is not None]
        finally:
            self._ended()
        for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
            raise error
        return _together([f.result() for f in futures])

    def _watched(self, values: Values, traced: Traced) -> dict[int, Arrays]:
        homes = self.plan.schedule.mesh_of_stage
        meshes = [self.part.meshes[homes.index(w)] for w in range(len(self.interpreters))]
        watch = StepWatch([list(mesh.devices.flat) for mesh in meshes], traced.memory, traced.alone)
        begin = self.part.begin(values)
        jax.block_until_ready(begin.initial)
        watch.begun()
        for executables, worker in zip(self.executables, watch.workers, strict=True):
            executables.watch = worker
        self.transport.watch = watch.transfers
        try:
            found = self._in_threads(begin)
        finally:
            self.transport.watch = None
            for executables in self.executables:
                executables.watch = None
        watch.transfers.close()
        traced.steps.append(watch.timeline(self.program))
        return found

    def _feeds(self, begin: Begin) -> list[dict[int, Feed]]:
        """Each worker's."""
        home = self.plan.schedule.mesh_of_stage
        return [{s: feed for s, feed in begin.feeds.items() if home[s] == w} for w in range(len(self.executables))]

    def _ended(self) -> None:
        """Nothing of a step is kept."""
        self.transport.start()
        for executables in self.executables:
            executables.start({})

    def _started(self, begin: Begin, call: Call = at_once) -> list[Steps]:
        """One step of each worker."""
        self.transport.start(call)
        for executables, feeds in zip(self.executables, self._feeds(begin), strict=True):
            executables.start(feeds, call)
        buffers = self.program.buffers
        return [
            interpreter.steps({b: arrays for b, arrays in begin.initial.items() if buffers[b].worker == w})
            for w, interpreter in enumerate(self.interpreters)
        ]

    def _worker(self, run: Steps) -> dict[int, Arrays]:
        try:
            with jax.enable_x64(self.x64):
                while True:
                    changes = self.transport.changes
                    if not next(run):
                        self.transport.wait(changes)
        except StopIteration as end:
            return end.value
        except BaseException:
            self.transport.fail()
            raise

    def _outputs(self, values: Values, found: Mapping[int, Arrays]) -> list[Leaf]:
        last = self.part.meshes[len(self.stages) - 1]

        def made(t: TensorType, mine: list[Piece]) -> Leaf:
            whole = len(mine) == 1 and mine[0].stop == 0
            return mine[0].array if whole else Array(t.shape, mine[0].array.dtype, tuple(mine))

        def given(argument: int) -> Leaf:
            x = values[argument]
            return x if isinstance(x, jax.Array | Array) else typed(x, self.graph.argument_types[argument])

        def number(c: Constant) -> Leaf:
            value = jnp.full(c.type.shape, np.asarray(c.value), jnp.dtype(c.type.dtype))
            return jax.device_put(value, NamedSharding(last, PartitionSpec()))

        return outputs(self.graph, self.part.pieces(found), made, given, number)

    # --- state and batches -------------------------------------------------------------------------------------------

    def loader(
        self, batch: Batch, source: StepSource, *, prefetch: int, start: Any, deadline_s: float | None
    ) -> Loader:
        """See `Executor`: batches are drawn into host memory, ahead in a thread; stages cut microbatches out of it."""

        def read(given: Any, number: int) -> Any:
            return batch.of(batch.read(given, number, batch.numbers))

        return read_ahead(source, read, prefetch=prefetch, start=start, deadline_s=deadline_s)

    def init(self, wanted: Wanted) -> list[Leaf]:
        """See `Executor`."""
        return state.init(self.planned, [stage.mesh for stage in self.stages], wanted)

    def abstract(self, wanted: Wanted) -> list[Any]:
        """See `Executor`: `jax.ShapeDtypeStruct`s with shardings, and `autopar.Array`s of such."""
        return state.abstract(self.planned, [stage.mesh for stage in self.stages], wanted)


def _together(workers: Sequence[dict[int, Arrays]]) -> dict[int, Arrays]:
    return {b: arrays for mine in workers for b, arrays in mine.items()}
