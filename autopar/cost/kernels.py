"""Seconds of operators that are kernels of their own: products and convolutions, attention, opaque calls.

In: a node, its FLOPs and bytes on one device, and for products their sizes there. Out: seconds (`kernel_s`).

A convolution is the product that it is as an implicit matrix (Chetlur et al., "cuDNN", 2014). Attention reaches, of the
peak of its dtype P, with heads of d elements and s positions,

    rate = share(d) P s / (s + ramp + diagonal [causal])                                                   `attention_s`

where ``diagonal`` is lost to tiles of which a causal mask leaves a half. Opaque calls are taken to reach `OPAQUE` of
the peak, or the memory's rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost import roofline
from autopar.cost.products import family, product_s
from autopar.ir.cluster import DeviceSpec, Platform
from autopar.ir.graph import Node
from autopar.primitives import record_of
from autopar.primitives.attention import Attended, attended

OPAQUE = 0.5
"""Of the matrix units' peak, what kernels reach of which nothing is known but their FLOPs (guessed: most of them are
attention in pallas)."""


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """float64[strategies] each: how many products of how many rows and columns, on a device."""

    batch: Any
    rows: Any
    columns: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """``shares``: (head size, share of the peak) ascending; smaller heads have the first, larger ones the last.
    ``backward``: of that, what the backward pass reaches."""

    shares: tuple[tuple[int, float], ...]
    ramp: float
    diagonal: float
    backward: float
    launch_s: float = 5e-6

    def share(self, head_size: int) -> float:
        """Of the peak, with endless sequences."""
        return next((share for size, share in reversed(self.shares) if size <= head_size), self.shares[0][1])


# H100, H200: cuDNN's forward pass of 512 to 16384 positions, as in the figures of FlashAttention-3 (Shah et al., 2024;
# github.com/Dao-AILab/flash-attention, assets/flash3_fp16_fwd.png); the backward pass' 0.7 is a guess, between that and
# FlashAttention-2's. A100: FlashAttention-2, forward and backward pass together
# (assets/flash2_a100_fwd_bwd_benchmark.png). Fitted on all lengths but 2048 and 8192
# (`python -m benchmarks.microbenchmarks`). Blackwell: as Hopper (guessed). TPUs: guessed.
_CUDNN = AttentionRates(shares=((64, 0.402), (128, 0.574)), ramp=10.0, diagonal=395.0, backward=0.7)
_FLASH_2 = AttentionRates(shares=((64, 0.57), (128, 0.643)), ramp=178.0, diagonal=345.0, backward=1.0)
_SPLASH = AttentionRates(shares=((64, 0.3), (128, 0.55)), ramp=200.0, diagonal=500.0, backward=0.9, launch_s=1e-6)

ATTENTION: dict[str, AttentionRates] = {
    "A100": _FLASH_2, "H100": _CUDNN, "H200": _CUDNN, "B200": _CUDNN, "GB200": _CUDNN, "B300": _CUDNN, "GB300": _CUDNN,
    "TPU-v3": _SPLASH, "TPU-v4": _SPLASH, "TPU-v5e": _SPLASH, "TPU-v5p": _SPLASH, "TPU-v6e": _SPLASH, "TPU7x": _SPLASH,
}  # fmt: skip
"""`products.family` → what attention reaches there. Of others: `OPAQUE`."""


SUSTAINED = (
    {"V100": 0.86, "A100": 0.735, "TPU-v4": 0.88, "TPU-v5e": 0.93, "TPU-v5p": 0.93, "TPU-v6e": 0.78}
    | dict.fromkeys(("H100", "H200", "B200", "GB200", "B300", "GB300"), 0.76)
)  # fmt: skip
"""`products.family` → of what single kernels reach, what a step of them does: under its power limit a GPU lowers its
clock, and between kernels it waits (fitted on published runs, `python -m benchmarks.published`: 155 of A100, 51 of
H100, 2 of V100, 4, 14, 11 and 8 of TPU v4, v5e, v5p and v6e; H200 and Blackwell as H100, a guess). Of others 1."""
REACHED: dict[Platform, float] = {"gpu": 0.9, "tpu": 0.83, "cpu": 1.0}
"""Of the data sheet's memory bandwidth: a copy on a v6e moves 1360 of 1640 GB/s (AI-Hypercomputer/tpu-recipes), those
of GPUs' Triton kernels about nine tenths (guessed)."""


def memory_bytes_per_s(device: DeviceSpec) -> float:
    """What operators that are bound by memory reach."""
    return device.memory_bytes_per_s * (REACHED[device.platform] if family(device) else 1.0)


def reached_flops_per_s(device: DeviceSpec, dtype: str) -> float:
    """What large products of a dtype reach in a step."""
    side = 8192.0
    seconds = float(product_s(device, dtype, 1, side, side, side))
    return 2 * side**3 / seconds * SUSTAINED.get(family(device), 1.0)


def kernel_s(device: DeviceSpec, node: Node, flops: Any, sizes: ProductSizes | None, moved_bytes: Any) -> Any:
    """Seconds of a contraction or an opaque call on one device.

    Args:
        flops, moved_bytes: float64[strategies], of one device.
        sizes: those of a contraction of two operands; None for others.
    """
    dtype = roofline.dominant_dtype(node)
    memory_s, sustained = moved_bytes / memory_bytes_per_s(device), SUSTAINED.get(family(device), 1.0)
    attention = attended(node) if record_of(node.primitive).traits.attends else None
    if attention is not None:
        return np.maximum(attention_s(device, dtype, flops, attention) / sustained, memory_s)
    if sizes is not None and record_of(node.primitive).traits.contraction:
        outputs = np.maximum(1.0, sizes.batch * sizes.rows * sizes.columns)
        result = node.result_types[0].dtype
        depth = np.maximum(1.0, flops / (2 * outputs))
        windows = node.primitive == "conv_general_dilated"  # constants are fitted on what matrix products move
        moved = moved_bytes if windows else None
        return product_s(device, dtype, sizes.batch, sizes.rows, sizes.columns, depth, result, moved) / sustained
    share = OPAQUE if family(device) else 1.0
    return np.maximum(flops / (share * device.peak_flops_per_s(dtype)), memory_s)


def attention_s(device: DeviceSpec, dtype: str, flops: Any, of: Attended) -> Any:
    """Seconds of attention of so many FLOPs (a number or an array) on one device."""
    peak, known = device.peak_flops_per_s(dtype), ATTENTION.get(family(device))
    if known is None:
        return flops / (peak * (OPAQUE if family(device) else 1.0))
    full = of.positions / (of.positions + known.ramp + (known.diagonal if of.causal else 0.0))
    share = known.share(of.head_size) * (known.backward if of.backward else 1.0)
    return known.launch_s + flops / (peak * share * full)
