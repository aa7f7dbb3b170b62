"""The text of an optimised HLO module → its computations and instructions: `parse`.

In: ``compiled.as_text()`` of XLA's compilers for CPU, GPU or TPU (`HloModule::ToString`; an instruction is ``%name =
type opcode(operands), attributes``). Out: a `Module`. Types keep their layouts, of which the TPU's say how arrays are
padded, ``{1,0:T(8,128)(2,1)}``, and in which memory they are, ``S(1)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip


def dtype_bits(dtype: str) -> int:
    """Bits of an element of an HLO type. Raises ValueError where it is not known."""
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("f8"):
        return 8
    if dtype.startswith("f4"):
        return 4
    raise ValueError(f"unknown HLO element type {dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array's type. ``order`` lists its dimensions from the minor-most one (empty: none was printed); ``tiles`` as
    printed, 0 for ``*``; ``space`` is its memory, 0 the device's main one."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements, padding left out."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, padding left out."""
        return (self.elements * dtype_bits(self.dtype) + 7) // 8

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in memory, padding of tiles included."""
        order = self.order or tuple(reversed(range(len(self.dims))))
        dims = [self.dims[d] for d in reversed(order)]
        for tile in self.tiles:
            dims = _tiled(dims, tile)
        return (math.prod(dims) * dtype_bits(self.dtype) + 7) // 8


def _tiled(dims: list[int], tile: tuple[int, ...]) -> list[int]:
    """Dimensions, major ones first, of an array that is cut into tiles, the last of them padded."""
    for i, size in enumerate(tile):
        if size == 0 and i + 1 < len(tile):  # `*`: joined with the next dimension
            at = len(dims) - len(tile) + i
            dims = [*dims[:at], dims[at] * dims[at + 1], *dims[at + 2 :]] if at >= 0 else dims
            tile = tile[:i] + tile[i + 1 :]
            return _tiled(dims, tile)
    dims = [1] * (len(tile) - len(dims)) + dims
    outer, inner = dims[: len(dims) - len(tile)], dims[len(dims) - len(tile) :]
    return [*outer, *(-(-d // t) for d, t in zip(inner, tile, strict=True)), *tile]


Type: TypeAlias = "Array | tuple[Type, ...]"


def arrays(value_type: Type) -> Iterator[Array]:
    """The arrays of a type, tuples flattened, tokens left out."""
    if isinstance(value_type, Array):
        if value_type.dtype not in ("token", "opaque"):
            yield value_type
        return
    for element in value_type:
        yield from arrays(element)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """``operands`` are names; ``text`` is what stands between its brackets, ``attributes`` what follows them."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    text: str
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The raw value of ``name=``."""
        match = re.search(rf"[,\s]{name}=", self.attributes)
        if not match:
            return None
        at = match.end()
        if self.attributes[at] in "{(":
            return self.attributes[at : balanced(self.attributes, at)]
        end = re.search(r", [a-z_]+=|$", self.attributes[at:])
        assert end is not None
        return self.attributes[at : at + end.start()].strip()

    def called_as(self, name: str) -> str | None:
        """The computation that attribute ``name`` names."""
        found = self.attribute(name)
        return None if found is None else found.lstrip("%")

    @property
    def called(self) -> list[str]:
        """Computations that it runs, those of a loop and of reductions' additions among them."""
        out: list[str] = []
        for match in _CALLED.finditer(self.attributes):
            at = match.end()
            if self.attributes[at] == "{":
                out += re.findall(r"[\w.\-<>]+", self.attributes[at : balanced(self.attributes, at)])
            else:
                out += re.findall(r"[\w.\-<>]+", re.split(r"[,\s]", self.attributes[at:])[0])
        return out

    @property
    def target(self) -> str:
        """What a custom call calls; "" of other instructions."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def known_trips(self) -> int | None:
        """How often a loop's body runs, where the compiler says it."""
        match = _TRIPS.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        """The operator of JAX that it is of; "" where none is named."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in their order."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        """What it gives."""
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Number → parameter."""
        return {int(i.text): i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction → those that read it."""
        out: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                out[name].append(instruction)
        return out

    def operand_types(self, instruction: Instruction) -> list[Type]:
        """Types of an instruction's operands."""
        return [self.instructions[name].type for name in instruction.operands]


@dataclass(frozen=True)
class Module:
    """A program: computations by name; ``num_devices`` that run it together."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int

    @cached_property
    def is_tiled(self) -> bool:
        """True for a TPU's: layouts are of tiles, and memories other than 0 are on the chip."""
        types = (a for i in self.computations[self.entry].instructions.values() for a in arrays(i.type))
        return any(a.tiles for a in types)

    def in_main_memory(self, array: Array) -> bool:
        """True unless it is in a memory of the chip (VMEM, SMEM). Other platforms number memories otherwise."""
        return array.space in (0, _HOST_MEMORY) or not self.is_tiled


_HOST_MEMORY = 5
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+) \(.*\) -> .*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-<>]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=?]*)\](?:\{([^}]*)\})?")
_TYPE_TOKEN = re.compile(rf"(?P<open>\()|(?P<close>\))|{_ARRAY.pattern}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BRACKET = re.compile(r'["(){}\[\]]')
_PAIRS = {"(": ")", "{": "}", "[": "]"}


