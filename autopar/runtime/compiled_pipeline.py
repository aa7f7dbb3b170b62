"""A pipeline on this process's devices, to be called as its step: what `PlannedPipeline.compile` gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.arrays import Array, Piece
from autopar.data import Loader, read_ahead
from autopar.frontend.layering.layers import Layered
from autopar.ir.plan import Plan
from autopar.jax_compat import Device
from autopar.runtime.batches import Argnums, StepSource, batch_of, checked
from autopar.runtime.in_process import InProcess
from autopar.runtime.part import argument_like, flat_arguments, leaf_rows
from autopar.runtime.partition_specs import partition_spec
from autopar.runtime.tracing import Traced, tracing


class CompiledPipeline:
    """A step, compiled: call it with the step's arguments, static ones left out.

    Leaves may be arrays of any kind. Those that come out are `jax.Array`s on the mesh of the stage that made them, or
    `autopar.Array`s where several stages have the value; either goes back in without moving.
    """

    def __init__(
        self, layered: Layered, planned: Plan, devices: Sequence[Device], user_rules: Mapping[str, str],
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.planned, self._layered = planned, layered
        self._runtime = InProcess(layered, planned.pipelined, devices, user_rules, options)

    @property
    def closed(self) -> bool:
        """False: it has no workers that may end."""
        return False

    def close(self) -> None:
        """Nothing: arrays are this process's, and go when nobody has them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step. Raises PlanMismatchError: see `flat_arguments`."""
        found = self._runtime(flat_arguments(self._layered, args, kwargs))
        return jax.tree_util.tree_unflatten(self._layered.call.out_tree, found)

    def trace(
        self, path: str | os.PathLike[str] | None = None, *, memory: bool = True, alone: bool = False
    ) -> AbstractContextManager[Traced]:
        """Within it, steps note what runs when: ``with step.trace("trace.json") as traced``.

        ``print(traced)`` shows the last step beside the simulated one: seconds, and of each worker how long it was
        busy, its bubble and its devices' peak memory; of each two meshes the time of their transfers. ``traced.steps``
        has the timelines. Traced steps wait for every task and so take a little longer.

        Args:
            path: all of them are written there for Perfetto (ui.perfetto.dev), when the block ends.
            memory: look at live arrays before and after each task, some 0.1 ms each where there are a hundred.
            alone: one task at a time, which has the machine to itself: what it takes, for the simulator.
        """
        return tracing(lambda: self._runtime.trace(memory, alone), self._runtime.end_trace, path)

    def loader(
        self, source: StepSource, argnums: Argnums = None, *, prefetch: int = 2, start: Any = 0,
        deadline_s: float | None = None,
    ) -> Loader:  # fmt: skip
        """Batches for the step, drawn ahead in a thread: see `PipelineStep.loader`. Raises DataError where ``source``,
        ``argnums``, ``prefetch`` or ``start`` cannot be used."""
        batch = batch_of(self._layered, argnums)

        def read(given: Any, number: int) -> Any:
            return batch.of(batch.read(given, number, batch.numbers))

        return read_ahead(checked(source), read, prefetch=prefetch, start=start, deadline_s=deadline_s)

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``init_fn(*args, **kwargs)``, every part of it made on the devices that the step wants it on: no device ever
        holds the whole state.

        Raises:
            PlanMismatchError: no argument of the step has the tree, shapes and dtypes of what it returns.
        """
        leaves, pieces, tree = self._wanted(init_fn, *args, **kwargs)
        made: dict[tuple[int, int], jax.Array] = {}
        for stage in sorted({piece.stage for mine in pieces for piece in mine}):
            spots = [(i, p) for i, mine in enumerate(pieces) for p in mine if p.stage == stage]
            rows = [(i, p.start, p.stop) for i, p in spots]
            found = leaf_rows(init_fn, args, kwargs, rows, [p.array.sharding for _, p in spots])
            made.update({(i, id(p)): x for (i, p), x in zip(spots, found, strict=True)})
        there = [[replace(p, array=made[i, id(p)]) for p in mine] for i, mine in enumerate(pieces)]
        return jax.tree_util.tree_unflatten(tree, list(map(_leaf, leaves, there)))

    def abstract(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `init` would return, with nothing made: `jax.ShapeDtypeStruct`s with shardings, and `autopar.Array`s of
        such. `autopar.restore` takes it. Raises as `init` does."""
        leaves, pieces, tree = self._wanted(init_fn, *args, **kwargs)
        return jax.tree_util.tree_unflatten(tree, list(map(_leaf, leaves, pieces)))

    def _wanted(
        self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], list[list[Piece]], Any]:
        """Of what ``init_fn`` returns the leaves' types, the pieces that stages want of each, and the tree."""
        leaves, tree = jax.tree_util.tree_flatten(jax.eval_shape(init_fn, *args, **kwargs))
        numbers = argument_like(self._layered, leaves, tree)
        pieces: list[list[Piece]] = [[] for _ in leaves]
        for stage in self._runtime.stages:
            for (a, start, stop), x in stage.lowering.arguments.items():
                if a not in numbers:
                    continue
                leaf = leaves[numbers.index(a)]
                shape = (stop - start, *leaf.shape[1:]) if stop else leaf.shape
                sharding = NamedSharding(stage.mesh, partition_spec(x.spec))
                there = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
                pieces[numbers.index(a)].append(Piece(stage.number, start, stop, there))
        first = SingleDeviceSharding(self._runtime.stages[0].mesh.devices.flat[0])
        for leaf, mine in zip(leaves, pieces, strict=True):
            if not mine:  # no stage reads it
                mine.append(Piece(-1, 0, 0, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)))
        return leaves, pieces, tree


def _leaf(leaf: Any, pieces: Sequence[Piece]) -> Any:
    """A leaf of its pieces."""
    if len(pieces) == 1 and pieces[0].stop == 0:
        return pieces[0].array
    return Array(leaf.shape, leaf.dtype, tuple(pieces))
