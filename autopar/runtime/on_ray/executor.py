"""The driver's side of a step on Ray: `RayExecutor` ships what workers lack, and keeps handles of what they have.

Outputs are handles (`arrays.RemoteArray`): their numbers stay on the workers. What the step does not compute, arguments
that it returns as they are, and numbers, are returned by the driver.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np

from autopar.frontend.layering.layers import Layered
from autopar.frontend.trace import Traced as TracedStep
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.ir.cluster import LogicalMesh, Platform
from autopar.ir.errors import OptionError
from autopar.ir.graph import TensorType
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.program import Program
from autopar.ir.resharding import host_at
from autopar.runtime.batches import Batch, StepSource
from autopar.runtime.executor import Wanted
from autopar.runtime.on_ray.arrays import RemoteArray, RemotePiece
from autopar.runtime.on_ray.gang import Gang
from autopar.runtime.on_ray.keeper import RayKeeper, RayTarget
from autopar.runtime.on_ray.loader import RayLoader, keepers, numbers
from autopar.runtime.on_ray.messages import Job, Live, Loaded, Made, Make, Others, Rows, Step, Stepped, packed
from autopar.runtime.on_ray.process import Process
from autopar.runtime.one_program.executor import predicted
from autopar.runtime.part import check_types, outputs, program_of
from autopar.runtime.pieces import host_of, key_implementation
from autopar.runtime.tracing import Traced, put_together, tracing

T = TypeVar("T")
LOAD_S = 600.0
"""For workers to trace and compile their stages (chosen)."""
ASK_S = 30.0
"""For what workers know at once (chosen)."""
STEP_S = 300.0
"""For a step, where the user does not say (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What the driver knows of a step that its workers run.

    Attributes:
        traced: the step in layers, or as one program.
        consts: values of the first flat arguments, which the step closed over.
        types, paths: of all flat arguments.
        consumed: arguments whose memory the step takes.
        results: types of the flat results.
        predicted: the step as it is planned, with its program if it has stages.
    """

    traced: Layered | TracedStep
    plan: Plan
    consts: tuple[Any, ...]
    types: tuple[TensorType, ...]
    paths: tuple[str, ...]
    consumed: Collection[int]
    results: tuple[TensorType, ...]

    def predicted(self) -> tuple[Timeline, Program | None]:
        """The planned step, and the program that it simulates, if it has stages."""
        if isinstance(self.traced, Layered):
            program = program_of(self.traced.graph, self.plan)[1]
            return simulate(program), program
        return predicted(self.plan), None

    def outputs(
        self, pieces: Mapping[int, list[RemotePiece]], made: Callable[[TensorType, list[RemotePiece]], Any],
        given: Callable[[int], Any],
    ) -> list[Any]:  # fmt: skip
        """The flat results; ``made``: of type and pieces, ``given``: of an argument that comes out as it went in."""
        if not isinstance(self.traced, Layered):
            return [made(t, pieces[j]) for j, t in enumerate(self.results)]
        return outputs(
            self.traced.graph, pieces, made, given,
            lambda number: np.full(number.type.shape, number.value, number.type.dtype),
        )  # fmt: skip


def handed(traced: Layered | TracedStep, plan: Plan) -> Handed:
    """What of a step and its plan the driver keeps."""
    types, paths = tuple(a.type for a in plan.inputs), tuple(a.path for a in plan.inputs)
    consts = traced.consts if isinstance(traced, Layered) else tuple(traced.jaxpr.consts)
    if isinstance(traced, Layered):
        consumed: Collection[int] = traced.graph.consumed
    else:
        consumed = frozenset(a for a, donated in enumerate(traced.donated, len(consts)) if donated)
    return Handed(
        traced=traced, plan=plan, consts=consts, types=types, paths=paths, consumed=consumed,
        results=tuple(a.type for a in plan.outputs),
    )  # fmt: skip


class RayExecutor:
    """A step of a plan on a gang of its own: call it with the step's arguments, static ones left out.

    Args:
        step: what the driver knows of it.
        job: what workers need to trace it; worker 0's.
        settings, environment, address: see `Gang`.
        deadline_s: for a step, after which the gang is killed.

        platform: of the workers' devices; None: as the plan has them.

    Raises:
        PlanMismatchError, ClusterError, WorkerError: see `Worker`, `Gang`.
    """

    def __init__(
        self, step: Handed, job: Job, settings: Mapping[str, Any],
        environment: Mapping[str, str], deadline_s: float, address: str = "", platform: Platform | None = None,
    ) -> None:  # fmt: skip
        planned = step.plan
        self.step, self.deadline_s = step, deadline_s
        self.observed: Traced | None = None
        processes = _processes(planned)
        platforms: list[Platform] = [platform or meshes[0].device.platform for meshes in _meshes(planned)]
        self.gang = Gang(
            [
                [Process(platform=platform, devices=len(ids)) for ids in mine]
                for platform, mine in zip(platforms, processes, strict=True)
            ],
            settings, environment, address,
        )  # fmt: skip
        try:
            self._connect(job, processes)
        except BaseException:
            self.gang.close()
            raise
        self._number = 0
        self._turn = threading.Lock()
        """Steps run one after the other, whichever threads call."""
        self._consts = len(step.consts)
        self._dropped: list[RemotePiece] = []
        self._shut: list[int] = []
        """Loaders that nobody has any more."""
        self._loaders, self._drawn = itertools.count(), numbers()
        self.keeper = RayKeeper(
            self.gang, self.loaded, lambda t, pieces: self._handle(t, tuple(RemotePiece(*p) for p in pieces))
        )

    def _connect(self, job: Job, processes: Sequence[tuple[tuple[int, ...], ...]]) -> None:
        """Has the workers compile the step, and tells them of each other."""
        jobs = [(replace(job, worker=w, processes=mine),) for w, mine in enumerate(processes)]
        loaded: list[list[Loaded]] = self.gang.ask_all("load", jobs, LOAD_S)
        self.loaded = [mine[0] for mine in loaded]
        self.addresses = [x.offered.address for mine in loaded for x in mine]
        """Of the workers' processes, for each other: of a mesh on several hosts, one after the other."""
        of_device = {
            d: x.offered.address
            for mine, theirs in zip(processes, loaded, strict=True)
            for ids, x in zip(mine, theirs, strict=True)
            for d in ids
        }
        others = Others(
            peers=of_device,
            types={key: t for x in self.loaded for key, t in x.offered.types.items()},
            sent=frozenset().union(*(x.offered.sent for x in self.loaded)),
        )
        self.gang.ask("connect", [(others,)] * len(processes), LOAD_S)

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' processes."""
        return tuple(self.gang.pids)

    @property
    def closed(self) -> bool:
        """True where its workers have ended."""
        return self.gang.closed

    def live(self) -> list[Live]:
        """What each worker's process holds now; of a mesh on several hosts, one after the other."""
        return [x for mine in self.gang.ask_all("live", [()] * len(self.loaded), ASK_S, late_ends=False) for x in mine]

    def sent_bytes(self) -> dict[tuple[int, int], int]:
        """(process, other process), in the order of `addresses` → bytes of values that the one has sent the other."""
        told = self.gang.ask_all("sent_bytes", [()] * len(self.loaded), ASK_S, late_ends=False)
        sent = [mapping for mine in told for mapping in mine]
        return {(i, self.addresses.index(peer)): size for i, of in enumerate(sent) for peer, size in of.items()}

    def close(self) -> None:
        """Kills the workers; their arrays are gone."""
        self.gang.close()

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """See `Executor`; returns when the step's numbers are there, on the workers.

        Raises:
            WorkerError: a worker died, failed, or the step was not done within the deadline. The gang is closed.
        """
        step = self.step
        check_types(step.plan.name, step.paths[self._consts :], step.types[self._consts :], leaves)
        values = dict(enumerate(leaves, self._consts))
        with self._turn:
            made = self._run(values)
        return self._outputs(values, made)

    def _run(self, values: Mapping[int, Any]) -> list[tuple[Made, ...]]:
        messages = self._messages(values)
        done: list[Stepped] = self.gang.ask("step", messages, self.deadline_s)
        self._number += 1
        seen = [mine.seen for mine in done if mine.seen is not None]
        if self.observed is not None and seen:
            self.observed.steps.append(put_together(self._predicted[1], seen))
        taken = {(w, n) for w, (step,) in enumerate(messages) for numbers in step.held.values() for n in numbers}
        stay = {id(x) for a, x in values.items() if a not in self.step.consumed}
        for a in self.step.consumed:
            x = values.get(a)
            if id(x) in stay:  # another argument, too, which is not donated
                continue
            if isinstance(x, RemoteArray) and x.gang is self.gang:
                x.donated()
                self._dropped += [p for p in x.pieces if (p.worker, p.number) not in taken]
            elif isinstance(x, RemoteArray):
                x.delete()
        return [mine.made for mine in done]

    def _messages(self, values: Mapping[int, Any]) -> list[tuple[Step]]:
        for x in values.values():
            if isinstance(x, RemoteArray):
                x.check()
        hosts: dict[int, np.ndarray[Any, Any]] = {}

        def host(a: int) -> np.ndarray[Any, Any]:
            if a not in hosts:
                hosts[a] = self._host(a, values[a])
            return hosts[a]

        orders: list[tuple[dict[int, dict[Rows, np.ndarray[Any, Any]]], dict[int, tuple[int, ...]]]] = []
        for w, loaded in enumerate(self.loaded):
            given: dict[int, dict[Rows, np.ndarray[Any, Any]]] = {}
            held: dict[int, tuple[int, ...]] = {}
            for a, wanted in sorted(loaded.wanted.items()):
                x = values[a]
                here = isinstance(x, RemoteArray) and x.gang is self.gang
                mine = [p for p in x.pieces if p.worker == w] if here else []
                has = {p.rows for p in mine}
                if mine:
                    held[a] = tuple(p.number for p in mine)
                for rows in sorted(wanted):
                    if rows not in has and all(p.rows[2] for p in mine):
                        _, start, stop = rows
                        given.setdefault(a, {})[rows] = host(a)[start:stop] if stop else host(a)
            orders.append((given, held))
        dropped, shut = _emptied(self._dropped), tuple(_emptied(self._shut))
        return [
            (Step(
                number=self._number, given=given, held=held, shut=shut,
                dropped=tuple(p.number for p in dropped if p.worker == w),
                watch=None if self.observed is None else "memory" if self.observed.memory else "tasks",
            ),)
            for w, (given, held) in enumerate(orders)
        ]  # fmt: skip

    def loader(
        self, batch: Batch, source: StepSource, *, prefetch: int, start: Any, deadline_s: float | None
    ) -> RayLoader:
        """See `Executor`: workers draw what they read. Raises DataError for a source that cannot be sent to them."""
        return RayLoader(
            self.gang, next(self._loaders), batch, keepers(batch, [frozenset(x.wanted) for x in self.loaded]),
            lambda a, pieces: self._handle(self.step.types[a], pieces), self._drawn, self._shut,
            source, prefetch, start, self.deadline_s if deadline_s is None else deadline_s,
        )  # fmt: skip

    def _host(self, a: int, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, RemoteArray):
            return x.host()
        t = self.step.types[a]
        if isinstance(x, jax.Array):
            return host_of(x)
        return np.asarray(x) if key_implementation(t) is not None else np.asarray(x, dtype=t.dtype)

    def trace(
        self, path: str | os.PathLike[str] | None, *, memory: bool, alone: bool
    ) -> AbstractContextManager[Traced]:
        """See `Executor`. Times of workers on several hosts are as right as these hosts' clocks.

        Raises OptionError for ``alone``: workers in processes of their own take no turns.
        """
        if alone:
            raise OptionError("alone=True: only where all meshes are in one process")
        return tracing(self, Traced(self._predicted[0], memory, alone=False), path)

    @cached_property
    def _predicted(self) -> tuple[Timeline, Program | None]:
        return self.step.predicted()

    def init(self, wanted: Wanted) -> list[Any]:
        """See `Executor`. Ray pickles the function (by cloudpickle); what no worker reads is made here.

        Raises:
            WorkerError: see `Gang`.
        """
        given = packed((wanted.args, wanted.kwargs))
        orders = [
            tuple((i, a, rows) for i, a in enumerate(wanted.numbers) for rows in sorted(x.wanted.get(a, ())))
            for x in self.loaded
        ]
        made: list[tuple[Made, ...]] = self.gang.ask(
            "make", [(Make(function=wanted.function, given=given, spots=spots),) for spots in orders], LOAD_S
        )
        pieces = self._pieces(made)

        def here(i: int) -> Any:
            return jax.jit(lambda: jax.tree_util.tree_leaves(wanted.function(*wanted.args, **wanted.kwargs))[i])()

        types = [self.step.types[a] for a in wanted.numbers]
        return [self._handle(t, tuple(pieces[i])) if i in pieces else here(i) for i, t in enumerate(types)]

    def abstract(self, wanted: Wanted) -> list[Any]:
        """See `Executor`: of each leaf, what workers want."""
        out: list[Any] = []
        for a, leaf in zip(wanted.numbers, wanted.leaves, strict=True):
            read = bool(self.keeper.wanted(a))  # else it stays with the driver
            out.append(RayTarget(self.keeper, a, self.step.types[a]) if read else leaf)
        return out

    def _handle(self, value_type: TensorType, pieces: tuple[RemotePiece, ...]) -> RemoteArray:
        return RemoteArray(self.gang, value_type, pieces, self._dropped, self.keeper)

    def _pieces(self, made: Sequence[tuple[Made, ...]]) -> dict[int, list[RemotePiece]]:
        """Output → its pieces."""
        pieces: dict[int, list[RemotePiece]] = {}
        for w, mine in enumerate(made):
            for m in mine:
                pieces.setdefault(m.output, []).append(RemotePiece(w, m.rows, m.number))
        return pieces

    def _outputs(self, values: Mapping[int, Any], made: Sequence[tuple[Made, ...]]) -> list[Any]:
        return self.step.outputs(
            self._pieces(made), lambda t, mine: self._handle(t, tuple(mine)),
            lambda a: values[a] if a >= self._consts else self.step.consts[a],
        )  # fmt: skip


def _emptied(found: list[T]) -> list[T]:
    """What was in a list, which finalizers may add to meanwhile."""
    return [found.pop() for _ in range(len(found))]


def _processes(planned: Plan) -> list[tuple[tuple[int, ...], ...]]:
    """Of each worker the devices of its mesh, by host."""
    out: list[tuple[tuple[int, ...], ...]] = []
    for meshes in _meshes(planned):
        hosts: dict[tuple[int, int], list[int]] = {}
        for d in sorted({d for mesh in meshes for d in mesh.device_ids}):
            group, host, _ = host_at(planned.cluster, d)
            hosts.setdefault((group, host), []).append(d)
        out.append(tuple(map(tuple, hosts.values())))
    return out


def _meshes(planned: Plan) -> list[list[LogicalMesh]]:
    """Of each worker, the meshes of its stages."""
    if isinstance(planned.body, OneProgram):
        return [list(planned.meshes)]
    home = planned.pipelined.plan.schedule.mesh_of_stage
    return [[m for m, w in zip(planned.meshes, home, strict=True) if w == worker] for worker in range(1 + max(home))]
