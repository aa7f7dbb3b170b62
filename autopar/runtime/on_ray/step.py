"""The driver's side of a step on Ray: `RayStep` ships what workers lack, and keeps handles of what they have.

Outputs are `RemoteArray`s: they stay on the workers, are fetched when their numbers are asked for, and go back into the
step without moving. A handle that is dropped lets go of its arrays with the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.ir.errors import PlanMismatchError, WorkerError
from autopar.ir.graph import TensorType
from autopar.ir.pipeline_file import PipelineFile
from autopar.layering.layers import Layered
from autopar.runtime.on_ray.gang import Gang
from autopar.runtime.on_ray.keeper import RayKeeper, RayTarget
from autopar.runtime.on_ray.messages import Job, Loaded, Made, Others, Rows, Step
from autopar.runtime.part import argument_like, forwarded
from autopar.runtime.pieces import array_of, host_of, key_implementation

LOAD_S = 600.0
"""For workers to trace and compile their stages (chosen)."""
FETCH_S = 120.0
"""For arrays to come to the driver (chosen)."""
STEP_S = 300.0
"""For a step, where the user does not say (chosen)."""


class RemotePiece(NamedTuple):
    """Rows of a value that worker ``worker`` keeps as array ``number``."""

    worker: int
    rows: Rows
    number: int


class RemoteArray:
    """A leaf of what a step on Ray takes and gives; it lies on the workers.

    Attributes:
        shape, dtype: as of an array.
        pieces: what is where.
    """

    def __init__(
        self, gang: Gang, value_type: TensorType, pieces: tuple[RemotePiece, ...], dropped: list[Any],
        keeper: RayKeeper,
    ) -> None:  # fmt: skip
        self.keeper = keeper
        self.type, self.pieces, self.gang = value_type, pieces, gang
        self.shape = value_type.shape
        keys = key_implementation(value_type) is not None
        self.dtype = jax.random.key(0).dtype if keys else jax.numpy.dtype(value_type.dtype)
        self.deleted = False
        weakref.finalize(self, dropped.extend, pieces)

    def fetch(self) -> Any:
        """The value: a NumPy array, for keys one of JAX. Raises WorkerError as a step does, and where a step that
        donates it has run."""
        host = self.host()
        return host if key_implementation(self.type) is None else array_of(self.type, host, jax.devices()[0])

    def host(self) -> np.ndarray[Any, Any]:
        """The value in host memory, for keys their data."""
        if self.deleted:
            raise WorkerError(f"{self!r} was donated to a step and is gone")
        whole = next((piece for piece in self.pieces if piece.rows[2] == 0), None)
        wanted = [whole] if whole is not None else self._by_rows()
        numbers = [tuple(p.number for p in wanted if p.worker == w) for w in range(len(self.gang.pids))]
        answers = self.gang.ask("fetch", [(n,) for n in numbers], FETCH_S)
        found = {(w, n): x for w, mine in enumerate(numbers) for n, x in zip(mine, answers[w], strict=True)}
        parts = [found[piece.worker, piece.number] for piece in wanted]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _by_rows(self) -> list[RemotePiece]:
        at, out = 0, list[RemotePiece]()
        for piece in sorted(self.pieces, key=lambda p: p.rows[1:]):
            if piece.rows[1] == at:
                at = piece.rows[2]
                out.append(piece)
        assert at == self.shape[0], f"no worker has rows {at} up of {self!r}"
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = np.asarray(self.fetch())
        return found if dtype is None else found.astype(dtype)

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __repr__(self) -> str:
        return f"RemoteArray({self.dtype}{list(self.shape)} on workers {sorted({p.worker for p in self.pieces})})"


class RayStep:
    """A step of a plan on a gang of its own: call it with the step's arguments, static ones left out.

    Args:
        layered, file: the step in layers and its plan.
        job: what workers need to trace it; worker 0's.
        deadline_s: for a step, after which the gang is killed.

    Raises:
        PlanMismatchError, ClusterError, WorkerError: see `Worker`, `Gang`.
    """

    def __init__(
        self, layered: Layered, file: PipelineFile, job: Job, environment: Mapping[str, str], deadline_s: float
    ) -> None:
        self.layered, self.graph, self.deadline_s = layered, layered.graph, deadline_s
        homes = file.plan.schedule.mesh_of_stage
        devices = [
            sorted({d for s, stage in enumerate(file.plan.stages) if homes[s] == w for d in stage.mesh.device_ids})
            for w in range(1 + max(homes))
        ]
        self.gang = Gang([len(mine) for mine in devices], environment)
        jobs = [(replace(job, worker=w),) for w in range(len(devices))]
        self.loaded: list[Loaded] = self.gang.ask("load", jobs, LOAD_S)
        others = Others(
            peers={d: x.address for mine, x in zip(devices, self.loaded, strict=True) for d in mine},
            types={key: t for x in self.loaded for key, t in x.types.items()},
            sent=frozenset().union(*(x.sent for x in self.loaded)),
        )
        self.gang.ask("connect", [(others,)] * len(devices), LOAD_S)
        self._number = 0
        self._consts = len(layered.consts)
        self._dropped: list[RemotePiece] = []
        self.keeper = RayKeeper(
            self.gang, self.loaded, lambda t, pieces: self._handle(t, tuple(RemotePiece(*p) for p in pieces))
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' processes."""
        return tuple(self.gang.pids)

    def close(self) -> None:
        """Kills the workers; their arrays are gone."""
        self.gang.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step; returns when its numbers are there, on the workers.

        Raises:
            PlanMismatchError: arguments of another tree or other shapes than the plan's.
            WorkerError: a worker died, failed, or the step was not done within the deadline. The gang is closed.
        """
        call, graph = self.layered.call, self.graph
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, RemoteArray))
        types = graph.argument_types[self._consts :]
        if tree != call.in_tree:
            raise PlanMismatchError(f"{graph.name}: the plan is for arguments {call.in_tree}; got {tree}. Plan again")
        for path, leaf, t in zip(call.arg_paths, leaves, types, strict=True):
            if tuple(np.shape(leaf) if not hasattr(leaf, "shape") else leaf.shape) != t.shape:
                raise PlanMismatchError(f"{graph.name}: {path} has shape {list(np.shape(leaf))}; the plan is for {t}")
        values = dict(enumerate(leaves, self._consts))
        made: list[tuple[Made, ...]] = self.gang.ask("step", self._messages(values), self.deadline_s)
        self._number += 1
        for a, _ in graph.donated:
            x = values.get(a)
            if isinstance(x, RemoteArray):
                x.deleted = True
        return jax.tree_util.tree_unflatten(call.out_tree, self._outputs(values, made))

    def _messages(self, values: Mapping[int, Any]) -> list[tuple[Step]]:
        dropped, self._dropped[:] = list(self._dropped), []
        hosts: dict[int, np.ndarray[Any, Any]] = {}

        def host(a: int) -> np.ndarray[Any, Any]:
            if a not in hosts:
                hosts[a] = self._host(a, values[a])
            return hosts[a]

        out: list[tuple[Step]] = []
        for w, loaded in enumerate(self.loaded):
            given: dict[int, dict[Rows, np.ndarray[Any, Any]]] = {}
            held: dict[int, tuple[int, ...]] = {}
            for a, wanted in sorted(loaded.wanted.items()):
                x = values[a]
                if isinstance(x, RemoteArray) and x.deleted:
                    raise WorkerError(f"{self.layered.call.arg_paths[a - self._consts]}: {x!r} was donated and is gone")
                mine = (
                    [p for p in x.pieces if p.worker == w] if isinstance(x, RemoteArray) and x.gang is self.gang else []
                )
                has = {p.rows for p in mine}
                if mine:
                    held[a] = tuple(p.number for p in mine)
                for rows in sorted(wanted):
                    if rows not in has and all(p.rows[2] for p in mine):
                        _, start, stop = rows
                        given.setdefault(a, {})[rows] = host(a)[start:stop] if stop else host(a)
            step = Step(
                number=self._number, given=given, held=held, dropped=tuple(p.number for p in dropped if p.worker == w)
            )
            out.append((step,))
        return out

    def _host(self, a: int, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, RemoteArray):
            return x.host()
        t = self.graph.argument_types[a]
        if isinstance(x, jax.Array):
            return host_of(x)
        return np.asarray(x) if key_implementation(t) is not None else np.asarray(x, dtype=t.dtype)

    def abstract(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``init_fn(*args, **kwargs)`` returns, as `autopar.restore` takes it: of each leaf, what workers want.

        Raises:
            PlanMismatchError: no argument of the step has the tree, shapes and dtypes of what it returns.
        """
        leaves, tree = jax.tree_util.tree_flatten(jax.eval_shape(init_fn, *args, **kwargs))
        out: list[Any] = []
        for a, leaf in zip(argument_like(self.layered, leaves, tree), leaves, strict=True):
            read = bool(self.keeper.wanted(a))  # else it stays with the driver
            out.append(RayTarget(self.keeper, a, self.graph.argument_types[a]) if read else leaf)
        return jax.tree_util.tree_unflatten(tree, out)

    def _handle(self, value_type: TensorType, pieces: tuple[RemotePiece, ...]) -> RemoteArray:
        return RemoteArray(self.gang, value_type, pieces, self._dropped, self.keeper)

    def _outputs(self, values: Mapping[int, Any], made: Sequence[tuple[Made, ...]]) -> list[Any]:
        pieces: dict[int, list[RemotePiece]] = {}
        for w, mine in enumerate(made):
            for m in mine:
                pieces.setdefault(m.output, []).append(RemotePiece(w, m.rows, m.number))
        update = self.graph.update
        out: list[Any] = []
        for j, o in enumerate(update.outputs):
            if j in pieces:
                t = update.values[o] if isinstance(o, int) else o.type
                out.append(self._handle(t, tuple(pieces[j])))
                continue
            source = forwarded(self.graph, j)
            if isinstance(source, int):
                out.append(values[source] if source >= self._consts else self.layered.consts[source])
            else:
                out.append(np.full(source.type.shape, source.value, source.type.dtype))
        return out
