"""Collectives of a compiled program: what it moves, between whom, how often.

In: a `hlo_text.Module`. Out: one `HloCollective` per tensor that a collective moves, with its replica groups, bytes per
device before it and the number of times one run executes it; `axes_of` says along which axes of a mesh that is, `tally`
sums them up. Nothing here knows of plans.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.verify.hlo_loops import executed
from autopar.verify.hlo_text import Array, Computation, Instruction, Module, arrays, parse

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OTHER = ("collective-broadcast", "ragged-all-to-all")
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One tensor moved by one collective instruction.

    ``groups`` are replica groups, or (source, target) pairs of a collective-permute. ``trips`` is how often
    a run executes it, None below a loop of unknown length (``below`` then: `hlo_loops.Run.below`). Elements of one
    combined instruction share ``computation`` and ``instruction``.
    """

    kind: str
    groups: Groups
    operand_bytes: int
    dtype: str
    trips: int | None
    computation: str
    instruction: str
    below: int = 1


def parse_collectives(text: str) -> tuple[HloCollective, ...]:
    """`collectives` of a module's text. Raises ValueError for text that it cannot read."""
    return collectives(parse(text))


def collectives(module: Module) -> tuple[HloCollective, ...]:
    """Every collective of a compiled module, loops multiplied out.

    Combined instructions give one row per operand; an all-to-all in tuple form (its operand cut in as many
    pieces as the group has members) is one row with all its bytes. Start and done count once, and so does what a TPU
    program carries along through several fusions. Rows that move nothing (no bytes, or groups of one device) are left
    out. Both branches of a conditional count once each. Raises ValueError for a collective that is none of `KINDS`.
    """
    out: list[HloCollective] = []
    fused = {
        n
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode == "fusion"
        for n in i.called
    }
    for run in executed(module):
        i, computation = run.instruction, module.computations[run.computation]
        kind = i.opcode.removesuffix("-start")
        if kind in _OTHER:
            raise ValueError(f"HLO holds a {kind}, which autopar never emits: {i.name}")
        if kind not in KINDS or _goes_on(computation, i):
            continue
        groups = groups_of(i, module.num_devices)
        if not any(a != b for a, b in groups) if kind == "collective-permute" else all(len(g) < 2 for g in groups):
            continue
        if run.computation in fused and _scatters(computation, i):
            kind = "reduce-scatter"
        for dtype, size in _moved(computation, i, kind):
            if size:
                out.append(
                    HloCollective(
                        kind=kind, groups=groups, operand_bytes=size, dtype=dtype, trips=run.trips,
                        computation=run.computation, instruction=i.name, below=run.below,
                    )
                )  # fmt: skip
    return tuple(out)


