"""What each instruction of a compiled program does: FLOPs of its products, bytes between main memory and chip.

In: a `hlo_text.Module`. Out: `Work` of each instruction that has any, in the program's order.

A fusion reads its operands and writes its results once. Of an operand that it only slices or gathers from, the slices
count (`_read`); of a result that is an updated operand, the update (`_written`). Arrays in a memory of the chip cost
nothing, padding of tiles counts as bytes. FLOPs are those of products and convolutions (`hlo_products`): padding and
dilation, which compilers for TPUs write products with, have none. Collectives are `hlo_collectives`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.verify.hlo_collectives import KINDS
from autopar.verify.hlo_loops import executed
from autopar.verify.hlo_products import Flops, is_known_call, product_flops
from autopar.verify.hlo_text import Array, Computation, Instruction, Module, arrays

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier while call "
    "conditional async-start async-update async-done domain add-dependency get-dimension-size".split()
)
_FREE_TARGETS = frozenset(
    {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape",
     "SPMDShardToFullShape"}
)  # fmt: skip
"""Custom calls that only name a buffer."""
_WHOLE = frozenset(
    "dot convolution reduce reduce-window sort custom-call rng rng-bit-generator fft cholesky triangular-solve "
    "select-and-scatter map".split()
)
"""What reads all of its operands, whatever of its result is read."""
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_SAME_VALUE = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an instruction does each time that it runs.

    Attributes:
        flops: of products, by dtype (HLO's name).
        bytes: between main memory and chip.
        trips, below: how often it runs, as `hlo_loops.Run`.
        is_start: True for a copy that goes on beside the instructions that follow; ``awaits``: the start that it waits
            for.
        opaque: what a custom call calls whose FLOPs cannot be seen; ``""`` of all others.
    """

    computation: str
    instruction: str
    opcode: str
    op_name: str
    trips: int | None
    below: int
    flops: Flops = ()
    bytes: float = 0.0
    is_start: bool = False
    awaits: str = ""
    opaque: str = ""


def works(module: Module) -> tuple[Work, ...]:
    """Work of every instruction that a run executes, in order; those that do nothing are left out."""
    out: list[Work] = []
    reading = _Reading(module)
    for run in executed(module, fused=False):
        i, computation = run.instruction, module.computations[run.computation]
        is_start = i.opcode.endswith("-start") and i.opcode != "async-start" and not _is_collective(i)
        awaits = i.operands[0] if i.opcode.endswith("-done") else ""
        flops = tuple(_flops(module, computation, i))
        moved = reading.moved(computation, i)
        opaque = i.target if i.opcode == "custom-call" and not flops and not is_known_call(i.target) else ""
        if i.target in _FREE_TARGETS:
            opaque = ""
        if flops or moved or awaits or opaque:
            out.append(
                Work(
                    computation=run.computation, instruction=i.name, opcode=i.opcode, op_name=i.op_name,
                    trips=run.trips, below=run.below, flops=_summed(flops), bytes=moved, is_start=is_start,
                    awaits=awaits, opaque=opaque,
                )
            )  # fmt: skip
    return tuple(out)


def _is_collective(i: Instruction) -> bool:
    return i.opcode.removesuffix("-start").removesuffix("-done") in KINDS


def _flops(module: Module, computation: Computation, i: Instruction) -> Iterator[tuple[str, float]]:
    """(dtype, FLOPs) of an instruction's products, those inside of a fusion too."""
    yield from product_flops(computation, i)
    if i.opcode == "fusion":
        for name in i.called:
            inner = module.computations[name]
            for each in inner.instructions.values():
                yield from _flops(module, inner, each)


def _summed(flops: Flops) -> Flops:
    total: dict[str, float] = {}
    for dtype, count in flops:
        total[dtype] = total.get(dtype, 0.0) + count
    return tuple(sorted(total.items()))


