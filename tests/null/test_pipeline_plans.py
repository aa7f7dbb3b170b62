"""Planning pipelines of small models from Python; what is refused, and how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli import main
from autopar.ir.cluster import ClusterSpec
from autopar.ir.diff import diff_text
from autopar.ir.errors import ClusterError, InfeasibleError, MicrobatchError, OptionError, VerifyError
from autopar.ir.graph import TensorType
from autopar.ir.held_where import held_where
from autopar.ir.plan_text import plan_text
from autopar.ir.presets import cluster_from_text
from autopar.ir.pretty import shard_bytes
from tests.clusters import SLOW_8

pytestmark = pytest.mark.xdist_group("pipeline plans")  # one process makes what all tests of the file share

ROOT = Path(__file__).parents[2]


# Planning ----------------------------------------------------------------------------------------------------------


def make(
    layers: int = 4, width: int = 512, batch: int = 1024, *, clips: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An MLP with a residual connection around each block, as shapes; ``clips``: gradients by their global norm."""

    def forward(params: Any, x: Any) -> Any:
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return x

    def train_step(params: Any, x: Any) -> Any:
        loss_fn = lambda params, x: jnp.mean((forward(params, x) - x) ** 2)
        loss, grads = autopar.value_and_grad(loss_fn)(params, x)
        rate = 0.1 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))) if clips else 0.1
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    train_step.forward = forward  # type: ignore[attr-defined]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    layer = {"up": array(width, 4 * width), "down": array(4 * width, width)}
    return train_step, ({"layers": [layer] * layers}, array(batch, width))


def in_stages(
    *, infers: bool = False, clips: bool = False, **options: Any
) -> tuple[autopar.Step[..., Any], tuple[Any, ...]]:
    """The MLP on two CPU devices, to be searched in this process; a stage a device unless ``options`` say otherwise."""
    step, args = make(clips=clips)
    step = step.forward if infers else step  # type: ignore[attr-defined]
    defaults: dict[str, Any] = {
        "cluster": "cpu:2", "num_microbatches": 4, "submeshes": ["1x1"], "recompute": "none", "workers": 1
    }  # fmt: skip
    return autopar.parallelize(step, **{**defaults, **options}), args


def planned(**options: Any) -> autopar.StepPlan:
    """The plan of `in_stages`."""
    step, args = in_stages(**options)
    return step.plan(*args)


@pytest.fixture(scope="module")
def pair() -> autopar.StepPlan:
    return planned(stages=2, donate_argnums=0)


def test_a_small_model_is_planned(pair: autopar.StepPlan, tmp_path: Path) -> None:
    plan = pair.stages
    assert [(s.start, s.stop, s.mesh.device_ids) for s in plan.stages] == [(0, 2, (0,)), (2, 4, (1,))]
    assert {(cut.source, cut.target, cut.phase) for cut in plan.cuts} >= {(0, 1, "forward"), (1, 0, "backward")}
    assert sorted(a.path + p.rows for a in pair.data.inputs for p in a.places if p.stage == 1) == [
        f"args[0]['layers'][{k}]['{name}']" for k in (2, 3) for name in ("down", "up")
    ]
    assert pair.predictions.step_s == min(c.step_s for c in pair.data.provenance.considered)
    pair.save(tmp_path / "pair.json")
    loaded = autopar.load_plan(tmp_path / "pair.json")
    assert loaded.data == pair.data
    assert loaded.digest == pair.digest
    timeline = loaded.simulate()
    assert timeline.makespan_s == pair.predictions.step_s
    assert [w.peak_bytes for w in timeline.workers] == [w.peak_bytes for w in pair.predictions.workers]
    assert str(loaded) == str(pair)
    assert "compared under the same cost model" in pair.explain()


def test_user_control_is_kept(pair: autopar.StepPlan) -> None:
    one = planned(stage_starts=(0, 3), schedule="gpipe")
    assert [(s.start, s.stop) for s in one.stages.stages] == [(0, 3), (3, 4)]
    assert one.stages.schedule.name == "gpipe"
    text = diff_text(pair.data, one.data)
    assert "stages: 2 changed" in text
    assert "- 4 microbatches; in stages; 2 stages; submeshes 1x1; remat none\n" in text
    assert "+ 4 microbatches; in stages; schedules gpipe; stages from layers 0, 3; submeshes 1x1; remat none\n" in text


