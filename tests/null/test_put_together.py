"""Timelines of workers in processes of their own, as one."""

from __future__ import annotations

from autopar.inter_op.program.timeline import Event, WorkerTimeline
from autopar.ir.program import CutTransfer, Program
from autopar.runtime.tracing import Seen, put_together


def test_times_count_from_the_first_worker() -> None:
    transfers = tuple(CutTransfer(cut=5 + w, source=w, target=1 - w, time_s=0.0) for w in range(2))
    program = Program(buffers=(), executables=(), transfers=transfers, groups=(), workers=((), ()))

    def seen(zero_s: float, *crossed: tuple[int, Event]) -> Seen:
        worker = WorkerTimeline(events=(Event(0.0, 1.0, "F"),), busy_s=1.0, memory=((0.5, 8.0),), peak_bytes=9.0)
        return Seen(zero_s=zero_s, worker=worker, transfers=crossed)

    giver = seen(100.0, (0, Event(1.0, 1.5, "0.3")), (1, Event(0.0, 6.0, "1.0")))
    taker = seen(102.0, (0, Event(-1.5, 2.0, "0.3")), (1, Event(3.0, 3.5, "1.0")))
    found = put_together(program, [giver, taker])
    assert [w.events for w in found.workers] == [(Event(0.0, 1.0, "F"),), (Event(2.0, 3.0, "F"),)]
    assert [w.memory for w in found.workers] == [((0.5, 8.0),), ((2.5, 8.0),)]
    assert [w.peak_bytes for w in found.workers] == [9.0, 9.0]
    first, second = found.links
    assert first.events == (Event(1.0, 4.0, "cut 5.3"),) and first.busy_s == 3.0
    assert second.events == (Event(5.0, 6.0, "cut 6.0"),), "from when the giver began until both are done"
    assert found.makespan_s == 6.0
