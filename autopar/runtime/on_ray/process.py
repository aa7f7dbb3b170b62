"""What a worker's process is: which devices it has, what it asks Ray for, and what its environment says.

From the plan: a mesh's device says which platform it is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.cluster import Platform
from autopar.ir.errors import ClusterError, NoRoomError

RESOURCES: Mapping[Platform, str] = {"gpu": "GPU", "tpu": "TPU"}
"""What Ray calls a device."""
PLATFORMS: Mapping[Platform, str] = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX_PLATFORMS. The CPU stays beside accelerators: what calls the host needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a worker, with ``devices`` devices of a platform."""

    platform: Platform
    devices: int

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources that it takes of a node: one of the CPUs, by which Ray counts actors, and its devices."""
        more = {RESOURCES[self.platform]: float(self.devices)} if self.platform != "cpu" else {}
        return {"CPU": 1.0, **more}

    @property
    def options(self) -> dict[str, Any]:
        """The same as options of an actor. Ray shows it those devices only (CUDA_VISIBLE_DEVICES and the like)."""
        match self.platform:
            case "cpu":
                return {"num_cpus": 1}
            case "gpu":
                return {"num_cpus": 1, "num_gpus": self.devices}
            case "tpu":
                return {"num_cpus": 1, "resources": {"TPU": self.devices}}

    @property
    def variables(self) -> dict[str, str]:
        """Variables of its environment; how XLA takes memory stays as the node's says."""
        count = {"JAX_NUM_CPU_DEVICES": str(self.devices)} if self.platform == "cpu" else {}
        return {"JAX_PLATFORMS": PLATFORMS[self.platform], **count}


def needed(processes: Iterable[Process]) -> dict[str, float]:
    """Ray's resources that processes take together."""
    out: dict[str, float] = {}
    for process in processes:
        for name, count in process.bundle.items():
            out[name] = out.get(name, 0.0) + count
    return out


def no_room(
    processes: Sequence[Process], total: Mapping[str, float], free: Mapping[str, float], waited_s: float
) -> ClusterError:
    """The error to raise where Ray has no room for processes. ``total``, ``free``: resources of all its nodes;
    ``waited_s``: how long that was waited for."""
    wanted = needed(processes)
    missing = [name for name in wanted if not total.get(name)]
    count, s = len(processes), "" if len(processes) == 1 else "s"
    who = f"{count} workers ask" if s else "worker asks"
    if missing:
        name = missing[0]
        hint = "ray start --num-gpus" if name == "GPU" else "ray start --resources"
        return ClusterError(
            f"the plan's {who} Ray for {wanted[name]:g} {name}; no node of it has one. Start "
            f"nodes where they are (or say so to {hint}), or plan for what is there (spec=)"
        )
    listed = ", ".join(f"{n:g} {name} ({free.get(name, 0):g} of {total[name]:g} free)" for name, n in wanted.items())
    each = max(processes, key=lambda p: p.devices)
    on_one = f"; {each.devices} {RESOURCES[each.platform]} on one node" if each.platform != "cpu" else ""
    return NoRoomError(
        f"Ray has no room for {count} worker{s} within {waited_s:g} s. {'They ask' if s else 'It asks'} for "
        f"{listed}{on_one}"
    )


def lacks_kind(processes: Iterable[Process], total: Mapping[str, float]) -> bool:
    """True where no node has any of a resource that processes take; ``total``: resources of all nodes."""
    return any(not total.get(name) for name in needed(processes))
