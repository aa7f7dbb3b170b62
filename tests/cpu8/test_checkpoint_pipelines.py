"""Checkpoints of pipelines' states: of tied weights one copy is written, of stacked ones each stage's rows; any plan
restores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.arrays import Piece
from autopar.checkpoint import saving
from autopar.ir.errors import CheckpointError
from tests.clusters import SLOW_8
from tests.compare import assert_close
from tests.models import build

STAGES: Any = {"num_microbatches": 4, "workers": 1}
PLANS: dict[str, Any] = {
    "whole": {"mesh": (2, 4)},
    "two": {**STAGES, "stages": 2, "submeshes": ["1x2"], "schedule": "1f1b"},
    "wide": {**STAGES, "stages": 2, "submeshes": ["1x4"], "schedule": "gpipe"},
    "four": {**STAGES, "stages": 4, "submeshes": ["1x1"], "schedule": "1f1b", "layers": 4},
    "interleaved": {**STAGES, "submeshes": ["1x4"], "schedule": "interleaved_1f1b", "layers": 4},
}
WAYS = (("mlp", "wide", "whole"), ("mlp", "whole", "four"))
"""(model, plan that saves, plan that restores); whole: one mesh of all devices."""
MORE = [(m, a, b) for m in ("mlp", "gpt_tied", "gpt_scan") for a in ("two", "whole") for b in ("wide", "four", "two")]
MORE += [("gpt_tied", "two", "interleaved"), ("gpt_scan", "interleaved", "whole")]


def compiled(model: Any, plan: str) -> Any:
    """The step under a plan, with `abstract` and `init`."""
    known = {k: v for k, v in model.kwargs.items() if k in ("batch_argnums", "static_argnums", "donate_argnums")}
    step = autopar.parallelize(model.step, cluster=SLOW_8, **known, **PLANS[plan])
    step.plan(*model.args)
    return step


def hosted(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(w, marks=pytest.mark.full) for w in MORE)], ids="-".join)
@pytest.mark.usefixtures("float64")
def test_another_plan_goes_on_where_one_saved(way: tuple[str, str, str], tmp_path: Path) -> None:
    name, first, second = way
    model = build(name, "float64")
    serial = jax.jit(model.step)
    want, got = model.args, model.fresh_args()
    step = compiled(model, first)
    for _ in range(2):
        want, got = model.next_args(serial(*want)), model.next_args(step(*got))
    save = autopar.save(tmp_path, got[0], step=2)
    step(*got)  # donates what was saved
    save.wait(60)
    other = compiled(model, second)
    target = other.abstract(lambda: model.args[0])
    state = autopar.restore(tmp_path, target)
    placed = jax.tree.map(_place, target)
    assert jax.tree.map(_place, state) == placed
    assert_close(hosted(state), hosted(want[0]), 1e-9, least_norm=1e-6)
    got = (state, *got[1:])
    for _ in range(2):
        expected, out = serial(*want), other(*got)
        assert_close(hosted(out), hosted(expected), 1e-9, least_norm=1e-6)
        want, got = model.next_args(expected), model.next_args(out)
    assert_close(
        hosted(autopar.restore(tmp_path, got[0])), hosted(state_after(model, serial, 2)), 1e-9, least_norm=1e-6
    )


def state_after(model: Any, serial: Any, steps: int) -> Any:
    args = model.args
    for _ in range(steps):
        args = model.next_args(serial(*args))
    return args[0]


def _place(x: Any) -> Any:
    if isinstance(x, autopar.Array):
        return [(p.stage, p.start, p.stop, p.array.sharding, p.array.shape) for p in x.pieces]
    return x.sharding, x.shape


@pytest.mark.usefixtures("float64")
def test_init_makes_what_abstract_says(tmp_path: Path) -> None:
    model = build("gpt_tied", "float64")
    step = compiled(model, "two")
    target, made = step.abstract(lambda: model.args[0]), step.init(lambda: model.args[0])
    assert jax.tree.map(_place, made) == jax.tree.map(_place, target)
    assert any(isinstance(x, autopar.Array) for x in jax.tree.leaves(target)), "nothing is tied"
    assert_close(hosted(made), hosted(model.args[0]), 0.0)
    with pytest.raises(CheckpointError, match="has no numbers"):
        autopar.save(tmp_path, [x for x in jax.tree.leaves(target) if isinstance(x, autopar.Array)], step=0)


# --- Arrays made by hand --------------------------------------------------------------------------------------------


def sharding(devices: slice, *spec: Any) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[devices]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def rows() -> tuple[np.ndarray, autopar.Array]:
    """(6, 4): rows 0 and 1 on one mesh, the others on a second, cut otherwise; rows 4 and 5 also on a third."""
    value = np.arange(24, dtype=np.float32).reshape(6, 4)
    pieces = (
        Piece(1, 2, 6, jax.device_put(value[2:], sharding(slice(2, 4), "x"))),
        Piece(0, 0, 2, jax.device_put(value[:2], sharding(slice(0, 2), None, "x"))),
        Piece(2, 4, 6, jax.device_put(value[4:], sharding(slice(4, 8)))),
    )
    return value, autopar.Array(value.shape, value.dtype, pieces)


def copies() -> tuple[np.ndarray, autopar.Array]:
    value = np.arange(32, dtype=np.float32).reshape(8, 4) + 100
    pieces = tuple(
        Piece(s, 0, 0, jax.device_put(value, sharding(slice(2 * s, 2 * s + 2), "x" if s else None))) for s in range(3)
    )
    return value, autopar.Array(value.shape, value.dtype, pieces)


def test_each_element_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (by_rows, stacked), (tied, shared) = rows(), copies()
    written: list[tuple[str, Any]] = []
    write = saving.write_slices

    def noted(folder: Any, writer: Any, slices: Any) -> int:
        written.extend((leaf.name, box) for leaf, boxes in slices for box, _ in boxes)
        return write(folder, writer, slices)

    monkeypatch.setattr(saving, "write_slices", noted)
    autopar.save(tmp_path, {"rows": stacked, "tied": shared}, step=1).wait(60)
    assert sorted(written) == [
        ("rows", ((0, 2), (0, 2))), ("rows", ((0, 2), (2, 4))), ("rows", ((2, 4), (0, 4))), ("rows", ((4, 6), (0, 4))),
        ("tied", ((0, 8), (0, 4))),
    ]  # fmt: skip
    plain = autopar.restore(tmp_path)
    np.testing.assert_array_equal(plain["rows"], by_rows)
    np.testing.assert_array_equal(plain["tied"], tied)


def test_pieces_come_back_as_they_were(tmp_path: Path) -> None:
    (by_rows, stacked), (tied, shared) = rows(), copies()
    keys = jax.random.split(jax.random.key(3), 4)
    key_pieces = tuple(
        Piece(s, 2 * s, 2 * s + 2, jax.device_put(keys[2 * s : 2 * s + 2], sharding(slice(2 * s, 2 * s + 2), "x")))
        for s in range(2)
    )
    tree = {"rows": stacked, "tied": shared, "keys": autopar.Array((4,), keys.dtype, key_pieces), "n": np.int64(3)}
    autopar.save(tmp_path, tree, step=1).wait(60)
    got = autopar.restore(tmp_path, tree)
    for name in ("rows", "tied", "keys"):
        assert _place(got[name]) == _place(tree[name])
    for piece in got["rows"].pieces:
        np.testing.assert_array_equal(piece.array, by_rows[piece.start : piece.stop])
    for piece in got["tied"].pieces:
        np.testing.assert_array_equal(piece.array, tied)
    for piece in got["keys"].pieces:
        assert (jax.random.key_data(piece.array) == jax.random.key_data(keys[piece.start : piece.stop])).all()
    as_one = autopar.restore(tmp_path, {**tree, "rows": sharding(slice(0, 2), "x"), "tied": sharding(slice(0, 8))})
    np.testing.assert_array_equal(as_one["rows"], by_rows)
    assert isinstance(as_one["tied"], jax.Array)


def test_what_does_not_fit_is_said_with_its_leaf(tmp_path: Path) -> None:
    (_, stacked), (_, shared) = rows(), copies()
    autopar.save(tmp_path, {"rows": stacked, "tied": shared}, step=1).wait(60)
    with pytest.raises(CheckpointError, match=r"leaf \['tied'\]: the tree given wants float32 of shape \(6, 4\)"):
        autopar.restore(tmp_path, {"rows": stacked, "tied": stacked})
    with pytest.raises(CheckpointError, match=r"leaf \['other'\] is not in the checkpoint.*alike: \['rows'\]"):
        autopar.restore(tmp_path, {"rows": stacked, "other": shared})
    stacked.pieces[0].array.delete()
    with pytest.raises(CheckpointError, match=r"leaf \['rows'\]: its array was donated or deleted"):
        autopar.save(tmp_path, {"rows": stacked, "tied": shared}, step=2)
    for data in tmp_path.glob("1/default/**/d/*"):
        data.write_bytes(bytes(x ^ 1 for x in data.read_bytes()))
    with pytest.raises(CheckpointError, match=r"leaf \['rows'\]: its data is missing or damaged"):
        autopar.restore(tmp_path, {"rows": abstract(stacked), "tied": shared})


def abstract(x: autopar.Array) -> autopar.Array:
    """The same places, for new numbers."""
    pieces = tuple(
        Piece(p.stage, p.start, p.stop, jax.ShapeDtypeStruct(p.array.shape, jnp.float32, sharding=p.array.sharding))
        for p in x.pieces
    )
    return autopar.Array(x.shape, x.dtype, pieces)
