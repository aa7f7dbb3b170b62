"""Where the seconds of a planned step go, and what that means to people: throughput, utilisation, dearest lines.

In: an `ir.plan.Plan`. Out: `Spending`, of the busiest worker of a pipeline.

Utilisation is that of model FLOPs (Chowdhery et al., "PaLM", 2022, appendix B): those of products and attention, of the
backward pass at most twice the forward pass', so that recomputation does not count; over the devices' peak at the dtype
in which they are fastest, but float8 and integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import TensorType
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.sharding_plan import OperatorRow
from autopar.ir.strategy import Collective

DTYPES = ("bfloat16", "float16", "float32")
"""Whose peaks utilisation is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds a step of a device: ``what`` they go to; ``beside``: of these, what runs beside compute."""

    what: str
    seconds: float
    beside: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Attributes:
    rows: seconds by kind of work, collectives by kind and axes, the bubble of a pipeline; collectives with all of
        their time. What does not run ``beside`` others sums up to the step's.
    utilisation: model FLOPs, as a part of the peak; None where there are no products.
    examples_per_s, tokens_per_s: None where no argument says how many there are.
    dearest: (operator and source line, seconds), the dearest first.
    """

    rows: tuple[Spent, ...]
    utilisation: float | None
    examples_per_s: float | None
    tokens_per_s: float | None
    dearest: tuple[tuple[str, float], ...]


def spending(plan: Plan) -> Spending:
    """What a plan's step spends its time on."""
    match plan.body:
        case OneProgram(sharding=sharding):
            per_worker = [list(sharding.operators)]
            collectives = list(sharding.collectives)
            worker, devices = 0, [sharding.mesh.num_devices]
            device = sharding.mesh.device
        case Pipelined() as pipelined:
            per_worker, each = _workers(pipelined)
            worker = max(range(len(per_worker)), key=lambda w: plan.predictions.workers[w].busy_s)
            collectives = each[worker]
            devices = [w.num_devices for w in plan.predictions.workers]
            device = pipelined.worker_meshes()[worker].device
    mine, step_s = per_worker[worker], plan.predictions.step_s
    idle_s = step_s * plan.predictions.bubble_of(worker) if isinstance(plan.body, Pipelined) else 0.0
    shown_s = step_s - idle_s - math.fsum(row.time_s for row in mine)
    rows = [*_of_work(mine), *_of_collectives(collectives, shown_s)]
    if idle_s > 0:
        rows.append(Spent(what="bubble", seconds=idle_s))
    flops = sum(n * _model_flops(operators) for n, operators in zip(devices, per_worker, strict=True))
    peak = peak_of(device) * sum(devices)
    examples, tokens = _batch(plan)
    lines: dict[str, float] = {}
    for row in mine:
        line = f"{row.primitive} ({row.source})" if row.source else row.primitive
        lines[line] = lines.get(line, 0.0) + row.time_s
    dearest = sorted(lines.items(), key=lambda item: -item[1])
    return Spending(
        rows=tuple(rows), utilisation=flops / (peak * step_s) if flops and step_s else None,
        examples_per_s=examples / step_s if examples and step_s else None,
        tokens_per_s=tokens / step_s if tokens and step_s else None, dearest=tuple(dearest),
    )  # fmt: skip


def _workers(pipelined: Pipelined) -> tuple[list[list[OperatorRow]], list[list[Collective]]]:
    """Operators and collectives of each worker's layers, and the collectives between them."""
    schedule = pipelined.plan.schedule
    operators: list[list[OperatorRow]] = [[] for _ in schedule.tasks]
    collectives: list[list[Collective]] = [[] for _ in schedule.tasks]
    for number, stage in enumerate(pipelined.plan.stages):
        worker = schedule.mesh_of_stage[number]
        collectives[worker] += pipelined.between[number]
        for k in stage.layers:
            operators[worker] += pipelined.sharding_of(k).operators
            collectives[worker] += pipelined.sharding_of(k).collectives
    return operators, collectives


def _of_work(operators: Sequence[OperatorRow]) -> Iterator[Spent]:
    names = {"products": "products", "attention": "attention", "kernels": "other kernels", "memory": "memory-bound"}
    for work, name in names.items():
        seconds = math.fsum(o.time_s for o in operators if o.work == work and o.phase != "update")
        if seconds:
            yield Spent(what=name, seconds=seconds)
    update_s = math.fsum(o.time_s for o in operators if o.phase == "update")
    if update_s:
        yield Spent(what="update", seconds=update_s)


def _of_collectives(collectives: Sequence[Collective], shown_s: float) -> Iterator[Spent]:
    """What ``shown_s`` leaves of all of them runs beside compute: of each its part of those that may, or, where these
    take less, its part of all."""
    hidden_s = max(0.0, math.fsum(c.time_s for c in collectives) - shown_s)
    may_s = math.fsum(c.time_s for c in collectives if c.beside)
    if every := may_s < hidden_s:
        may_s = math.fsum(c.time_s for c in collectives)
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    for (kind, axes), mine in sorted(groups.items()):
        beside_s = math.fsum(c.time_s for c in mine if every or c.beside)
        yield Spent(
            what=f"{kind} over {','.join(axes)}", seconds=math.fsum(c.time_s for c in mine),
            beside=min(beside_s, hidden_s * beside_s / may_s) if beside_s else 0.0,
        )  # fmt: skip


def _model_flops(operators: Sequence[OperatorRow]) -> float:
    forward, backward = (
        math.fsum(o.flops for o in operators if o.phase == phase and o.work != "memory")
        for phase in ("forward", "backward")
    )
    return forward + min(2 * forward, backward)


def _batch(plan: Plan) -> tuple[int | None, int | None]:
    """(examples, tokens) of a step: of the batch's arrays the leading dimension, and the elements of whole numbers of
    two dimensions."""
    given: list[TensorType] = [a.type for a in plan.inputs if a.role == "batch" and len(a.type.shape) > 0]
    examples = max((t.shape[0] for t in given), default=None)
    tokens = [t.size for t in given if len(t.shape) == 2 and t.dtype.startswith(("int", "uint"))]
    return examples, max(tokens, default=None)


def peak_of(device: DeviceSpec) -> float:
    """FLOP/s that utilisation is of."""
    return max(dict(device.flops_per_s).get(dtype, 0.0) for dtype in DTYPES)
