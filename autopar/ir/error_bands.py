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
    "A100": ErrorBand(low=0.88, high=1.24, runs=41),
    "H100": ErrorBand(low=0.85, high=1.20, runs=26),
    "TPU-v5e": ErrorBand(low=0.94, high=1.18, runs=14),
    "TPU-v5p": ErrorBand(low=0.90, high=1.34, runs=11),
    "TPU-v6e": ErrorBand(low=0.50, high=1.46, runs=8),
}
"""First word of a device's name, of a TPU the whole name → its band. Constants of `cost.kernels` and `intra_op.overlap`
were fitted on runs that are among these."""


def error_band(device_name: str) -> ErrorBand | None:
    """The band of a device; None where too little was compared, as for devices that were measured."""
    name = device_name if device_name.startswith("TPU") else device_name.partition("-")[0]
    return BANDS.get(name)
