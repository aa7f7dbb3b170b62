"""Processes of several hosts in one `jax.distributed` group that nobody else is told of."""

from __future__ import annotations

import socket

JOIN_S = 120
"""For the processes of a group to find each other (chosen)."""


def meeting_place(address: str) -> str:
    """``address:port``, a port of this host's that is free now, for the first process of a group."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def join(coordinator: str, count: int, index: int) -> None:
    """Joins a group of ``count`` processes as number ``index``; number 0 is its coordinator, and binds to that address
    alone (without it JAX takes all interfaces). Clusters that JAX would find by itself (Slurm, Kubernetes) are none of
    the group's business."""
    import jax

    jax.distributed.initialize(
        coordinator, count, index, initialization_timeout=JOIN_S, cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator if index == 0 else None,
    )  # fmt: skip
