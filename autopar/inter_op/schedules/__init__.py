"""Pipeline schedules by name. Each is a function of the number of meshes and of microbatches; durations do not matter.

A new schedule is a file here that exports its `ScheduleRecord`, and an entry in `SCHEDULES`: then it is searched,
simulated, run and checked (`ScheduleRecord.verify`, `check_schedule`, a golden) as the others are.
"""

from __future__ import annotations

from autopar.inter_op.schedules.eager_1f1b import EAGER_1F1B
from autopar.inter_op.schedules.gpipe import GPIPE
from autopar.inter_op.schedules.inference import INFERENCE
from autopar.inter_op.schedules.interleaved_1f1b import INTERLEAVED_1F1B
from autopar.inter_op.schedules.one_f_one_b import ONE_F_ONE_B
from autopar.inter_op.schedules.record import ScheduleOptions, ScheduleRecord
from autopar.inter_op.schedules.zero_bubble import ZB_H1, ZB_H2
from autopar.ir.errors import ScheduleError
from autopar.ir.pipeline import Schedule

SCHEDULES: dict[str, ScheduleRecord] = {
    GPIPE.name: GPIPE,
    ONE_F_ONE_B.name: ONE_F_ONE_B,
    EAGER_1F1B.name: EAGER_1F1B,
    INTERLEAVED_1F1B.name: INTERLEAVED_1F1B,
    ZB_H1.name: ZB_H1,
    ZB_H2.name: ZB_H2,
    INFERENCE.name: INFERENCE,
}


def plain_schedule(*, trains: bool) -> ScheduleRecord:
    """The schedule that a single stage runs, of those with a backward pass or of those without. No other holds fewer
    microbatches on as many stages, each with a mesh of its own."""
    (plain,) = (record for record in SCHEDULES.values() if record.on_one_stage and record.trains == trains)
    return plain


def make_schedule(name: str, num_meshes: int, num_microbatches: int, **options: int) -> Schedule:
    """The schedule of that name. Raises ScheduleError for an unknown name or option and where the schedule cannot be
    made for these numbers."""
    record = SCHEDULES.get(name)
    if record is None:
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    for option in options:
        if option not in record.options:
            raise ScheduleError(f"{name} takes no option {option!r}; it takes {', '.join(record.options) or 'none'}")
    return record.build(num_meshes, num_microbatches, **options)


__all__ = ["SCHEDULES", "ScheduleOptions", "ScheduleRecord", "make_schedule", "plain_schedule"]
