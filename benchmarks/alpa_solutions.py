"""What Alpa (Zheng et al., OSDI 2022) found for its suites on p3.16xlarge, and the one time published with its code.

`SOLUTIONS`: row of `benchmarks.suite_models.SUITE` → `Solution`. The stages are the ones its code replays
(github.com/alpa-projects/alpa, benchmark/alpa: suite_auto_gpt.py, suite_auto_moe.py, suite_wresnet.py,
suite_unet.py); they agree with the paper's text and figures. No step time is published for them but as throughput in
a plot, which is not repeated here. `MEASURED` is the point its documentation gives to check an installation by, with
its compile time.

Nothing here was measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``layers`` of the clustering in it; ``submesh``: hosts × devices of a host; ``logical``: the same devices as two
    mesh axes. ``batch_first``: the batch dimension was bound to the first axis, so that (data parallel, operator
    parallel) is ``logical``; otherwise the solver chose, and what it chose is not published."""

    layers: int
    submesh: Shape
    logical: Shape
    batch_first: bool = False

    @property
    def devices(self) -> int:
        """Of the submesh."""
        return self.submesh[0] * self.submesh[1]

    @property
    def parallel(self) -> Shape | None:
        """(data parallel, operator parallel), where published."""
        return self.logical if self.batch_first or self.devices == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Stages in order of the forward pass. All were found with rematerialisation."""

    stages: tuple[Stage, ...]
    num_microbatches: int

    @property
    def num_layers(self) -> int:
        """Into how many layers the model was clustered."""
        return sum(stage.layers for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step time. ``batch_first`` as in `Stage`; ``peak_bytes`` per device; ``flops_per_s`` per device, the backward
    pass counted as two forward ones; ``flops_per_s_recomputed`` with the recomputed forward pass too."""

    row: str
    cluster: str
    global_batch: int
    num_microbatches: int
    data_parallel: int
    operator_parallel: int
    pipeline_parallel: int
    batch_first: bool
    step_s: float
    peak_bytes: float
    flops_per_s: float
    flops_per_s_recomputed: float
    compile_s: tuple[float, float]


def _solution(
    num_microbatches: int,
    layers: tuple[int, ...],
    submeshes: tuple[Shape, ...],
    logical: tuple[Shape, ...],
    batch_first: tuple[bool, ...],
) -> Solution:
    stages = tuple(
        Stage(layers=n, submesh=submesh, logical=shape, batch_first=first)
        for n, submesh, shape, first in zip(layers, submeshes, logical, batch_first, strict=True)
    )
    return Solution(stages=stages, num_microbatches=num_microbatches)


def _equal(
    num_microbatches: int, stages: int, layers: int, submesh: Shape, logical: Shape, *, batch_first: bool
) -> Solution:
    """``stages`` times the same, each of ``layers``."""
    return _solution(
        num_microbatches, (layers,) * stages, (submesh,) * stages, (logical,) * stages, (batch_first,) * stages
    )


SOLUTIONS: dict[str, Solution] = {
    "gpt-350M": _equal(512, 1, 1, (1, 1), (1, 1), batch_first=False),
    "gpt-760M": _equal(128, 2, 3, (1, 1), (1, 1), batch_first=True),
    "gpt-1.3B": _equal(128, 2, 3, (1, 2), (2, 1), batch_first=True),
    "gpt-2.6B": _solution(128, (2, 2, 4), ((1, 2), (1, 2), (1, 4)), ((2, 1), (2, 1), (4, 1)), (True, False, False)),
    "gpt-6.7B": _equal(64, 2, 4, (1, 8), (2, 4), batch_first=True),
    "gpt-15B": _equal(128, 4, 4, (1, 8), (2, 4), batch_first=True),
    "gpt-39B": _equal(1024, 16, 1, (1, 4), (1, 4), batch_first=True),
    "moe-380M": _equal(512, 1, 1, (1, 1), (1, 1), batch_first=False),
    "moe-690M": _equal(32, 1, 8, (1, 2), (2, 1), batch_first=True),
    "moe-1.3B": _equal(32, 2, 4, (1, 2), (2, 1), batch_first=True),
    "moe-2.4B": _equal(32, 2, 4, (1, 4), (4, 1), batch_first=True),
    "moe-10B": _equal(16, 2, 4, (1, 8), (8, 1), batch_first=False),
    "moe-27B": _equal(128, 8, 1, (1, 4), (4, 1), batch_first=False),
    "moe-70B": _equal(64, 8, 1, (1, 8), (8, 1), batch_first=False),
    "wide-resnet-250M": _equal(24, 1, 16, (1, 1), (1, 1), batch_first=False),
    "wide-resnet-500M": _equal(24, 1, 16, (1, 2), (1, 2), batch_first=False),
    "wide-resnet-1B": _equal(24, 1, 16, (1, 4), (1, 4), batch_first=False),
    "wide-resnet-2B": _solution(24, (8, 8), ((1, 4), (1, 4)), ((4, 1), (1, 4)), (False, True)),
    "wide-resnet-4B": _solution(32, (5, 4, 7), ((1, 4), (1, 4), (1, 8)), ((4, 1), (4, 1), (8, 1)), (True, True, False)),
    "wide-resnet-6.8B": _solution(32, (5, 4, 4, 3), ((1, 8),) * 4, ((8, 1),) * 4, (True, False, False, False)),
    "wide-resnet-13B": _solution(
        38,
        (4, 4, 4, 4, 4, 4, 5, 4),
        ((1, 8),) * 8,
        ((8, 1), (1, 8), (8, 1), (1, 8), (8, 1), (8, 1), (1, 8), (8, 1)),
        (False, True, False, True, False, False, True, False),
    ),
    "u-transformer-470M": _solution(4, (7, 6), ((1, 1),) * 2, ((1, 1),) * 2, (False,) * 2),
    "u-transformer-1B": _solution(32, (8, 5), ((1, 2),) * 2, ((1, 2),) * 2, (False,) * 2),
    "u-transformer-2B": _solution(32, (8, 5), ((1, 4),) * 2, ((1, 4),) * 2, (False,) * 2),
}
"""Row → what was found for it."""

MEASURED = Measured(
    row="gpt-2.6B",
    cluster="p3.16xlarge",
    global_batch=32,
    num_microbatches=4,
    data_parallel=2,
    operator_parallel=2,
    pipeline_parallel=2,
    batch_first=True,
    step_s=2.464,
    peak_bytes=8.745 * 2**30,  # printed as 8.745 GB by code whose GB is 2**30 bytes
    flops_per_s=28e12,
    flops_per_s_recomputed=37.0e12,
    compile_s=(67.0, 22.0),
)
"""Not a found solution: two equal stages, set by hand, with rematerialisation, the batch bound to the first mesh axis
(``force_batch_dim_mapping=True``) and reduce-scatter preferred, so that the optimizer's state is split over both axes.
An earlier run of the same, the batch not bound, took 2.425 s and as much memory (its README of April 2022)."""

COMPILE_S = {"gpt-39B": 2393.0}
"""Seconds to find and compile, profiling on the cluster included (the paper's table of compilation times)."""