def _moved(computation: Computation, i: Instruction, kind: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each tensor."""
    operands: list[Array] = [a for t in computation.operand_types(i) for a in arrays(t)]
    if kind == "reduce-scatter" and i.opcode == "all-reduce":
        operands = [a for p in computation.instructions.values() if p.opcode == "parameter" for a in arrays(p.type)]
    if kind == "all-to-all" and isinstance(i.type, tuple):
        return [(operands[0].dtype, sum(a.bytes for a in operands))]
    return [(a.dtype, a.bytes) for a in operands]


def _scatters(computation: Computation, i: Instruction) -> bool:
    """True for the all-reduce in a fusion that makes a slice of it alone: how XLA for TPUs writes some reduce-scatters.
    The same code is emitted for them as for others (``SingleInputAllReduceScatterFusion``, libtpu 0.0.42); padding
    between parameter and all-reduce is not counted."""
    root = computation.root
    return i.opcode == "all-reduce" and root.opcode == "dynamic-slice" and root.operands[0] == i.name


def _goes_on(computation: Computation, i: Instruction) -> bool:
    """True for a part of a TPU's asynchronous collective other than its start: the compiler writes it once more into
    every fusion that runs beside it, and into the one that waits for it."""
    if "async_collective_fusion_config" not in i.attributes:
        return False
    return not any(user.target == "AsyncCollectiveStart" for user in computation.users[i.name])


def groups_of(i: Instruction, num_devices: int) -> Groups:
    """Replica groups of a collective; of a collective-permute its (source, target) pairs."""
    if i.opcode.startswith("collective-permute"):
        pairs = i.attribute("source_target_pairs")
        assert pairs is not None, f"{i.name} has no pairs"
        return parse_groups(pairs, num_devices)
    return parse_groups(i.attribute("replica_groups") or "{}", num_devices)


def parse_groups(text: str, num_devices: int) -> Groups:
    """Replica groups in any of XLA's notations: listed, iota, or by mesh axes; ``{}`` is everyone."""
    text = text.strip()
    if text.startswith("{"):
        groups = tuple(tuple(int(d) for d in g.split(",") if d) for g in re.findall(r"\{([\d, ]*)\}", text[1:-1]))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        flat = _iota(text)
        per_group = int(text[1 : text.index("]")].split(",")[1])
        return tuple(tuple(flat[i : i + per_group]) for i in range(0, len(flat), per_group))
    return _mesh_groups(text)


def _iota(text: str) -> list[int]:
    """``[2,4]<=[8]`` or ``[4,2]<=[2,4]T(1,0)``: the device list, flat."""
    match = re.match(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$", text.strip())
    if not match:
        raise ValueError(f"cannot read device list {text!r}")
    shape = [int(d) for d in match.group(2).split(",")]
    order = [int(d) for d in match.group(3).split(",")] if match.group(3) else list(range(len(shape)))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = [[i * strides[d] for i in range(shape[d])] for d in order]
    return [sum(index) for index in itertools.product(*ranges)]


def _mesh_groups(text: str) -> Groups:
    """``mesh['a'=2,'b'=4] {'a'}``: devices that differ in axis a only form a group."""
    match = re.match(r"^@?(?:\w+)?mesh\[(?P<axes>[^\]]*)\](?P<ids>.*?)\s*\{(?P<used>[^}]*)\}$", text.strip())
    if not match:
        raise ValueError(f"cannot read replica_groups={text}")
    axes = [(n, int(s)) for n, s in re.findall(r"'([^']+)'=(\d+)", match.group("axes"))]
    shape = [s for _, s in axes]
    ids = list(range(math.prod(shape)))
    if "device_ids" in match.group("ids"):
        listed = re.search(r"device_ids=\((.*)\)", match.group("ids"))
        if not listed:
            raise ValueError(f"cannot read replica_groups={text}")
        inner = listed.group(1)
        ids = _iota(inner) if "<=" in inner else [int(d) for d in re.findall(r"\d+", inner)]
    # An axis may be used in part: 'a':(k)m is the m-fold part of a that k-fold parts lie before.
    used: dict[str, list[tuple[int, int]]] = {}
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match.group("used")):
        size = dict(axes)[name]
        used.setdefault(name, []).append((int(before), int(part)) if part else (1, size))
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, index in enumerate(itertools.product(*(range(s) for s in shape))):
        key: list[int] = []
        for (name, size), i in zip(axes, index, strict=True):
            for before, part in used.get(name, []):
                after = size // (before * part)
                i -= (i // after) % part * after
            key.append(i)
        groups.setdefault(tuple(key), []).append(ids[position])
    return tuple(tuple(g) for g in groups.values())


def axes_of(
    groups: Groups, mesh_shape: Sequence[int], names: Sequence[str], *, permute: bool = False
) -> tuple[str, ...]:
    """The mesh axes (sorted by name, those of size 1 left out) that ``groups`` run along.

    Device ids are positions in the row-major mesh. Raises ValueError where no set of axes has these groups.
    With ``permute`` the groups are (source, target) pairs: the axes along which any pair differs.
    """
    coordinates = list(itertools.product(*(range(s) for s in mesh_shape)))
    live = [d for d, s in enumerate(mesh_shape) if s > 1]
    if permute:
        return tuple(sorted(names[d] for d in live if any(coordinates[a][d] != coordinates[b][d] for a, b in groups)))
    wanted = {frozenset(g) for g in groups}
    for count in range(len(live) + 1):
        for chosen in itertools.combinations(live, count):
            along: dict[tuple[int, ...], list[int]] = {}
            for device, index in enumerate(coordinates):
                along.setdefault(tuple(c for d, c in enumerate(index) if d not in chosen), []).append(device)
            if {frozenset(g) for g in along.values()} == wanted:
                return tuple(sorted(names[d] for d in chosen))
    raise ValueError(f"replica groups {groups} run along no axes of a mesh {tuple(mesh_shape)} {tuple(names)}")


Key: TypeAlias = tuple[str, tuple[str, ...], int]


def tally(
    rows: Iterable[HloCollective], mesh_shape: Sequence[int], names: Sequence[str]
) -> tuple[Counter[Key], Counter[Key]]:
    """Executions per (kind, axes, operand bytes): first those counted exactly, second instructions inside
    loops of unknown length."""
    known: Counter[Key] = Counter()
    unknown: Counter[Key] = Counter()
    for c in rows:
        axes = axes_of(c.groups, mesh_shape, names, permute=c.kind == "collective-permute")
        key = (c.kind, axes, c.operand_bytes)
        if c.trips is None:
            unknown[key] += 1
        elif c.trips:
            known[key] += c.trips
    return known, unknown


_SCALAR_BYTES = 8


def instruction_counts(
    rows: Iterable[HloCollective], *, scalars: bool = False, times_trips: bool = False
) -> Counter[str]:
    """Collective instructions by kind, a combined one counted once.

    Those that move nothing but scalars (at most 8 bytes per operand) are left out unless ``scalars``. With
    ``times_trips`` each counts as often as it runs.
    """
    largest: dict[tuple[str, str, str], int] = {}
    trips: dict[tuple[str, str, str], int] = {}
    for c in rows:
        key = (c.kind, c.computation, c.instruction)
        largest[key] = max(largest.get(key, 0), c.operand_bytes)
        trips[key] = 1 if c.trips is None else c.trips
    return Counter(
        {
            kind: sum(
                trips[k] if times_trips else 1
                for k in largest
                if k[0] == kind and (scalars or largest[k] > _SCALAR_BYTES)
            )
            for kind in sorted({k[0] for k in largest})
        }
    )
