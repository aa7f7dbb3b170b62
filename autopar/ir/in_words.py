"""A plan in the words of those who lay out models by hand: data parallel, ZeRO, tensor, sequence and expert parallel.

In: a `Plan`. Out: what each axis of each stage's mesh is for (`parallelism`), and one line of that (`in_words`):

    ZeRO-3 over x, tensor parallel over y
    4 stages, 1f1b, 16 microbatches: ZeRO-1 over data, tensor parallel over tensor

What an axis splits is weighed by the FLOPs of products and attention (`ir.sharding_plan.AxisUse`); a part of less than
`SHOWN` is left out. An axis that splits examples is ZeRO (Rajbhandari et al., "ZeRO", SC 2020) where it also splits
most bytes of the weights (3), or of the optimizer's state (2 where sums of gradients are split as they are added up
over microbatches, else 1; with one microbatch 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.layer_text import indices_text
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.sharding_plan import AxisUse
from autopar.ir.strategy import Collective

SHOWN = 0.1
"""The part of an axis' FLOPs from which on it is told what is split so (chosen)."""
MOST = 0.5
"""The part of the bytes of a kind from which on they count as split (chosen)."""
_NAMES = {
    "positions": "sequence parallel", "experts": "expert parallel", "features": "tensor parallel",
    "nothing": "the same work",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What ``axes`` of a stage's mesh are for, in words: ``what`` (``ZeRO-3``)."""

    axes: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"{self.what} over {'·'.join(self.axes)}"


def in_words(plan: Plan) -> str:
    """One line: stages and schedule, where there are several, and what the mesh axes of each stage are for."""
    each = parallelism(plan)
    stages: dict[str, list[int]] = {}
    for number, words in enumerate(each):
        stages.setdefault(", ".join(map(str, words)) or "one device", []).append(number)
    if isinstance(plan.body, OneProgram):
        return _microbatches(next(iter(stages)), plan.config.num_microbatches)
    schedule = plan.pipelined.plan.schedule
    head = f"{len(each)} stage{'s' if len(each) > 1 else ''}, {schedule.name}"
    head = _microbatches(head, schedule.num_microbatches)
    if len(stages) == 1:
        return f"{head}: {next(iter(stages))}"
    rest = "; ".join(
        f"{words} in stage{'s' if len(numbers) > 1 else ''} {indices_text(numbers)}"
        for words, numbers in stages.items()
    )
    return f"{head}: {rest}"


def _microbatches(text: str, count: int) -> str:
    return f"{text}, {count} microbatches" if count > 1 else text


def parallelism(plan: Plan) -> tuple[tuple[Words, ...], ...]:
    """For each stage what its mesh's axes are for, in the order of the axes; axes of one device are left out, and those
    of one purpose are together."""
    match plan.body:
        case OneProgram(sharding=sharding):
            return (_words(plan, 0, _shares([sharding.uses]), sharding.collectives),)
        case Pipelined() as pipelined:
            out: list[tuple[Words, ...]] = []
            for number, stage in enumerate(pipelined.plan.stages):
                layers = [pipelined.sharding_of(k) for k in stage.layers]
                collectives = [*pipelined.between[number], *(c for layer in layers for c in layer.collectives)]
                out.append(_words(plan, number, _shares([layer.uses for layer in layers]), collectives))
            return tuple(out)


def _shares(every: Iterable[Sequence[AxisUse]]) -> dict[str, dict[str, float]]:
    """Axis → what it splits → the part of the FLOPs."""
    flops: dict[str, dict[str, float]] = {}
    for uses in every:
        for use in uses:
            mine = flops.setdefault(use.axis, {})
            for what, count in use.flops:
                mine[what] = mine.get(what, 0.0) + count
    return {
        axis: {what: count / total for what, count in mine.items()}
        for axis, mine in flops.items()
        if (total := sum(mine.values())) > 0
    }


def _words(
    plan: Plan, stage: int, shares: dict[str, dict[str, float]], collectives: Sequence[Collective]
) -> tuple[Words, ...]:
    purposes: dict[str, list[str]] = {}
    for axis in plan.meshes[stage].axes:
        if axis.size > 1:
            purposes.setdefault(_purpose(plan, stage, axis.name, shares, collectives), []).append(axis.name)
    return tuple(Words(axes=tuple(axes), what=what) for what, axes in purposes.items())


def _purpose(
    plan: Plan, stage: int, axis: str, shares: dict[str, dict[str, float]], collectives: Sequence[Collective]
) -> str:
    """What one axis is for."""
    mine = sorted(shares.get(axis, {}).items(), key=lambda item: (-item[1], item[0]))
    parts = [(what, part) for what, part in mine if part >= SHOWN]
    weights = split_part(plan, stage, "weights", axis) >= MOST
    if not parts:
        return "sharded" if weights else "the same work"

    def name(what: str) -> str:
        if what == "examples":
            return _of_examples(plan, stage, axis, weights, collectives)
        return _NAMES[what] + (" with sharded weights" if what == "positions" and weights else "")

    if len(parts) == 1:
        return name(parts[0][0])
    if any(what == "experts" for what, _ in parts):  # their products, and all others
        return " and ".join(name(what) for what, _ in sorted(parts, key=lambda part: part[0] != "experts"))
    *said, last = (f"{name(what)} ({100 * part:.0f} %)" for what, part in parts)
    return f"{', '.join(said)} and {last}"


def _of_examples(plan: Plan, stage: int, axis: str, weights: bool, collectives: Sequence[Collective]) -> str:
    if weights:
        return "ZeRO-3"
    if split_part(plan, stage, "optimizer state", axis) < MOST:
        return "data parallel"
    count = plan.config.num_microbatches
    sums = [c for c in collectives if axis in c.axes and c.kind in ("reduce-scatter", "all-reduce")]
    each = sum(c.operand_bytes * c.count for c in sums if c.kind == "reduce-scatter" and c.trips >= count)
    return "ZeRO-2" if each >= MOST * sum(c.operand_bytes * c.count for c in sums) else "ZeRO-1"


def split_part(plan: Plan, stage: int, role: str, axis: str) -> float:
    """The part of the bytes of arguments of ``role`` (`ir.plan.ROLES`) that ``axis`` of a stage's mesh splits; 0 where
    the stage holds none."""
    total = split = 0
    for size, axes in _held(plan, stage, role):
        total += size
        split += size if axis in axes else 0
    return split / total if total else 0.0


def _held(plan: Plan, stage: int, role: str) -> Iterator[tuple[int, set[str]]]:
    """(bytes of the whole, axes that split it) of what a stage holds of a role."""
    for argument in plan.inputs:
        for place in argument.places:
            if argument.role == role and place.stage == stage:
                yield place.type_of(argument.type).size_bytes, {axis for dim in place.spec.dims for axis in dim}
