"""Checkpoints: round trips, other shardings, errors, damage, interruption, and Orbax on the other side."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import checkpoint
from autopar.checkpoint import store
from autopar.checkpoint.leaf import chunk_of
from autopar.ir.errors import CheckpointError
from tests.checkpoints import assert_same, bits
from tests.null.test_imports import run_python

DTYPES = (
    "bool int4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e8m0fnu"
).split()


def mesh(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple("abc"[: len(sizes)]))


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 8, shape).astype(kind)


@st.composite
def sharded(draw: st.DrawFn, sizes: tuple[int, ...] = (4, 2)) -> Callable[[tuple[int, ...]], NamedSharding]:
    """A sharding of any shape whose dimensions are multiples of 8 (or shardings of scalars)."""
    axes = draw(st.permutations("abc"[: len(sizes)]))
    places = draw(st.lists(st.integers(0, 2), min_size=len(axes), max_size=len(axes)))

    def of(shape: tuple[int, ...]) -> NamedSharding:
        spec: list[tuple[str, ...]] = [() for _ in shape]
        for axis, place in zip(axes, places):
            if place < len(shape) and shape[place] % 8 == 0:
                spec[place] += (axis,)
        return NamedSharding(mesh(*sizes), PartitionSpec(*(names or None for names in spec)))

    return of


leaves = st.tuples(
    st.lists(st.sampled_from([1, 3, 8, 16, 0]), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 99)
)
scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), st.none())
names = st.text("ab./~ é0", min_size=1, max_size=4)
trees = st.recursive(
    leaves | scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=6,
)


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3 and isinstance(x[1], str)


def clashes(tree: Any) -> bool:
    """True where two paths have one name, which is an error of its own."""
    try:
        checkpoint.leaves_of(jax.tree.map(lambda x: 0, tree, is_leaf=is_leaf))
    except CheckpointError:
        return True
    return False


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(tree=trees, one=sharded(), other=sharded((2, 2, 2)), data=st.data())
def test_what_was_saved_is_restored_in_any_sharding(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, one: Any, other: Any, data: st.DataObject
) -> None:
    if clashes(tree):
        return
    with jax.enable_x64(True):
        kinds = data.draw(st.sampled_from(["jax", "numpy"]))

        def made(of: Any, x: Any) -> Any:
            if not is_leaf(x):
                return x
            value = random_array(*x)
            return value if kinds == "numpy" else jax.device_put(value, of(x[0]))

        saved = jax.tree.map(lambda x: made(one, x), tree, is_leaf=is_leaf)
        wanted = jax.tree.map(lambda x: made(other, x), tree, is_leaf=is_leaf)
        root = tmp_path_factory.mktemp("saves")
        autopar.save(root, saved, step=0).wait(60)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x,
            wanted,
        )
        assert_same(autopar.restore(root, like), wanted)
        shutil.rmtree(root)


@settings(max_examples=200)
@given(data=st.data())
def test_chunks_divide_every_box_and_are_small(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=3)))
    cuts = [sorted(data.draw(st.sets(st.integers(0, size), max_size=3)) | {0, size}) for size in shape]
    boxes = [tuple((c[i], c[i + 1]) for c in cuts) for i in range(min(len(c) for c in cuts) - 1)]
    chunk = chunk_of(shape, "float32", boxes, limit_bytes=400)
    assert all(c >= 1 for c in chunk)
    for box in boxes:
        for (start, stop), size, step in zip(box, shape, chunk):
            assert start % step == 0 and (stop % step == 0 or stop == size)
    assert np.prod(chunk) * 4 <= 400


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    weight: Any
    inner: Any


def training_state() -> Any:
    params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.zeros(4, jnp.bfloat16)}
    return {
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        "pair": Pair(1, Pair(None, ())),
        "model": Model(weight=params["w"] + 1, inner=[Model(weight=np.float32(2.5), inner=3.5)]),
        "key": jax.random.key(3),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(5, impl="rbg"), (4, 2)), NamedSharding(mesh(2, 2), PartitionSpec("b", "a"))
        ),
        "step": 7,
        "done": False,
        "phase": 1 + 2j,
    }


def test_a_training_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = training_state()
    autopar.save(tmp_path, state, step=3).wait(60)
    assert_same(autopar.restore(tmp_path, state), state)
    bare = autopar.restore(tmp_path)
    assert bits(bare["opt"][1][0]["mu"]["w"]) == bits(state["opt"][1][0].mu["w"])
    assert bare["step"] == 7 and bare["pair"]["second"] == {"first": None, "second": ()}
    assert list(bare["model"]["inner"]) == [{"weight": np.float32(2.5), "inner": 3.5}]
    keys = autopar.restore(tmp_path, {"keys": NamedSharding(mesh(4), PartitionSpec("a"))}, partial=True)["keys"]
    assert bits(jax.random.key_data(keys)) == bits(jax.random.key_data(state["keys"]))


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros((8, 100_000)), NamedSharding(mesh(8), PartitionSpec("a")))
    saves = []
    for number in range(4):
        saves.append(autopar.save(tmp_path, {"x": x}, step=number))
        x = step(step(x))
    saves[-1].wait(60)
    for number in range(4):
        (got,) = autopar.restore(tmp_path, step=number).values()
        assert (got == 2 * number).all()
    # What was restored may be donated too, also where devices share the memory that it was read into.
    like = {"x": NamedSharding(mesh(8), PartitionSpec())}
    back = autopar.restore(tmp_path, like, step=3)["x"]
    assert (np.asarray(step(back)) == 7).all()
    assert (autopar.restore(tmp_path, step=3)["x"] == 6).all()


def test_only_the_slices_wanted_are_read(tmp_path: Path) -> None:
    x = jax.device_put(
        jnp.arange(1 << 20, dtype=jnp.int32).reshape(1024, 1024), NamedSharding(mesh(8), PartitionSpec("a"))
    )
    autopar.save(tmp_path, {"x": x, "y": jnp.arange(1 << 20)}, step=0).wait(60)
    found = checkpoint.open_checkpoint(tmp_path)
    before = _bytes_read()
    (part,) = checkpoint.read_slices(found, [(found.leaves["x"], ((100, 120), (0, 1024)))])
    assert (part == np.asarray(x)[100:120]).all()
    assert 0 < _bytes_read() - before < 1.2 * (1 << 19)  # one chunk of eight: 512 KiB


def _bytes_read() -> int:
    import tensorstore

    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(value["value"] for m in tensorstore.experimental_collect_matching_metrics(name) for value in m["values"])


def test_replicas_are_dealt_out_and_written_once(tmp_path: Path) -> None:
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh(4, 2), PartitionSpec("b")))
    autopar.save(tmp_path, {"x": x}, step=0).wait(60)
    assert checkpoint.open_checkpoint(tmp_path).leaves["x"].chunk == (4, 8)


def test_the_last_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 10, 20):
        last = autopar.save(tmp_path, {"x": jnp.ones(3)}, step=step, keep=2)
    last.wait(60)
    assert (checkpoint.steps(tmp_path), autopar.latest(tmp_path)) == ((10, 20), 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", checkpoint.OWNER]
    checkpoint.delete(tmp_path, 10)
    assert checkpoint.steps(tmp_path) == (20,)
    assert autopar.latest(tmp_path / "none") is None


def test_what_cannot_be_removed_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An older checkpoint, or what an interrupted save has left, that the file system keeps: NFS with a file open."""
    (tmp_path / "3.orbax-checkpoint-tmp-half" / "default").mkdir(parents=True)
    remove, stuck = shutil.rmtree, ["3.", "1."]

    def sometimes(path: Any, *rest: Any) -> None:
        if any(Path(path).name.startswith(start) for start in stuck):
            raise OSError(39, "Directory not empty")
        remove(path, *rest)

    monkeypatch.setattr(shutil, "rmtree", sometimes)
    for step in (1, 5, 10):
        assert autopar.save(tmp_path, {"x": jnp.ones(3)}, step=step, keep=1).wait(60) == tmp_path / str(step)
    assert checkpoint.steps(tmp_path) == (10,)
    assert any("cannot be removed, and takes room" in r.getMessage() for r in caplog.records)
    stuck.clear()
    autopar.save(tmp_path, {"x": jnp.ones(3)}, step=20, keep=1).wait(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20", checkpoint.OWNER], "it is not tried again"


# Errors.


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            {"a": {"w": jnp.zeros((2, 3))}},
            r"leaf \['a'\]\['w'\]: .* wants float32 of shape \(2, 3\).* has float32",
        ),
        ({"a": {"w": jnp.zeros((3, 2), int)}}, r"\['a'\]\['w'\]: .* wants int32 .* has float32 of shape \(3, 2\)"),
        ({"a": {"v": jnp.zeros((3, 2))}}, r"leaf \['a'\]\['v'\] is not in the checkpoint.*alike: \['a'\]\['w'\]"),
        ({"a": {"w": 1.0}}, r"wants a Python float, the checkpoint has float32 of shape \(3, 2\)"),
        ({"a": {"w": None}}, "wants None or an empty container, the checkpoint has float32"),
        ({"n": jnp.zeros(())}, r"wants float32 of shape \(\), the checkpoint has nothing \(None\)"),
        (
            {"k": jnp.zeros(2, "uint32")},
            r"wants uint32 of shape \(2,\), .* has random keys \(threefry2x32\)",
        ),
        ({"k": jax.random.key(0, impl="rbg")}, r"wants random keys \(rbg\)"),
        ({"s": 1.5}, "wants a Python float, the checkpoint has int64"),
        ({"a": {"w": NamedSharding(mesh(2), PartitionSpec("a"))}}, r"\['a'\]\['w'\]: shape \(3, 2\) cannot have the"),
        ({"l": NamedSharding(mesh(2), PartitionSpec())}, r"\['l'\]: float64 needs JAX's 64-bit types"),
        ({"a": {"w": "text"}}, "a str says nothing about what to restore"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path_factory: pytest.TempPathFactory, like: Any, message: str) -> None:
    root = tmp_path_factory.getbasetemp() / "fixed"
    if not root.exists():
        tree = {"a": {"w": jnp.zeros((3, 2))}, "n": None, "k": jax.random.key(0), "s": 3, "l": np.zeros(3)}
        autopar.save(root, tree, step=0).wait(60)
    with pytest.raises(CheckpointError, match=message):
        autopar.restore(root, like, partial=True)


