"""Workers in one process: their meshes, and how arrays get from one to another (`runtime.interpreter.Transport`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.inter_op.update_rounds import Crossing
from autopar.ir.errors import PlanMismatchError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.program import Program
from autopar.ir.sharding import ShardingSpec
from autopar.runtime.interpreter import Arrays
from autopar.runtime.moves import Move

_KEYS = {"forward": "receive", "backward": "receive", "gradient": "part", "update": "copy"}
"""What arrays of a cut are called where they arrive, by its phase."""


class Stopped(Exception):
    """Another worker failed; this one waits for nothing more."""


def stage_meshes(plan: PipelinePlan, devices: Sequence[jax.Device]) -> list[Mesh]:
    """The mesh of each stage; the plan's device i is ``devices[i]``.

    Raises PlanMismatchError where there are too few."""
    wanted = 1 + max(d for stage in plan.stages for d in stage.mesh.device_ids)
    if wanted > len(devices):
        raise PlanMismatchError(
            f"the plan's stages run on {wanted} devices; this process has {len(devices)}. Plan for this many, or give "
            f"it more (JAX_NUM_CPU_DEVICES={wanted} on CPU)"
        )
    return [
        Mesh(np.array([devices[d] for d in s.mesh.device_ids]).reshape(s.mesh.shape), s.mesh.axis_names)
        for s in plan.stages
    ]


class Cuts:
    """The cuts of a plan: what has left its source → what arrives at its target, only dispatched."""

    def __init__(self, plan: PipelinePlan, meshes: Sequence[Mesh], devices: Sequence[jax.Device]) -> None:
        known = dict(enumerate(devices))
        self.moves: dict[tuple[int, int], tuple[Any, Move]] = {}
        for number, cut in enumerate(plan.cuts):
            src, dst = plan.stages[cut.source].mesh, plan.stages[cut.target].mesh
            for v in cut.values:
                at = cut.target if cut.phase == "update" else v.dst_spec
                key = (_KEYS[cut.phase], v.value, at)
                move = Move(v.type, src, v.src_spec, dst, v.dst_spec, known, meshes[cut.target], cut.phase == "update")
                self.moves[v.value, number] = (key, move)

    def __call__(self, arrays: Arrays) -> Arrays:
        out: Arrays = {}
        for (_, value, cut), x in arrays.items():
            key, move = self.moves[value, cut]
            out[key] = move(x)
        return out


class MeshTransport:
    """One step's transfers between workers of this process: sent by the source's thread, taken by the target's.

    Args:
        crossings: what crosses in exchanges, and its types by value and source stage.
    """

    def __init__(
        self, plan: PipelinePlan, program: Program, meshes: Sequence[Mesh], devices: Sequence[jax.Device], cuts: Cuts,
        crossings: Sequence[Crossing], types: Mapping[tuple[int, int], TensorType],
    ) -> None:  # fmt: skip
        self.program, self.cuts = program, cuts
        self.home = plan.schedule.mesh_of_stage
        known = dict(enumerate(devices))
        self.wanted: dict[tuple[int, int], list[tuple[Any, int, Move]]] = {}
        """(round, target worker) → (key, source worker, move)."""
        for c in crossings:
            for target in dict.fromkeys(self.home[t] for t in c.targets):
                for source in c.sources:
                    at = next(t for t in (*c.sources, *c.targets) if self.home[t] == target)
                    t = types[c.value, source]
                    whole = ShardingSpec(dims=((),) * len(t.shape))
                    move = Move(t, plan.stages[source].mesh, whole, plan.stages[at].mesh, whole, known, meshes[at])
                    row = (("crossing", c.value, source), self.home[source], move)
                    self.wanted.setdefault((c.after, target), []).append(row)
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int], Arrays] = {}
        self._given: dict[tuple[int, int, int], Arrays] = {}
        self._failed = False

    def start(self) -> None:
        """Before a step."""
        self._sent.clear()
        self._given.clear()
        self._failed = False

    def fail(self) -> None:
        """Wakes all who wait, with `Stopped`."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def send(self, transfer: int, microbatch: int, arrays: Arrays) -> None:
        """See `Transport.send`."""
        moved = self.cuts(arrays)
        with self._changed:
            self._sent[transfer, microbatch] = moved
            self._changed.notify_all()

    def receive(self, transfer: int, microbatch: int) -> Arrays:
        """See `Transport.receive`."""
        with self._changed:
            self._wait(lambda: (transfer, microbatch) in self._sent)
            return self._sent.pop((transfer, microbatch))

    def exchange(self, group: int, number: int, worker: int, arrays: Arrays) -> Arrays:
        """See `Transport.exchange`."""
        with self._changed:
            self._given[group, number, worker] = arrays
            self._changed.notify_all()
        out: Arrays = {}
        for key, source, move in self.wanted.get((number, worker), ()):
            with self._changed:
                self._wait(lambda source=source: (group, number, source) in self._given)
                x = self._given[group, number, source][key]
            out[key] = move(x)
        return out

    def _wait(self, ready: Any) -> None:
        self._changed.wait_for(lambda: self._failed or ready())
        if self._failed:
            raise Stopped
