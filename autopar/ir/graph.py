"""The operator graph: what `trace` makes of a jaxpr, and all that planning sees of it.

A `Graph` lists values by id (``values[i]`` is value i's type) and nodes in execution order. A node's
id is its equation's index in ``Traced.jaxpr`` (in a body: in that body's jaxpr), so that a decision on
the graph can be carried out on the jaxpr. Bodies of scan, while, cond and remat are Graphs inside
their node, with value ids of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar, cast

from autopar.ir.errors import VerifyError

T = TypeVar("T")
Json: TypeAlias = "None | bool | int | float | str | tuple[Json, ...] | dict[str, Json]"

_ITEMSIZE_BITS = {
    "bool": 8, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16,
    "int32": 32, "uint32": 32, "int64": 64, "uint64": 64, "bfloat16": 16, "float16": 16, "float32": 32,
    "float64": 64, "complex64": 64, "complex128": 128, "float0": 8,
}  # fmt: skip
_KEY_BITS = {"key<fry>": 64, "key<rbg>": 128, "key<urbg>": 128}


def itemsize_bits(dtype: str) -> int:
    """Bits of one element of ``dtype`` (a numpy or ml_dtypes name, or ``key<impl>``). Raises VerifyError for a name
    that is not known."""
    if dtype in _ITEMSIZE_BITS:
        return _ITEMSIZE_BITS[dtype]
    if dtype.startswith("float8"):
        return 8
    if dtype.startswith("float4"):
        return 4
    if dtype.startswith("float6"):
        return 6
    if dtype.startswith("key<"):
        return _KEY_BITS.get(dtype, 128)
    raise VerifyError(f"unknown dtype {dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Shape and dtype of a value; ``dtype`` is numpy's name (``float32``) or ``key<impl>``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole value, elements of less than a byte packed. Raises VerifyError for an unknown dtype."""
        return (self.size * itemsize_bits(self.dtype) + 7) // 8

    @property
    def is_key(self) -> bool:
        """True for typed PRNG keys, which no collective can move."""
        return self.dtype.startswith("key<")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def verify(self) -> None:
        """Raises VerifyError where a dimension is negative or the dtype is unknown."""
        if any(d < 0 for d in self.shape):
            raise VerifyError(f"negative dimension in {self}")
        itemsize_bits(self.dtype)


