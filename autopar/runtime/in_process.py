"""A pipeline plan → a step that runs on this process's devices: `InProcess`.

Each worker of the plan's program is a thread that dispatches to a mesh of its own; arrays are real ones of JAX, and
nothing waits for numbers inside a step. See docs/decisions/017.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.arrays import Array, Piece
from autopar.inter_op.stage_graph import stage_graph
from autopar.inter_op.update_rounds import update_schedule
from autopar.ir.graph import TensorType
from autopar.ir.pipeline_file import PipelineFile
from autopar.jax_compat import Var, dce
from autopar.layering.layers import Layered
from autopar.microbatch.replay import split_rows
from autopar.program.emit import emit
from autopar.runtime.interpreter import Arrays, Interpreter
from autopar.runtime.meshes import Cuts, MeshTransport, Stopped, stage_meshes
from autopar.runtime.stage_program import StageProgram, WorkerExecutables
from autopar.runtime.stages import StageLowering
from autopar.step_plan import partition_spec

Leaf = Any
"""An array of any kind, `autopar.Array` included, or a scalar of Python."""


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
        self.devices = devices
        self.x64 = bool(jax.config.jax_enable_x64)
        self.meshes = stage_meshes(self.plan, devices)
        homes = [s for s, stage in enumerate(self.plan.stages) for _ in range(stage.start, stage.stop)]
        parts = [stage_graph(self.graph, k, k + 1, [file.sharding_of(k).remat]) for k in range(len(self.graph.layers))]
        self.schedule = update_schedule(self.graph, homes, parts)
        splits = any(t.phase == "weight_grad" for tasks in self.plan.schedule.tasks for t in tasks)
        self.trains = self.graph.loss >= 0
        self.stages = [
            StageProgram(
                StageLowering(layered, file, s, mesh, user_rules, splits), s, self.schedule, homes, splits,
                options or {},
            )
            for s, mesh in enumerate(self.meshes)
        ]  # fmt: skip
        self.program = emit(self.plan, exchange=file.exchange, rounds=self.schedule.rounds)
        self.program.verify()
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            for stage in self.stages:
                stage.compile(executor)
        self._before = self._compiled_before()
        self._start_workers()
        self._consts: dict[int, Leaf] = dict(enumerate(layered.consts))

    def _start_workers(self) -> None:
        plan, cuts = self.plan, Cuts(self.plan, self.meshes, self.devices)
        types = {
            (c.value, s): self.stages[s].update.crossed(c.value, s).type
            for c in self.schedule.crossings
            for s in c.sources
        }
        self.transport = MeshTransport(
            plan, self.program, self.meshes, self.devices, cuts, self.schedule.crossings, types
        )
        self.executables: list[WorkerExecutables] = []
        self.interpreters: list[Interpreter] = []
        for w in range(len(self.program.workers)):
            mine = {s: self.stages[s] for s, mesh in enumerate(plan.schedule.mesh_of_stage) if mesh == w}
            self.executables.append(WorkerExecutables(plan, mine, self.schedule.rounds, self.trains, cuts))
            self.interpreters.append(Interpreter(self.program, w, self.executables[w], self.transport))
        self.threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"autopar worker {w}") for w in range(len(self.interpreters))
        ]
        self.state_of: dict[int, int] = {}
        self.gradient_of: dict[int, int] = {}
        at = 0
        for s in range(len(self.stages)):  # the order in which `emit` makes them
            for kind in ("state", "gradient") if self.trains else ("state",):
                at = next(i for i in range(at, len(self.program.buffers)) if self.program.buffers[i].kind == kind)
                (self.state_of if kind == "state" else self.gradient_of)[s] = at
                at += 1

    # --- a step ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The step's flat outputs for its flat arguments, closed-over constants left out."""
        values = [*self.layered.consts, *leaves]
        taken: set[int] = set()
        placed = [self._arguments(stage, values, taken) for stage in self.stages]
        once = self._run_before(values)
        feeds = self._feeds(values, once)
        initial: dict[int, Arrays] = {}
        for s, stage in enumerate(self.stages):
            state = {**placed[s], **self._once(stage, once)}
            state.update(stage.compiled["begin"](state))
            initial[self.state_of[s]] = state
            if self.trains:
                initial[self.gradient_of[s]] = stage.compiled["zeros"]({})
        found = self._workers(initial, feeds)
        return self._outputs(values, found)

    def _workers(self, initial: Mapping[int, Arrays], feeds: Sequence[Sequence[Arrays]]) -> list[dict[int, Arrays]]:
        """One step of all workers."""
        self.transport.start()
        home = self.plan.schedule.mesh_of_stage
        futures: list[Future[dict[int, Arrays]]] = []
        for w, interpreter in enumerate(self.interpreters):
            self.executables[w].start({s: feeds[s] for s in range(len(feeds)) if home[s] == w})
            mine = {b: arrays for b, arrays in initial.items() if self.program.buffers[b].worker == w}
            futures.append(self.threads[w].submit(self._worker, interpreter, mine))
        errors = [f.exception() for f in futures]
        for error in sorted((e for e in errors if e is not None), key=lambda e: isinstance(e, Stopped)):
            raise error
        return [f.result() for f in futures]

    def _worker(self, interpreter: Interpreter, initial: Mapping[int, Arrays]) -> dict[int, Arrays]:
        try:
            with jax.enable_x64(self.x64):
                return interpreter.step(initial)
        except BaseException:
            self.transport.fail()
            raise

    # --- what goes in ----------------------------------------------------------------------------------------------

    def _arguments(self, stage: StageProgram, values: Sequence[Leaf], taken: set[int]) -> Arrays:
        """What a stage holds of the arguments. ``taken``: identities of arrays that are some stage's to donate."""
        out: Arrays = {}
        donated = {a for a, _ in self.graph.donated}
        for (a, start, stop), array in stage.lowering.arguments.items():
            sharding = NamedSharding(stage.lowering.mesh, partition_spec(array.spec))
            x = placed(values[a], stage.number, start, stop, array.type, sharding, a in donated)
            if a in donated:
                x = jnp.copy(x) if id(x) in taken else x
                taken.add(id(x))
            out[array.key] = x
        return out

    def _compiled_before(self) -> tuple[Any, list[int]] | None:
        """What is computed before the layers, and which arguments it reads."""
        before = self.layered.before
        if not before.outvars:
            return None
        small = dce(before)
        read = {v for e in small.eqns for v in e.invars if isinstance(v, Var)}
        read |= {v for v in small.outvars if isinstance(v, Var)}
        which = [i for i, v in enumerate(small.invars) if v in read]

        def run(*xs: Any) -> list[Any]:
            given: list[Any] = [None] * len(small.invars)
            for i, x in zip(which, xs, strict=True):
                given[i] = x
            return jax.core.eval_jaxpr(small, [], *given)

        return jax.jit(run), which

    def _run_before(self, values: Sequence[Leaf]) -> list[Any]:
        if self._before is None:
            return []
        run, which = self._before
        first = self.devices[self.plan.stages[0].mesh.device_ids[0]]
        return run(*[jax.device_put(typed(_whole(values[a]), self.graph.argument_types[a]), first) for a in which])

    def _once(self, stage: StageProgram, once: Sequence[Any]) -> Arrays:
        """What a stage reads of what is computed before the layers, the same for every microbatch."""
        out: Arrays = {}
        for array in stage.tasks["begin"].takes:
            if array.key[0] == "before":
                x = once[self.graph.before_values.index(array.key[1])]
                out[array.key] = jax.device_put(x, NamedSharding(stage.lowering.mesh, partition_spec(array.spec)))
        return out

    def _feeds(self, values: Sequence[Leaf], once: Sequence[Any]) -> list[list[Arrays]]:
        """Of each stage and microbatch, what it reads of the batch."""
        graph, layered, n = self.graph, self.layered, self.graph.num_microbatches
        split: dict[int, Any] = {}

        def parts(v: int) -> Any:
            if v not in split:
                if v in graph.arguments:
                    a = graph.arguments.index(v)
                    x, rows = typed(_whole(values[a]), graph.argument_types[a]), layered.rows[a]
                else:
                    b = graph.before_values.index(v)
                    x, rows = once[b], layered.before_rows[b]
                split[v] = [x] * n if rows is None or n == 1 else list(split_rows(x, rows, n))
            return split[v]

        out: list[list[Arrays]] = []
        for stage in self.stages:
            wanted = [a for a in stage.tasks["forward"].takes if a.key[0] == "receive"]
            wanted = [a for a in wanted if a.key[1] not in graph.makers]
            feed: list[Arrays] = []
            for j in range(n):
                mine: Arrays = {}
                for array in wanted:
                    x = np.int32(j) if array.key[1] == graph.index else parts(array.key[1])[j]
                    sharding = NamedSharding(stage.lowering.mesh, partition_spec(array.spec))
                    mine[array.key] = jax.device_put(x, sharding)
                feed.append(mine)
            out.append(feed)
        return out

    # --- what comes out --------------------------------------------------------------------------------------------

    def _outputs(self, values: Sequence[Leaf], found: Sequence[dict[int, Arrays]]) -> list[Leaf]:
        graph, update = self.graph, self.graph.update
        pieces: dict[int, list[Piece]] = {}
        for s in range(len(self.stages)):
            arrays = found[self.plan.schedule.mesh_of_stage[s]][self.state_of[s]]
            for (_, j, start, stop), x in arrays.items():
                pieces.setdefault(j, []).append(Piece(s, start, stop, x))
        output_of = {graph.arguments[a]: j for a, j in graph.donated}
        for buffers in found:
            for arrays in buffers.values():
                for key, x in arrays.items():
                    if key[0] == "copy" and key[1] in output_of:
                        pieces.setdefault(output_of[key[1]], []).append(Piece(key[2], 0, 0, x))
        slots = {slot: i for i, slot in enumerate(update.inputs)}
        ahead = len(graph.trained) + len(graph.combined)
        out: list[Leaf] = []
        for j, o in enumerate(update.outputs):
            if j in pieces:
                mine = pieces[j]
                t = update.values[o] if isinstance(o, int) else o.type
                whole = len(mine) == 1 and mine[0].stop == 0
                out.append(mine[0].array if whole else Array(t.shape, jnp.dtype(t.dtype), tuple(mine)))
            elif not isinstance(o, int):
                mesh = self.meshes[-1]
                value = jnp.full(o.type.shape, o.value, jnp.dtype(o.type.dtype))
                out.append(jax.device_put(value, NamedSharding(mesh, PartitionSpec())))
            else:
                a = slots[o] - ahead
                assert a >= 0, f"nothing gives output {j}"
                x = values[a]
                out.append(x if isinstance(x, jax.Array | Array) else typed(x, graph.argument_types[a]))
        return out


def _whole(x: Leaf) -> Any:
    return x.whole() if isinstance(x, Array) else x


def typed(x: Any, value_type: TensorType) -> Any:
    """A leaf as an array of the type that the plan has it in."""
    if isinstance(x, jax.Array):
        return x
    return np.asarray(x, dtype=value_type.dtype)


def placed(
    x: Leaf, stage: int, start: int, stop: int, value_type: TensorType, sharding: NamedSharding, own: bool
) -> jax.Array:
    """A leaf, or rows of it, where a stage wants it. ``own``: not memory that another array of the step has."""
    if isinstance(x, Array):
        found = x.find(stage, start, stop, sharding)
        if found is not None:
            return found
        x = x.whole()
    if isinstance(x, jax.Array) and stop == 0 and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    x = typed(x, value_type)
    x = x[start:stop] if stop else x
    moved = jax.device_put(x, sharding)
    return jnp.copy(moved) if own and isinstance(x, jax.Array) else moved
