"""Layouts of layers and pipelines on disk: found again, made again where they are damaged, and never in the way."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cost.logical_meshes import logical_mesh
from autopar.frontend.layering import layered
from autopar.inter_op import layer_layouts
from autopar.inter_op.cache import StoredLayouts, key_of, load, store
from autopar.inter_op.layer_layouts import Setting, Table, table_of, tables
from autopar.inter_op.layer_problems import Parts, parts_of
from autopar.intra_op.stage_costs import Solving, StageProblem
from autopar.ir.cluster import LogicalMesh
from autopar.ir.errors import InfeasibleError
from autopar.ir.layers import StageGraph
from autopar.ir.presets import cluster_from_text
from benchmarks.models import mlp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stored")]  # what all share is made once


@pytest.fixture(scope="module")
def parts() -> Parts:
    step, args = mlp()
    return parts_of(layered(step, args, num_microbatches=2, layers=2).graph, ("none",))


@pytest.fixture(scope="module")
def mesh() -> LogicalMesh:
    return logical_mesh(cluster_from_text("cpu:2"), (2,))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every problem that is solved."""
    out: list[str] = []
    solve = StageProblem.solve

    def counted(self: StageProblem, *args: float, **pins: Any) -> object:
        out.append(self.remat)
        return solve(self, *args, **pins)

    monkeypatch.setattr(StageProblem, "solve", counted)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("batch_axes", [None, (0,)])