def test_a_parallelized_step_brings_its_argnums() -> None:
    step, args = make()
    wrapped = autopar.parallelize(step, donate_argnums=0)
    in_stages = wrapped.with_options(
        cluster="cpu:2", num_microbatches=4, stages=2, submeshes=[(1, 1)], recompute="none", workers=1
    )
    assert sum(a.donated_to >= 0 for a in in_stages.plan(*args).data.inputs) == 8


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 2)])
def test_meshes_of_any_rank_may_be_asked_for(shape: tuple[int, ...]) -> None:
    plan = planned(cluster="cpu:8", submeshes=None, mesh=[shape], schedule="1f1b")
    assert [stage.mesh.shape for stage in plan.stages.stages] == [shape]


def test_scalars_of_all_gradients_are_exchanged() -> None:
    plan = planned(stages=2, clips=True, schedule="1f1b")
    assert plan.data.pipelined.exchange is not None
    assert len(plan.program.groups) == 1
    assert plan.simulate().makespan_s == plan.predictions.step_s


def test_layers_without_parameters() -> None:
    """A layer that neither reads an argument nor carries a gradient over microbatches: its loop has no inputs."""
    plan = planned(stages=2, layers=13, schedule="1f1b")
    assert len(plan.data.pipelined.layers) == 13


def test_a_step_that_only_infers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(infers=True, num_microbatches=1, stages=2, batch_argnums=(1,))
    assert plan.stages.schedule.name == "inference"
    assert all(cut.phase == "forward" for cut in plan.stages.cuts)
    plan.save(tmp_path / "infers.json")
    assert main(["simulate", str(tmp_path / "infers.json")]) == 0
    assert "inference, 1 microbatches, 2 stages on 2 workers" in capsys.readouterr().out


SCRIPT = """
from tests.null.test_pipeline_plans import planned
print(planned(submeshes=None, schedule=("1f1b", "zb_h1"), workers={workers}).digest)
"""


@pytest.mark.slow
def test_equal_inputs_give_equal_digests_whatever_the_hash_seed(tmp_path: Path) -> None:
    """In this process, and in a script with two planning processes, which do not run the script again."""
    found: list[str] = []
    for seed in (1, 2):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(workers=seed))
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, path], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        found.append(done.stdout)
    assert found[0] == found[1]
    assert re.fullmatch("[0-9a-f]{64}\n", found[0])


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages": 5},
            "5 stages, but train_step has 4 layers: a stage needs at least one. Cut it into more layers",
        ),
        ({"stages": 0}, "stages: 0; a number of 1 or more, or two of them"),
        ({"stages": 3, "stage_starts": (0, 2)}, "stages is 3, but stage_starts names 2 stages (0, 2)"),
        ({"stage_starts": (1, 2)}, "stage_starts: 1, 2 must ascend from layer 0"),
        ({"stage_starts": (0, 4)}, "stage_starts: 4 is past the last of 4 layers (0 to 3)"),
        (
            {"stages": 3, "schedule": "1f1b"},
            "3 stages on the 2 devices of cluster cpu:2: each needs a mesh of its own, but under interleaved_1f1b",
        ),
        ({"stages": 1, "schedule": ["gpipe"]}, "a single stage runs one task after the other; allow 1f1b"),
        (
            {"submeshes": ["1x3"]},
            "submeshes: 1x3 (hosts x devices of each) is no part of cluster cpu:2; there are 1x1, 1x2",
        ),
        ({"submeshes": []}, "submeshes: none is allowed"),
        ({"submeshes": [(1,)]}, "submeshes: (1,) is not (hosts, devices of each); write (1, 4) or 1x4, say"),
        (
            {"submeshes": ["1x1", "1x2"], "stage_starts": (0, 2), "schedule": "1f1b"},
            "submeshes: 2 stages on 1x1, 1x2 take 3 devices; cluster cpu:2 has 2",
        ),
        (
            {"submeshes": ["1x1", "1x2"], "stage_starts": (0, 2), "schedule": "1f1b", "uniform_stages": True},
            "uniform_stages: the stages' submeshes are not equal: 1x1, 1x2",
        ),
        (
            {"submeshes": None, "mesh": ["2"], "stages": 2, "schedule": "1f1b"},
            "submeshes: 2 stages on 2 x (1,2) at least take 4 devices; cluster cpu:2 has 2",
        ),
        (
            {"mesh": ["2x2"]},
            "mesh: 2x2 is no logical mesh of an allowed submesh; these have 1 devices",
        ),
        ({"schedule": ["1f1c"]}, "schedule: there is no '1f1c' (did you mean 1f1b?)"),
        ({"schedule": []}, "schedule: none is allowed; there are gpipe, 1f1b"),
        ({"schedule": "inference"}, "schedule: inference has no backward pass, but train_step takes gradients"),
        (
            {"infers": True, "schedule": "zb_h1", "num_microbatches": 1},
            "schedule: zb_h1 splits the backward pass, but forward has none: it takes no gradients",
        ),
        ({"recompute": "all"}, "recompute: 'all' is not one of none, dots, full"),
        ({"memory_bytes": 0}, "memory_bytes must be above 0, got 0"),
        ({"workers": 0}, "workers: 0 processes; at least 1"),
        ({"num_microbatches": 0}, "num_microbatches: 0 is no number of microbatches; at least 1"),
        ({"layers": "all"}, "layers: 'all' is neither a number of layers"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    step, args = make()
    infers = options.pop("infers", False)
    step = step.forward if infers else step  # type: ignore[attr-defined]
    options = {"cluster": "cpu:2", "num_microbatches": 4, "submeshes": ["1x1"], "workers": 1, **options}
    with pytest.raises(OptionError, match=re.escape(message)):
        autopar.parallelize(step, **options).plan(*args)


def test_a_batch_that_microbatches_do_not_divide() -> None:
    with pytest.raises(MicrobatchError, match=r"args\[1\]: the batch has 1024 examples, which num_microbatches=3"):
        planned(num_microbatches=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices_per_host": 0}, "must be at least 1; they are 1, 0, 1 and 1"),
        ({"hosts": -2}, "must be at least 1; they are -2, 8, 1 and 1"),
        (
            {"nic": {"bytes_per_s": 0.0}},
            "cluster cpu, group 0: nic: link needs positive, finite latency_s and bytes_per_s",
        ),
        ({"intra_host": {"latency_s": -1.0}}, "cluster cpu, group 0: intra_host: link needs positive, finite"),
        ({"device": {"memory_bytes": -5}}, "memory and rates must be positive; memory_bytes is -5"),
        (
            {"device": {"flops_per_s": (("float32", 0.0),)}},
            "memory and rates must be positive; flops_per_s float32 is 0.0",
        ),
    ],
)
def test_clusters_with_zero_or_negative_entries(change: dict[str, Any], message: str) -> None:
    cluster = cluster_from_text("cpu")
    (group,) = cluster.groups
    for field, value in change.items():
        group = replace(group, **{field: replace(getattr(group, field), **value) if isinstance(value, dict) else value})
    with pytest.raises(ClusterError, match=re.escape(message)):
        planned(cluster=replace(cluster, groups=(group,)))


