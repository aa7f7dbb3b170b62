"""How a worker's arrays get to other processes (`interpreter.Transport`): each cut and each exchange is a `Crossing`.

What is fetched is waited for before anything that reads it is dispatched. XLA's CPU client lets 32 programs be in
flight on a device, and who launches one more holds a thread while it waits (`xla::Semaphore::Acquire` in
`ExecuteLaunch`, seen in the stacks of a GPT's workers with 29 values in an exchange). Programs on two devices are
launched by the client's own threads: when all of these wait so, and what is in flight waits for pieces, pieces that
arrive find no thread to run their readers, for good.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from autopar.inter_op.crossing import Exchanged
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Program
from autopar.jax_compat import Device
from autopar.runtime.crossing import STEP_BITS, Coming, Crossing
from autopar.runtime.interpreter import Arrays
from autopar.runtime.meshes import arrives_as, gathered, inside
from autopar.runtime.moves import Move
from autopar.runtime.tape import Call, at_once
from autopar.runtime.tracing import TransferWatch
from autopar.runtime.transports import Transport


class _Way(NamedTuple):
    """A crossing, and the keys of its values where they leave and where they arrive."""

    crossing: Crossing
    sent: Sequence[Any]
    arriving: Sequence[Any]
    gather: Move | None = None
    """What is made of those that have arrived, in their order."""


class Between:
    """Worker ``worker``'s transfers.

    Args:
        meshes: of this worker, by stage.
        devices: the plan's device id → the device, of this process.
        peers: device id → the address of its process, of all.
        sent: (cut, value): what stages send of what the plan has in its cuts.
        exchanges: what crosses in exchanges.
    """

    def __init__(
        self, plan: PipelinePlan, program: Program, worker: int, meshes: Mapping[int, Mesh],
        devices: Mapping[int, Device], transport: Transport, peers: Mapping[int, str],
        sent: frozenset[tuple[int, int]], exchanges: Sequence[Exchanged],
    ) -> None:  # fmt: skip
        self._transport, self._meshes = transport, meshes
        self.step = 0
        self._mine: Arrays = {}
        """What this worker gave in the exchange that it is in."""
        self._call: Call = at_once
        self.watch: TransferWatch | None = None
        """Of a step that is traced: of what is sent it sees when it was offered, of other messages when they came."""
        self._coming: dict[int, Coming] = {}
        """Number of a crossing's first message → what is on its way."""
        first = 0
        self._cuts: list[_Way] = []
        """Of each of the program's transfers."""
        for t in program.transfers:
            cut = plan.cuts[t.cut]
            assert t.resharding is not None, "a program that only is simulated"
            values = [i for i, v in enumerate(cut.values) if (t.cut, v.value) in sent]
            there = meshes[cut.target] if t.target == worker else None
            crossing = Crossing(t.resharding, values, first, devices, peers, there)
            keys = [("send", v.value, t.cut) for v in cut.values]
            here = [cut.values[i] for i in crossing.arriving]
            late = there is not None and any(v.landed is not None for v in here)
            gather = gathered(lambda *xs: list(xs), here, there) if late and there is not None else None
            self._cuts.append(_Way(crossing, keys, [arrives_as(cut, v) for v in cut.values], gather))
            first += crossing.legs * (plan.schedule.num_microbatches + 1)
        self._exchanges: dict[int, list[_Way]] = {}
        """Round → what crosses, to each worker."""
        self._inside: dict[int, list[tuple[Any, Any]]] = {}
        """Round → what this worker gets of itself."""
        for x in exchanges:
            if x.target == worker:
                self._inside[x.after] = inside(plan, x, meshes)
            if x.resharding is not None:
                keys = [("crossing", *part) for part in x.coming]
                there = meshes[x.at] if x.target == worker else None
                crossing = Crossing(x.resharding, range(len(keys)), first, devices, peers, there)
                self._exchanges.setdefault(x.after, []).append(_Way(crossing, keys, keys))
                first += crossing.legs

    def start(self, step: int, call: Call = at_once) -> None:
        """Called before step number ``step``, or before steps are noted: forgets what an earlier one expected. ``call``
        dispatches, or notes what is to be."""
        self.step, self._call = step % (1 << STEP_BITS), call
        self._coming.clear()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """See `Transport.send`."""
        start_s = time.perf_counter()
        self._offered(self._cuts[transfer], microbatch + 1, arrays)
        if self.watch is not None:
            self.watch.begun(transfer, microbatch, start_s, None)

    def expect(self, transfer: int, microbatch: int) -> None:
        """See `Transport.expect`."""
        start_s = time.perf_counter()
        crossing = self._cuts[transfer].crossing
        self._call(partial(self._fetch, crossing, microbatch + 1), (), 0)
        if self.watch is not None and crossing.arriving:
            self.watch.begun(transfer, microbatch, start_s, self._coming[crossing.number(microbatch + 1)].arrival.wait)

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """See `Transport.receive`."""
        return self._taken(self._cuts[transfer], microbatch + 1)

    def arrived(self, transfer: int, microbatch: int) -> bool:
        """See `Transport.arrived`: others have processes of their own."""
        return True

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        """See `Transport.give`."""
        self._mine = arrays
        for way in self._exchanges.get(number, ()):
            self._offered(way, 0, arrays)

    def given(self, group: int, number: int, worker: int) -> bool:
        """See `Transport.given`."""
        return True

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """See `Transport.taken`; what this worker gave itself stays in the process."""
        out: Arrays = {}
        for key, move in self._inside.get(number, ()):
            x = self._mine[key]
            out[key] = x if move is None else self._call(move, (x,), 1)[0]
        self._mine = {}
        for way in self._exchanges.get(number, ()):
            if way.crossing.arriving:
                self._call(partial(self._fetch, way.crossing, 0), (), 0)
                out |= self._taken(way, 0)
        return out

    def _offered(self, way: _Way, turn: int, arrays: Arrays) -> None:
        if way.crossing.leaving:
            given = [arrays[way.sent[v]] for v in way.crossing.leaving]
            self._call(partial(self._offer, way.crossing, turn), given, 0)

    def _taken(self, way: _Way, turn: int) -> Arrays:
        keys = [way.arriving[v] for v in way.crossing.arriving]
        arrays = self._call(partial(self._make, way.crossing, turn), (), len(keys)) if keys else ()
        if way.gather is not None:
            arrays = self._call(way.gather, arrays, len(keys))
        return dict(zip(keys, arrays, strict=True))

    def _offer(self, crossing: Crossing, turn: int, *arrays: jax.Array) -> tuple[()]:
        crossing.offer(self._transport, self.step, turn, arrays)
        return ()

    def _fetch(self, crossing: Crossing, turn: int) -> tuple[()]:
        self._coming[crossing.number(turn)] = crossing.fetch(self._transport, self.step, turn)
        return ()

    def _make(self, crossing: Crossing, turn: int) -> list[jax.Array]:
        return crossing.make(self._coming.pop(crossing.number(turn)))