def balanced(text: str, start: int) -> int:
    """Position after the bracket that closes the one at ``start``; brackets in strings are passed over."""
    stack: list[str] = []
    quoted = False
    for match in _BRACKET.finditer(text, start):
        c = match[0]
        if c == '"':
            quoted = quoted if text[match.start() - 1] == "\\" else not quoted
        elif quoted:
            continue
        elif c in _PAIRS:
            stack.append(_PAIRS[c])
        elif stack and c == stack[-1]:
            stack.pop()
            if not stack:
                return match.end()
    raise ValueError(f"unbalanced bracket in HLO line: {text[start : start + 120]!r}")


@lru_cache(maxsize=65536)
def type_from_text(text: str) -> Type:
    """``(f32[8,16]{1,0:T(8,128)S(1)}, u32[])`` → its type. Raises ValueError for text that is none."""
    stack: list[list[Type]] = [[]]
    at = 0
    while at < len(text):
        match = _TYPE_TOKEN.match(text, at)
        if match is None:
            comment = re.compile(r"[,\s]+|/\*.*?\*/").match(text, at)
            if comment is None:
                raise ValueError(f"cannot read HLO type {text!r}")
            at = comment.end()
            continue
        at = match.end()
        if match["open"]:
            stack.append([])
        elif match["close"]:
            if len(stack) < 2:
                raise ValueError(f"cannot read HLO type {text!r}")
            element = tuple(stack.pop())
            stack[-1].append(element)
        else:
            dtype, dims, layout = match[3], match[4], match[5]
            stack[-1].append(_array(dtype, dims, layout or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"cannot read HLO type {text!r}")
    return stack[0][0]


def _array(dtype: str, dims: str, layout: str) -> Array:
    order, _, rest = layout.partition(":")
    tiles: list[tuple[int, ...]] = []
    tiling = re.search(r"T((?:\([^)]*\))+)", rest)
    if tiling:
        for tile in re.findall(r"\(([^)]*)\)", tiling[1]):
            tiles.append(tuple(0 if t == "*" else int(t) for t in tile.split(",") if t))
    space = re.search(r"S\((\d+)\)", rest)
    return Array(
        dtype=dtype,
        dims=tuple(int(d.lstrip("<=")) for d in dims.split(",") if d),
        order=tuple(int(d) for d in order.split(",") if d),
        tiles=tuple(tiles),
        space=int(space[1]) if space else 0,
    )


def _instruction(line: str) -> Instruction | None:
    match = _NAME.match(line)
    if not match:
        return None
    at = match.end()
    end = balanced(line, at) if line[at] == "(" else line.index(" ", at)
    head = _OPCODE.match(line, end)
    if not head:
        raise ValueError(f"cannot read HLO instruction: {line[:160]!r}")
    closes = balanced(line, head.end() - 1)
    text, opcode = line[head.end() : closes - 1], head[1]
    names: list[str] = []
    if opcode not in ("parameter", "constant", "iota", "partition-id", "replica-id"):
        names = re.findall(r"%([\w.\-<>]+)", text) or [n.strip() for n in text.split(",") if n.strip()]
    return Instruction(
        name=match[2], type=type_from_text(line[at:end]), opcode=opcode, operands=tuple(names), text=text,
        attributes=line[closes:], is_root=bool(match[1]),
    )  # fmt: skip


def parse(text: str) -> Module:
    """The module that ``text`` is of. Raises ValueError for text that it cannot read."""
    found: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            match = None if line.startswith(" ") else _HEADER.match(line)
            if match:
                current = found.setdefault(match["name"], {})
                entry = match["name"] if match["entry"] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation in the HLO text")
    counts = (re.search(rf"{word}=(\d+)", text) for word in ("num_partitions", "replica_count"))
    num_devices = math.prod(int(c[1]) if c else 1 for c in counts)
    return Module({name: Computation(name, i) for name, i in found.items()}, entry, num_devices)
