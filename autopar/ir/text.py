"""Figures and tables as text: units of three digits, aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.cluster import LinkSpec

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(count: float) -> str:
    """Bytes in decimal units: ``1.23 GB``."""
    return f"{count:.0f} B" if abs(count) < 1000 else si_text(count) + "B"


def rate_text(rate: float, unit: str) -> str:
    """A rate and its unit with a decimal prefix: ``1.23 TFLOP/s`` for the unit ``FLOP/s``."""
    return si_text(rate) + unit


def seconds_text(seconds: float) -> str:
    """Seconds to three significant digits: ``12.3 ms``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) >= 1:
        return f"{_three(seconds)} s"
    scale, unit = (1e3, "ms") if abs(seconds) >= 1e-3 else (1e6, "us")
    return f"{_three(seconds * scale)} {unit}"


def si_text(number: float) -> str:
    """A number to three significant digits and its decimal prefix, for a unit to follow: ``1.23 k``, ``12 ``."""
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
    if 0 < abs(percent) < 0.1:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    return ">99.9 %" if 99.95 <= percent < 100 else f"{percent:.1f} %"


def link_text(link: LinkSpec) -> str:
    """A link's bandwidth and latency: ``50 GB/s, 3 us``."""
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
