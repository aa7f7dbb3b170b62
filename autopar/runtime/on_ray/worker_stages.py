"""The stages of a pipeline that one worker has: `WorkerStages`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Sharding

from autopar.arrays import Array, Piece
from autopar.frontend.layering.layers import layered
from autopar.frontend.layering.source import Source
from autopar.ir.program import ONCE, Run
from autopar.runtime.batches import signature_of
from autopar.runtime.feeds import Feed
from autopar.runtime.interpreter import Arrays, Interpreter
from autopar.runtime.on_ray.between import Between
from autopar.runtime.on_ray.messages import Offered, Others, Rows
from autopar.runtime.on_ray.step_part import Here, Watch
from autopar.runtime.part import Begin, Part
from autopar.runtime.tape import Tape
from autopar.runtime.transports.choice import chosen


class WorkerStages:
    """See `StepPart`. ``source``: the step; ``check`` is called with the fingerprint of what it is traced as."""

    def __init__(self, source: Source, here: Here, check: Any) -> None:
        job = here.job
        self._plan, self._worker, self._local = job.planned.pipelined.plan, job.worker, here.local
        self._here = [s for s, mesh in enumerate(self._plan.schedule.mesh_of_stage) if mesh == job.worker]
        self._layered = layered(
            source.step, source.args, dict(source.kwargs), num_microbatches=source.num_microbatches,
            batch_argnums=source.batch_argnums, static_argnums=source.static_argnums,
            donate_argnums=source.donate_argnums, layers=source.layers, platform=source.platform,
        )  # fmt: skip
        check(self._layered.graph.fingerprint)
        self._part = Part(self._layered, job.planned, here.devices, self._here, job.rules, job.options)
        self.signature, self.consumed = signature_of(self._layered), self._part.graph.consumed
        self._executables = self._part.executables(job.worker)
        self._transport = chosen(here.address, job.secret, list(here.local.values()))
        self._tape: Tape | None = None
        """At the instruction that is executed."""
        self._begun: Begin | None = None

    @property
    def wanted(self) -> Mapping[int, Collection[Rows]]:
        """See `StepPart`."""
        consts = len(self._layered.consts)
        return {a: rows for a, rows in self._part.wanted().items() if a >= consts}

    @property
    def offered(self) -> Offered:
        """See `StepPart`."""
        return Offered(
            address=self._transport.address,
            types=self._part.crossing_types(),
            sent=frozenset(
                (number, v.value)
                for number, cut in enumerate(self._plan.cuts)
                if cut.source in self._here
                for v in cut.values
                if v.value in self._part.stages[cut.source].sends(cut.phase)
            ),
        )

    def place(self, argument: int, rows: Rows) -> Sharding:
        """See `StepPart`."""
        return self._part.place(argument, rows)

    def connect(self, others: Others) -> None:
        """See `StepPart`."""
        part = self._part
        self._between = Between(
            self._plan, part.program, self._worker, part.meshes, self._local, self._transport, others.peers,
            others.sent, part.exchanges(others.types),
        )  # fmt: skip

    def begin(self, number: int, values: Mapping[int, Array]) -> None:
        """See `StepPart`."""
        begun = self._begun = self._part.begin({**dict(enumerate(self._layered.consts)), **values})
        if self._tape is None:
            self._tape = Tape(begun.initial, partial(self._noted, begun.feeds))
        self._executables.start(begun.feeds)
        self._between.start(number)

    def run(self, watch: Watch | None) -> Mapping[int, list[Piece]]:
        """See `StepPart`."""
        assert self._begun is not None and self._tape is not None
        begun, self._begun = self._begun, None
        found = self._tape.play(begun.initial) if watch is None else self._watched(begun.initial, self._tape, watch)
        self._executables.start({})
        return self._part.pieces(found)

    def sent(self) -> None:
        """See `StepPart`."""
        self._transport.flush()

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """See `StepPart`."""
        return dict(self._transport.sent)

    def where(self) -> str:
        """See `StepPart`."""
        if self._tape is None:
            return f"beginning stages {self._here}"
        program = self._part.program
        instruction = program.workers[self._worker][self._tape.at]
        text = f"instruction {self._tape.at}: {program.describe(instruction)}"
        if not isinstance(instruction, Run):
            return text
        task = program.executables[instruction.executable]
        part = "" if instruction.microbatch == ONCE else f", microbatch {instruction.microbatch}"
        return f"{text}, the {task.phase.replace('forward_', 'forward and ')} of stage {task.stage}{part}"

    def _watched(self, initial: dict[int, Arrays], tape: Tape, watch: Watch) -> dict[int, Arrays]:
        """A step, task by task."""
        jax.block_until_ready(initial)
        watch.worker.begun()
        self._executables.watch, self._between.watch = watch.worker, watch.transfers
        try:
            return self._interpreter(tape).step(initial)
        finally:
            self._executables.watch = self._between.watch = None

    def _interpreter(self, tape: Tape) -> Interpreter:
        return Interpreter(self._part.program, self._worker, self._executables, self._between, tape.timer)

    def _noted(self, feeds: Mapping[int, Feed], initial: dict[int, Arrays], tape: Tape) -> dict[int, Arrays]:
        self._executables.start(feeds, tape.call)
        self._between.start(0, tape.call)
        return self._interpreter(tape).step(initial)
