"""Plans beside their compiled programs: `autopar.verify_step` and `autopar verify`."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.cli import main
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import CompilerError, PlanMismatchError
from autopar.ir.plan import Plan
from autopar.ir.presets import cluster_from_text
from autopar.verify import compilers
from autopar.verify.compilers import check_installed, described
from autopar.verify.environment import environment
from autopar.verify.verdict import Verification, verification
from autopar.verify.verifying import step_of, verify_step
from tests.compare import OPTIMISED

WIDTH, BATCH = 256, 1024
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
PARAMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4

TARGET = f"""
import jax, jax.numpy as jnp, autopar
def make(width={WIDTH}, batch={BATCH}):
    def loss(params, x):
        for w in params:
            x = autopar.layer_boundary(jnp.tanh(x @ w))
        return jnp.mean(x**2)
    def step(params, x):
        value, grads = autopar.value_and_grad(loss)(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads)], value
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return step, ([shape] * 4, jax.ShapeDtypeStruct((batch, width), jnp.float32))
"""


def _loss(params: Any, x: Any) -> Any:
    for w in params:
        x = autopar.layer_boundary(jnp.tanh(x @ w))
    return jnp.mean(x**2)


def _step(params: Any, x: Any) -> Any:
    value, grads = autopar.value_and_grad(_loss)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def _parallel(**options: Any) -> Any:
    return autopar.parallelize(_step, **{"cluster": "cpu:8", "compiler_options": OPTIMISED, **options})


def _figure(found: Verification, name: str) -> Any:
    return next(f for f in found.figures if f.name.strip() == name)


@pytest.mark.parametrize("method", ["data_parallel", "zero3", "tensor_parallel"])
def test_one_program(method: str) -> None:
    found = verify_step(_parallel(mesh=(8,), method=method, donate_argnums=0), PARAMS, X)
    assert all(c.agrees for c in found.collectives) and found.collectives, str(found.collectives)
    assert _figure(found, "peak memory").agrees or method == "tensor_parallel"  # planned a third short
    assert _figure(found, "FLOPs").compiled == 2 * WIDTH * WIDTH * BATCH * (3 * 4 - 1) / 8
    assert _figure(found, "arguments").planned == _figure(found, "arguments").compiled
    assert _figure(found, "of these in place").planned == _figure(found, "of these in place").compiled > 0
    assert _figure(found, "step").compiled > 0
    assert found.facts["programs"][0]["memory"]["argument_bytes"] == _figure(found, "arguments").compiled


def test_stages() -> None:
    parallel = _parallel(stages=2, num_microbatches=4, schedule="1f1b", submeshes=[(1, 4)])
    found = verify_step(parallel, PARAMS, X)
    assert all(c.agrees for c in found.collectives), str(found.collectives)
    assert [p.runs for p in found.programs if p.task == "backward"] == [4] * sum(
        p.task == "backward" for p in found.programs
    )
    peaks = [f for f in found.figures if f.name.startswith("peak memory")]
    assert len(peaks) == 2 and all(f.agrees for f in peaks), str(peaks)


def test_a_clipped_step_in_stages() -> None:
    """Its gradients are reduced once, though two rounds of the update read them; and new values of a state that is not
    donated are all there before the step is done."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        value, grads = autopar.value_and_grad(_loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = PARAMS, jax.eval_shape(optimizer.init, PARAMS)
    parallel = autopar.parallelize(
        step,
        cluster="cpu:8",
        stages=2,
        num_microbatches=2,
        submeshes=[(1, 4)],
        zero=0,
        tensor=1,
        compiler_options=OPTIMISED,
    )
    found = verify_step(parallel, state, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32))  # the update holds most
    rows = [c for c in found.collectives if c.compiled_bytes]
    assert {c.kind for c in rows} == {"all-reduce"} and all(c.agrees for c in rows), str(rows)
    assert sum(c.compiled_bytes for c in rows) == pytest.approx(len(PARAMS) * 4 * WIDTH**2, rel=1e-3)
    peaks = [f for f in found.figures if f.name.startswith("peak memory")]
    assert [f.planned for f in peaks] == pytest.approx([f.compiled for f in peaks], rel=0.01)


