"""How far measured steps were from predicted ones, by device: what a prediction may be off by.

Of published runs, each planned in its own layout (`python -m benchmarks.published`): dense models in 16 bits, whose
sources state times and layouts. For devices of which fewer than `FEWEST` runs were compared nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """Measured seconds of a step over predicted ones, 10th to 90th percentile of ``runs`` runs."""

    low: float
    high: float
    runs: int


BANDS: Mapping[str, ErrorBand] = {
    "A100": ErrorBand(low=0.89, high=1.27, runs=153),
    "H100": ErrorBand(low=0.88, high=1.20, runs=51),
    "TPU-v5e": ErrorBand(low=0.93, high=1.12, runs=14),
    "TPU-v5p": ErrorBand(low=0.89, high=1.32, runs=11),
    "TPU-v6e": ErrorBand(low=0.52, high=1.23, runs=8),
}
"""First word of a device's name, of a TPU the whole name → its band. Constants of `cost.kernels` and `intra_op.overlap`
were fitted on runs that are among these."""


def error_band(device_name: str) -> ErrorBand | None:
    """The band of a device; None where too little was compared, as for devices that were measured."""
    name = device_name if device_name.startswith("TPU") else device_name.partition("-")[0]
    return BANDS.get(name)
