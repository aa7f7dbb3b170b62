"""What a command waits for, on stderr: a bar on a terminal, elsewhere a line at each phase and every few seconds."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from autopar.ir.progress import Progress, Tell
from autopar.ir.text import seconds_text

EVERY_S = 5.0
"""Seconds from one line to the next of a phase."""


@contextmanager
def shown(first: str) -> Generator[Tell]:
    """Shows ``first``, then what the function that it gives is told, until the end."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(first, markup=False, soft_wrap=True)
        yield _lines(console)
        return
    bar = Bar(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[more]}", markup=False), console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task(first, total=None, more="")

    def tell(now: Progress) -> None:
        more = [] if now.best_s is None else [f"best {seconds_text(now.best_s)} a step"]
        more += [] if now.left_s is None else [f"at most {max(0.0, now.left_s):.0f} s left"]
        bar.update(task, description=now.phase, completed=now.done, total=now.total, more=", ".join(more))

    with bar:
        yield tell


def _lines(console: Console) -> Tell:
    last_s, phase = 0.0, ""

    def tell(now: Progress) -> None:
        nonlocal last_s, phase
        if now.phase != phase or time.monotonic() - last_s >= EVERY_S:
            last_s, phase = time.monotonic(), now.phase
            console.print(str(now), markup=False, soft_wrap=True)

    return tell