def test_what_a_cluster_as_a_whole_needs() -> None:
    cluster = cluster_from_text("cpu")
    (group,) = cluster.groups
    with pytest.raises(ClusterError, match="cluster two: several groups need a `between` link"):
        ClusterSpec(name="two", groups=(group, group)).verify()
    with pytest.raises(ClusterError, match="cluster cpu, group 0: device: device cpu: flops_per_s needs float32"):
        bad = replace(group, device=replace(group.device, flops_per_s=(("bfloat16", 1.0),)))
        replace(cluster, groups=(bad,)).verify()


def test_links_between_groups_are_checked_too() -> None:
    (group,) = cluster_from_text("cpu").groups
    slow = replace(group.nic, bytes_per_s=-1.0)
    with pytest.raises(ClusterError, match="cluster two, between: link needs positive, finite"):
        ClusterSpec(name="two", groups=(group, group), between=slow).verify()


@pytest.mark.slow
def test_a_model_that_does_not_fit() -> None:
    """The refusal says by how much; a limit a little above what it names does fit."""
    pattern = (
        r"no cut of 4 layers into stages fits 1 MB a device on cpu:2: the leanest needs (\S+) MB, (\S+) MB \((\S+) %\) "
        r"more\. What would fit: a limit of [\d.]+ [kMG]?B"
    )
    with pytest.raises(InfeasibleError, match=pattern) as caught:
        planned(memory_bytes=1_000_000, schedule="1f1b")
    found = re.search(pattern, str(caught.value))
    assert found is not None
    least = float(found[1])
    assert float(found[2]) == pytest.approx(least - 1, rel=0.01)
    assert float(found[3]) == pytest.approx(100 * (least - 1), rel=0.01)
    assert 'recomputing layers (recompute="full"). More microbatches than 4 lower' in str(caught.value)
    assert str(caught.value).endswith("Tried were submeshes (1,1)")
    with pytest.raises(InfeasibleError):
        planned(memory_bytes=int(0.97e6 * least), schedule="1f1b")
    assert planned(memory_bytes=int(1.03e6 * least), schedule="1f1b").predictions.peak_memory_bytes <= 1.03e6 * least