class _Reading:
    """Bytes that instructions of a module read and write."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[str, str], int] = {}
        self._caller: dict[str, tuple[Computation, Instruction]] = {}

    def moved(self, computation: Computation, i: Instruction) -> float:
        """Bytes between main memory and chip."""
        if i.opcode in _FREE or i.opcode.endswith("-done") or _is_collective(i) or i.target in _FREE_TARGETS:
            return 0.0
        results = list(arrays(i.type))
        opcode = i.opcode.removesuffix("-start")
        if i.opcode == "copy-start":  # its result is (copy, source, context)
            return float(sum(map(self._stored, results[:2])))
        if opcode in _SLICES:
            made = results if opcode == i.opcode else [next(a for a in results[1:])]
            whole = next(arrays(computation.operand_types(i)[0]))
            indices = [a for t in computation.operand_types(i)[1:] for a in arrays(t)]
            return sum(map(self._stored, [*made, *indices])) + sum(a.elements for a in made) * self._each(whole)
        if opcode == "dynamic-update-slice":
            whole, update = (next(arrays(t)) for t in computation.operand_types(i)[:2])
            return self._stored(update) + update.elements * self._each(whole)
        if opcode == "scatter":
            return float(self._scattered(computation, i))
        if i.opcode == "fusion":
            return self._fusion(computation, i)
        if i.target.startswith(("__cublas", "__cudnn")):
            results = [a for a in results if a.dtype != "s8"] if len(results) > 1 else results  # workspaces
        operands = {name: computation.instructions[name].type for name in i.operands}
        return float(
            sum(self._stored(a) for t in operands.values() for a in arrays(t)) + sum(map(self._stored, results))
        )

    def _stored(self, array: Array) -> int:
        return array.stored_bytes if self._module.in_main_memory(array) else 0

    def _each(self, array: Array) -> float:
        """Bytes of an element of it, padding shared out."""
        return self._stored(array) / array.elements if array.elements else 0.0

    def _scattered(self, computation: Computation, i: Instruction) -> float:
        types = computation.operand_types(i)
        count = (len(types) - 1) // 2
        into, others = types[:count], types[count:]
        updates = [a for t in types[count + 1 :] for a in arrays(t)]
        total = float(sum(self._stored(a) for t in others for a in arrays(t)))
        for t, update in zip(into, updates, strict=True):
            total += 2 * update.elements * self._each(next(arrays(t)))
        return total

    # --- fusions -------------------------------------------------------------------------------------------------

    def _fusion(self, computation: Computation, fusion: Instruction) -> float:
        inner = self._module.computations[fusion.called[0]]
        self._caller[inner.name] = computation, fusion
        read: dict[str, float] = {}
        for number, name in enumerate(fusion.operands):
            operand = computation.instructions[name].type
            if not isinstance(operand, Array):
                read[name] = float(sum(map(self._stored, arrays(operand))))
            elif self._stored(operand) and number in inner.parameters:
                elements = self._read(inner, inner.parameters[number].name)
                read[name] = min(self._stored(operand), read.get(name, 0.0) + elements * self._each(operand))
        total = sum(read.values())
        roots = [inner.root]
        if inner.root.opcode == "tuple":
            roots = [inner.instructions[name] for name in inner.root.operands]
        for root, array in zip(roots, self._results(fusion), strict=False):
            total += self._written(inner, root) * self._each(array)
        return total

    def _results(self, fusion: Instruction) -> list[Array]:
        return [a for element in (fusion.type if isinstance(fusion.type, tuple) else (fusion.type,))
                for a in [next(arrays(element), Array(dtype="pred", dims=(0,)))]]  # fmt: skip

    def _read(self, computation: Computation, name: str) -> int:
        """How many elements of a value are read by those who read it inside of a fusion."""
        key = computation.name, name
        if key not in self._known:
            self._known[key] = 0  # of what refers to itself nothing more is read
            self._known[key] = self._found(computation, name)
        return self._known[key]

    def _found(self, computation: Computation, name: str) -> int:
        whole = sum(a.elements for a in arrays(computation.instructions[name].type))
        total = 0
        if computation.instructions[name].is_root:
            outer = self._caller.get(computation.name)
            inside = outer is not None and outer[0].name in self._caller  # a fusion in a fusion
            total += self._read(outer[0], outer[1].name) if outer is not None and inside else whole
        for user in computation.users[name]:
            if total >= whole:
                break
            total += self._by(computation, user, name, whole)
        return min(total, whole)

    def _by(self, computation: Computation, user: Instruction, name: str, whole: int) -> int:
        """Elements of a value that one of its readers reads."""
        results = sum(a.elements for a in arrays(user.type))
        if user.opcode == "tuple":
            return 0 if computation.instructions[name].opcode == "parameter" else whole
        if user.opcode in _SLICES:
            return min(whole, results) if user.operands[0] == name else whole
        if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            return 0 if self._is_result(computation, user) else whole
        if user.opcode == "scatter":
            into = user.operands[: (len(user.operands) - 1) // 2]
            return min(whole, self._written(computation, user)) if name in into else whole
        if user.opcode == "fusion":
            inner = self._module.computations[user.called[0]]
            self._caller[inner.name] = computation, user
            return sum(self._read(inner, inner.parameters[n].name) for n, o in enumerate(user.operands) if o == name)
        if _is_collective(user):
            return 0
        if results == whole and user.opcode not in _WHOLE:
            return self._read(computation, user.name)
        return whole

    def _is_result(self, computation: Computation, i: Instruction) -> bool:
        """True where a value is the fusion's result, or one of them, and nothing else."""
        if i.is_root:
            return True
        users = computation.users[i.name]
        return bool(users) and all(
            u.opcode == "tuple" or (u.opcode in _SAME_VALUE and self._is_result(computation, u)) for u in users
        )

    def _written(self, computation: Computation, i: Instruction) -> int:
        """Elements of a result that a fusion writes."""
        while i.opcode in _SAME_VALUE:
            i = computation.instructions[i.operands[0]]
        match i.opcode:
            case "parameter":  # handed on in its place
                return 0
            case "dynamic-update-slice":
                return sum(a.elements for a in arrays(computation.instructions[i.operands[1]].type))
            case "scatter":
                updates = i.operands[(len(i.operands) - 1) // 2 + 1 :]
                return sum(a.elements for a in arrays(computation.instructions[updates[0]].type))
            case "fusion":
                inner = self._module.computations[i.called[0]]
                if inner.root.opcode != "tuple":
                    return self._written(inner, inner.root)
            case _:
                pass
        return 0 if _is_collective(i) else sum(a.elements for a in arrays(i.type))
