"""Which of Ray's nodes are there.

Ray takes some 15 s to notice that a host is gone without a word, and would place actors there meanwhile; so their
daemons are asked.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

ANSWER_S = 2.0
"""For a daemon to take a connection (chosen)."""


def alive_hosts() -> int:
    """Nodes that Ray has, and that answer."""
    listed, silent = _nodes()
    return len(listed) - len(silent)


def silent_nodes() -> list[str]:
    """Identities of nodes that Ray takes for alive, and that do not answer."""
    return [node["NodeID"] for node in _nodes()[1]]


def _nodes() -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Those that Ray takes for alive; those of them that do not answer."""
    listed = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(max(len(listed), 1), thread_name_prefix="autopar nodes") as threads:
        answered = list(threads.map(_answers, listed))
    return listed, [node for node, here in zip(listed, answered, strict=True) if not here]


def _answers(node: Mapping[str, Any]) -> bool:
    """Whether a node's daemon takes connections."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S).close()
    except OSError:
        return False
    return True
