"""A pipeline plan → a step that runs on this process's devices: `InProcess`.

One thread dispatches for all workers of the plan's program, each to a mesh of its own, a task of each in turn; arrays
are real ones of JAX, and nothing waits for numbers inside a step. Each worker has a thread where tasks are waited for:
while a step is traced, and where it calls the host. See docs/decisions/017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.arrays import Array
from autopar.ir.pipeline_file import PipelineFile
from autopar.jax_compat import calls_host
from autopar.layering.layers import Layered
from autopar.program.simulate import simulate
from autopar.runtime.interpreter import Arrays, Interpreter, Steps, in_turn
from autopar.runtime.meshes import MeshTransport, Stopped
from autopar.runtime.part import Begin, Leaf, Part, Values, forwarded, typed
from autopar.runtime.tracing import StepWatch, Traced


class InProcess:
    """A step on ``devices``, the plan's device i being ``devices[i]``.

    Args:
        layered: the step in layers that the plan is for.
        options: compiler options.

    Raises PlanMismatchError where there are too few devices.
    """

    def __init__(
        self, layered: Layered, file: PipelineFile, devices: Sequence[jax.Device],
        user_rules: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.layered, self.graph, self.plan = layered, layered.graph, file.plan
        self.x64 = bool(jax.config.jax_enable_x64)
        known = dict(enumerate(devices))
        self.part = part = Part(layered, file, known, range(len(self.plan.stages)), user_rules, options)
        self.schedule, self.program = part.schedule, part.program
        self.stages = list(part.stages.values())
        self.transport = MeshTransport(
            self.plan, self.program, part.meshes, known, part.cuts, self.schedule.crossings, part.crossing_types()
        )
        self.executables = [part.executables(w) for w in range(len(self.program.workers))]
        self.interpreters = [
            Interpreter(self.program, w, mine, self.transport) for w, mine in enumerate(self.executables)
        ]
        self.traced: Traced | None = None
        codes = (layered.update, *(c for kind in layered.kinds for c in (kind.forward, *kind.joint)))
        self.waits = any(map(calls_host, codes))
        """Dispatching a task may take as long as the task."""

    # --- a step ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The step's flat outputs for its flat arguments, closed-over constants left out."""
        values = dict(enumerate([*self.layered.consts, *leaves]))
        if self.traced is None:
            dispatch = self._at_once if self.waits else self._in_turn
            return self._outputs(values, self._workers(self.part.begin(values), dispatch))
        homes = self.plan.schedule.mesh_of_stage
        meshes = [self.part.meshes[homes.index(w)] for w in range(len(self.interpreters))]
        watch = StepWatch([list(mesh.devices.flat) for mesh in meshes], self.traced.memory, self.traced.alone)
        begin = self.part.begin(values)
        jax.block_until_ready(begin.initial)
        watch.begun()
        for executables, worker in zip(self.executables, watch.workers, strict=True):
            executables.watch = worker
        self.transport.watch = watch.transfers
        try:
            out = self._outputs(values, self._workers(begin, self._at_once))
        finally:
            watch.transfers.close()
            self.transport.watch = None
            for executables in self.executables:
                executables.watch = None
        self.traced.steps.append(watch.timeline(self.program))
        return out

    def trace(self, memory: bool, alone: bool) -> Traced:
        """Traces all steps from now on, until `traced` is None again; see `CompiledPipeline.trace`."""
        self.traced = Traced(simulate(self.program), memory, alone)
        return self.traced

    def _workers(self, begin: Begin, run: Callable[[list[Steps]], list[dict[int, Arrays]]]) -> list[dict[int, Arrays]]:
        """One step of all workers."""
        self.transport.start()
        home = self.plan.schedule.mesh_of_stage
        runs: list[Steps] = []
        for w, interpreter in enumerate(self.interpreters):
            self.executables[w].start({s: feed for s, feed in begin.feeds.items() if home[s] == w})
            mine = {b: arrays for b, arrays in begin.initial.items() if self.program.buffers[b].worker == w}
            runs.append(interpreter.steps(mine))
        try:
            return run(runs)
        finally:
            self.transport.start()

    def _in_turn(self, runs: Sequence[Steps]) -> list[dict[int, Arrays]]:
        with jax.enable_x64(self.x64):
            return in_turn(runs)

    def _at_once(self, runs: Sequence[Steps]) -> list[dict[int, Arrays]]:
        """Each worker in a thread of its own."""
        with ThreadPoolExecutor(len(runs), thread_name_prefix="autopar worker") as threads:
            futures = [threads.submit(self._worker, run) for run in runs]
            errors = [e for e in (f.exception() for f in futures) if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
            raise error
        return [f.result() for f in futures]

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

    def _outputs(self, values: Values, found: Sequence[dict[int, Arrays]]) -> list[Leaf]:
        graph, update = self.graph, self.graph.update
        pieces = self.part.pieces(dict(enumerate(found)))
        out: list[Leaf] = []
        for j, o in enumerate(update.outputs):
            if j in pieces:
                mine = pieces[j]
                t = update.values[o] if isinstance(o, int) else o.type
                whole = len(mine) == 1 and mine[0].stop == 0
                out.append(mine[0].array if whole else Array(t.shape, jnp.dtype(t.dtype), tuple(mine)))
                continue
            source = forwarded(graph, j)
            if isinstance(source, int):
                x = values[source]
                out.append(x if isinstance(x, jax.Array | Array) else typed(x, graph.argument_types[source]))
            else:
                value = jnp.full(source.type.shape, source.value, jnp.dtype(source.type.dtype))
                out.append(
                    jax.device_put(value, NamedSharding(self.part.meshes[len(self.stages) - 1], PartitionSpec()))
                )
        return out
