"""Processes of several hosts in one `jax.distributed` group that nobody else is told of."""

from __future__ import annotations

import socket

JOIN_S = 120
"""For the processes of a group to find each other (chosen)."""


_HELD: dict[str, socket.socket] = {}
"""Places that nobody else on this host gets until the group has met there."""


def meeting_place(address: str) -> str:
    """``address:port``, a port of this host's that is kept free until `join`, for the first process of a group."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as JAX's coordinator sets, of this user's only
    held.bind((address, 0))
    _HELD[place := f"{address}:{held.getsockname()[1]}"] = held
    return place


def join(coordinator: str, count: int, index: int) -> None:
    """Joins a group of ``count`` processes as number ``index``; number 0 is its coordinator, and binds to that address
    alone (without it JAX takes all interfaces). Clusters that JAX would find by itself (Slurm, Kubernetes) are none of
    the group's business."""
    import jax

    jax.distributed.initialize(
        coordinator, count, index, initialization_timeout=JOIN_S, cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator if index == 0 else None,
    )  # fmt: skip
    if coordinator in _HELD:
        _HELD.pop(coordinator).close()
