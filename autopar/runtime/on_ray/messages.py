"""What a driver and its actors say to each other, over Ray's channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from autopar.arrays import keys_of
from autopar.ir.graph import TensorType
from autopar.ir.plan import Plan
from autopar.runtime.tracing import Seen

Rows: TypeAlias = tuple[int, int, int]
"""(stage, start, stop): rows of a value on a stage, stop 0 for all of it."""
DRAWN: Rows = (-1, 0, 0)
"""A leaf of a batch in host memory: all of it, on no stage yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A step for a worker to run its stages of.

    ``processes``: the plan's devices that each of the worker's processes has. ``source`` is a `Source` by cloudpickle,
    which each worker traces again, as jaxprs cannot be pickled; the plan's fingerprint says whether the same came out.
    ``options``: the compiler's.
    """

    worker: int
    processes: tuple[tuple[int, ...], ...]
    planned: Plan
    source: bytes
    rules: Mapping[str, str]
    options: Mapping[str, Any]
    secret: bytes
    """That the gang's processes show each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What other workers have to know of one. ``address``: of its transport, "" where it has none; ``types``:
    (cut, value) → what crosses; ``sent``: those that it sends."""

    address: str = ""
    types: Mapping[tuple[int, int], TensorType] = field(default_factory=dict)
    sent: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A worker that has compiled its stages. ``wanted``: argument → the rows that it reads; ``devices``: all that its
    process has of its own; ``seconds``: what it took; ``programs``: how many it asked the compilation cache for,
    ``cached``: how many that had."""

    pid: int
    devices: tuple[str, ...]
    wanted: Mapping[int, frozenset[Rows]]
    offered: Offered
    seconds: float
    programs: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """What a worker has to know of the others: device id → its process's address; types and cuts as in `Offered`,
    of all."""

    peers: Mapping[int, str]
    types: Mapping[tuple[int, int], TensorType]
    sent: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. ``given``: argument → rows in host memory, for keys their data; ``held``: argument → numbers of arrays
    that the worker keeps; ``dropped``: those that nobody wants any more; ``shut``: loaders likewise; ``watch``: what
    is traced, tasks alone or what devices hold too."""

    number: int
    given: Mapping[int, Mapping[Rows, np.ndarray[Any, Any]]]
    held: Mapping[int, tuple[int, ...]]
    dropped: tuple[int, ...]
    shut: tuple[int, ...]
    watch: Literal["tasks", "memory"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step that a worker has done."""

    made: tuple[Made, ...]
    seen: Seen | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A loader. ``source``: by cloudpickle; ``wanted``: leaves to keep of its batches, by their numbers as arguments;
    the rest: see `Step.loader`."""

    loader: int
    source: bytes
    argnums: Any
    wanted: tuple[int, ...]
    prefetch: int
    start: int
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A loader's next batch. ``numbers``: argument → the array that it becomes."""

    loader: int
    numbers: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The answer to a `Draw`. ``over``: there is no batch, because of ``error``, if there is one."""

    over: bool
    error: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a worker has of an output after a step: array ``number`` of it."""

    output: int
    rows: Rows
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """A state to make: leaves of what ``function`` returns. ``given``: (args, kwargs), `packed`. ``spots``: (number of
    the leaf, argument of the step, rows)."""

    function: Any
    given: Any
    spots: tuple[tuple[int, int, Rows], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What one process of several has of an array of a shape: boxes that no other gives, for keys their data."""

    shape: tuple[int, ...]
    tiles: tuple[tuple[tuple[slice, ...], np.ndarray[Any, Any]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Live arrays of a worker's process, their bytes, and what is resident of the process."""

    arrays: int
    bytes: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A random key: typed ones cannot be pickled."""

    implementation: str
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """``summary`` in one line, ``where`` the worker was, ``trace`` of the error; ``lost``: it lost another process,
    which is more likely to be the cause."""

    summary: str
    where: str
    trace: str
    lost: bool


def packed(tree: Any) -> Any:
    """A tree of arrays, numbers and what else Ray pickles, with random keys as `Key`s."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return Key(implementation=str(jax.random.key_impl(x)), data=np.asarray(jax.random.key_data(x)))
        return np.asarray(x) if isinstance(x, jax.Array) else x

    return jax.tree.map(one, tree)


def unpacked(tree: Any) -> Any:
    """What `packed` was given."""

    def one(x: Any) -> Any:
        return keys_of(x.implementation, x.data) if isinstance(x, Key) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Key))
