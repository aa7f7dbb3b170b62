"""FLOPs of the products that an HLO instruction is: a multiply-add counts two.

``dot``: 2 × elements of the result × length of what is summed over. ``convolution``: 2 × batch × output features ×
input features of a group × pairs (output position, window position) that meet an element of the input; where the window
lies on padding, or between the elements of a dilated input, there is nothing to multiply. TPU compilers write batched
products that way. Custom calls of cuBLAS and cuDNN say the same in their attributes or configurations; of a Pallas
kernel on a TPU what it states (`pallas_call`'s ``cost_estimate``) is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from autopar.verify.hlo_text import Array, Computation, Instruction, arrays

Flops: TypeAlias = tuple[tuple[str, float], ...]

_CUDNN_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, None),
    "__cudnn$convBiasActivationForward": (0, 1, None),
    "__cudnn$convForwardGraph": (0, 1, None),
    "__cudnn$convBackwardInput": (None, 1, 0),
    "__cudnn$convBackwardFilter": (0, None, 1),
}
"""Target → which operands are input, filter and output; None: the first result."""
_STATED = re.compile(r'"flops":\s*"?(\d+)"?')


def product_flops(computation: Computation, i: Instruction) -> Iterator[tuple[str, float]]:
    """(dtype of the operands, FLOPs) of a product; nothing of other instructions, fusions' insides left out."""
    match i.opcode:
        case "dot":
            lhs = _array(computation, i.operands[0])
            summed = _numbers(i.attribute("lhs_contracting_dims") or "")
            yield lhs.dtype, 2.0 * _elements(i) * math.prod(lhs.dims[d] for d in summed)
        case "convolution":
            lhs, rhs = (_array(computation, name) for name in i.operands[:2])
            yield lhs.dtype, convolution_flops(i, lhs, rhs, next(arrays(i.type)))
        case "custom-call":
            yield from _call_flops(computation, i)
        case _:
            pass


def is_known_call(target: str) -> bool:
    """True where a custom call is no computation that could hold products."""
    return not target or not target.startswith(("__gpu$", "tpu_custom_call", "__cudnn", "__cublas"))


def _call_flops(computation: Computation, i: Instruction) -> Iterator[tuple[str, float]]:
    target = i.target
    if target.startswith("__cublas$") and (summed := _configured(i, "lhs_contracting_dimensions")) is not None:
        lhs = _array(computation, i.operands[0])
        yield lhs.dtype, 2.0 * next(arrays(i.type)).elements * math.prod(lhs.dims[d] for d in summed)
    elif target in _CUDNN_CONVOLUTIONS:
        made = next(arrays(i.type))
        lhs, rhs, out = (made if n is None else _array(computation, i.operands[n]) for n in _CUDNN_CONVOLUTIONS[target])
        yield lhs.dtype, convolution_flops(i, lhs, rhs, out)
    elif target.startswith("__cudnn$fmha"):
        scores = re.search(r'"intermediate_tensor_(?:shape|dimensions)":[^\]]*?"dimensions":\[([^\]]*)\]', i.attributes)
        if scores is not None:  # [batch, heads, queries, keys]
            batch, heads, queries, keys = (int(d) for d in re.findall(r"\d+", scores[1]))
            query = _array(computation, i.operands[0])
            size = query.elements / (batch * heads * queries)
            products = 5 if "Backward" in target else 2
            yield query.dtype, 2.0 * products * batch * heads * queries * keys * size
    elif (stated := _STATED.search(i.attributes)) is not None and float(stated[1]):
        first = next((a for n in i.operands for a in arrays(computation.instructions[n].type)), None)
        yield first.dtype if first is not None else "f32", float(stated[1])


def convolution_flops(i: Instruction, lhs: Array, rhs: Array, out: Array) -> float:
    """FLOPs of a convolution of ``lhs`` with ``rhs``; ``i`` has its ``window`` and ``dim_labels``."""
    labels = re.fullmatch(r"([^_]*)_([^-]*)->(.*)", i.attribute("dim_labels") or "")
    if labels is None:
        raise ValueError(f"cannot read the labels of {i.name}: {i.attributes[:160]!r}")
    ins, kernel, outs = labels.groups()
    window = _window(i.attribute("window") or "{}")
    pairs = 1.0
    for d in sorted(c for c in outs if c.isdigit()):
        n = int(d)
        pairs *= _pairs(
            lhs.dims[ins.index(d)], rhs.dims[kernel.index(d)], out.dims[outs.index(d)],
            window["stride"].get(n, 1), window["pad"].get(n, 0), window["lhs_dilate"].get(n, 1),
            window["rhs_dilate"].get(n, 1),
        )  # fmt: skip
    batch, features = out.dims[outs.index("b")], out.dims[outs.index("f")]
    return 2.0 * batch * features * rhs.dims[kernel.index("i")] * pairs


def _window(text: str) -> dict[str, dict[int, int]]:
    """``{size=1x16 pad=0_0x15_15}`` → of each property, by spatial dimension; of padding what lies in front."""
    out: dict[str, dict[int, int]] = {name: {} for name in ("stride", "pad", "lhs_dilate", "rhs_dilate")}
    for name, values in re.findall(r"(\w+)=(\S+)", text.strip("{}")):
        if name in out:
            out[name] = {d: int(v.partition("_")[0]) for d, v in enumerate(values.split("x"))}
    return out


def _pairs(size: int, window: int, out: int, stride: int, pad: int, dilate: int, window_dilate: int) -> int:
    """How many pairs (output position, window position) meet an element of the input."""
    at = np.arange(out, dtype=np.int64) * stride - pad
    last = (size - 1) * dilate
    total = 0
    for k in range(window):
        p = at + k * window_dilate
        total += int(np.count_nonzero((p >= 0) & (p <= last) & (p % dilate == 0)))
    return total


def _array(computation: Computation, name: str) -> Array:
    return next(arrays(computation.instructions[name].type))


def _elements(i: Instruction) -> int:
    return next(arrays(i.type)).elements


def _numbers(text: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", text)]


def _configured(i: Instruction, name: str) -> list[int] | None:
    match = re.search(rf'"{name}":\[([^\]]*)\]', i.attributes)
    return _numbers(match[1]) if match else None
