"""The compiled tasks of one stage, and what a worker's `Run`s do with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.inter_op.update_rounds import UpdateSchedule
from autopar.ir.errors import AutoparError
from autopar.ir.pipeline import CutPhase, CutValue, PipelinePlan
from autopar.ir.program import Executable
from autopar.runtime import updates
from autopar.runtime.feeds import Feed
from autopar.runtime.interpreter import Arrays
from autopar.runtime.one_program.lower import check_compiles
from autopar.runtime.one_program.lowering import cannot_run
from autopar.runtime.pieces import dtype_of
from autopar.runtime.stage_arrays import Array, Key, StageTask, fused, outer_shape, outer_spec
from autopar.runtime.stages import StageLowering
from autopar.runtime.tape import Call, at_once
from autopar.runtime.tracing import WorkerWatch
from autopar.runtime.update_values import UpdateValues

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class Compiled:
    """A task as it runs: arrays by key → arrays by key, in the order of ``takes`` and ``gives``."""

    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    run: Any
    """A `jax.stages.Compiled`."""
    same: tuple[tuple[Key, Key], ...] = ()
    """What it gives that it takes, by their keys."""

    def __call__(self, known: Mapping[Key, Any], call: Call = at_once) -> Arrays:
        out: Arrays = {}
        if self.gives:
            taken = [known[key] for key in self.takes]
            out.update(zip(self.gives, call(self.run, taken, len(self.gives)), strict=True))
        for key, taken in self.same:
            out[key] = known[taken]
        return out

    @property
    def more_bytes(self) -> int:
        """Bytes that a device holds beside the arguments while it runs: results in no argument's place, temporaries."""
        found = self.run.memory_analysis()
        return found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes


