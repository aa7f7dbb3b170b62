"""Cases of `benchmarks.resharding`: those of the literature's microbenchmarks, those where no unsplit plan is optimal,
our own with traffic both ways and with a NIC per device, and random ones; and their JSON form.

A case's meshes lie one after the other on a cluster: rows of a mesh (its first dimension, or the product of the first
``host_dims``) are hosts, the rest a host's devices.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autopar.ir.cluster import DeviceSpec, LinkSpec, LogicalMesh, MeshAxis
from autopar.ir.errors import ReshardingError
from autopar.ir.graph import TensorType
from autopar.ir.resharding import CrossValue, HostLinks, Network, PlacedMesh
from autopar.ir.sharding import ShardingSpec

NIC = LinkSpec(latency_s=50e-6, bytes_per_s=25e9 / 8)
"""What the tables assume: 25 Gb/s a host, 50 µs a chunk."""
INTRA_HOST = LinkSpec(latency_s=5e-6, bytes_per_s=25e10 / 8)
"""Ten times a NIC, which is what the literature's figures for gathering inside a host come to; latency guessed."""
_DEVICE = DeviceSpec(name="any", memory_bytes=1, flops_per_s=(("float32", 1.0),), memory_bytes_per_s=1.0)

RANDOM_ELEMENTS = 2**20
"""About what random cases have at least: an element is not cut, and few of them are no bandwidth problem."""

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A mesh's shape and, for each dimension of a tensor, the mesh axes that split it."""

    mesh: tuple[int, ...]
    spec: Dims
    host_dims: int = 1

    @property
    def hosts(self) -> int:
        """Hosts of the mesh."""
        return math.prod(self.mesh[: self.host_dims])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One resharding: ``copies`` equal tensors together, with ``back`` as many the other way at the same time; with
    ``rails`` every device has a NIC of its own."""

    name: str
    shape: tuple[int, ...]
    src: Side
    dst: Side
    dtype: str = "int32"
    copies: int = 1
    back: bool = False
    rails: bool = False


class Problem(NamedTuple):
    """What `plan_resharding` takes."""

    values: tuple[CrossValue, ...]
    meshes: tuple[PlacedMesh, ...]
    network: Network


def problem_of(case: Case, scale: float = 1.0) -> Problem:
    """A case on hosts with the tables' links, bandwidths multiplied by ``scale``."""
    meshes: list[PlacedMesh] = []
    hosts: list[HostLinks] = []
    devices = 0
    for side in (case.src, case.dst):
        local = math.prod(side.mesh[side.host_dims :])
        count = side.hosts * local
        mesh = LogicalMesh(
            axes=tuple(MeshAxis(name=f"a{i}", size=size, link=NIC) for i, size in enumerate(side.mesh)),
            device_ids=tuple(range(devices, devices + count)),
            device=_DEVICE,
        )
        host = tuple(len(hosts) + i // local if local else 0 for i in range(count))
        nics = tuple(i % local if case.rails else 0 for i in range(count))
        meshes.append(PlacedMesh(mesh=mesh, hosts=host, nics=nics))
        links = HostLinks(
            nics=local if case.rails else 1, nic=_scaled(NIC, scale), intra_host=_scaled(INTRA_HOST, scale)
        )
        hosts += [links] * side.hosts
        devices += count
    src, dst = (
        ShardingSpec(dims=tuple(tuple(f"a{a}" for a in axes) for axes in side.spec)) for side in (case.src, case.dst)
    )
    value_type = TensorType(shape=case.shape, dtype=case.dtype)
    forward = CrossValue(type=value_type, src=0, src_spec=src, dst=1, dst_spec=dst)
    backward = CrossValue(type=value_type, src=1, src_spec=dst, dst=0, dst_spec=src)
    values = (forward,) * case.copies + ((backward,) * case.copies if case.back else ())
    return Problem(values, tuple(meshes), Network(hosts=tuple(hosts)))


def _scaled(link: LinkSpec, scale: float) -> LinkSpec:
    return LinkSpec(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s * scale)


def side(mesh: Sequence[int], spec: str, host_dims: int = 1) -> Side:
    """``R01RR`` → a Side: per dimension R, or S and the mesh axes that split it."""
    dims: list[tuple[int, ...]] = []
    for letter in spec:
        if letter in "RS":
            dims.append(())
        else:
            dims[-1] = (*dims[-1], int(letter))
    return Side(mesh=tuple(mesh), spec=tuple(dims), host_dims=host_dims)


_BIG = (1024, 1024, 512)
_SPLIT = (3840, 1024, 128)  # divisible among 2, 3, 4 and 5 hosts


def _case(name: str, shape: Sequence[int], src: Side, dst: Side, **more: Any) -> Case:
    return Case(name=name, shape=tuple(shape), src=src, dst=dst, **more)


CASES: tuple[Case, ...] = (
    *(
        _case(f"1-to-m ({m[0]},{m[1]})", (2**28,), side((1, 1), "R"), side(m, "R"))
        for m in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))
    ),
    _case("c1", _BIG, side((2, 4), "S0RR"), side((2, 4), "S0RR")),
    _case("c2", _BIG, side((2, 4), "RRR"), side((2, 4), "S0RR")),
    _case("c3", _BIG, side((2, 4), "RS0R"), side((2, 4), "S0RR")),
    _case("c4", _BIG, side((2, 4), "RS01R"), side((2, 4), "S01RR")),
    _case("c5", _BIG, side((2, 4), "S1RR"), side((2, 4), "S0RR")),
    _case("c6", (3072, 1024, 170), side((2, 4), "S0RR"), side((3, 4), "S0RR")),
    _case("c7", _BIG, side((1, 4), "S01RR"), side((2, 4), "RRR")),
    _case("c9", _BIG, side((2, 4), "RS0R"), side((2, 4), "RRS0")),
    _case("R(2h) → S⁰(3h)", _SPLIT, side((2, 4), "RRR"), side((3, 4), "S0RR")),
    _case("R(3h) → S⁰(4h)", _SPLIT, side((3, 4), "RRR"), side((4, 4), "S0RR")),
    _case("R(2h) → S⁰(5h)", _SPLIT, side((2, 4), "RRR"), side((5, 4), "S0RR")),
    _case("S⁰ × 2 replicas (4h) → S⁰(5h)", _SPLIT, side((2, 2, 4), "S0RR", 2), side((5, 4), "S0RR")),
    _case("S⁰(3h) → S⁰(4h)", _SPLIT, side((3, 4), "S0RR"), side((4, 4), "S0RR")),
    _case("R(3h) → S⁰(4h), three tensors", _SPLIT, side((3, 4), "RRR"), side((4, 4), "S0RR"), copies=3),
)
"""Both tables."""

