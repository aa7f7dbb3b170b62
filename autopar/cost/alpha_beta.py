"""Times of collectives along one mesh axis: the α–β model of ring algorithms.

With n devices, latency α per hop, bandwidth β bytes per second and b bytes per device before the
collective (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
2005): all-gather (n−1)(α + b/β); reduce-scatter and all-to-all (n−1)(α + b/(nβ)); all-reduce twice the
reduce-scatter; a collective-permute α + b/β. Where an all-to-all sees other links than a ring does (along a
torus, where messages cross many), an axis says which (`ir.cluster.MeshAxis.exchange`).
"""

from __future__ import annotations

from typing import Any

from autopar.ir.cluster import LinkSpec


def collective_s(kind: str, size: int, operand_bytes: Any, link: LinkSpec) -> Any:
    """Seconds of one collective along a mesh axis of ``size`` devices.

    Args:
        kind: one of `ir.strategy.CollectiveKind`.
        operand_bytes: per device before it, a number or an array; the result is of the same shape.

    Raises:
        ValueError: ``kind`` is not a collective.
    """
    hops, alpha, beta = size - 1, link.latency_s, link.bytes_per_s
    if kind == "all-gather":
        return hops * (alpha + operand_bytes / beta)
    if kind in ("reduce-scatter", "all-to-all"):
        return hops * (alpha + operand_bytes / (size * beta))
    if kind == "all-reduce":
        return 2 * hops * (alpha + operand_bytes / (size * beta))
    if kind == "collective-permute":
        return alpha + operand_bytes / beta
    raise ValueError(f"not a collective: {kind}")
