"""Random values of any dtype, their tiles, and random small reshardings, for tests that move them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autopar.ir.graph import TensorType
from autopar.ir.resharding import Box, Hop, ReshardingPlan, Transfer, tile_box
from autopar.resharding.chunks import Chunking
from autopar.resharding.planning import plan_resharding
from autopar.runtime.pieces import array_of, data_type, element_bytes, host_of
from benchmarks.resharding_cases import Case, Side, problem_of, side

DTYPES = (
    *"bool int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split(),
    *"bfloat16 float16 float32 float64 complex64 complex128 float4_e2m1fn".split(),
    *"float8_e3m4 float8_e4m3 float8_e4m3fn float8_e4m3b11fnuz float8_e4m3fnuz".split(),
    *"float8_e5m2 float8_e5m2fnuz float8_e8m0fnu key<fry> key<rbg>".split(),
)
SMALL = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
"""Bits of those whose bytes in host memory are not all used."""


def random_value(type: TensorType, seed: int) -> np.ndarray[Any, Any]:
    """Random bits, NaNs with payloads included: of ``type``'s shape and dtype, for keys their data."""
    inner, dtype = data_type(type)
    shape = (*type.shape, *inner)
    draw = np.random.default_rng(seed)
    raw = np.frombuffer(draw.bytes(math.prod(shape) * dtype.itemsize), np.uint8)
    if type.dtype in SMALL:
        raw = raw & ((1 << SMALL[type.dtype]) - 1)
        if type.dtype in ("int2", "int4"):
            return (raw.astype(np.int8) - (1 << (SMALL[type.dtype] - 1))).astype(dtype).reshape(shape)
    return raw.view(dtype).reshape(shape)


def part_of(value: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    """A box of a value."""
    return value[tuple(slice(a, b) for a, b in box)]


def bits_of(array: jax.Array | np.ndarray[Any, Any]) -> bytes:
    """All bytes of an array in row-major order; for keys those of their data."""
    host = host_of(array) if isinstance(array, jax.Array) else array
    return element_bytes(host, host.ndim).tobytes()


def source_tiles(plan: ReshardingPlan, values: list[np.ndarray[Any, Any]], devices: Any) -> dict[Any, jax.Array]:
    """(value, device id) → the source tile on its device."""
    out: dict[Any, jax.Array] = {}
    for v, value in enumerate(plan.values):
        mesh = plan.meshes[value.src].mesh
        for i, d in enumerate(mesh.device_ids):
            box = tile_box(value.type, value.src_spec, mesh, i)
            out[v, d] = array_of(value.type, np.array(part_of(values[v], box), order="C"), devices[d])
    return out


def wanted_bits(plan: ReshardingPlan, values: list[np.ndarray[Any, Any]]) -> dict[Any, bytes]:
    """(value, device id) → the bytes of the destination tile there."""
    out: dict[Any, bytes] = {}
    for v, value in enumerate(plan.values):
        mesh = plan.meshes[value.dst].mesh
        for i, d in enumerate(mesh.device_ids):
            out[v, d] = bits_of(part_of(values[v], tile_box(value.type, value.dst_spec, mesh, i)))
    return out


def planned(case: Case, chunk_bytes: float = 64.0, **options: Any) -> ReshardingPlan:
    """A case's plan, in chunks small enough that there are many."""
    chunking = Chunking(chunk_bytes=chunk_bytes, min_chunk_bytes=1.0)
    plan = plan_resharding(*problem_of(case), chunking=chunking, **options)
    plan.verify()
    return plan


def random_case(seed: int, *, ragged: bool, back: bool = False) -> Case:
    """A small value of any rank from up to 4 devices to up to 4 others, on hosts of 1 or 2 devices."""
    draw = random.Random(seed)
    rank = draw.randint(0, 4)

    def drawn() -> Side:
        mesh = draw.choice([(1,), (2,), (3,), (4,), (2, 2), (1, 2), (1, 3), (4, 1)])
        dims: list[tuple[int, ...]] = [()] * rank
        for axis in range(len(mesh)):
            if rank and draw.random() < 0.7:
                d = draw.randrange(rank)
                dims[d] = (*dims[d], axis)
        return Side(mesh=mesh, spec=tuple(dims))

    src, dst = drawn(), drawn()
    shape: list[int] = []
    for d in range(rank):
        parts = [math.prod(s.mesh[a] for a in s.spec[d]) for s in (src, dst)]
        shape.append(draw.randint(1, 11) if ragged else math.lcm(*parts) * draw.randint(1, 3))
    dtype = draw.choice(DTYPES)
    return Case(name=f"seed {seed}", shape=tuple(shape), src=src, dst=dst, dtype=dtype, back=back)


def chain(hosts: int, elements: int, chunk_elements: int, dtype: str = "int32") -> ReshardingPlan:
    """A value from device 0 to the ``hosts`` − 1 others, one after the other: hop by hop, in one transfer."""
    case = Case(name="chain", shape=(elements,), dtype=dtype, src=side((1,), "R"), dst=side((hosts - 1,), "R"))
    hops = tuple(Hop(device=d, source=d - 2) for d in range(1, hosts))
    transfer = Transfer(
        value=0, box=((0, elements),), start=0, stop=elements, sender=0, hops=hops, chunk_elements=chunk_elements,
        stream=0,
    )  # fmt: skip
    plan = replace(planned(case), transfers=(transfer,))
    plan.verify()
    return plan
