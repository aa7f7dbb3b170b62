"""A step that ends the worker that runs it: once, at a place that is given. What it patches is the worker's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

Place = str
"""forward, stall (likewise, but the process stops rather than dies), transfer (a chunk of a large array), message
(of a small one), relay (a chunk that is passed on), checkpoint."""


_ARMED: list[bool] = []


def before_forward(act: Callable[[int], None]) -> None:
    """Has stages that this process compiles call ``act`` with their number before each forward task."""
    from autopar.runtime.stage_program import StageProgram

    finish = StageProgram._finish  # type: ignore[attr-defined]

    def finished(it: StageProgram, *lowered: Any) -> None:
        finish(it, *lowered)
        name = next(name for name in it.compiled if name.startswith("forward"))  # fused with the next one, perhaps
        forward = it.compiled[name]

        def run(*arrays: Any) -> Any:
            act(it.number)
            return forward.run(*arrays)

        it.compiled[name] = replace(forward, run=run)

    StageProgram._finish = finished  # type: ignore[attr-defined]


class Saboteur:
    """``step``, which at its ``at``-th forward task, arrival or write of a checkpoint in a worker's process ends that
    process, unless ``flag`` is there: then it has happened. ``flag`` has the process's number."""

    def __init__(self, step: Callable[..., Any], place: Place, at: int, flag: Path) -> None:
        self.step, self.place, self.at, self.flag, self.driver = step, place, at, flag, os.getpid()
        self.__name__ = "sabotaged"

    def __call__(self, state: Any, batch: Any) -> Any:
        if os.getpid() != self.driver and not _ARMED and not self.flag.exists():  # a step is traced several times
            _ARMED.append(True)
            self._arm()
        return self.step(state, batch)

    def _arm(self) -> None:
        from autopar.runtime import transports
        from autopar.runtime.on_ray import archive
        from autopar.runtime.transports.wire import Wire

        count = 0

        def passes() -> None:
            nonlocal count
            count += 1
            if count == self.at:
                self._end()

        match self.place:
            case "forward" | "stall":
                before_forward(lambda _: passes())
            case "transfer" | "message":
                came = Wire.came

                def arrived(it: Any, *given: Any, **how: Any) -> None:
                    came(it, *given, **how)
                    passes()

                Wire.came = arrived
                if self.place == "transfer":
                    transports.SMALL_BYTES = -1  # in all workers: nothing is sent without asking
            case "relay":
                landed = Wire._landed

                def passed_on(it: Any, landing: Any, chunk: int) -> None:
                    landed(it, landing, chunk)
                    if landing.relays:
                        passes()

                Wire._landed = passed_on
            case "checkpoint":
                write = archive.write_slices

                def half(folder: Any, writer: Any, slices: Any) -> int:
                    slices = list(slices)
                    write(folder, writer, slices[: 1 + len(slices) // 2])
                    passes()
                    return write(folder, writer, slices[1 + len(slices) // 2 :])

                archive.write_slices = half
            case _:
                raise AssertionError(self.place)

    def _end(self) -> None:
        try:
            with self.flag.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:  # the other worker was first
            return
        os.kill(os.getpid(), signal.SIGSTOP if self.place == "stall" else signal.SIGKILL)
