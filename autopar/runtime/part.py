"""Some stages of a pipeline's step on devices of this process: what of a plan one worker, or all of them, compile.

In: values of the step's flat arguments. Out: the buffers that a step starts from (`Part.begin`), and of those that it
leaves behind the outputs' pieces (`Part.pieces`). What happens in between is the interpreter's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from autopar.arrays import Array, Piece
from autopar.frontend.layering.layers import Layered
from autopar.frontend.to_graph import tensor_type
from autopar.garbage import collection_paused
from autopar.inter_op.crossing import Exchanged, cut_resharding, exchanged
from autopar.inter_op.program.emit import emit
from autopar.inter_op.update_rounds import UpdateSchedule, update_schedule
from autopar.ir.graph import Constant, TensorType
from autopar.ir.layers import LayeredGraph, StageGraph
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.jax_compat import Device, Var, dce
from autopar.runtime.compiling import compiler_options
from autopar.runtime.feeds import Feed, Source, parts
from autopar.runtime.interpreter import Arrays
from autopar.runtime.meshes import Cuts, stage_meshes
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.pieces import put, whole_here
from autopar.runtime.stage_program import StageProgram, StageTasks, WorkerExecutables
from autopar.runtime.stages import StageLowering, layers_apart, without_repeats
from autopar.runtime.traced_once import TracedOnce

log = logging.getLogger("autopar")
Leaf = Any
"""An array of any kind, `autopar.Array` included, or a scalar of Python."""
P = TypeVar("P")
"""A piece of an output, on whichever runtime."""
Values: TypeAlias = Mapping[int, Leaf]
"""Of the step's flat arguments, closed-over constants first, those that the part reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a step starts from: ``initial``: buffer → arrays; ``feeds``: stage → what it reads of the batch."""

    initial: dict[int, Arrays]
    feeds: Mapping[int, Feed]


