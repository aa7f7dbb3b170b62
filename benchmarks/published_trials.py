"""Layouts that ran on A100 of 80 GB, or ran out of memory: are they predicted to? (`benchmarks.published --trials`)

A plan says what a compiled program holds. The trials' framework runs operator by operator, and holds more, which
`eager_peak_bytes` adds to what each stage of a plan has:

    scores of words   all of them on every device of a tensor group, in as many copies as eager operators make
    norms             without a kernel of their own, what two operators each keep for the backward pass
    sequence parallel the gathered operands of products, which Megatron-LM gathers again

Of the memory `USABLE` is there; it alone is fitted, on every other sheet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.published_compared import Compared, ordered, summary_of

MEMORY_BYTES = 80e9
USABLE = 0.89
"""The part of a GPU's memory that arrays may have: the rest is the context's, the collectives' and lost to fragments.
The largest of whole percents with which at most 2 % of what is said to fit did not, on the sheets that are not
`kept_apart`."""
BALANCED_BAR, WRONG_FITS_BAR = 0.92, 0.03
SCORE_BYTES = 20
"""Of a word's score: in bfloat16, in float32, its log-softmax, of that the gradient and what it is made of, in float32
each, and the gradient in bfloat16."""
PLANNED_SCORE_BYTES = 8
"""What plans have already of one of the device's (the difference between plans of two sizes of microbatches)."""
NORM_BYTES = 2 * (4 + 2)
"""Of a block's two norms, an element: its operand in float32, and the normalized value before it is scaled."""
GATHERED_BYTES = 2 * 2
"""Of the operands of a block's two first products, an element."""


def eager_peak_bytes(compared: Compared) -> float:
    """The peak of a trial's fullest device, what its framework holds beside the plan included."""
    run, told = compared.run, json.loads(compared.found.facts)
    case = run.case
    assert case is not None
    tokens = case.batch // case.data // case.microbatches * case.model.seq
    split = case.tensor if case.sequence_parallel else 1
    peaks: list[float] = []
    for stage, peak in enumerate(told["worker_peak_bytes"]):
        blocks = case.model.layers / case.pipeline * told["in_flight"][stage] if case.recompute == "none" else 1
        elements = blocks * tokens * case.model.hidden
        more = 0.0 if "rms kernel" in run.kernel else NORM_BYTES * elements / split
        more += GATHERED_BYTES * elements if split > 1 else 0.0
        if stage == case.pipeline - 1:
            more += tokens * case.model.vocab * (SCORE_BYTES - PLANNED_SCORE_BYTES / case.tensor)
        peaks.append(peak + more)
    return max(peaks)


def report(compared: Sequence[Compared], console: Console) -> int:
    """Prints the tables; 1 where a bar is missed."""
    known = [x for x in compared if not x.found.why]
    for each in compared:
        if each.found.why:
            console.print(each.run.id, each.found.why)
    peaks = [(x, eager_peak_bytes(x)) for x in known]
    apart = kept_apart(x.run.sheet for x in known)
    table = Table(
        "sheets", "ran, fits", "ran, does not", "ran out, fits", "ran out, does not", "balanced accuracy",
        "of the fits ran out", title=f"{len(known)} trials; {USABLE:.0%} of 80 GB",
    )  # fmt: skip
    missed = False
    for name, rows in (
        ("all", peaks),
        ("fitted on", [(x, peak) for x, peak in peaks if x.run.sheet not in apart]),
        ("kept apart", [(x, peak) for x, peak in peaks if x.run.sheet in apart]),
    ):
        counts = memory_counts(((x.run.status == "ok", peak) for x, peak in rows), USABLE)
        cells = (counts.ran_fits, counts.ran_not, counts.out_fits, counts.out_not)
        table.add_row(name, *map(str, cells), f"{counts.balanced:.3f}", f"{counts.wrong_fits:.3f}")
        missed |= name == "all" and not (counts.balanced >= BALANCED_BAR and counts.wrong_fits <= WRONG_FITS_BAR)
    console.print(table)
    good = [x for x in known if not math.isnan(x.error)]
    middle, p90, signed = summary_of(x.error for x in good)
    right, pairs = ordered(good)
    console.print(f"{len(good)} step times: median |ln| {middle:.3f}, p90 {p90:.3f}, median ln {signed:+.3f}; "
                  f"order {right} of {pairs} pairs")  # fmt: skip
    return int(missed)


def kept_apart(sheets: Iterable[str]) -> set[str]:
    """Every other sheet, by name: no constant is fitted on these."""
    return set(sorted(set(sheets))[1::2])


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Trials: ran, or ran out of memory; predicted to fit, or not to."""

    ran_fits: int
    ran_not: int
    out_fits: int
    out_not: int

    @property
    def balanced(self) -> float:
        """The mean of the shares of both kinds that are predicted right."""
        ran, out = self.ran_fits + self.ran_not, self.out_fits + self.out_not
        return (self.ran_fits / ran + self.out_not / out) / 2 if ran and out else math.nan

    @property
    def wrong_fits(self) -> float:
        """Of those predicted to fit, the share that did not."""
        fits = self.ran_fits + self.out_fits
        return self.out_fits / fits if fits else math.nan


def memory_counts(trials: Iterable[tuple[bool, float]], usable: float) -> MemoryCounts:
    """Of trials (whether it ran, the predicted peak in bytes) with so much of the memory usable."""
    kinds = [(ran, peak <= usable * MEMORY_BYTES) for ran, peak in trials]
    return MemoryCounts(
        ran_fits=kinds.count((True, True)), ran_not=kinds.count((True, False)),
        out_fits=kinds.count((False, True)), out_not=kinds.count((False, False)),
    )  # fmt: skip
