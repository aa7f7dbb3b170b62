"""Workers in one process: their meshes, and how arrays get from one to another (`runtime.interpreter.Transport`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.inter_op.update_rounds import Crossing
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import ClusterError, PlanMismatchError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Program
from autopar.ir.sharding import ShardingSpec
from autopar.jax_compat import Device
from autopar.runtime.interpreter import Arrays
from autopar.runtime.moves import Move, Moves, Route
from autopar.runtime.tape import Call, at_once
from autopar.runtime.tracing import TransferWatch

_KEYS = {"forward": "receive", "backward": "receive", "gradient": "part", "update": "copy"}
"""What arrays of a cut are called where they arrive, by its phase."""


class Stopped(Exception):
    """Another worker failed; this one waits for nothing more."""


def mesh_of(logical: LogicalMesh, devices: Sequence[Device] | None = None) -> Mesh:
    """A logical mesh over ``devices`` (None: all of this process's backend), its device i being ``devices[i]``.

    Raises ClusterError where there are fewer devices than the mesh has.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) <= max(logical.device_ids):
        raise ClusterError(
            f"the plan's mesh {logical} needs {logical.num_devices} devices; this process sees {len(devices)} "
            f"({devices[0].platform}). Plan for the devices that are there, or, to try it on a CPU, set "
            f"JAX_NUM_CPU_DEVICES={logical.num_devices}"
        )
    array = np.array([devices[i] for i in logical.device_ids]).reshape(logical.shape)
    return Mesh(array, logical.axis_names)


def stage_meshes(plan: PipelinePlan, devices: Mapping[int, Device], here: Collection[int]) -> dict[int, Mesh]:
    """The meshes of stages ``here``, by stage; ``devices``: the plan's device id → the device.

    Raises PlanMismatchError where there are too few."""
    wanted = {d for s in here for d in plan.stages[s].mesh.device_ids}
    if not wanted <= set(devices):
        raise PlanMismatchError(
            f"the plan's stages {sorted(here)} run on {len(wanted)} devices, the last of them {max(wanted)}; this "
            f"process has {len(devices)}. Plan for this many, or give it more (JAX_NUM_CPU_DEVICES={1 + max(wanted)} "
            "on CPU)"
        )
    out: dict[int, Mesh] = {}
    for s in sorted(here):
        mesh = plan.stages[s].mesh
        out[s] = Mesh(np.array([devices[d] for d in mesh.device_ids]).reshape(mesh.shape), mesh.axis_names)
    return out


def cut_routes(plan: PipelinePlan, number: int) -> list[tuple[int, Any, Route]]:
    """What crosses in cut number ``number``: (value of the step, key of the array where it arrives, its route). Raises
    ReshardingError where partial sums would cross."""
    cut = plan.cuts[number]
    src, dst = plan.stages[cut.source].mesh, plan.stages[cut.target].mesh
    out: list[tuple[int, Any, Route]] = []
    for v in cut.values:
        at = cut.target if cut.phase == "update" else v.dst_spec
        out.append((v.value, (_KEYS[cut.phase], v.value, at), Route(v.type, src, v.src_spec, dst, v.dst_spec)))
    return out


def crossing_routes(
    plan: PipelinePlan, crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType]
) -> dict[tuple[int, int], list[tuple[Any, int, int, Route]]]:
    """What workers want of exchanges: (round, target worker) → (key, source worker, stage where it arrives, its way).

    Args:
        types: of what crosses, by value and source stage.
    """
    home = plan.schedule.mesh_of_stage
    out: dict[tuple[int, int], list[tuple[Any, int, int, Route]]] = {}
    for c in crossings:
        for target in dict.fromkeys(home[t] for t in c.targets):
            for source in c.sources:
                at = next(t for t in (*c.sources, *c.targets) if home[t] == target)
                t = types[c.value, source]
                whole = ShardingSpec(dims=((),) * len(t.shape))
                route = Route(t, plan.stages[source].mesh, whole, plan.stages[at].mesh, whole)
                out.setdefault((c.after, target), []).append((("crossing", c.value, source), home[source], at, route))
    return out