class StageTasks:
    """The tasks of stage ``number``, by name: ``begin``, ``forward``, ``backward`` or ``input_grad`` and
    ``weight_grad``, ``grad_sync`` where gradients are sent, ``round 0``, …; of two that are fused, what they are
    together too, by its `RunPhase`. ``runs``: the names of those that run."""

    def __init__(self, lowering: StageLowering, number: int, schedule: UpdateSchedule) -> None:
        self.lowering, self.number = lowering, number
        self.update = UpdateValues(lowering, number, schedule)
        self.tasks: dict[str, StageTask] = {"begin": lowering.begin(), "forward": lowering.forward()}
        if lowering.graph.loss >= 0:
            if lowering.splits_backward:
                self.tasks["input_grad"], self.tasks["weight_grad"] = lowering.input_grad(), lowering.weight_grad()
            else:
                self.tasks["backward"] = lowering.backward()
        gradients = updates.gradients(self.update)
        if gradients is not None:
            self.tasks["grad_sync"] = gradients
        for r, task in enumerate(updates.rounds(self.update)):
            self.tasks[f"round {r}"] = task
        parts: tuple[str, ...] = ()
        if lowering.about.fused:
            parts = "forward", "input_grad" if lowering.splits_backward else "backward"
            later = {array.key for array in self.tasks["weight_grad"].takes} if lowering.splits_backward else set[Key]()
            first, after = (self.tasks[name] for name in parts)
            self.tasks["_".join(parts)] = fused(first, after, later, lowering.platform)
        self.runs = [name for name in self.tasks if name not in parts]

    def struct(self, array: Array, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
        """The shape and dtype that an array has outside tasks."""
        shape = outer_shape(array.type, array.spec, self.lowering.axis_sizes)
        return jax.ShapeDtypeStruct(shape, dtype_of(array.type), sharding=sharding)

    @property
    def looks(self) -> Hashable:
        """Equal for stages that run the same operators on the same shards, however often."""

        def arrays(found: Sequence[Array]) -> Hashable:
            return frozenset((a.key[0], a.type, a.spec) for a in found)

        tasks = tuple((name, arrays(task.takes), arrays(task.gives)) for name, task in self.tasks.items())
        return self.lowering.about.mesh.axes, frozenset(map(self.lowering.looks, self.lowering.layers)), tasks

    def check(self) -> None:
        """Traces every task; needs no device. Raises LoweringError where an operator cannot run on its shards, or not
        on the platform; RuleError where a user's kernel does not give what its rule says."""
        for name in self.runs:
            task = self.tasks[name]
            try:
                jaxpr = jax.make_jaxpr(task.run)(*map(self.struct, task.takes))
            except AutoparError:
                raise
            except Exception as error:
                raise cannot_run(f"stage {self.number}, {name},", error) from error
            check_compiles(jaxpr.jaxpr, self.lowering.platform)


class StageProgram:
    """A stage's tasks on ``mesh``, whose axes are the stage's; `compile` compiles them.

    Args:
        options: compiler options.
    """

    def __init__(self, stage: StageTasks, mesh: Mesh, options: Mapping[str, Any]) -> None:
        self.stage, self.mesh = stage, mesh
        self.lowering, self.number, self.update, self.tasks = stage.lowering, stage.number, stage.update, stage.tasks
        self.options = options
        self.compiled: dict[str, Compiled] = {}

    def shardings(self, arrays: Iterable[Array]) -> list[NamedSharding]:
        """The shardings that arrays have outside tasks."""
        return [NamedSharding(self.mesh, outer_spec(a.spec)) for a in arrays]

    def lower(self) -> dict[str, tuple[StageTask, Any]]:
        """Name → (task, its `jax.stages.Lowered`), with what it may donate."""
        out: dict[str, tuple[StageTask, Any]] = {}
        for name in self.stage.runs:
            task = self.tasks[name]
            structs = list(map(self.stage.struct, task.takes, self.shardings(task.takes)))
            donated = tuple(i for i, a in enumerate(task.takes) if self._donates(name, task, a))
            jitted = jax.jit(
                task.run, out_shardings=self.shardings(task.gives), donate_argnums=donated, keep_unused=True,
                compiler_options=dict(self.options),
            )  # fmt: skip
            out[name] = task, jitted.lower(*structs)
        return out

    def _donates(self, name: str, task: StageTask, array: Array) -> bool:
        """Gradient sums are updated in place; arguments too, by what takes their place, if the user gives them."""
        match array.key[0]:
            case "sum":
                return name in ("backward", "weight_grad", "forward_backward")
            case "argument":
                _, a, start, stop, spec = array.key
                outputs = {out for arg, out in self.lowering.graph.state if arg == a}
                last = f"round {len(self.update.takes) - 1}"
                return name == last and a in self.lowering.graph.consumed and any(
                    g.key[0] == "output" and g.key[1] in outputs and g.key[2:] == (start, stop)
                    and (g.type, g.spec) == (array.type, spec)
                    for g in task.gives
                )  # fmt: skip
            case _:
                return False

    def sends(self, phase: CutPhase) -> set[int]:
        """Values that the stage's tasks send in cuts of a phase."""
        names: tuple[str, ...]
        match phase:
            case "forward":
                names = ("forward",)
            case "backward":
                names = ("backward", "input_grad")
            case "gradient":
                names = ("grad_sync",)
            case "update":
                names = tuple(name for name in self.tasks if name.startswith("round "))
        found = (a.key for name in names if name in self.tasks for a in self.tasks[name].gives)
        return {key[1] for key in found if key[0] == "send"}

    def compile(self, executor: Executor) -> Callable[[], None]:
        """Has ``executor`` compile all tasks, several at a time, once they are lowered; what is returned waits for them
        and puts them into ``compiled``, with ``zeros``, which makes gradient sums."""
        log.info("stage %d: tracing and compiling %d tasks", self.number, len(self.stage.runs))
        lowered = self.lower()
        made = executor.map(lambda found: found[1].compile(), lowered.values())
        return lambda: self._finish(lowered, made)

    def _finish(self, lowered: Mapping[str, tuple[StageTask, Any]], made: Iterable[Any]) -> None:
        for (name, (task, _)), run in zip(lowered.items(), made, strict=True):
            takes, gives = tuple(a.key for a in task.takes), tuple(a.key for a in task.gives)
            self.compiled[name] = Compiled(takes, gives, run, task.same)
            log.info("stage %d: %s is compiled, %d of %d", self.number, name, len(self.compiled), len(lowered))
        sums = [a for layer in self.lowering.layers if layer.tasks.backward for a in self.lowering.sums(layer)]
        shapes = [(outer_shape(a.type, a.spec, self.lowering.axis_sizes), dtype_of(a.type)) for a in sums]
        zeros = jax.jit(lambda: [jnp.zeros(*shape) for shape in shapes], out_shardings=self.shardings(sums))
        self.compiled["zeros"] = Compiled((), tuple(a.key for a in sums), zeros.lower().compile())


class WorkerExecutables:
    """What one worker runs (`runtime.interpreter.Executables`): the tasks of its stages.

    Args:
        stages: of this worker, by number.
        rounds: how often stages exchange values of the update.
        trains: True where there is a backward pass.
        reshard: brings over what crosses between stages of this worker.
    """

    def __init__(
        self, plan: PipelinePlan, stages: Mapping[int, StageProgram], rounds: int, trains: bool,
        reshard: Callable[[Arrays, Call], Arrays],
    ) -> None:  # fmt: skip
        self.stages, self.rounds, self.trains, self.reshard = stages, rounds, trains, reshard
        self.cuts: dict[tuple[int, CutPhase], list[tuple[int, tuple[CutValue, ...]]]] = {}
        for number, cut in enumerate(plan.cuts):
            self.cuts.setdefault((cut.source, cut.phase), []).append((number, cut.values))
        self.round = 0
        self.feeds: Mapping[int, Feed] = {}
        self.call: Call = at_once
        self.kept: dict[int, Arrays] = {}
        self.doing: tuple[Executable, int] | None = None
        """What runs, for which microbatch."""
        self.watch: WorkerWatch | None = None
        """Of a step that is traced."""

    def start(self, feeds: Mapping[int, Feed], call: Call = at_once) -> None:
        """Forgets what an earlier step left: called before a step (or before it is noted), and after one so that none
        of its arrays is kept. ``feeds``: stage → what it reads of the batch; ``call`` dispatches, or notes what is to
        be."""
        self.round, self.feeds, self.kept, self.call = 0, feeds, {s: {} for s in self.stages}, call

    def run(self, executable: Executable, microbatch: int, given: Sequence[Arrays], gives: int) -> list[Arrays]:
        """See `runtime.interpreter.Executables`."""
        s, phase = executable.stage, executable.phase
        self.doing = executable, microbatch
        if phase == "reshard":
            return [self._watched(given[0], lambda: self.reshard(given[0], self.call))]
        if phase == "norm":
            return [self._norm(given)]
        compiled = self.stages[s].compiled
        match phase:
            case "grad_sync":
                made = self._task(compiled[phase], given[0]) if phase in compiled else {}
                return [given[0], *self._leaving(s, "gradient", made)]
            case "update":
                return self._update(s, given)
            case _:
                fed = [self._fed(s, microbatch)] if phase.startswith("forward") else []
                made = self._task(compiled[phase], self._merged([*given, *fed]))
                for key in [key for key in made if key[0] == "combined"]:
                    self.kept[s][*key, microbatch] = made.pop(key)
                crosses: CutPhase = "forward" if phase == "forward" else "backward"
                leaving = [] if phase == "weight_grad" else self._leaving(s, crosses, made)
                rest = {key: x for key, x in made.items() if key[0] != "send"}
                stays = [rest]
                if phase.startswith("forward") and "weight_grad" in compiled:  # what that reads of it, apart
                    read = [key for key in compiled["weight_grad"].takes if key[0] == "kept" and key in rest]
                    stays.insert(phase == "forward", {key: rest.pop(key) for key in read})
                return [*(stays if self.trains else []), *leaving]

    def add(self, total: Arrays, part: Arrays) -> Arrays:
        """See `runtime.interpreter.Executables`."""
        self.doing = None
        return self._watched((total, part), lambda: self._merged([total, part]))

    def _task(self, compiled: Compiled, known: Mapping[Key, Any]) -> Arrays:
        if self.watch is None:
            return compiled(known, self.call)
        return self._watched([known[key] for key in compiled.takes], lambda: compiled(known), compiled.more_bytes)

    def _fed(self, s: int, microbatch: int) -> Arrays:
        keys = self.feeds[s].keys
        if not keys:
            return {}
        return dict(zip(keys, self.call(lambda: self.feeds[s].take(microbatch), (), len(keys)), strict=True))

    def _merged(self, given: Sequence[Arrays]) -> Arrays:
        """All arrays; parts of one value that come from several stages are added up in their order."""
        out: Arrays = {}
        for arrays in given:
            for key, x in arrays.items():
                several = key in out and key[0] in ("receive", "part")
                out[key] = self.call(_sum, (out[key], x), 1)[0] if several else x
        return out

    def _watched(self, taken: Any, run: Callable[[], Arrays], more_bytes: int = 0) -> Arrays:
        if self.watch is None:
            return run()
        what = "+" if self.doing is None else self.doing[0].label(self.doing[1])
        return self.watch.call(what, more_bytes, taken, run)

    def _norm(self, given: Sequence[Arrays]) -> Arrays:
        """A round of all stages of the worker, for an exchange."""
        count = len(self.stages)
        gradients = given[count : 2 * count] if self.trains else [{}] * count
        scalars = given[2 * count if self.trains else count :]
        out: Arrays = {}
        for s, state, gradient in zip(self.stages, given, gradients, strict=False):
            out |= self._round(s, self.round, [state, gradient, *scalars])
        self.round += 1
        return out

    def _round(self, s: int, r: int, given: Sequence[Arrays]) -> Arrays:
        known: Arrays = {}
        for arrays in (*given, self.kept[s]):
            known.update(arrays)
        made = self._task(self.stages[s].compiled[f"round {r}"], known)
        crossing = {key: made.pop(key) for key in list(made) if key[0] == "crossing"}
        self.kept[s].update(made)
        return crossing

    def _update(self, s: int, given: Sequence[Arrays]) -> list[Arrays]:
        self._round(s, self.rounds, given)
        leaving = self._leaving(s, "update", self.kept[s])
        outputs = {key: x for key, x in self.kept[s].items() if key[0] == "output"}
        self.kept[s] = {}
        return [outputs, *([{}] if self.trains else []), *leaving]

    def _leaving(self, s: int, phase: CutPhase, made: Arrays) -> list[Arrays]:
        return [
            {("send", v.value, cut): made["send", v.value] for v in values if ("send", v.value) in made}
            for cut, values in self.cuts.get((s, phase), ())
        ]


_sum = jax.jit(lambda x, y: [x + y])