@pytest.mark.slow
def test_what_the_search_believes_to_fit_and_the_simulator_does_not() -> None:
    """A limit right above the least that the search counts."""
    with pytest.raises(InfeasibleError) as refused:
        planned(memory_bytes=40_000_000, schedule="1f1b")
    least = re.search(r"the leanest needs (\S+) MB", str(refused.value))
    assert least is not None, refused.value
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_bytes=int(1.003e6 * float(least[1])), schedule="1f1b")
    found = re.search(r"The nearest: 1f1b: .* needs (\S+) MB of \S+ MB a device \(\S+ % more", str(caught.value))
    assert found is not None, caught.value
    assert float(least[1]) < float(found[1])
    assert planned(memory_bytes=int(1.001e6 * float(found[1])), schedule="1f1b").stages.schedule.name == "1f1b"


def test_workers_of_unequal_size() -> None:
    plan = planned(cluster="cpu:4", submeshes=["1x1", "1x2"], stage_starts=(0, 3), schedule="1f1b")
    assert [s.mesh.num_devices for s in plan.stages.stages] == [1, 2]
    assert [w.num_devices for w in plan.predictions.workers] == [1, 2]


def test_a_schedule_that_nothing_suits() -> None:
    with pytest.raises(
        InfeasibleError, match="interleaved schedules want equal meshes, with 2, 3, 4, 6, 8, 12 stages each"
    ):
        planned(stages=3, schedule="interleaved_1f1b")


@pytest.mark.parametrize("count", [1, 32])
def test_interleaved_schedules_take_any_number_of_microbatches(count: int) -> None:
    plan = planned(stages=4, schedule="interleaved_1f1b", num_microbatches=count)
    assert plan.stages.schedule.num_microbatches == count


def test_gpipe_takes_many_microbatches() -> None:
    plan = planned(stages=2, schedule="gpipe", num_microbatches=128)
    assert plan.stages.schedule.in_flight == (128, 128)


def test_stages_may_share_a_mesh() -> None:
    plan = planned(stages=4, schedule="interleaved_1f1b")
    assert plan.stages.schedule.mesh_of_stage == (0, 1, 0, 1)
    assert [w.num_devices for w in plan.predictions.workers] == [1, 1]
    assert "\nstages: 4 on 2 meshes\n" in plan_text(plan.data)


def test_more_hosts_are_proposed_where_they_would_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_bytes=40_000_000, schedule="1f1b")
    assert "; 2 times as many hosts (" in str(caught.value)
    assert len(planned(cluster="cpu:4", memory_bytes=40_000_000, schedule="1f1b").stages.stages) > 2


@pytest.mark.slow
def test_one_program_is_explained() -> None:
    step, args = make()
    text = autopar.parallelize(step, cluster="cpu:4", num_microbatches=1, stages=1).plan(*args).explain()
    assert "collectives" in text and "dearest" in text and "to spare" in text


def test_the_batch_lies_as_the_first_layer_of_each_stage_reads_it() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any, batch: Any) -> Any:
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, gradients = autopar.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    batch = {name: jax.ShapeDtypeStruct((32, 64), jnp.float32) for name in ("x", "y")}
    options = {"cluster": SLOW_8, "stages": 2, "num_microbatches": 4, "submeshes": ["1x4"], "layers": 4, "workers": 1}
    plan = autopar.parallelize(step, **options).plan(params, batch).data
    fed = {a.path: [(place.stage, a.fed_type) for place in a.fed] for a in plan.inputs if a.role == "batch"}
    one = TensorType(shape=(8, 64), dtype="float32")
    assert fed == {"args[1]['x']": [(0, one)], "args[1]['y']": [(1, one)]}
    for i, a in enumerate(plan.inputs):
        held = held_where(plan, i)
        assert held and [h.place for h in held] == [*a.places, *a.fed]
        assert all(h.device_bytes == shard_bytes(h.type, h.place.spec, plan.meshes[h.place.stage]) for h in held)
    broken = replace(plan, inputs=tuple(replace(a, fed_type=None) for a in plan.inputs))
    with pytest.raises(VerifyError, match="is fed to stage 0, or in no type"):
        broken.verify()
