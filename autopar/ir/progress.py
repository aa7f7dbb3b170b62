"""How far planning is, and until when it may go on: `Progress`, told to whom asked for it, and `Watch`.

A search polls its watch between pieces of work (`Watch.over`) and ends with the best that it has. What it leaves out
for that is recorded (`Watch.cut`): a plan of a search that was cut says so and is not kept for others.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far planning is.

    Attributes:
        phase: what is being done, in words.
        elapsed_s: wall seconds since the work began.
        done: pieces of the phase that are done.
        total: pieces that there are; None: not known before its end.
        best_s: predicted seconds a step of the best plan so far; None: there is none.
        left_s: seconds until the time limit; None: there is no limit.
    """

    phase: str
    elapsed_s: float
    done: int = 0
    total: int | None = None
    best_s: float | None = None
    left_s: float | None = None

    def __str__(self) -> str:
        count = "" if self.total is None else f" {self.done}/{self.total}"
        best = "" if self.best_s is None else f", best {self.best_s * 1e3:.4g} ms a step"
        left = "" if self.left_s is None else f", at most {max(0.0, self.left_s):.0f} s left"
        return f"{self.phase}{count}, {self.elapsed_s:.0f} s{best}{left}"


Tell: TypeAlias = Callable[[Progress], None]


class Stop(Protocol):
    """A flag that ends a search; of threads or of processes."""

    def is_set(self) -> bool:
        """True where the search is to end."""
        ...


@dataclass(slots=True)
class _Shared:
    tell: Tell | None = None
    began_s: float = field(default_factory=time.perf_counter)
    cut: bool = False
    interrupted: bool = False
    at_once: int = 0
    best_s: float | None = None


class Watch:
    """Until when a search may go on, and who is told how far it is.

    Args:
        limit_s: wall seconds from now on; None: no limit.
        tell: gets a `Progress` at each phase and each piece of work that is done, in the thread that plans.
        stop: another reason to end, of another process.
    """

    def __init__(self, limit_s: float | None = None, tell: Tell | None = None, stop: Stop | None = None) -> None:
        self._deadline_s = math.inf if limit_s is None else time.perf_counter() + limit_s
        self._stop, self._shared = stop, _Shared(tell)

    @property
    def left_s(self) -> float:
        """Seconds until the limit; infinite without one, below 0 after it."""
        return -math.inf if self.stopped else self._deadline_s - time.perf_counter()

    @property
    def cut(self) -> bool:
        """True where something was left out because time had ended, or Ctrl-C had come."""
        return self._shared.cut

    @property
    def interrupted(self) -> bool:
        """True where Ctrl-C came (`interruptible`)."""
        return self._shared.interrupted

    @property
    def stopped(self) -> bool:
        """True where something else than the limit ends the search: Ctrl-C, or another process."""
        return self._shared.interrupted or (self._stop is not None and self._stop.is_set())

    def over(self) -> bool:
        """True where the search is to end now. Who asks leaves something out then: the search is cut."""
        ended = self.left_s <= 0
        self._shared.cut |= ended
        return ended

    def was_cut(self) -> None:
        """Records that somebody else left something out: a solver's call, or another process."""
        self._shared.cut = True

    def part(self, share: float) -> Watch:
        """A watch over the next ``share`` (0 to 1) of the time that is left, of the same search."""
        return self._of_same(None if math.isinf(self._deadline_s) else max(0.0, share * self.left_s))

    def without_limit(self) -> Watch:
        """A watch of the same search for what is done however long it takes."""
        return self._of_same(None)

    def _of_same(self, limit_s: float | None) -> Watch:
        out = Watch(limit_s, stop=self._stop)
        out._shared = self._shared
        return out

    def tell(self, phase: str, done: int = 0, total: int | None = None) -> None:
        """Says where the search is."""
        shared = self._shared
        if shared.tell is not None:
            now_s, left_s = time.perf_counter(), self._deadline_s - time.perf_counter()
            shared.tell(
                Progress(
                    phase=phase, done=done, total=total, elapsed_s=now_s - shared.began_s, best_s=shared.best_s,
                    left_s=None if math.isinf(left_s) else left_s,
                )
            )  # fmt: skip

    def found(self, step_s: float) -> None:
        """Says that a plan was found that takes ``step_s`` seconds a step."""
        self._shared.best_s = min(step_s, math.inf if self._shared.best_s is None else self._shared.best_s)

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Meanwhile Ctrl-C raises KeyboardInterrupt the first time as well: what runs does not poll."""
        self._shared.at_once += 1
        try:
            yield
        finally:
            self._shared.at_once -= 1

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """The first Ctrl-C meanwhile ends the search with what it has, the second raises KeyboardInterrupt. Only the
        main thread gets them: in others, and where the program handles Ctrl-C itself, nothing is changed."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def interrupt(*_: object) -> None:
            again, self._shared.interrupted = self._shared.interrupted, True
            if again or self._shared.at_once:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
