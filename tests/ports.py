"""Ports for the Rays that tests start."""

from __future__ import annotations

import os

from autopar.runtime.on_ray.ports import Ports, is_free, ports_from

SPAN = 125
"""Ports from a node's first to its last, rounded up: heads on one machine are this far apart or more."""


def free_ports(first: int, last: int) -> Ports:
    """A head's, from ``first`` up to ``last``, that nothing listens on; tests that run at the same time try others
    first."""
    bases = list(range(first, last, SPAN))
    turn = os.getpid() % len(bases)
    for base in bases[turn:] + bases[:turn]:
        ports = ports_from(base)
        if all(is_free(port) for _, port in ports.daemons()):
            return ports
    raise AssertionError(f"no {SPAN} ports are free from {first} to {last}")
