"""Random small steps and clusters: what pipelines are searched exhaustively for (`benchmarks.small_pipelines`).

A step has two to four layers of unequal sizes, each of which reads the one before; some read an earlier one too, share
a weight with another, or are updated with the global norm of all gradients. A cluster has two to eight devices, of one
kind or two, on links from slow to fast. Sizes and rates are such that neither compute nor transfers are small beside
the other; latencies are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.frontend.layering import layered
from autopar.ir.cluster import ClusterSpec, DeviceSpec, HostGroup, LinkSpec
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PipelineOptions

FLOPS_PER_S = 1e12
"""Of a device of the slower kind, and ten times its bytes of memory a second (made up)."""
WIDTHS = (64, 128, 256)
ROWS = (16, 32, 64)
"""Of one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step on one cluster. ``memory``: the part of the memory that the plan without a limit needs which devices
    are given; 0: there is no limit."""

    text: str
    layered: LayeredGraph
    cluster: ClusterSpec
    options: PipelineOptions
    memory: float


def random_case(rng: np.random.Generator) -> Case:
    """Draws a case."""
    step, args, m, text = _random_step(rng)
    cluster, hosts = _random_cluster(rng)
    graph = layered(step, args, num_microbatches=m, donate_argnums=(0,)).graph
    kept = (("none",), ("none", "full"), ("none", "dots", "full"))[int(rng.integers(3))]
    memory = float(rng.choice([0.0, rng.uniform(0.8, 1.0), rng.uniform(0.5, 0.8)]))
    limit = f"{100 * memory:.0f} % of the memory" if memory else "any memory"
    return Case(
        text=f"{text}; {hosts}; {limit}; remat {', '.join(kept)}",
        layered=graph,
        cluster=cluster,
        options=PipelineOptions(remat=kept, workers=1),
        memory=memory,
    )


def with_memory(cluster: ClusterSpec, memory_bytes: float) -> ClusterSpec:
    """The cluster with devices of that much memory; of unequal ones the largest has it."""
    most = max(g.device.memory_bytes for g in cluster.groups)
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=max(1, int(memory_bytes * g.device.memory_bytes / most))))
        for g in cluster.groups
    )
    return replace(cluster, groups=groups)


def _random_step(rng: np.random.Generator) -> tuple[Callable[..., Any], tuple[Any, ...], int, str]:
    """A step, its arguments as shapes, microbatches, and it all in words."""
    count = int(rng.choice([2, 3, 3, 4, 4]))
    m = int(rng.choice([1, 2, 4, 8]))
    width, rows = int(rng.choice(WIDTHS)), int(rng.choice(ROWS))
    hidden = [int(width * rng.choice([0.5, 1, 2, 4])) for _ in range(count)]
    skips = [(a, b) for b in range(2, count) for a in range(b - 1) if rng.random() < 0.25]
    tied = count > 1 and rng.random() < 0.3
    clips = rng.random() < 0.3

    def loss(params: Any, x: Any) -> Any:
        made: list[Any] = []
        for k in range(count):
            y = x if k == 0 else made[-1]
            y = y + sum(made[a] for a, b in skips if b == k)
            z = jnp.tanh(y @ params["up"][k]) @ params["down"][k] + y
            if tied and k in (0, count - 1):
                z = z @ params["tied"]
            made.append(autopar.layer_boundary(z) if k < count - 1 else z)
        return jnp.mean(made[-1] ** 2)

    def step(params: Any, x: Any) -> Any:
        value, grads = autopar.value_and_grad(loss)(params, x)
        rate = 0.1 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))) if clips else 0.1
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": [array(width, h) for h in hidden], "down": [array(h, width) for h in hidden]}
    if tied:
        params["tied"] = array(width, width)
    text = f"{count} layers {width} x {hidden}, {m} x {rows} rows"
    text += f", skips {skips}" * bool(skips) + ", tied" * tied + ", global norm" * clips
    return step, (params, array(m * rows, width)), m, text


def _random_cluster(rng: np.random.Generator) -> tuple[ClusterSpec, str]:
    """A cluster, and it in words."""
    shapes = [(1, 2), (1, 4), (2, 1), (2, 2), (1, 6), (3, 1), (3, 2), (2, 4), (4, 1), (1, 8)]
    hosts, devices = shapes[int(rng.integers(len(shapes)))]
    inside, outside = (10 ** rng.uniform(9, 11), 10 ** rng.uniform(8, 10.5))
    first = _group(hosts, devices, 1.0, inside, outside)
    name = f"{hosts} x {devices} devices"
    groups = [first]
    if rng.random() < 0.3 and hosts * devices <= 4:
        faster, more = float(rng.choice([1.0, 2.0, 4.0])), float(rng.choice([0.5, 1.0, 2.0]))
        wide = int(rng.choice([1, 2]))
        groups.append(_group(1, wide, faster, inside, outside, more))
        name += f" and 1 x {wide} that are {faster:g} times as fast with {more:g} times the memory"
    between = LinkSpec(latency_s=1e-7, bytes_per_s=outside)
    cluster = ClusterSpec(name="made-up", groups=tuple(groups), between=between if len(groups) > 1 else None)
    return cluster, f"{name}, {inside / 1e9:.1f} GB/s inside, {outside / 1e9:.1f} GB/s between"


def _group(hosts: int, devices: int, faster: float, inside: float, outside: float, memory: float = 1.0) -> HostGroup:
    device = DeviceSpec(
        name=f"made-up x {faster:g}",
        memory_bytes=int(memory * 2**34),
        flops_per_s=(("float32", faster * FLOPS_PER_S),),
        memory_bytes_per_s=10 * faster * FLOPS_PER_S,
    )
    return HostGroup(
        hosts=hosts,
        devices_per_host=devices,
        device=device,
        intra_host=LinkSpec(latency_s=1e-8, bytes_per_s=inside),
        nics_per_host=1,
        nic=LinkSpec(latency_s=1e-7, bytes_per_s=outside),
    )