OWN_CASES: tuple[Case, ...] = (
    _case("S⁰(2h) → R(3h) and back", _SPLIT, side((2, 4), "S0RR"), side((3, 4), "RRR"), back=True),
    _case("S⁰¹(2h) → R(6h) and back", (999, 77, 130), side((2, 4), "S01RR"), side((6, 4), "RRR"), back=True),
    _case("R(3h) → RS⁰(4h) and back", (1000, 999), side((3, 2), "RR"), side((4, 2), "RS0"), back=True),
    _case("c5, rails", _BIG, side((2, 4), "S1RR"), side((2, 4), "S0RR"), rails=True),
    _case("R(2h) → R(3h), rails", (1001, 77, 13), side((2, 4), "RRR"), side((3, 4), "RRR"), rails=True),
    _case("S⁰(2h) → S¹(3h), rails", (1000, 999), side((2, 4), "S0R"), side((3, 4), "RS1"), rails=True),
    _case("64 × 64 tiles, 8 → 8 hosts", (4096, 4096), side((8, 8), "S01R"), side((8, 8), "RS01")),
)
"""Traffic both ways, ragged tiles, a NIC per device, many unit tasks."""


def case_from_json(data: Mapping[str, Any], name: str) -> Case:
    """A case from its JSON form. Raises ReshardingError, naming the case and what is wrong."""
    try:
        case = Case(
            name=str(data.get("name", name)),
            shape=_ints(data["shape"]),
            dtype=str(data.get("dtype", "int32")),
            src=_side_from_json(data["src"]),
            dst=_side_from_json(data["dst"]),
            copies=int(data.get("copies", 1)),
            back=bool(data.get("back", False)),
            rails=bool(data.get("rails", False)),
        )
        return case
    except KeyError as fault:
        raise ReshardingError(
            f"{name}: no {fault}; a case has shape, dtype, src and dst, both with mesh and spec"
        ) from None
    except (TypeError, ValueError, AttributeError) as fault:
        raise ReshardingError(f"{name}: {fault}") from fault


def _side_from_json(data: Mapping[str, Any]) -> Side:
    return Side(
        mesh=_ints(data["mesh"]),
        spec=tuple(_ints(axes) for axes in data["spec"]),
        host_dims=int(data.get("host_dims", 1)),
    )


def _ints(data: Sequence[Any]) -> tuple[int, ...]:
    if isinstance(data, str) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in data):
        raise ValueError(f"{data!r} is not a list of numbers from 0 on")
    return tuple(data)


def read_cases(path: Path) -> tuple[Case, ...]:
    """The cases of a file: a list, or a single one. Raises ReshardingError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ReshardingError(f"{path}: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise ReshardingError(f"{path}: not JSON: {fault}") from fault
    rows = data if isinstance(data, list) else [data]
    if not all(isinstance(row, dict) for row in rows):
        raise ReshardingError(f"{path}: expected a list of cases, each an object with shape, dtype, src and dst")
    return tuple(case_from_json(row, f"case {i}") for i, row in enumerate(rows))


def random_cases(count: int, seed: int = 0) -> tuple[Case, ...]:
    """Cases with 1–6 → 1–6 hosts of 1–4 devices, ranks 1–4, dimensions that need not divide."""
    draw = random.Random(seed)
    out: list[Case] = []
    for index in range(count):
        rank = draw.randint(1, 4)
        shape = [draw.randint(1, (100_000, 600, 80, 30)[rank - 1]) for _ in range(rank)]
        shape[draw.randrange(rank)] *= max(1, RANDOM_ELEMENTS // math.prod(shape))
        out.append(_case(f"random {index}", shape, _random_side(draw, rank), _random_side(draw, rank)))
    return tuple(out)


def _random_side(draw: random.Random, rank: int) -> Side:
    hosts, local = draw.randint(1, 6), draw.randint(1, 4)
    outer = (
        draw.choice([(f, hosts // f) for f in range(1, hosts + 1) if hosts % f == 0])
        if draw.random() < 0.3
        else (hosts,)
    )
    inner = (2, 2) if local == 4 and draw.random() < 0.5 else (local,)
    mesh = (*outer, *inner)
    dims: list[tuple[int, ...]] = [()] * rank
    for axis in draw.sample(range(len(mesh)), len(mesh)):
        if draw.random() < 0.6:
            d = draw.randrange(rank)
            dims[d] = (*dims[d], axis)
    return Side(mesh=mesh, spec=tuple(dims), host_dims=len(outer))


__all__ = ["CASES", "OWN_CASES", "Case", "Problem", "problem_of", "random_cases", "read_cases", "side"]
