"""A plan of one program on a Ray: every process of its mesh's hosts runs all of it (`WorkerProgram`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from autopar.arrays import Array, Piece
from autopar.frontend.layering.source import Source
from autopar.frontend.whole_step import whole_step
from autopar.ir.plan import OneProgram
from autopar.runtime.batches import Signature
from autopar.runtime.on_ray.messages import Offered, Others, Rows
from autopar.runtime.on_ray.step_part import Here, Watch
from autopar.runtime.one_program.executor import ProgramExecutor
from autopar.runtime.pieces import put

ALL: Rows = (0, 0, 0)
"""All of a value, on the only stage."""


class WorkerProgram:
    """See `StepPart`; ``source`` and ``check`` as in `WorkerStages`."""

    def __init__(self, source: Source, here: Here, check: Any) -> None:
        plan = here.job.planned
        assert isinstance(plan.body, OneProgram)
        found = whole_step(source, plan.name, keep_remat=plan.body.checkpoints)
        traced = found.traced
        check(traced.graph.fingerprint)
        self._consts = len(traced.jaxpr.consts)
        self.signature = Signature(
            num_args=len(source.args), static_argnums=source.static_argnums, batch_argnums=source.batch_argnums,
            in_tree=found.in_tree, paths=tuple(a.path for a in plan.inputs), types=tuple(a.type for a in plan.inputs),
            consts=self._consts,
        )  # fmt: skip
        self.consumed = frozenset(a for a, donated in enumerate(traced.donated, self._consts) if donated)
        devices = [here.devices[d] for d in sorted(here.devices)]
        self._executor = ProgramExecutor(traced, plan, devices[0].platform, devices, here.job.options)
        self._executor.compile()
        self._leaves: list[Any] = []

    @property
    def wanted(self) -> Mapping[int, Collection[Rows]]:
        """See `StepPart`."""
        return dict.fromkeys(range(self._consts, len(self.signature.types)), (ALL,))

    @property
    def offered(self) -> Offered:
        """See `StepPart`: nobody sends it anything but the driver."""
        return Offered()

    def place(self, argument: int, rows: Rows) -> Sharding:
        """See `StepPart`."""
        return self._executor.in_shardings[argument - self._consts]

    def connect(self, others: Others) -> None:
        """Nothing: JAX's own collectives are all that its processes exchange."""

    def begin(self, number: int, values: Mapping[int, Array]) -> None:
        """See `StepPart`."""
        donated, seen = self.consumed, set[int]()
        arrays = ((a, x.pieces[0].array) for a, x in values.items())
        found = {a: x if isinstance(x, jax.Array) else put(x, self.place(a, ALL)) for a, x in arrays}  # drawn here
        for a in sorted(found, key=lambda a: a in donated):  # what is donated is no other argument, too
            x = found[a]
            found[a] = jnp.copy(x) if a in donated and id(x) in seen else x
            seen.add(id(x))
        self._leaves = [found[a] for a in sorted(found)]

    def run(self, watch: Watch | None) -> Mapping[int, list[Piece]]:
        """See `StepPart`."""
        leaves, self._leaves = self._leaves, []
        made = self._executor(leaves) if watch is None else self._executor.watched(leaves, watch.worker)
        return {j: [Piece(*ALL, x)] for j, x in enumerate(made)}

    def sent(self) -> None:
        """Nothing leaves."""

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """See `StepPart`: its collectives are XLA's."""
        return {}

    def where(self) -> str:
        """See `StepPart`."""
        return "running the step"