def test_another_process_solves_the_same(parts: Parts, tmp_path: Path, batch_axes: tuple[int, ...] | None) -> None:
    """It gets no more than what layers are solved from, and stores what it finds under the same key."""
    cluster = cluster_from_text("cpu:4")
    meshes = [logical_mesh(cluster, shape) for shape in ((4,), (2, 2))]
    setting = Setting(batch_axes=batch_axes, cache=str(tmp_path))
    found = tables(parts, meshes, setting, workers=len(meshes) + 1)
    stored = set(tmp_path.rglob("*"))
    for mesh, one in zip(meshes, found, strict=True):
        assert isinstance(one, Table)
        alone = table_of(parts, mesh, replace(setting, cache=None))
        assert one.layouts == alone.layouts and (one.ranges.cost == alone.ranges.cost).all()
        table_of(parts, mesh, setting)
    assert set(tmp_path.rglob("*")) == stored


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_large_meshes_of_most_axes_are_looked_at_first(
    workers: int, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every process: what time is over for does least. Those that are always looked at are before them."""
    cluster = cluster_from_text("cpu:16")
    meshes = [logical_mesh(cluster, shape) for shape in ((1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 4))]
    here: list[tuple[int, ...]] = []

    def noted(parts: Parts, mesh: LogicalMesh, *_: Any) -> InfeasibleError:
        here.append(mesh.shape)
        return InfeasibleError("")

    monkeypatch.setattr(layer_layouts, "_layouts_or_why", noted)
    tables(parts, meshes, Setting(), workers, always=meshes[1:2])
    wanted = [(2,), (4, 4), (2, 4), (2, 2), (8,), (4,), (1,)]
    assert here == (wanted if workers == 1 else [shape for shape in wanted if shape in here])
    assert (1,) in here


def test_what_is_stored_is_not_solved_again(parts: Parts, mesh: LogicalMesh, tmp_path: Path, solved: list[str]) -> None:
    setting = Setting(cache=str(tmp_path / "new" / "folder"))
    first = table_of(parts, mesh, setting)
    assert solved
    solved.clear()
    again = table_of(parts, mesh, setting)
    assert not solved
    assert again.layouts == first.layouts
    assert (again.ranges.cost == first.ranges.cost).all()


def test_other_settings_are_other_entries(parts: Parts, mesh: LogicalMesh, tmp_path: Path, solved: list[str]) -> None:
    """What is forbidden, rules, how layers are solved, the mesh's links, the microbatches, and what operators are known
    to take are part of the key."""
    setting = Setting(cache=str(tmp_path))
    table_of(parts, mesh, setting)
    slower = replace(mesh.axes[0], link=replace(mesh.axes[0].link, bytes_per_s=1.0))
    more = replace(parts, layered=replace(parts.layered, num_microbatches=4))

    def cheaper(stage: StageGraph, **known: Any) -> StageGraph:
        first, *others = stage.graph.nodes
        return replace(stage, graph=replace(stage.graph, nodes=(replace(first, **known), *others)))

    made, said = (
        replace(parts, graphs={r: tuple(cheaper(g, **known) for g in graphs) for r, graphs in parts.graphs.items()})
        for known in ({"flops": 2.0}, {"flops": 1.0})
    )
    for number, (others, there, given) in enumerate((
        (parts, mesh, replace(setting, forbid=("all-gather",))),
        (parts, mesh, replace(setting, user_rules=(("f", "([i])->([i]) {i=2}"),))),
        (parts, replace(mesh, axes=(slower,)), setting),
        (more, mesh, setting),
        (parts, mesh, replace(setting, solving=Solving(solver="highs"))),
        (made, mesh, setting),
        (said, mesh, setting),
    )):  # fmt: skip
        solved.clear()
        table_of(others, there, given)
        assert solved
        assert len(list(tmp_path.iterdir())) == number + 2


def test_a_pipeline_is_not_planned_again(tmp_path: Path, solved: list[str]) -> None:
    step, args = mlp()
    options: dict[str, Any] = {"cluster": "cpu:2", "layers": 2, "recompute": "none", "workers": 1, "cache": tmp_path}
    first = autopar.parallelize(step, num_microbatches=2, **options).plan(*args)
    [path] = tmp_path.glob("pipeline-*.json")
    for entry in tmp_path.glob("layouts-*.json"):
        entry.unlink()
    solved.clear()
    again = autopar.parallelize(step, num_microbatches=2, **{**options, "workers": 2}).plan(*args)
    assert not solved
    assert [phase for phase, _ in again.data.provenance.seconds] == ["trace", "cache"]
    assert (again.digest, again.predictions) == (first.digest, first.predictions)
    assert again.data.provenance.considered == first.data.provenance.considered
    path.write_text(path.read_text()[:-1])
    assert autopar.parallelize(step, num_microbatches=2, **options).plan(*args).digest == first.digest
    assert solved


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"num_microbatches": 4}, {"cluster": "cpu:4"}, {"stages": 1}, {"memory_bytes": 1 << 40}]
)
def test_another_pipeline_is_planned_anew(tmp_path: Path, change: dict[str, Any]) -> None:
    step, args = mlp()
    options: dict[str, Any] = {
        "cluster": "cpu:2",
        "layers": 2,
        "recompute": "none",
        "workers": 1,
        "num_microbatches": 2,
    }
    autopar.parallelize(step, **options, cache=tmp_path).plan(*args)
    other = autopar.parallelize(step, **{**options, **change}, cache=tmp_path).plan(*args)
    assert other.digest == autopar.parallelize(step, **{**options, **change}).plan(*args).digest
    assert len(list(tmp_path.glob("pipeline-*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "{", '{"key":"x"}', "\udcff"])
def test_damaged_entries_are_made_again(
    parts: Parts, mesh: LogicalMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    setting = Setting(cache=str(tmp_path))
    first = table_of(parts, mesh, setting)
    [path] = tmp_path.iterdir()
    whole = path.read_text()
    path.write_bytes(damage.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING, logger="autopar"):
        assert table_of(parts, mesh, setting).layouts == first.layouts
    assert "is damaged" in caplog.text
    assert path.read_text() == whole


def test_a_folder_that_cannot_be_written_is_reported(
    parts: Parts, mesh: LogicalMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="autopar"):
        table_of(parts, mesh, Setting(cache=str(tmp_path / "file" / "folder")))
    assert "cannot be written" in caplog.text


def test_where_one_part_of_a_key_ends_matters() -> None:
    assert key_of((1, 23)) != key_of((12, 3))


def test_an_entry_under_another_name_is_none(tmp_path: Path) -> None:
    store(tmp_path, StoredLayouts(key="a", unit_s=1.0, layouts=()))
    (tmp_path / "layouts-a.json").rename(tmp_path / "layouts-b.json")
    assert load(tmp_path, StoredLayouts, "b") is None
