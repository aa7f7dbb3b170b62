"""Pipelines on a local Ray equal those of the in-process runtime bit for bit, and the step on one device."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.inter_op.schedules import SCHEDULES
from autopar.ir.program import Send
from autopar.runtime.on_ray.executor import _processes
from autopar.runtime.pieces import data_type
from tests.clusters import cluster
from tests.compare import assert_close
from tests.gathered import PARAMS, ROWS, one_to_several
from tests.models import build

DEADLINE_S = 120.0
STEPS = 3
QUICK = (("mlp", "1f1b", 2, "1x2"),)
"""(model, schedule, stages, submesh)."""
STAGE_A_MESH = tuple(name for name, record in SCHEDULES.items() if record.trains and not record.chunked)
FULL = (
    ("mlp", "zb_h1", 4, "1x1"),
    *((name, "1f1b", 2, "1x2") for name in ("gpt_tied", "gpt", "gpt_dropout", "gpt_scan", "moe", "conv_net", "unet")),
    *(("mlp", schedule, 2, "1x2") for schedule in STAGE_A_MESH if schedule != "1f1b"),
    ("gpt_scan", "interleaved_1f1b", None, "1x2"),
    *((name, "1f1b", 4, "1x1") for name in ("gpt_tied", "gpt_dropout", "moe", "conv_net", "unet")),
)


def planned(name: str, schedule: str, stages: int | None, submesh: str) -> tuple[Any, Any]:
    """(model, its step)."""
    model = build(name, "float64")
    known = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    hosts, devices = map(int, submesh.split("x"))
    hosts, devices = (hosts * (stages or 2), devices) if hosts > 1 else (1, devices * (stages or 2))
    made_up = cluster(devices, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=hosts)
    return model, autopar.parallelize(
        model.step, cluster=made_up, num_microbatches=4, workers=1, stages=stages, submeshes=[submesh],
        schedule=schedule, layers=None if stages == 2 else 4, **known,
    )  # fmt: skip


def on_ray(ray_cluster: Any, model: Any, near: Any) -> Any:
    """The same step on a Ray, by the same plan."""
    far = near.with_options(cluster=ray_cluster, plan=near.plan(*model.args), deadline_s=DEADLINE_S)
    far.plan(*model.args)
    return far


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.full) for c in FULL)], ids=str)
def test_equals_the_in_process_runtime_and_serial(ray_cluster: Any, case: Any) -> None:
    model, near = planned(*case)
    far = on_ray(ray_cluster, model, near)
    workers = far.compiled()
    per_worker = int(case[3][2:])
    assert {len(x.devices) for x in workers.loaded} == {per_worker}, "a worker sees devices of others"
    assert len({os.getpid(), *workers.pids}) == 1 + len(workers.loaded)
    serial = jax.jit(model.step)
    args, here, want = model.fresh_args(), model.fresh_args(), model.args
    for _ in range(STEPS):
        there, found, out = far(*args), near(*here), serial(*want)
        jax.tree.map(np.testing.assert_array_equal, on_host(there), on_host(found))
        assert_close(on_host(there), on_host(out), 1e-9, least_norm=1e-6)
        args, here, want = model.next_args(there), model.next_args(found), model.next_args(out)
    check_bytes(near, workers)
    far.close()


@pytest.mark.full
def test_what_lands_split_is_gathered(ray_cluster: Any) -> None:
    with jax.enable_x64(False):
        near = one_to_several(2)
        far = near.with_options(cluster=ray_cluster, plan=near.plan(PARAMS, ROWS), deadline_s=DEADLINE_S)
        far.plan(PARAMS, ROWS)
        args = here = (PARAMS, ROWS)
        for _ in range(STEPS):
            there, found = far(*args), near(*here)
            jax.tree.map(np.testing.assert_array_equal, on_host(there), on_host(found))
            args, here = (there[0], ROWS), (found[0], ROWS)
        check_bytes(near, far.compiled())
        far.close()


def check_bytes(near: Any, workers: Any) -> None:
    """What each process has sent each other in all steps is what the plan's transfers say, to the byte."""
    executor, plan = near.compiled(), workers.step.plan
    sent = frozenset().union(*(x.offered.sent for x in workers.loaded))
    crossings = [
        (t.resharding, [(t.cut, v.value) in sent for v in executor.plan.cuts[t.cut].values],
         sum(isinstance(i, Send) and i.transfer == n for i in executor.program.workers[t.source]))
        for n, t in enumerate(executor.program.transfers)
    ]  # fmt: skip
    for x in executor.part.exchanges(executor.part.crossing_types()):
        if x.resharding is not None:
            crossings.append((x.resharding, [True] * len(x.coming), 1))
    of = {d: i for i, ids in enumerate(ids for mine in _processes(plan) for ids in mine) for d in ids}
    wanted: dict[tuple[int, int], int] = {}
    for resharding, which, times in crossings:
        for transfer in resharding.transfers:
            inner, dtype = data_type(resharding.values[transfer.value].type)
            size = transfer.elements * math.prod(inner) * dtype.itemsize
            for leg in transfer.legs:
                ends = of[leg.giver], of[leg.taker]
                if which[transfer.value] and ends[0] != ends[1]:
                    wanted[ends] = wanted.get(ends, 0) + STEPS * times * size
    assert wanted, "nothing crosses"
    assert {ends: size for ends, size in workers.sent_bytes().items() if size} == wanted


