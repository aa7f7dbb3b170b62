"""Which collectives may run beside compute, and how much of them then shows.

In: flat planning nodes. Out: the operands whose resharding compilers schedule beside products (`aside`): what it
brings has been there before the products that it runs beside, or is not needed until the state is updated:

- *early*: weights, and what is made of state alone without a product: gathered beside the products before, of which
  the first ones of a program or a loop's body have none                                                     `_of_state`
- *late*: gradients of weights, which nothing reads but what leads to new state: reduced beside the products behind
  them, of which the last ones have none; of a stage, whose microbatches are programs of their own, beside the last
  one's backward pass                                                                                      `_for_state`

XLA's latency-hiding scheduler does so on GPUs, where it is switched on (`xla_gpu_enable_latency_hiding_scheduler`), and
with the early ones on TPUs (`REDUCES_BESIDE`); so do the common recipes of other frameworks (FSDP's prefetching,
Megatron's overlap_grad_reduce). What of a program is not in a loop runs beside that only, a loop's body beside itself.
Of f seconds of such collectives in a region with c seconds of compute

    exposed = share f + max(0, (1 − share) f − c)                                                           `exposed_s`

show, where ``share`` is what collectives cost the compute that they run beside: they take its multiprocessors and its
memory's time. The sharding problem prices the linear part, which is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.intra_op.flatten import Flat
from autopar.ir.cluster import Platform
from autopar.primitives import record_of

SHARES: Mapping[Platform, float] = {"gpu": 0.3, "tpu": 0.05, "cpu": 1.0}
"""Of hideable collectives what shows (GPUs': fitted on published runs under FSDP; TPUs': guessed; 1 where nothing is
hidden: XLA's CPU collectives hold their threads)."""


REDUCES_BESIDE: Mapping[Platform, bool] = {"gpu": True, "tpu": False, "cpu": False}
"""Whether sums of gradients run beside products too. In programs for TPU v5e, v5p, v6e and v7x (libtpu 0.0.42, an MLP)
all-reduces and reduce-scatters are synchronous, on a v5e with five options of asynchronous fusion as well."""


def exposed_s(platform: Platform, hideable_s: float, compute_s: float) -> float:
    """Seconds that ``hideable_s`` of collectives beside ``compute_s`` of compute add to these."""
    share = SHARES[platform]
    return share * hideable_s + max(0.0, (1 - share) * hideable_s - compute_s)


def aside(flat: Flat, platform: Platform) -> tuple[Any, Any]:
    """bool[edges] twice: operands whose resharding brings state or gradients of it, so that a compiler combines several
    into one collective; of these the ones that may run beside products."""
    heavy = [node is not None and record_of(node.primitive).traits.contraction
             for node in map(flat.node.__getitem__, flat.example)]  # fmt: skip
    products = [heavy[k] for k in flat.key]
    deepest: dict[int, int] = {}
    """Region → how deep its last products are."""
    first: dict[int, int] = {}
    """… and its first ones."""
    for n in (n for n, is_product in enumerate(products) if is_product):
        deepest[flat.region[n]] = max(deepest.get(flat.region[n], 0), flat.depth[n])
        first[flat.region[n]] = min(first.get(flat.region[n], flat.depth[n]), flat.depth[n])
    of_state, for_state, needed = _of_state(flat, products), _for_state(flat, products), _needed(flat, products)
    late_values = [flat.depth[n] > 0 or flat.kind[n] == "loop_out" for n in flat.maker]
    for n in range(len(flat.kind)):
        for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]] if not for_state[n] else ():
            if value >= 0:
                late_values[value] = False
    combined, hideable = np.zeros(len(flat.source), bool), np.zeros(len(flat.source), bool)
    for n in range(len(flat.kind)):
        for e in range(flat.first_edge[n], flat.first_edge[n + 1]):
            value = flat.source[e]
            if value < 0:
                continue
            made = flat.maker[value]
            node = flat.node[made]
            early = of_state[made] and flat.kind[n] == "op"
            late = late_values[value]
            combined[e] = early or late or flat.kind[n] == "arg"  # new state, gathered where it is sharded
            home = flat.exec_region[e]
            if flat.tasks >= 0:
                late &= flat.kind[made] == "loop_out" or (node is not None and node.phase != "update")
            else:
                late &= flat.depth[made] < deepest.get(home, 0)
            early &= home in first and (flat.tasks >= 0 or needed[n] > first[home])
            hideable[e] = (late and REDUCES_BESIDE[platform]) or early
    return combined, hideable


def _of_state(flat: Flat, products: list[bool]) -> list[bool]:
    """Which planning nodes' results are made of state alone, without a product."""
    out = [False] * len(flat.kind)
    for n, kind in enumerate(flat.kind):
        sources = flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]
        if kind == "arg":
            out[n] = bool(sources)  # its new value
        elif kind in ("const_in", "xs") or (kind == "op" and not products[n]):
            out[n] = any(v >= 0 for v in sources) and all(v < 0 or out[flat.maker[v]] for v in sources)
    return out


def _needed(flat: Flat, products: list[bool]) -> list[float]:
    """How deep the first product is that planning nodes are, or whose operands their results lead to."""
    out = [float(depth) if product else math.inf for depth, product in zip(flat.depth, products, strict=True)]
    for n in reversed(range(len(flat.kind))):
        for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]:
            if value >= 0 and not products[flat.maker[value]]:
                made = flat.maker[value]
                out[made] = min(out[made], out[n])
    return out


def _for_state(flat: Flat, products: list[bool]) -> list[bool]:
    """Which planning nodes lead to new state, and to no product or other stage, but for single numbers: a norm of all
    gradients."""
    out = [
        not product and kind != "pred" and (kind != "send" or types[0].size <= 1)
        for product, kind, types in zip(products, flat.kind, flat.operand_types, strict=True)
    ]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(flat.kind))):
            if not out[n] and flat.kind[n] != "arg":
                for value in flat.source[flat.first_edge[n] : flat.first_edge[n + 1]]:
                    made = flat.maker[value] if value >= 0 else -1
                    if made >= 0 and out[made] and flat.kind[made] != "arg":
                        out[made], changed = False, True
    return out
