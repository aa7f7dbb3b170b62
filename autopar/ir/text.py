"""Figures and tables as text: units of three digits, aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.cluster import LinkSpec

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(count: float) -> str:
    """Decimal units: 1.23 GB."""
    return f"{count:.0f} B" if abs(count) < 1000 else si_text(count) + "B"


def rate_text(rate: float, unit: str) -> str:
    """1.23 TFLOP/s, ``unit`` being FLOP/s."""
    return si_text(rate) + unit


def seconds_text(seconds: float) -> str:
    """12.3 ms; three significant digits."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{_three(seconds)} s"
    scale, unit = (1e3, "ms") if abs(seconds) >= 1e-3 else (1e6, "us")
    return f"{_three(seconds * scale)} {unit}"


def si_text(number: float) -> str:
    """1.23 k: three digits and a decimal prefix, or a space."""
    for size, prefix in _SI:
        if abs(number) >= size:
            return f"{_three(number / size)} {prefix}"
    return f"{_three(number)} "


def _three(number: float) -> str:
    """Three significant digits, no exponent from 1000 on."""
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def percent_text(part: float, whole: float) -> str:
    """``part`` of ``whole`` as 12.3 %; n/a where there is no whole."""
    if not whole:
        return "n/a"
    percent = 100 * part / whole
    return "<0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %"


def link_text(link: LinkSpec) -> str:
    """50 GB/s, 3 us."""
    return f"{bytes_text(link.bytes_per_s)}/s, {seconds_text(link.latency_s)}"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), indent: str = "  ") -> list[str]:
    """Lines of aligned columns; columns in ``right`` are aligned right. The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = set(right)
    return [
        (indent + "  ".join(c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))))
        .rstrip()
        for row in rows
    ]  # fmt: skip