def test_stored_leaves_are_not_left_out_unsaid(tmp_path: Path) -> None:
    autopar.save(tmp_path, {"a": jnp.zeros(2), "b": [1]}, step=0).wait(60)
    with pytest.raises(CheckpointError, match=r"1 stored leaves are not in the tree given: \['b'\]\[0\]"):
        autopar.restore(tmp_path, {"a": jnp.zeros(2)})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"f": [print]}, r"leaf \['f'\]\[0\]: a builtin_function_or_method cannot be stored"),
        ({"f": "text"}, r"leaf \['f'\]: a str cannot be stored"),
        ({"f": 2**63}, "does not fit 64 bits"),
        ({"a": {"b": 1}, "a.b": 2}, r"leaves \['a'\]\['b'\] and \['a.b'\] would both be called 'a.b'"),
        ({"f": jax.ShapeDtypeStruct((3,), "float32")}, r"leaf \['f'\]: a ShapeDtypeStruct has no numbers"),
        ({"f": np.array(["x"])}, r"leaf \['f'\]: arrays of dtype <U1 cannot be stored"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        autopar.save(tmp_path, tree, step=0)
    assert list(tmp_path.iterdir()) == []


def test_saving_where_a_step_is_traced(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"leaf \['a'\]: being traced. Save outside jax.jit"):
        jax.jit(lambda x: autopar.save(tmp_path, {"a": x}, step=0))(jnp.ones(3))


def test_steps_of_numpy_and_jax(tmp_path: Path) -> None:
    for step in (np.int64(3), jnp.int32(4)):
        autopar.save(tmp_path, {"a": 1}, step=step).wait(60)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["3", "4"]


def test_bad_steps_and_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint there"):
        autopar.restore(tmp_path, {})
    autopar.save(tmp_path, {"a": 1}, step=4).wait(60)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 3\. Complete steps: 4"):
        autopar.restore(tmp_path, {"a": 1}, step=3)
    with pytest.raises(CheckpointError, match="a checkpoint of step 4 already"):
        autopar.save(tmp_path, {"a": 1}, step=4)
    with pytest.raises(CheckpointError, match="keep=0"):
        autopar.save(tmp_path, {"a": 1}, step=5, keep=0)
    for step in (-1, 2.5, "x", True, jnp.ones(2)):
        with pytest.raises(CheckpointError, match=f"^step={re.escape(repr(step))}: expected a whole number, 0 or more"):
            autopar.save(tmp_path, {"a": 1}, step=step)  # type: ignore[arg-type]
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(CheckpointError, match=r"leaf \['a'\]: its array was donated or deleted"):
        autopar.save(tmp_path, {"a": deleted}, step=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot begin a checkpoint"):
        autopar.save(tmp_path / "file", {"a": 1}, step=5).wait(60)
    foreign = tmp_path / "9"
    (foreign / "default").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 9; its marker is missing"):
        autopar.restore(tmp_path, {"a": 1}, step=9)
    (foreign / "commit_success.txt").write_text("by somebody else")
    with pytest.raises(CheckpointError, match="_METADATA is missing: not a pytree that autopar or Orbax wrote"):
        autopar.restore(tmp_path, {"a": 1})
    (foreign / "default" / "_METADATA").write_text('{"tree": 1}')
    with pytest.raises(CheckpointError, match="not a description of a pytree as Orbax writes it"):
        autopar.restore(tmp_path, {"a": 1})


def test_an_error_of_the_thread_is_raised_once_by_wait_or_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "mkdir", _raises(OSError(28, "No space left on device")))
        lost = autopar.save(tmp_path, {"a": 1}, step=1)
        assert lost._done.wait(60)
    with pytest.raises(CheckpointError, match="No space left"):
        autopar.save(tmp_path, {"a": 1}, step=2)
    autopar.save(tmp_path, {"a": 1}, step=2).wait(60)
    assert checkpoint.steps(tmp_path) == (2,)


def _raises(error: BaseException) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> None:
        raise error

    return raises


def test_without_tensorstore_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = f"import autopar, numpy as np\nautopar.save({str(tmp_path)!r}, {{'a': np.ones(3)}}, step=0)"
    done = run_python(code, without=("tensorstore",))
    assert "pip install 'autopar[checkpoint]'" in done.stderr
    assert run_python("import autopar.checkpoint, sys\nassert 'tensorstore' not in sys.modules").returncode == 0
