"""Workers in one process: their meshes, and how arrays get from one to another (`runtime.interpreter.Transport`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.inter_op.crossing import Exchanged
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import ClusterError, PlanMismatchError
from autopar.ir.pipeline import Cut, CutValue, PipelinePlan
from autopar.ir.program import Program
from autopar.jax_compat import Device
from autopar.runtime.interpreter import Arrays
from autopar.runtime.local_devices import in_order
from autopar.runtime.moves import Move, Moves, resharded
from autopar.runtime.tape import Call, at_once
from autopar.runtime.tracing import TransferWatch

_KEYS = {"forward": "receive", "backward": "receive", "gradient": "part", "update": "copy"}
"""What arrays of a cut are called where they arrive, by its phase."""


class Stopped(Exception):
    """Another worker failed; this one waits for nothing more."""


def mesh_of(logical: LogicalMesh, cluster: ClusterSpec, devices: Sequence[Device] | None = None) -> Mesh:
    """A cluster's logical mesh over ``devices`` (None: all of this process's backend), in the order in which the
    cluster numbers them.

    Raises ClusterError where there are fewer devices than the mesh has.
    """
    there = in_order(jax.devices() if devices is None else devices, cluster)
    if len(there) <= max(logical.device_ids):
        needs = f"the plan's mesh {logical} needs {logical.num_devices} devices"
        if devices is not None:
            raise ClusterError(f"{needs}; {len(there)} {'was' if len(there) == 1 else 'were'} given. Plan for as many")
        raise ClusterError(
            f"{needs}; this process sees {len(there)} ({there[0].platform}). Plan for the devices that are there, or, "
            f"to try it on a CPU, set JAX_NUM_CPU_DEVICES={logical.num_devices}"
        )
    array = np.array([there[i] for i in logical.device_ids]).reshape(logical.shape)
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


def arrives_as(cut: Cut, value: CutValue) -> Any:
    """The key of what a cut brings over, where it arrives."""
    return _KEYS[cut.phase], value.value, cut.target if cut.phase == "update" else value.dst_spec


def gathered(along: Move, values: Sequence[CutValue], mesh: Mesh) -> Move:
    """``along``, and what lands split further than it is wanted gathered there."""
    late = [i for i, v in enumerate(values) if v.landed is not None]
    if not late:
        return along
    gather = resharded([values[i].dst_spec for i in late], mesh)

    def move(*arrays: jax.Array) -> list[jax.Array]:
        out = along(*arrays)
        for i, x in zip(late, gather(*[out[i] for i in late]), strict=True):
            out[i] = x
        return out

    return move


def inside(plan: PipelinePlan, target: Exchanged, meshes: Mapping[int, Mesh]) -> list[tuple[Any, Move | None]]:
    """What a worker gets in an exchange of what it gave itself: (key, how it gets to its mesh; None: it is there)."""
    out: list[tuple[Any, Move | None]] = []
    for value, source in target.own:
        same = plan.stages[source].mesh == plan.stages[target.at].mesh
        out.append((("crossing", value, source), None if same else resharded(None, meshes[target.at])))
    return out


class Cuts:
    """The cuts of a plan inside this process: what has left its source → what arrives at its target, only dispatched.

    Args:
        meshes: those of this process, by stage.
        devices: the plan's device id → the device.
    """

    def __init__(
        self, plan: PipelinePlan, program: Program, meshes: Mapping[int, Mesh], devices: Mapping[int, Device]
    ) -> None:
        self._plan, self._meshes, self._devices = plan, meshes, devices
        self._reshardings = {t.cut: t.resharding for t in program.transfers}
        self._moves: dict[tuple[int, tuple[int, ...]], tuple[tuple[Any, ...], Move]] = {}
        """(cut, values) → (their keys where they arrive, how they get there)."""

    def __call__(self, arrays: Arrays, call: Call) -> Arrays:
        if not arrays:
            return {}
        [cut] = {cut for _, _, cut in arrays}
        keys, move = self._move(cut, tuple(value for _, value, _ in arrays))
        return dict(zip(keys, call(move, list(arrays.values()), len(arrays)), strict=True))

    def _move(self, number: int, values: tuple[int, ...]) -> tuple[tuple[Any, ...], Move]:
        if (number, values) not in self._moves:
            cut = self._plan.cuts[number]
            places = {v.value: i for i, v in enumerate(cut.values)}
            chosen = [cut.values[places[value]] for value in values]
            resharding = self._reshardings.get(number)
            if number not in self._reshardings:
                move = resharded([v.dst_spec for v in chosen], self._meshes[cut.target])
            else:
                assert resharding is not None, "a program that only is simulated"
                meshes = self._meshes[cut.source], self._meshes[cut.target]
                along = Moves(resharding, [places[value] for value in values], self._devices, meshes)
                move = gathered(along, chosen, self._meshes[cut.target])
            self._moves[number, values] = tuple(arrives_as(cut, v) for v in chosen), move
        return self._moves[number, values]


class MeshTransport:
    """One step's transfers between workers of this process (`runtime.interpreter.Transport`).

    Args:
        meshes: of the stages, by stage.
        devices: the plan's device id → the device.
        cuts: brings over what crosses in cuts.
        exchanges: what crosses in exchanges.
    """

    def __init__(
        self, plan: PipelinePlan, meshes: Mapping[int, Mesh], devices: Mapping[int, Device], cuts: Cuts,
        exchanges: Sequence[Exchanged],
    ) -> None:  # fmt: skip
        self._plan, self.cuts, self._meshes, self._devices = plan, cuts, meshes, devices
        self._exchanges = {(x.after, x.target): x for x in exchanges}
        self._moves = {at: self._moved(x) for at, x in self._exchanges.items()}
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
        found = self._exchanges.get((number, worker))
        home = self._plan.schedule.mesh_of_stage
        return found is None or all((group, number, home[s]) in self._given for _, s in (*found.own, *found.coming))

    def taken(self, group: int, number: int, worker: int) -> Arrays:
        """See `Transport.taken`."""
        found = self._exchanges.get((number, worker))
        if found is None:
            return {}
        home = self._plan.schedule.mesh_of_stage
        out: Arrays = {}
        given = {("crossing", v, s): self._given[group, number, home[s]] for v, s in (*found.own, *found.coming)}
        own, keys, move = self._moves[number, worker]
        for key, along in own:
            x = given[key][key]
            out[key] = x if along is None else self._call(along, (x,), 1)[0]
        arrived = () if move is None else self._call(move, [given[key][key] for key in keys], len(keys))
        return out | dict(zip(keys, arrived, strict=True))

    def _moved(self, x: Exchanged) -> tuple[list[tuple[Any, Move | None]], list[Any], Move | None]:
        home = self._plan.schedule.mesh_of_stage
        workers = [*dict.fromkeys(home[source] for _, source in x.coming), x.target]
        meshes = [self._meshes[home.index(w)] for w in workers]
        keys = [("crossing", value, source) for value, source in x.coming]
        along = x.resharding and Moves(x.resharding, range(len(keys)), self._devices, meshes)
        return inside(self._plan, x, self._meshes), keys, along
