"""Collectives of a compiled program, read from its HLO text: the oracle that a plan's list is held against.

In: ``compiled.as_text()``. Out: one `HloCollective` per tensor that a collective moves, with its replica
groups, operand bytes per device and the number of times one run executes it. This file shares no code with
the planner. The text form is that of XLA's ``HloModule::ToString`` (instruction = ``%name = type
opcode(operands), attributes``).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OTHER = ("collective-broadcast", "ragged-all-to-all")
Groups = tuple[tuple[int, ...], ...]

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One tensor moved by one collective instruction.

    ``groups`` are replica groups, or (source, target) pairs of a collective-permute. ``trips`` is how often
    a run executes it, None below a loop of unknown length. Elements of one combined instruction
    share ``computation`` and ``instruction``.
    """

    kind: str
    groups: Groups
    operand_bytes: int
    dtype: str
    trips: int | None
    computation: str
    instruction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+) \(.*\) -> .*\{\s*$")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
)
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=?]*)\]")


def _balanced(text: str, start: int) -> int:
    """Position after the bracket that closes the one at ``start``."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    stack: list[str] = []
    quoted = False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c in pairs:
            stack.append(pairs[c])
        elif stack and c == stack[-1]:
            stack.pop()
            if not stack:
                return i + 1
    raise ValueError(f"unbalanced bracket in HLO line: {text[start : start + 120]!r}")


def _parse_instruction(line: str) -> _Instruction | None:
    match = re.match(r"^\s+(?:ROOT )?%?([\w.\-<>]+) = ", line)
    if not match:
        return None
    at = match.end()
    if line[at] == "(":
        end = _balanced(line, at)
    else:
        end = line.index(" ", at)
    head = re.match(r"\s*([\w\-]+)\(", line[end:])
    if not head:
        raise ValueError(f"cannot read HLO instruction: {line[:160]!r}")
    opens = end + head.end() - 1
    closes = _balanced(line, opens)
    return _Instruction(
        name=match.group(1),
        type=line[at:end],
        opcode=head.group(1),
        operands=line[opens + 1 : closes - 1],
        attributes=line[closes:],
    )


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Computation name → instructions, and the entry's name."""
    out: dict[str, list[_Instruction]] = {}
    entry = ""
    current: list[_Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            match = _HEADER.match(line)
            if match and not line.startswith(" "):
                current = out.setdefault(match.group("name"), [])
                if match.group("entry"):
                    entry = match.group("name")
        elif line.startswith("}"):
            current = None
        else:
            instruction = _parse_instruction(line)
            if instruction is not None:
                current.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation in the HLO text")
    return out, entry


def _dtype_bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    if dtype.startswith("f4"):
        return 4
    raise ValueError(f"unknown HLO element type {dtype!r}")


def _arrays(type_text: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a type, tuples flattened."""
    out: list[tuple[str, int]] = []
    for dtype, dims in _SHAPE.findall(type_text):
        if dtype == "token":
            continue
        size = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        out.append((dtype, (size * _dtype_bits(dtype) + 7) // 8))
    return out


def _attribute(text: str, name: str) -> str | None:
    """The raw value of ``name=`` in an attribute list."""
    match = re.search(rf"[,\s]{name}=", text)
    if not match:
        return None
    at = match.end()
    if text[at] in "{(":
        return text[at : _balanced(text, at)]
    end = re.search(r", [a-z_]+=|$", text[at:])
    assert end is not None
    return text[at : at + end.start()].strip()


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


def _called(attributes: str) -> list[str]:
    out: list[str] = []
    for match in _CALLED.finditer(attributes):
        at = match.end()
        text = attributes[at : _balanced(attributes, at)] if attributes[at] == "{" else attributes[at:].split(",")[0]
        out += re.findall(r"[\w.\-<>]+", text.split(" ")[0] if text[0] != "{" else text)
    return out


def _trip_count(attributes: str) -> int | None:
    match = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?', attributes)
    return int(match.group(1)) if match else None


def parse_collectives(text: str) -> tuple[HloCollective, ...]:
    """Every collective of a compiled module, loops multiplied out.

    Combined instructions give one row per operand; an all-to-all in tuple form (its operand cut in as many
    pieces as the group has members) is one row with all its bytes. Start and done count once. Rows that move
    nothing (no bytes, or groups of one device) are left out. Both branches of a conditional
    count once each. Raises ValueError for text that it cannot read.
    """
    header = re.search(r"num_partitions=(\d+)", text)
    replicas = re.search(r"replica_count=(\d+)", text)
    num_devices = (int(header.group(1)) if header else 1) * (int(replicas.group(1)) if replicas else 1)
    computations, entry = _computations(text)
    out: list[HloCollective] = []

    def visit(name: str, trips: int | None) -> None:
        body = computations[name]
        types = {i.name: i.type for i in body}
        for i in body:
            if i.opcode == "while":
                n = _trip_count(i.attributes)
                inside = None if n is None or trips is None else n * trips
                body_name = _attribute(i.attributes, "body")
                condition = _attribute(i.attributes, "condition")
                assert body_name is not None and condition is not None
                visit(body_name.lstrip("%"), inside)
                visit(condition.lstrip("%"), None if inside is None or trips is None else inside + trips)
                continue
            if i.opcode in ("async-update", "async-done"):
                continue
            kind = i.opcode.removesuffix("-start")
            if kind in _OTHER:
                raise ValueError(f"HLO holds a {kind}, which autopar never emits: {i.name}")
            if kind not in KINDS:
                for called in _called(i.attributes):
                    visit(called, trips)
                continue
            if kind == "collective-permute":
                pairs = _attribute(i.attributes, "source_target_pairs")
                assert pairs is not None
                groups = parse_groups(pairs, num_devices)
                moves = any(a != b for a, b in groups)
            else:
                groups = parse_groups(_attribute(i.attributes, "replica_groups") or "{}", num_devices)
                moves = any(len(g) > 1 for g in groups)
            names = re.findall(r"%([\w.\-<>]+)", i.operands) or [n.strip() for n in i.operands.split(",")]
            operands = [array for n in names for array in _arrays(types[n])]
            if kind == "all-to-all" and i.type.startswith("("):
                operands = [(operands[0][0], sum(size for _, size in operands))]
            for dtype, size in operands:
                if moves and size:
                    out.append(
                        HloCollective(
                            kind=kind,
                            groups=groups,
                            operand_bytes=size,
                            dtype=dtype,
                            trips=trips,
                            computation=name,
                            instruction=i.name,
                        )
                    )

    visit(entry, 1)
    return tuple(out)


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


Key = tuple[str, tuple[str, ...], int]


def tally(
    collectives: Iterable[HloCollective], mesh_shape: Sequence[int], names: Sequence[str]
) -> tuple[Counter[Key], Counter[Key]]:
    """Executions per (kind, axes, operand bytes): first those counted exactly, second instructions inside
    loops of unknown length."""
    known: Counter[Key] = Counter()
    unknown: Counter[Key] = Counter()
    for c in collectives:
        axes = axes_of(c.groups, mesh_shape, names, permute=c.kind == "collective-permute")
        key = (c.kind, axes, c.operand_bytes)
        if c.trips is None:
            unknown[key] += 1
        elif c.trips:
            known[key] += c.trips
    return known, unknown


_SCALAR_BYTES = 8


def instruction_counts(
    collectives: Iterable[HloCollective], *, scalars: bool = False, times_trips: bool = False
) -> Counter[str]:
    """Collective instructions by kind, a combined one counted once.

    Those that move nothing but scalars (at most 8 bytes per operand) are left out unless ``scalars``. With
    ``times_trips`` each counts as often as it runs.
    """
    largest: dict[tuple[str, str, str], int] = {}
    trips: dict[tuple[str, str, str], int] = {}
    for c in collectives:
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
