"""Seconds of matrix products, by shape: what a device's matrix units reach of their peak.

In: the sizes b, m, n, k of b products [m, k] x [k, n] on one device, and their dtype. Out: seconds.

**GPUs** cut the result into tiles of t_m x t_n, of which u run at once, one a streaming multiprocessor; k may be cut
into s parts that are added up afterwards. A library picks the fastest (`_tiled_s`):

    t = launch + min over (t_m, t_n, s) of  sums(s) + max(waves (2 t_m t_n ⌈k/s⌉ / rate + wave), bytes / memory)
    waves = ⌈ b ⌈m/t_m⌉ ⌈n/t_n⌉ s / u ⌉
    rate = share · peak / u · h / (h + c),   h = t_m t_n / (t_m + t_n)   FLOPs a byte that a tile loads
    sums(s) = 0 for s = 1, else sum + 4 b m n s / memory

This is the quantisation by tiles and waves of NVIDIA's "Matrix Multiplication Background User's Guide" (2023), with
the loss of small tiles as one constant c; products of few elements are none, and take what memory does (`_SMALL`).
``share``, ``launch``, ``wave``, ``c``, ``memory`` and ``sum`` are fitted
(`Tiled`; sources beside the figures).

**TPUs** have systolic arrays of d x d: k and n are padded to d, m to 8 rows (`_systolic_s`).

**All else** reaches what its `DeviceSpec` says (`roofline`): CPUs, and devices whose rates were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import itemsize_bits

_TILES = np.array([(256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64)])
_SPLITS = np.array([1, 2, 4, 8, 16])
_STEP = 64
"""Elements of k that a tile loads at once."""
_SMALL, _LOOP_S = 100, 2e-6
"""Elements of both operands, batch apart, from which on XLA has a product in tiles (its option
``xla_gpu_gemm_rewrite_size_threshold``); smaller ones are written out as a loop, a kernel like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """What tiles of one dtype reach on a GPU; see above. ``memory``: of the data sheet's bandwidth; above 1 where
    operands were in the cache when they were measured."""

    share: float
    launch_s: float
    wave_s: float
    loss: float
    memory: float
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledUnits:
    """A GPU's matrix units: ``units`` streaming multiprocessors; ``of``: (dtype, what it reaches), the first for all
    that are not named."""

    units: int
    of: tuple[tuple[str, Tiled], ...]

    def dtype(self, name: str) -> Tiled:
        """What products of a dtype reach."""
        return dict(self.of).get(name, self.of[0][1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Systolic:
    """A TPU's matrix units, ``side`` x ``side``: what they reach of their peak, and of memory; an operator takes
    ``launch_s`` beside."""

    side: int
    share: float
    memory: float
    launch_s: float


MatrixUnits: TypeAlias = "TiledUnits | Systolic"

# Tiles are fitted to XLA's own table of cuBLAS products on H100, B200 and GB200
# (xla/service/gpu/model/matmul_interpolator_data.h, as compiled in jax-cuda12-pjrt 0.10.2; sizes 256 to 4096, batches
# 1, 2 and 4), on two thirds of its shapes (`python -m benchmarks.microbenchmarks`). float32 there is TF32. Its fp8
# rows on H100 exceed the data sheet's peak by up to a third, so the share of fp8 is that of the best measured product
# instead (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS": 1402 TFLOP/s of 1979).
_HOPPER = TiledUnits(
    units=132,
    of=(
        ("bfloat16", Tiled(share=0.916, launch_s=4.5e-6, wave_s=1.41e-6, loss=6.2, memory=0.77, sum_s=2.9e-6)),
        ("float32", Tiled(share=0.944, launch_s=6.7e-6, wave_s=1.18e-6, loss=35.0, memory=0.64, sum_s=2e-7)),
        ("float8_e4m3fn", Tiled(share=0.75, launch_s=5.8e-6, wave_s=4.7e-7, loss=1.0, memory=1.7, sum_s=1e-7)),
        ("float8_e5m2", Tiled(share=0.75, launch_s=5.8e-6, wave_s=4.7e-7, loss=1.0, memory=1.7, sum_s=1e-7)),
    ),
)  # fmt: skip
_BLACKWELL = TiledUnits(
    units=148,
    of=(
        ("bfloat16", Tiled(share=1.07, launch_s=4.3e-6, wave_s=1.53e-6, loss=30.0, memory=0.74, sum_s=5.9e-6)),
        ("float32", Tiled(share=0.88, launch_s=6.1e-6, wave_s=1.55e-6, loss=10.7, memory=0.69, sum_s=3.0e-5)),
        ("float8_e4m3fn", Tiled(share=1.088, launch_s=5.4e-6, wave_s=4.4e-7, loss=34.0, memory=0.62, sum_s=1.3e-6)),
        ("float8_e5m2", Tiled(share=1.088, launch_s=5.4e-6, wave_s=4.4e-7, loss=34.0, memory=0.62, sum_s=1.3e-6)),
    ),
)  # fmt: skip
# A100: square bf16 products of 512 to 8192 (NVIDIA's chart of cuBLAS, 28 to 290 TFLOP/s) and the best of many shapes,
# 271 (stas00/ml-engineering); launches as Hopper's.
_AMPERE = TiledUnits(
    units=108, of=(("bfloat16", Tiled(share=0.97, launch_s=4.5e-6, wave_s=1.4e-6, loss=6.2, memory=0.8, sum_s=2.9e-6)),)
)
# The V100's preset has what large products reach; small ones as A100's.
_VOLTA = TiledUnits(
    units=80, of=(("float16", Tiled(share=1.07, launch_s=5e-6, wave_s=1.4e-6, loss=6.2, memory=0.9, sum_s=2.9e-6)),)
)
_ADA = TiledUnits(
    units=142, of=(("bfloat16", Tiled(share=0.9, launch_s=5e-6, wave_s=1.4e-6, loss=6.2, memory=0.8, sum_s=2.9e-6)),)
)  # guessed: as Ampere
# v6e: 8192 cubed in bf16 takes 1.329 ms on the device, 0.90 of its peak; 128 to 32768 on a core of v7x 2.6 to 956
# TFLOP/s, 0.83 of its peak (AI-Hypercomputer/tpu-recipes, microbenchmarks). Others as v6e's.
_SYSTOLIC_128 = Systolic(side=128, share=0.88, memory=0.85, launch_s=1e-6)
_SYSTOLIC_256 = Systolic(side=256, share=0.9, memory=0.85, launch_s=1e-6)
_IRONWOOD = Systolic(side=256, share=0.83, memory=0.95, launch_s=1.6e-6)

_KNOWN: dict[str, MatrixUnits] = {
    "V100": _VOLTA, "A100": _AMPERE, "A10G": _ADA, "L4": _ADA, "L40S": _ADA, "H100": _HOPPER, "H200": _HOPPER,
    "B200": _BLACKWELL, "GB200": _BLACKWELL, "B300": _BLACKWELL, "GB300": _BLACKWELL, "TPU-v3": _SYSTOLIC_128,
    "TPU-v4": _SYSTOLIC_128, "TPU-v5e": _SYSTOLIC_128, "TPU-v5p": _SYSTOLIC_128, "TPU-v6e": _SYSTOLIC_256,
    "TPU7x": _IRONWOOD,
}  # fmt: skip


def family(device: DeviceSpec) -> str:
    """What constants of a device go by: the first word of a preset's name, ``H100`` of ``H100-SXM5-80GB``; TPUs' names
    whole. "" of names that are no preset's: rates of these were measured, and are reached."""
    name = device.name if device.platform == "tpu" else device.name.partition("-")[0] * ("-" in device.name)
    return name if name in _KNOWN else ""


def matrix_units(device: DeviceSpec) -> MatrixUnits | None:
    """Those of a device whose rates are a data sheet's; None of others."""
    return _KNOWN.get(family(device))


def product_s(
    device: DeviceSpec, dtype: str, batch: Any, m: Any, n: Any, k: Any, result_dtype: str = "", moved_bytes: Any = None
) -> Any:
    """Seconds of ``batch`` products [m, k] x [k, n] of ``dtype`` on one device, ``result_dtype`` as the operands' if
    not given. Sizes are numbers, or float64 arrays of one shape; the result is of that shape. ``moved_bytes``: of
    operands and results, where that is not what the products have (a convolution's, whose windows overlap)."""
    sizes = np.broadcast_arrays(*(np.asarray(x, float) for x in (batch, m, n, k)))
    if moved_bytes is None:
        b, m, n, k = sizes
        operand_bytes = itemsize_bits(dtype) / 8
        result_bytes = itemsize_bits(result_dtype or dtype) / 8
        moved_bytes = b * ((m * k + k * n) * operand_bytes + m * n * result_bytes)
    units, peak = matrix_units(device), device.peak_flops_per_s(dtype)
    if isinstance(units, TiledUnits):
        return _tiled_s(sizes, moved_bytes, units, units.dtype(dtype), peak, device.memory_bytes_per_s)
    if isinstance(units, Systolic):
        return _systolic_s(sizes, moved_bytes, units, peak, device.memory_bytes_per_s)
    b, m, n, k = sizes
    return np.maximum(2 * b * m * n * k / peak, moved_bytes / device.memory_bytes_per_s)


def _tiled_s(sizes: Any, moved_bytes: Any, gpu: TiledUnits, of: Tiled, peak: float, bytes_per_s: float) -> Any:
    b, m, n, k = (x[..., None, None] for x in sizes)
    rows, columns = _TILES[:, 0][:, None], _TILES[:, 1][:, None]
    waves = np.ceil(b * np.ceil(m / rows) * np.ceil(n / columns) * _SPLITS / gpu.units)
    intensity = rows * columns / (rows + columns)
    rate = of.share * peak / gpu.units * intensity / (intensity + of.loss)
    part = np.ceil(k / _SPLITS / _STEP) * _STEP
    memory = of.memory * bytes_per_s
    moved = np.asarray(moved_bytes, float)[..., None, None]
    seconds = np.maximum(waves * (2 * rows * columns * part / rate + of.wave_s), moved / memory)
    seconds = seconds + np.where(_SPLITS > 1, of.sum_s + 4 * b * m * n * _SPLITS / memory, 0.0)
    useful = part * _SPLITS < 2 * k + _STEP
    tiled = of.launch_s + np.where(useful, seconds, np.inf).min((-2, -1))
    b, m, n, k = sizes
    written_out = _LOOP_S + np.asarray(moved_bytes, float) / bytes_per_s
    few: Any = (m + n) * k < _SMALL
    return np.where(few, written_out, tiled)


def _systolic_s(sizes: Any, moved_bytes: Any, tpu: Systolic, peak: float, bytes_per_s: float) -> Any:
    b, m, n, k = sizes
    deep, wide = np.ceil(k / tpu.side) * tpu.side, np.ceil(n / tpu.side) * tpu.side
    other = np.ceil(m / tpu.side) * tpu.side
    flops = np.minimum(2 * b * np.ceil(m / 8) * 8 * wide * deep, 2 * b * np.ceil(n / 8) * 8 * other * deep)
    return tpu.launch_s + np.maximum(flops / (tpu.share * peak), moved_bytes / (tpu.memory * bytes_per_s))