def one_nan(value: T) -> T:
    """``value``, or the one object for all NaN: graphs that have it are equal, as Python compares what they hold by
    identity first."""
    return cast(T, math.nan) if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A literal operand; ``value`` is given for scalars, else None."""

    type: TensorType
    value: bool | int | float | complex | None = None


Operand: TypeAlias = int | Constant
Phase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One equation.

    ``params`` holds the primitive's parameters as plain JSON (named tuples as dictionaries, enums by
    name, dtypes as numpy names; callables and jaxprs left out). ``operands`` are value ids of the same
    graph, or Constants; ``results`` are value ids. ``source`` is ``file.py:line`` of the user's code.
    """

    id: int
    primitive: str
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    bodies: tuple[Graph, ...] = ()
    phase: Phase = "forward"
    source: str = ""
    digest: str = ""
    """Hash of what the node computes on what: source lines, addresses and callables left out."""
    hidden: Graph | None = None
    """The body of an opaque call (a pallas kernel, a user's shard_map): not planned, its work is counted."""
    hidden_runs: int = 1
    """How often one execution of the node runs ``hidden``: grid points of a kernel, devices of a shard_map."""
    flops: float | None = None
    """FLOPs of the whole operator, where the user says them."""

    @property
    def called(self) -> str:
        """What people know it by: the name that a user gave a kernel, or a foreign function's; else the primitive."""
        names = {"autopar_kernel": "name", "ffi_call": "target_name"}
        name = self.params.get(names.get(self.primitive, ""))
        return name if isinstance(name, str) and name else self.primitive

    def __str__(self) -> str:
        where = f", {self.source}" if self.source else ""
        return f"{self.called} (node {self.id}{where})"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A function's operators in execution order.

    Constraints (checked by `verify`): operand and result ids index ``values``; each value is defined
    once, by ``inputs`` or one node, before it is used; node ids ascend; ``arg_paths`` names each input.
    """

    values: tuple[TensorType, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    arg_paths: tuple[str, ...] = ()
    out_paths: tuple[str, ...] = ()
    state: tuple[tuple[int, int], ...] = ()
    """(input position, output position) pairs of one sharding, unless pinned apart: the output is the new value, which
    the next call takes, or takes the buffer."""
    donated: tuple[int, ...] = ()
    """The inputs among them whose buffer the output takes."""
    fingerprint: str = ""

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Value id → position in ``nodes`` of its last use; ``len(nodes)`` for outputs."""
        out: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            for operand in node.operands:
                if isinstance(operand, int):
                    out[operand] = position
        for operand in self.outputs:
            if isinstance(operand, int):
                out[operand] = len(self.nodes)
        return out

    def verify(self) -> None:
        """Raises VerifyError at the first broken constraint."""
        for value_type in dict.fromkeys(self.values):
            value_type.verify()
        defined = set(self.inputs)
        if len(defined) != len(self.inputs):
            raise VerifyError("graph inputs repeat a value")
        last = -1
        for node in self.nodes:
            if node.id <= last:
                raise VerifyError(f"{node}: ids do not ascend")
            last = node.id
            for operand in node.operands:
                if isinstance(operand, int) and operand not in defined:
                    raise VerifyError(f"{node}: uses value {operand} before it is defined")
            for result in node.results:
                if result in defined:
                    raise VerifyError(f"{node}: defines value {result} twice")
                if not 0 <= result < len(self.values):
                    raise VerifyError(f"{node}: result {result} is not a value")
                defined.add(result)
            if node.hidden_runs < 1 or (node.flops is not None and not node.flops >= 0):
                raise VerifyError(f"{node}: runs its body {node.hidden_runs} times, or takes {node.flops} FLOPs")
            for body in node.bodies if node.hidden is None else (*node.bodies, node.hidden):
                body.verify()
        for operand in self.outputs:
            if isinstance(operand, int) and operand not in defined:
                raise VerifyError(f"output {operand} is never defined")
        for side, count in zip(zip(*self.state, strict=True), (len(self.inputs), len(self.outputs)), strict=False):
            if len(set(side)) != len(side) or not all(0 <= at < count for at in side):
                raise VerifyError(f"state: {self.state} pairs what is not there, or twice")
        if not set(self.donated) <= {i for i, _ in self.state}:
            raise VerifyError(f"inputs {self.donated} are donated, and not all have an output that takes their buffer")
        if self.arg_paths and len(self.arg_paths) != len(self.inputs):
            raise VerifyError("arg_paths and inputs differ in length")
        if self.out_paths and len(self.out_paths) != len(self.outputs):
            raise VerifyError("out_paths and outputs differ in length")


def node_digest(
    primitive: str, params_text: str, operands: Sequence[Operand], results_text: str, bodies: Sequence[Graph]
) -> str:
    """`Node.digest` of a node that was traced. ``params_text`` is the ``repr`` of its parameters, ``results_text``
    `types_text` of its results."""
    inputs = [o if isinstance(o, int) else (str(o.type), o.value) for o in operands]
    text = f"({primitive!r}, {params_text}, {inputs!r}, {results_text}, {[b.fingerprint for b in bodies]!r})"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def types_text(types: Sequence[TensorType]) -> str:
    """Types in what digests are of."""
    return repr([str(t) for t in types])


def graph_fingerprint(
    values: Sequence[TensorType], nodes: Sequence[Node], inputs: Sequence[int], outputs: Sequence[Operand],
    arg_paths: tuple[str, ...],
) -> str:  # fmt: skip
    """`Graph.fingerprint` of a graph that was traced: of its nodes' digests, of its inputs and outputs."""
    digest = hashlib.sha256()
    for node in nodes:
        digest.update(node.digest.encode())
    digest.update(repr((tuple(inputs), [o if isinstance(o, int) else str(o) for o in outputs], arg_paths)).encode())
    digest.update("".join(str(values[i]) for i in inputs).encode())
    return digest.hexdigest()
