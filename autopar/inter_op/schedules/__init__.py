"""Pipeline schedules by name. Each is a function of the number of meshes and of microbatches; durations do not matter.

A new schedule is a file here and an entry in `SCHEDULES`; `check_schedule` is run over every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.inter_op.schedules.eager_1f1b import eager_1f1b, overlap_depth
from autopar.inter_op.schedules.gpipe import gpipe
from autopar.inter_op.schedules.inference import inference
from autopar.inter_op.schedules.interleaved_1f1b import interleaved_1f1b
from autopar.inter_op.schedules.one_f_one_b import one_f_one_b
from autopar.inter_op.schedules.zero_bubble import zb_h1, zb_h2
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """``build(num_meshes, num_microbatches, **options)``, which options it takes, and what it asks of stages: whether
    their backward passes are split, whether a mesh has several of them, whether there is a backward pass."""

    build: Callable[..., Schedule]
    options: tuple[str, ...] = ()
    splits_backward: bool = False
    chunked: bool = False
    trains: bool = True


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(build=gpipe),
    "1f1b": ScheduleKind(build=one_f_one_b),
    "eager_1f1b": ScheduleKind(build=eager_1f1b, options=("depth",)),
    "interleaved_1f1b": ScheduleKind(build=interleaved_1f1b, options=("chunks",), chunked=True),
    "zb_h1": ScheduleKind(build=zb_h1, splits_backward=True),
    "zb_h2": ScheduleKind(build=zb_h2, splits_backward=True),
    "inference": ScheduleKind(build=inference, trains=False),
}


def make_schedule(name: str, num_meshes: int, num_microbatches: int, **options: int) -> Schedule:
    """The schedule of that name. Raises ScheduleError for an unknown name or option and where the schedule cannot be
    made for these numbers."""
    kind = SCHEDULES.get(name)
    if kind is None:
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    for option in options:
        if option not in kind.options:
            raise ScheduleError(f"{name} takes no option {option!r}; it takes {', '.join(kind.options) or 'none'}")
    return kind.build(num_meshes, num_microbatches, **options)


__all__ = ["SCHEDULES", "ScheduleKind", "make_schedule", "overlap_depth"]