class Part:
    """Stages ``here``, compiled.

    Args:
        layered: the step in layers that the plan is for.
        devices: the plan's device id → the device, for the meshes of these stages at least.
        options: compiler options.

    Raises PlanMismatchError where devices are missing.
    """

    def __init__(
        self, layered: Layered, planned: Plan, devices: Mapping[int, Device], here: Collection[int],
        user_rules: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        pipelined = planned.pipelined
        self.layered, self.graph, self.plan, self.devices = layered, layered.graph, pipelined.plan, devices
        self.cluster = planned.cluster
        self.meshes = stage_meshes(self.plan, devices, here)
        layers = layers_apart(self.graph, pipelined)
        self.schedule, self.program = program_of(self.graph, planned, layers)
        self.trains = self.graph.loss >= 0
        self.stages = {
            s: StageProgram(
                StageTasks(
                    StageLowering(layered, pipelined, layers, s, mesh.devices.flat[0].platform, user_rules),
                    s,
                    self.schedule,
                ),
                mesh,
                compiler_options(planned, mesh.devices.flat[0].platform, options or {}),
            )
            for s, mesh in self.meshes.items()
        }
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            tasks = sum(len(stage.stage.runs) for stage in self.stages.values())
            log.info("%s: compiling %d tasks of %d stages", self.graph.name, tasks, len(self.stages))
            # a stage is traced while those before it are compiled
            for finish in [stage.compile(executor) for stage in self.stages.values()]:
                finish()
        self._before = self._compiled_before()
        self.cuts = Cuts(self.plan, self.program, self.meshes, devices)
        self.state_of: dict[int, int] = {}
        self.gradient_of: dict[int, int] = {}
        at = 0
        for s in range(len(self.plan.stages)):  # the order in which `emit` makes them
            for kind in ("state", "gradient") if self.trains else ("state",):
                at = next(i for i in range(at, len(self.program.buffers)) if self.program.buffers[i].kind == kind)
                (self.state_of if kind == "state" else self.gradient_of)[s] = at
                at += 1

    def crossing_types(self) -> dict[tuple[int, int], TensorType]:
        """(value, stage) → what stages of this part give in exchanges."""
        return {
            (c.value, s): self.stages[s].update.crossed(c.value, s).type
            for c in self.schedule.crossings
            for s in c.sources
            if s in self.stages
        }

    def exchanges(self, types: Mapping[tuple[int, int], TensorType]) -> tuple[Exchanged, ...]:
        """What workers get in exchanges; ``types``: `crossing_types` of all parts."""
        return exchanged(self.plan, self.schedule.crossings, types, self.cluster)

    def executables(self, worker: int) -> WorkerExecutables:
        """What worker ``worker`` runs: the tasks of its stages."""
        mine = {s: self.stages[s] for s, mesh in enumerate(self.plan.schedule.mesh_of_stage) if mesh == worker}
        return WorkerExecutables(self.plan, mine, self.schedule.rounds, self.trains, self.cuts)

    def wanted(self) -> dict[int, set[tuple[int, int, int]]]:
        """Which values the part reads: argument → (stage, start, stop); stop 0: all of it."""
        out: dict[int, set[tuple[int, int, int]]] = {}
        for s, stage in self.stages.items():
            for a, start, stop in stage.lowering.arguments:
                out.setdefault(a, set()).add((s, start, stop))
            for v in self._fed(stage):
                if v in self.graph.arguments:
                    out.setdefault(self.graph.arguments.index(v), set()).add((s, 0, 0))
        if self._before is not None and self._reads_before():
            for a in self._before[1]:
                out.setdefault(a, set()).add((min(self.stages), 0, 0))
        return out

    def place(self, argument: int, rows: tuple[int, int, int]) -> Sharding:
        """The sharding that rows (stage, start, stop) of an argument are to have."""
        stage, start, stop = rows
        program = self.stages[stage]
        wanted = program.lowering.arguments.get((argument, start, stop))
        if wanted is None:  # what is read before the layers, or cut into microbatches
            return SingleDeviceSharding(program.mesh.local_devices[0])
        return NamedSharding(program.mesh, partition_spec(wanted.spec))

    def _reads_before(self) -> bool:
        """Whether these stages read anything that is computed before the layers."""
        known = {*self.graph.arguments, self.graph.index}
        return any(
            not self._fed(stage) <= known or any(array.key[0] == "before" for array in stage.tasks["begin"].takes)
            for stage in self.stages.values()
        )

    def begin(self, values: Values) -> Begin:
        """What a step on ``values`` starts from."""
        placed = self._arguments(values)
        once = self._run_before(values)
        feeds = self._feeds(values, once)
        initial: dict[int, Arrays] = {}
        for s, stage in self.stages.items():
            state = {**placed[s], **self._once(stage, once)}
            state.update(stage.compiled["begin"](state))
            initial[self.state_of[s]] = state
            if self.trains:
                initial[self.gradient_of[s]] = stage.compiled["zeros"]({})
        return Begin(initial=initial, feeds=feeds)

    def pieces(self, found: Mapping[int, Arrays]) -> dict[int, list[Piece]]:
        """Output → its pieces on these stages. ``found``: buffer → what a step has left there."""
        pieces: dict[int, list[Piece]] = {}
        for s in self.stages:
            for (_, j, start, stop), x in found[self.state_of[s]].items():
                pieces.setdefault(j, []).append(Piece(s, start, stop, x))
        output_of = {self.graph.arguments[a]: j for a, j in self.graph.state}
        for arrays in found.values():
            for key, x in arrays.items():
                if key[0] == "copy" and key[1] in output_of:
                    pieces.setdefault(output_of[key[1]], []).append(Piece(key[2], 0, 0, x))
        return pieces

    def _arguments(self, values: Values) -> dict[int, Arrays]:
        """What each stage holds of the arguments. What is donated is no array that another one is, too."""
        out: dict[int, Arrays] = {s: {} for s in self.stages}
        taken: set[int] = set()
        donated = self.graph.consumed
        wanted = [(s, *each) for s, stage in self.stages.items() for each in stage.lowering.arguments.items()]
        for s, (a, start, stop), array in sorted(wanted, key=lambda each: each[1][0] in donated):
            sharding = NamedSharding(self.stages[s].mesh, partition_spec(array.spec))
            x = placed(values[a], s, start, stop, array.type, sharding, a in donated)
            x = jnp.copy(x) if a in donated and id(x) in taken else x
            taken.add(id(x))
            out[s][array.key] = x
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

    def _run_before(self, values: Values) -> list[Any]:
        if self._before is None or not self._reads_before():
            return []
        run, which = self._before
        first = self.meshes[min(self.stages)].local_devices[0]
        return run(*[jax.device_put(typed(_whole(values[a]), self.graph.argument_types[a]), first) for a in which])

    def _once(self, stage: StageProgram, once: Sequence[Any]) -> Arrays:
        """What a stage reads of what is computed before the layers, the same for every microbatch."""
        out: Arrays = {}
        for array in stage.tasks["begin"].takes:
            if array.key[0] == "before":
                x = once[self.graph.before_values.index(array.key[1])]
                out[array.key] = put(x, NamedSharding(stage.mesh, partition_spec(array.spec)))
        return out

    def _fed(self, stage: StageProgram) -> set[int]:
        """Values that its forward task reads of the batch."""
        received = {a.key[1] for a in stage.tasks["forward"].takes if a.key[0] == "receive"}
        return {v for v in received if v not in self.graph.makers}

    def _feeds(self, values: Values, once: Sequence[Any]) -> dict[int, Feed]:
        """Of each stage, what it reads of the batch."""
        graph, layered, n = self.graph, self.layered, self.graph.num_microbatches
        sources: dict[int, Source | None] = {graph.index: np.int32}
        whole: dict[int, Any] = {}

        def source(v: int) -> Source | None:
            """None: the same for every microbatch."""
            if v not in sources:
                if v in graph.arguments:
                    a = graph.arguments.index(v)
                    x, rows = typed(_whole(values[a]), graph.argument_types[a]), layered.rows[a]
                else:
                    b = graph.before_values.index(v)
                    x, rows = once[b], layered.before_rows[b]
                sources[v] = None if rows is None or n == 1 else parts(x, rows, n)
                whole[v] = np.array(x) if sources[v] is None and isinstance(x, np.ndarray) else x
            return sources[v]

        out: dict[int, Feed] = {}
        for stage in self.stages.values():
            fixed: Arrays = {}
            mine: dict[Any, tuple[Source, NamedSharding]] = {}
            for array in stage.tasks["forward"].takes:
                v = array.key[1]
                if array.key[0] != "receive" or v not in self._fed(stage):
                    continue
                found, sharding = source(v), NamedSharding(stage.mesh, partition_spec(array.spec))
                if found is None:
                    fixed[array.key] = put(whole[v], sharding)
                else:
                    mine[array.key] = found, sharding
            out[stage.number] = Feed(fixed, mine, n)
        return out


def program_of(
    graph: LayeredGraph, planned: Plan, layers: Sequence[StageGraph] | None = None
) -> tuple[UpdateSchedule, Program]:
    """(how the stages of a plan divide the update, the instructions of its step). ``layers``: `layers_apart`, if they
    are there. Raises VerifyError as `update_schedule` and `emit`."""
    pipelined = planned.pipelined
    schedule = update_schedule(graph, pipelined.plan.home, layers or layers_apart(graph, pipelined))
    program = emit(
        pipelined.plan,
        exchange=pipelined.exchange,
        rounds=schedule.rounds,
        transfers_of=partial(cut_resharding, cluster=planned.cluster),
    )
    program.verify()
    return schedule, program


@collection_paused()
def check_stages(
    layered: Layered, pipelined: Pipelined, platform: str, user_rules: Mapping[str, str],
    layers: Sequence[StageGraph] | None = None,
) -> None:  # fmt: skip
    """Traces what each stage runs, as on a worker; of stages, and of their layers, that run the same, the first (of
    equal layers in a row two, the others being elsewhere: `stages.without_repeats`). Needs no device. ``layers``:
    `layers_apart`, if they are there.

    Raises:
        RuleError: a user's kernel does not give on shards what its sharding rule says.
        LoweringError: an operator cannot run on its shards, or not on the plan's devices; names it.
    """
    graph, count, layers = layered.graph, len(pipelined.plan.stages), layers or layers_apart(layered.graph, pipelined)
    here = [without_repeats(graph, pipelined, layers, s) for s in range(count)]
    home = [s if k in here[s] else count for k, s in enumerate(pipelined.plan.home)]
    schedule, once = update_schedule(graph, home, layers), TracedOnce()
    stages = (
        StageTasks(StageLowering(layered, pipelined, layers, s, platform, user_rules, once, here[s]), s, schedule)
        for s in range(count)
    )
    for stage in {stage.looks: stage for stage in stages}.values():
        stage.check()


def forwarded(graph: LayeredGraph, output: int) -> int | Constant:
    """What output number ``output`` is where no stage gives it: an argument (its number), which comes out as it went
    in, or a constant."""
    o = graph.update.outputs[output]
    if not isinstance(o, int):
        return o
    argument = graph.update.inputs.index(o) - len(graph.trained) - len(graph.combined)
    assert argument >= 0, f"nothing gives output {output}"
    return argument


def outputs(
    graph: LayeredGraph, pieces: Mapping[int, list[P]], made: Callable[[TensorType, list[P]], Leaf],
    given: Callable[[int], Leaf], number: Callable[[Constant], Leaf],
) -> list[Leaf]:  # fmt: skip
    """A step's flat outputs.

    Args:
        pieces: output → its pieces, where stages have any.
        made: (type, pieces) → the output.
        given: number of an argument that comes out as it went in → the output.
        number: a constant → the output.
    """
    out: list[Leaf] = []
    for j, o in enumerate(graph.update.outputs):
        if j in pieces:
            out.append(made(graph.update.values[o] if isinstance(o, int) else o.type, pieces[j]))
            continue
        source = forwarded(graph, j)
        out.append(given(source) if isinstance(source, int) else number(source))
    return out


def leaf_rows(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    spots: Sequence[tuple[int, int, int]], where: Sequence[Sharding],
) -> list[jax.Array]:  # fmt: skip
    """Rows of leaves of what ``function(*args, **kwargs)`` returns, made by one program, of which XLA drops what makes
    the rest.

    Args:
        spots: (leaf, start, stop) of each array, stop 0 for all of the leaf.
        where: the sharding of each.
    """

    def rows() -> list[Any]:
        leaves = jax.tree_util.tree_leaves(function(*args, **kwargs))
        return [leaves[i][start:stop] if stop else leaves[i] for i, start, stop in spots]

    return jax.jit(rows, out_shardings=list(where))()


def check_types(name: str, paths: Sequence[str], types: Sequence[TensorType], leaves: Sequence[Leaf]) -> None:
    """Raises TypeError unless flat arguments have the types that the plan of step ``name`` has: NumPy's as JAX takes
    them (without x64, float64 as float32), Python's numbers where that makes the argument no other dtype."""
    for path, leaf, t in zip(paths, leaves, types, strict=True):
        if not _is_of(leaf, t):
            found = _type_of(leaf) if hasattr(leaf, "dtype") else repr(leaf)
            raise TypeError(f"{name}: {path} is {found}; the plan is for {t}")


def _is_of(leaf: Any, value_type: TensorType) -> bool:
    if not hasattr(leaf, "dtype"):
        number = isinstance(leaf, bool | int | float | complex) and value_type.shape == () and not value_type.is_key
        return number and jnp.result_type(leaf, jnp.dtype(value_type.dtype)) == jnp.dtype(value_type.dtype)
    return tensor_type(leaf) == value_type or _type_of(leaf) == value_type


def _type_of(leaf: Any) -> TensorType:
    """An array's, NumPy's as JAX takes it."""
    if isinstance(leaf, jax.Array | Array):
        return tensor_type(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return tensor_type(jax.ShapeDtypeStruct(leaf.shape, dtype))


def _whole(x: Leaf) -> Any:
    return whole_here(x.whole() if isinstance(x, Array) else x)


def typed(x: Any, value_type: TensorType) -> Any:
    """A leaf as an array of the type that the plan has it in; arrays of JAX as they are."""
    if isinstance(x, jax.Array):
        return x
    return np.asarray(x, dtype=value_type.dtype)


def placed(
    x: Leaf, stage: int, start: int, stop: int, value_type: TensorType, sharding: NamedSharding, own: bool
) -> jax.Array:
    """Rows ``start`` to ``stop`` of a leaf (stop 0: all of it) in the sharding in which stage ``stage`` wants them.
    ``own``: True where that may not be memory which another array of the step has."""
    if isinstance(x, Array):
        found = x.find(stage, start, stop, sharding)
        if found is not None:
            return found
        x = x.whole()
    if isinstance(x, jax.Array) and stop == 0 and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    x = typed(x, value_type)
    x = x[start:stop] if stop else x
    moved = put(x, sharding)
    return jnp.copy(moved) if own and isinstance(x, jax.Array) else moved