def test_what_differs_is_said() -> None:
    step = _parallel(mesh=(8,), method="zero3")
    found = verify_step(step, PARAMS, X)
    plan = step.last_plan.data
    p, rows = plan.predictions, plan.sharding.collectives
    slower = replace(p, step_s=2 * p.step_s, peak_memory_bytes=p.peak_memory_bytes // 2)
    fewer = replace(plan.sharding, collectives=rows[1:])
    other: Plan = replace(plan, predictions=slower, body=replace(plan.body, sharding=fewer))
    worse = verification(other, "cpu", found.programs, (), 1)
    assert not worse.agrees
    assert not _figure(worse, "peak memory").agrees
    assert [c.agrees for c in worse.collectives].count(False) == 1


def test_another_compiler_judges_collectives_alone() -> None:
    step = _parallel(mesh=(8,), method="zero3", cluster="dgx-h100")
    found = verify_step(step, PARAMS, X, compiler="cpu")
    assert found.agrees and "not judged" in found.notes[0]


def test_compilers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("libtpu", "jax_cuda12_plugin") else real(name)
    )
    for compiler, extra in (("cuda", "verify-cuda"), ("tpu", "verify-tpu")):
        with pytest.raises(CompilerError, match=f"pip install 'autopar\\[{extra}\\]'"):
            check_installed(compiler)
    with pytest.raises(CompilerError, match="JAX_NUM_CPU_DEVICES=64"):
        described("cpu", cluster_from_text("cpu:64"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(CompilerError, match="does not compile for cluster v5e-8"):
        described("cuda", cluster_from_text("v5e-8"))
    with pytest.raises(CompilerError, match=r"unequal hosts.* --compiler cpu .*, or compiler=\"cpu\""):
        described("cuda", cluster_from_text("dgx-h100+dgx-h200"))
    with pytest.raises(CompilerError, match="no target describes L4-24GB"):
        described("cuda", cluster_from_text("g6.48xlarge"))
    with pytest.raises(CompilerError, match="known are cpu, cuda, tpu"):
        verify_step(_parallel(mesh=(8,)), PARAMS, X, compiler="rocm")  # type: ignore[arg-type]


def test_what_a_process_that_compiles_needs() -> None:
    assert environment("cpu", cluster_from_text("cpu:4")) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    assert environment("tpu", cluster_from_text("v5e-8"))["TPU_SKIP_MDS_QUERY"] == "1"


def test_a_plan_of_another_step() -> None:
    plan = _parallel(mesh=(8,), donate_argnums=0).plan(PARAMS, X).data
    again = step_of(_step, plan)
    assert again.arguments.donate_argnums == (0,)
    assert step_of(_parallel(static_argnums=(), donate_argnums=0), plan).arguments.donate_argnums == (0,)
    with pytest.raises(PlanMismatchError, match="other arguments"):
        verify_step(again, PARAMS, jax.ShapeDtypeStruct((BATCH * 2, WIDTH), jnp.float32))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    (tmp_path / "target.py").write_text(TARGET)
    assert main(["plan", "target.py:make", "--cluster", "cpu:8", "--mesh", "8", "--out", "plan.json"]) == 0
    capfd.readouterr()
    code = main(["verify", "plan.json", "target.py:make", "--json"])
    facts = json.loads(capfd.readouterr().out)
    assert code == (0 if facts["agrees"] else 1)
    assert all(c["agrees"] for c in facts["collectives"])
    assert main(["verify", "plan.json", "target.py:make", "--set", "batch=512"]) == 2
    assert "the plan was made for other arguments" in capfd.readouterr().err


# --- compilers that come with extras -----------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setattr(logging.getLogger("jax"), "level", logging.ERROR)


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100", "dgx-h200"])
def test_gpus(quiet: None, cluster: str) -> None:
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra verify-cuda")
    step = autopar.parallelize(_step, cluster=cluster, mesh=(8,), method="zero3")
    found = verify_step(step, PARAMS, X)
    assert found.compiler == "cuda" and all(c.agrees for c in found.collectives), str(found.collectives)
    assert _figure(found, "FLOPs").agrees
    assert _figure(found, "arguments").planned == _figure(found, "arguments").compiled


def test_stages_on_gpus(quiet: None) -> None:
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra verify-cuda")
    step = autopar.parallelize(
        _step, cluster="dgx-h100", stages=2, num_microbatches=4, schedule="1f1b", submeshes=[(1, 4)]
    )
    found = verify_step(step, PARAMS, X)
    assert {p.stage for p in found.programs} == {0, 1} and all(c.agrees for c in found.collectives)


@pytest.mark.slow
def test_a_slice(quiet: None) -> None:
    pytest.importorskip("libtpu", reason="needs the extra verify-tpu")
    step = autopar.parallelize(_step, cluster="v5e-8", mesh=(2, 4))
    found = verify_step(step, PARAMS, X)
    assert found.compiler == "tpu" and found.collectives
    assert _figure(found, "FLOPs").agrees
    assert _figure(found, "arguments").compiled > 0


@pytest.mark.slow
def test_stages_on_a_slice(quiet: None) -> None:
    pytest.importorskip("libtpu", reason="needs the extra verify-tpu")
    step = autopar.parallelize(
        _step, cluster="v5e-8", stages=2, num_microbatches=4, schedule="1f1b", submeshes=[(1, 4)], method="zero3"
    )
    found = verify_step(step, PARAMS, X)
    assert {p.stage for p in found.programs} == {0, 1} and found.collectives


def test_a_part_of_a_slice_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    def chip(i: int, x: int, y: int) -> Any:
        return Chip(id=i, platform="tpu", device_kind="TPU v5 lite", coords=(x, y, 0), process_index=0, slice_index=0)

    class Chip(SimpleNamespace):
        __hash__ = object.__hash__

    def slices(cluster: ClusterSpec) -> list[Any]:
        asked.append(cluster.name)
        return [chip(y, 0, y) for y in range(4)]

    asked: list[str] = []
    monkeypatch.setattr(compilers, "_slices", slices)
    column = [chip(2 * y + 1, 1, y) for y in (2, 0, 1, 3)]
    assert [d.coords for d in compilers.alone(column)] == [(0, y, 0) for y in (2, 0, 1, 3)]
    assert asked == ["v5e-1x4"]
    with pytest.raises(CompilerError, match="a stage's devices: 3 devices"):
        compilers.alone([chip(0, 0, 0), chip(1, 1, 0), chip(2, 0, 1)])
    others: list[Any] = [SimpleNamespace(platform="cpu")]
    assert compilers.alone(others) == others
