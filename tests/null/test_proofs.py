"""What a plan says is proven of it holds for every choice of strategies, also those that the search leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.intra_op.solve import GAP
from autopar.intra_op.strategy_graph import _Clusters
from autopar.ir.plan import Plan
from benchmarks.models import gpt, mlp

pytestmark = pytest.mark.slow

CLUSTERS = ("cpu:8", "dgx-h100", "v5e-8")


def product(size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One product: no operator follows another."""
    a = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jnp.matmul, (a, a)


STEPS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "product": lambda: product(512),
    "mlp": lambda: mlp(width=256, batch=512),
    "wide mlp": lambda: mlp(width=2048, batch=256),
    "gpt": lambda: gpt(layers=1, hidden=64, heads=4, seq=32, vocab=128, batch=16),
}


def planned(name: str, cluster: str, **options: Any) -> Plan:
    step, args = STEPS[name]()
    return autopar.parallelize(step, cluster=cluster, mesh=(8,), **options).plan(*args).data


def dissolved(patch: pytest.MonkeyPatch) -> None:
    """Every operator chooses for itself."""
    patch.setattr(_Clusters, "_join_operand", lambda self, c: False)
    patch.setattr(_Clusters, "_join_user", lambda self, c: None)


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(name, cluster, marks=pytest.mark.full if name == "gpt" and cluster != "v5e-8" else ())
        for name in STEPS
        for cluster in CLUSTERS
    ],
)
def test_no_plan_takes_less_than_the_bound(name: str, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(name, cluster)
    report, step_s = found.sharding.report, found.predictions.step_s
    assert 0 < report.bound_s <= step_s == report.objective_s
    assert report.problem_gap <= GAP or report.status != "optimal"
    forced = [
        planned(name, cluster, method=m).predictions.step_s for m in ("data_parallel", "zero3", "tensor_parallel")
    ]
    dissolved(monkeypatch)
    alone = planned(name, cluster)
    assert min(*forced, alone.predictions.step_s) >= report.bound_s * (1 - 1e-9)
    if report.status == "optimal":
        assert alone.predictions.step_s >= step_s * (1 - GAP)


def test_a_problem_in_which_nothing_follows_is_proven() -> None:
    assert planned("product", "cpu:8").sharding.report.status == "optimal"


def test_a_limit_leaves_the_bound() -> None:
    free = planned("mlp", "cpu:8")
    least = planned("mlp", "cpu:8", memory_bytes=free.predictions.peak_memory_bytes - 1)
    assert least.sharding.report.bound_s <= least.predictions.step_s