class Cuts:
    """The cuts of a plan inside this process: what has left its source → what arrives at its target, only dispatched.

    Args:
        meshes: those of this process, by stage.
    """

    def __init__(self, plan: PipelinePlan, meshes: Mapping[int, Mesh], devices: Mapping[int, Device]) -> None:
        self.moves: dict[tuple[int, int], tuple[Any, Move]] = {}
        for number, cut in enumerate(plan.cuts):
            if cut.source in meshes and cut.target in meshes:
                for value, key, route in cut_routes(plan, number):
                    move = Move(route, devices, meshes[cut.target], cut.phase == "update")
                    self.moves[value, number] = (key, move)

    def __call__(self, arrays: Arrays, call: Call) -> Arrays:
        found = dict(self.moves[value, cut] for _, value, cut in arrays)
        arrived = call(Moves(list(found.values())), list(arrays.values()), len(arrays)) if arrays else ()
        return dict(zip(found, arrived, strict=True))


class MeshTransport:
    """One step's transfers between workers of this process (`runtime.interpreter.Transport`).

    Args:
        meshes: of the stages, by stage.
        devices: the plan's device id → the device.
        cuts: brings over what crosses in cuts.
        crossings, types: what crosses in exchanges, and its types by value and source stage.
    """

    def __init__(
        self, plan: PipelinePlan, program: Program, meshes: Mapping[int, Mesh], devices: Mapping[int, Device],
        cuts: Cuts, crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType],
    ) -> None:  # fmt: skip
        self.program, self.cuts = program, cuts
        self.wanted = {
            at: [(key, source, Move(route, devices, meshes[stage])) for key, source, stage, route in rows]
            for at, rows in crossing_routes(plan, crossings, types).items()
        }
        """(round, target worker) → (key, source worker, move)."""
        self._expected: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], Arrays] = {}
        """What was sent before it was expected."""
        self._sent: dict[tuple[int, int], Arrays] = {}
        """What was sent and expected."""
        self._given: dict[tuple[int, int, int], Arrays] = {}
        self._call: Call = at_once
        self._changed = threading.Condition()
        self._failed = False
        self.changes = 0
        """How often anything was sent or given; for `wait`."""
        self.watch: TransferWatch | None = None
        """Of a step that is traced."""

    def start(self, call: Call = at_once) -> None:
        """Forgets what an earlier step sent and gave: called before a step (or before it is noted), and after one so
        that none of its arrays is kept. ``call`` dispatches, or notes what is to be (`tape.Call`)."""
        self._call = call
        for kept in (self._expected, self._waiting, self._sent, self._given):
            kept.clear()
        self._failed = False

    def fail(self) -> None:
        """Wakes all threads that wait; they raise `Stopped`."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, changes: int) -> None:
        """Returns when another thread has sent or given anything since `changes` had this value. Raises Stopped where
        another worker failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self.changes != changes)
        if self._failed:
            raise Stopped

    def _change(self) -> None:
        with self._changed:
            self.changes += 1
            self._changed.notify_all()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """See `Transport.send`. Nothing takes memory on the target before it is expected there."""
        with self._changed:
            expected = (transfer, microbatch) in self._expected
            if not expected:
                self._waiting[transfer, microbatch] = arrays
        if expected:
            self._move(transfer, microbatch, arrays)

    def expect(self, transfer: int, microbatch: int) -> None:
        """See `Transport.expect`."""
        with self._changed:
            self._expected.add((transfer, microbatch))
            arrays = self._waiting.pop((transfer, microbatch), None)
        if arrays is not None:
            self._move(transfer, microbatch, arrays)

    def _move(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        start_s = time.perf_counter()
        arrived = self.cuts(arrays, self._call)
        if self.watch is not None:
            self.watch.begun(transfer, microbatch, start_s, arrived)
        self._sent[transfer, microbatch] = arrived
        self._change()

    def arrived(self, transfer: int, microbatch: int) -> bool:
        """See `Transport.arrived`."""
        return (transfer, microbatch) in self._sent

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """See `Transport.receive`."""
        return self._sent.pop((transfer, microbatch))

    def give(self, group: int, number: int, worker: int, arrays: Arrays) -> None:
        """See `Transport.give`."""
        self._given[group, number, worker] = arrays
        self._change()

    def given(self, group: int, number: int, worker: int) -> bool:
        """See `Transport.given`."""
        return all((group, number, source) in self._given for _, source, _ in self.wanted.get((number, worker), ()))

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """See `Transport.taken`."""
        found = self.wanted.get((number, worker), ())
        given = [self._given[group, number, s][key] for key, s, _ in found]
        arrived = self._call(Moves([move for *_, move in found]), given, len(found)) if found else ()
        return dict(zip([key for key, *_ in found], arrived, strict=True))