QUICK_OF_HOSTS = (("mlp", "1f1b", 2, "2x1"),)
FULL_OF_HOSTS = (
    *((name, "1f1b", 2, "2x2") for name in ("mlp", "gpt", "gpt_dropout", "gpt_scan", "moe", "conv_net", "unet")),
    *(("mlp", schedule, 2, "2x1") for schedule in STAGE_A_MESH if schedule != "1f1b"),
    ("gpt_tied", "1f1b", 2, "2x1"),
    ("gpt_scan", "interleaved_1f1b", None, "2x1"),
)


@pytest.mark.parametrize(
    "case", [*QUICK_OF_HOSTS, *(pytest.param(c, marks=pytest.mark.full) for c in FULL_OF_HOSTS)], ids=str
)
def test_meshes_of_two_hosts(ray_cluster: Any, case: Any) -> None:
    """Two processes a mesh, each with its own devices; sums between processes have an order of their own."""
    model, near = planned(*case)
    far = on_ray(ray_cluster, model, near)
    workers = far.compiled()
    assert {len(x.devices) for x in workers.loaded} == {int(case[3][2:])}
    assert len(set(workers.pids)) == 2 * len(workers.loaded) == 4
    serial = jax.jit(model.step)
    args, here, want = model.fresh_args(), model.fresh_args(), model.args
    for _ in range(STEPS):
        there, found, out = far(*args), near(*here), serial(*want)
        assert_close(on_host(there), on_host(found), 1e-6, least_norm=1e-6)
        assert_close(on_host(there), on_host(out), 1e-9, least_norm=1e-6)
        args, here, want = model.next_args(there), model.next_args(found), model.next_args(out)
    check_bytes(near, workers)
    far.close()


@pytest.mark.parametrize(("name", "steps"), [("mlp", 60), ("gpt", 200)], ids=lambda x: str(x))
@pytest.mark.full
def test_many_steps_do_not_grow(ray_cluster: Any, name: str, steps: int) -> None:
    """Live arrays and their bytes stay as they are; the process by less than a step's worth of either."""
    model, near = planned(name, "1f1b", 2, "1x2")
    far = on_ray(ray_cluster, model, near)
    workers = far.compiled()
    args = model.fresh_args()
    held: list[tuple[Any, ...]] = []
    for i in range(steps):
        args = model.next_args(far(*args))
        if i >= steps // 2:
            held.append(workers.live())
    first, last = held[0], held[-1]
    print(f"{name}: {first} after {steps // 2} steps, {last} after {steps}")
    for a, b in zip(first, last, strict=True):
        assert (a.arrays, a.bytes) == (b.arrays, b.bytes)
        assert b.resident_bytes - a.resident_bytes < RSS_GROWTH_BYTES
    far.close()


RSS_GROWTH_BYTES = 8 * 2**20
"""Of a worker in the second half of the steps: allocators' and Ray's (chosen)."""


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
