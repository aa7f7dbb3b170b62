"""Times of collectives along one mesh axis: the α–β model of ring algorithms.

With n devices, latency α per hop, bandwidth β bytes per second and b bytes per device before the
collective (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
2005): all-gather (n−1)(α + b/β); reduce-scatter and all-to-all (n−1)(α + b/(nβ)); all-reduce twice the
reduce-scatter; a collective-permute α + b/β. An all-to-all along a torus ring crosses on average n/4
links, which is costed by ``torus``.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.cluster import LinkSpec


def collective_s(kind: str, size: int, operand_bytes: Any, link: LinkSpec, *, torus: bool = False) -> Any:
    """Seconds of one collective along a mesh axis of ``size`` devices.

    Args:
        kind: one of `ir.strategy.CollectiveKind`.
        operand_bytes: per device before it, a number or an array; the result is of the same shape.
        torus: True where the axis is a torus ring.

    Raises:
        ValueError: ``kind`` is not a collective.
    """
    hops, alpha, beta = size - 1, link.latency_s, link.bytes_per_s
    if kind == "all-gather":
        return hops * (alpha + operand_bytes / beta)
    if kind == "reduce-scatter":
        return hops * (alpha + operand_bytes / (size * beta))
    if kind == "all-reduce":
        return 2 * hops * (alpha + operand_bytes / (size * beta))
    if kind == "all-to-all":
        spread = max(1.0, size / 4) if torus else 1.0
        return hops * (alpha + spread * operand_bytes / (size * beta))
    if kind == "collective-permute":
        return alpha + operand_bytes / beta
    raise ValueError(f"not a collective: {kind}")
