"""Seconds of a collective along one mesh axis.

In: its kind, the devices n of the axis, b bytes per device before it, and the link that its rings see. Out: seconds.

**Links that were measured**, and those of which nothing else is known (`LinkSpec.fabric` is ""): the α–β model of ring
algorithms with latency α per hop and β bytes per second (Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005): all-gather (n−1)(α + b/β); reduce-scatter and all-to-all (n−1)(α + b/(nβ));
all-reduce twice the reduce-scatter; a collective-permute α + b/β                                       `_alpha_beta_s`.

**Known fabrics**: with w the bytes that pass a device's link (those of the same rings), the faster of two protocols

    t = min over p of  start_p + hop_p (n−1) + w / (share_p β (n/8)^growth)                               `_protocols_s`

as NCCL's tuning has it (src/graph/tuning.cc): one for small messages, of little latency and a part of the rate, and
one for large ones. Figures per kind: `FABRICS`.

Where an all-to-all sees other links than a ring does (along a torus, where messages cross many), an axis says which
(`ir.cluster.MeshAxis.exchange`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autopar.ir.cluster import LinkSpec, Platform
from autopar.ir.strategy import CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocols:
    """How a kind of collective goes over a fabric: (start, hop in seconds, share of the link's rate) of small and of
    large messages; the rate goes with the number of devices to the power of ``growth``. ``hops``: where the
    second figure counts latencies of the link: a ring has n−1, a tree log₂ n."""

    small: tuple[float, float, float]
    large: tuple[float, float, float]
    growth: float = 0.0
    hops: Literal["", "ring", "tree"] = ""


def wire_bytes(kind: str, size: int, operand_bytes: Any) -> Any:
    """Bytes that pass a device's link in one direction; ``operand_bytes`` per device before the collective. Raises
    ValueError where ``kind`` is not a collective."""
    if kind == "all-gather":
        return (size - 1) * operand_bytes
    if kind in ("reduce-scatter", "all-to-all"):
        return (size - 1) / size * operand_bytes
    if kind == "all-reduce":
        return 2 * (size - 1) / size * operand_bytes
    if kind == "collective-permute":
        return operand_bytes
    raise ValueError(f"not a collective: {kind}")


def collective_s(kind: str, size: int, operand_bytes: Any, link: LinkSpec) -> Any:
    """Seconds of one collective along a mesh axis of ``size`` devices.

    Args:
        kind: one of `ir.strategy.CollectiveKind`.
        operand_bytes: per device before it, a number or an array; the result is of the same shape.

    Raises:
        ValueError: ``kind`` is not a collective.
    """
    wire = wire_bytes(kind, size, operand_bytes)
    of = FABRICS.get(link.fabric, {}).get(kind)  # type: ignore[call-overload]
    return _alpha_beta_s(kind, size, wire, link) if of is None else _protocols_s(of, size, wire, link)


def _alpha_beta_s(kind: str, size: int, wire: Any, link: LinkSpec) -> Any:
    hops = {"all-reduce": 2 * (size - 1), "collective-permute": 1}.get(kind, size - 1)
    return hops * link.latency_s + wire / link.bytes_per_s


def _protocols_s(of: Protocols, size: int, wire: Any, link: LinkSpec) -> Any:
    rate = link.bytes_per_s * (size / 8) ** of.growth
    steps = math.log2(size) if of.hops == "tree" else size - 1
    each_s = link.latency_s if of.hops else 1.0
    ways = [start + hop * steps * each_s + wire / (share * rate) for start, hop, share in (of.small, of.large)]
    return np.minimum(*ways)


def _network(small_s: float, large_s: float, share: float) -> dict[CollectiveKind, Protocols]:
    """Rings of hosts, and trees for all-reduces, whose small messages have a third of the rate."""
    ring = Protocols(small=(small_s, 1, share / 3), large=(large_s, 1, share), hops="ring")
    tree = replace(ring, small=(small_s, 2, share / 3), large=(large_s, 2, share), hops="tree")
    return {"all-gather": ring, "reduce-scatter": ring, "all-to-all": ring, "all-reduce": tree,
            "collective-permute": ring}  # fmt: skip


# nvlink4 (H100 and H200, 8 a host), nvlink5 (B200, 8 a host) and nvlink5-72 (GB200, racks of 72) are fitted to XLA's
# own table of NCCL's collectives (xla/service/gpu/model/collective_interpolator_data.h, as compiled in
# jax-cuda12-pjrt 0.10.2): 1 KiB to 16 GiB, groups of 2 to 72, each third size and groups of 8 and 32 in racks kept from
# the fit; all-reduces of nvlink4 also to NVIDIA's sample of a DGX H100 (github.com/NVIDIA/dgxc-benchmarking, nccl).
# nvlink3 (A100) is nvlink4 with the rate that large messages reach (NVIDIA's GTC 2024 talk S62129: 232 GB/s of 300).
# NICs: ib, 46 to 48 GB/s of 400 Gb/s (NVIDIA/nccl, issue 1218); ethernet (AWS' EFA on p5), efa-p4 and tcpx, AWS' and
# Google's nccl-tests of two hosts: 69, 165 and 136 μs at 8 bytes; 437, 77 and 298 GB/s at 1 GiB
# (`python -m benchmarks.microbenchmarks`). pcie: 24 GB/s of 32 (stas00/ml-engineering, network).
FABRICS: dict[str, dict[CollectiveKind, Protocols]] = {
    "nvlink3": {
        "all-reduce": Protocols(small=(1.5e-5, 5.3e-7, 0.45), large=(4.9e-5, 2.6e-6, 0.8), growth=0.2),
        "all-gather": Protocols(small=(8.6e-6, 2.9e-6, 0.305), large=(2.7e-5, 1.4e-6, 0.78), growth=0.2),
        "reduce-scatter": Protocols(small=(1.4e-5, 3.9e-6, 0.115), large=(2.5e-5, 5.4e-7, 0.78), growth=0.2),
        "all-to-all": Protocols(small=(2.75e-5, 9e-7, 0.116), large=(4.9e-5, 0.0, 0.75), growth=0.07),
        "collective-permute": Protocols(small=(1.3e-5, 0.0, 0.165), large=(1.8e-4, 1.9e-5, 0.7)),
    },
    "nvlink4": {
        "all-reduce": Protocols(small=(1.5e-5, 5.3e-7, 0.529), large=(4.9e-5, 2.6e-6, 0.884), growth=0.35),
        "all-gather": Protocols(small=(8.6e-6, 2.9e-6, 0.305), large=(2.7e-5, 1.4e-6, 0.763), growth=0.2),
        "reduce-scatter": Protocols(small=(1.4e-5, 3.9e-6, 0.115), large=(2.5e-5, 5.4e-7, 0.723), growth=0.34),
        "all-to-all": Protocols(small=(2.75e-5, 9e-7, 0.116), large=(4.9e-5, 0.0, 0.746), growth=0.07),
        "collective-permute": Protocols(small=(1.3e-5, 0.0, 0.165), large=(1.8e-4, 1.9e-5, 0.668)),
    },
    "nvlink5": {
        "all-reduce": Protocols(small=(1.8e-5, 4.6e-6, 0.256), large=(3.3e-5, 7.1e-6, 0.68), growth=0.21),
        "all-gather": Protocols(small=(2.3e-5, 1.5e-6, 0.269), large=(3.3e-5, 6.3e-7, 0.674), growth=0.23),
        "reduce-scatter": Protocols(small=(6e-5, 0.0, 0.318), large=(2.6e-5, 1.8e-6, 0.694), growth=0.26),
        "all-to-all": Protocols(small=(3.6e-5, 0.0, 0.411), large=(1.1e-4, 0.0, 0.768), growth=0.33),
        "collective-permute": Protocols(small=(1.7e-5, 0.0, 0.0922), large=(4.7e-4, 0.0, 0.676)),
    },
    "nvlink5-72": {
        "all-reduce": Protocols(small=(4e-5, 3.4e-7, 0.407), large=(4.7e-6, 4.7e-6, 0.774), growth=0.15),
        "all-gather": Protocols(small=(1.3e-5, 1.3e-6, 0.338), large=(3.3e-5, 1.3e-6, 0.718), growth=0.03),
        "reduce-scatter": Protocols(small=(1.4e-5, 1.3e-6, 0.24), large=(3.5e-5, 1.1e-6, 0.74), growth=0.03),
        "all-to-all": Protocols(small=(2.36e-5, 5.1e-7, 0.588), large=(1.72e-4, 0.0, 0.697)),
        "collective-permute": Protocols(small=(1.2e-5, 0.0, 0.0249), large=(3.74e-4, 0.0, 0.79)),
    },
    "ib": _network(1.5e-5, 5e-5, 0.95),
    "ethernet": _network(1.8e-5, 1.0e-4, 0.95),
    "efa-p4": _network(1.1e-4, 4e-4, 0.9),
    "tcpx": _network(9e-5, 7e-4, 0.9),
    "pcie": _network(1.5e-5, 3e-5, 0.75),
}  # fmt: skip
"""Kinds of links whose `LinkSpec.bytes_per_s` is the data sheet's → what collectives get of it."""

COMBINED_BYTES: dict[Platform, int] = {"gpu": 30 * 2**20, "tpu": 30 * 2**20, "cpu": 0}
"""Gathered or reduced bytes of the collectives that XLA makes of several smaller ones, where they bring state or
gradients of it (xla_gpu_all_gather_combine_threshold_bytes and the like: about 30 MiB), among `COMBINED_DEVICES` and
fewer; 0: it makes none."""
COMBINED_DEVICES = 8


def combined_bytes(platform: Platform, size: int) -> int:
    """As `COMBINED_BYTES`, of groups of ``size`` devices: more where the rounds of a ring are more, as Megatron-Core's
    buckets have it (40 M parameters, from 41 replicas on 1 M a replica); how much more is chosen."""
    return COMBINED_BYTES[platform] * max(1, size // COMBINED_DEVICES)
