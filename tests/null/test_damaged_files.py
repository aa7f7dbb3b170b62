"""Files of every kind, damaged at random: what reads them says what is wrong or gives an answer, and never anything
else; neither time nor memory grows with what a few bytes claim."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import checkpoint
from autopar.checkpoint.owner import OWNER
from autopar.cli import main
from autopar.inter_op.cache import StoredLayouts, StoredPipeline, load
from autopar.ir import files
from autopar.ir.errors import AutoparError
from autopar.ir.presets import cluster_from_file, cluster_from_text
from autopar.ir.serde import load_plan, to_json
from autopar.launch.cluster import Cluster, record, recorded
from autopar.launch.hosts import Host, hosts_from_text
from autopar.launch.records import folder_of, read_node, write_node
from autopar.launch.sessions import Reach
from autopar.runtime.on_ray.ports import Ports

pytestmark = pytest.mark.xdist_group("damaged files")  # one process makes what all tests of the file share

FULL = 10_000
"""Of all kinds together (half a minute)."""
WITHIN_S = 20.0
"""For one file; the slowest, of the largest nesting, take less than one."""
HOSTILE: tuple[Any, ...] = (
    None, True, "", "x" * 1000, "\ud800", 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.0, -0.5, 1e308, 5e-324, [], {},
    [[]], {"": None}, {"type": "x"}, "NaN", "../../etc", "('", "%s%n", "[" * 50,
)  # fmt: skip
RAW = (b"", b"\x00", b"\xff", b"{", b"}", b"[", b"]", b'"', b",", b"9" * 5000, b"[" * 20000, b"NaN", b"1e999", b"\n")


WHOLE: dict[Path, bytes] = {}
"""What was in the files at first: an owner that lets go removes its own."""


def step(w: Any, x: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), jnp.tanh(x @ w), None, length=3)
        return (y**2).mean()

    value, grad = autopar.value_and_grad(loss)(w, x)
    return w - 0.1 * grad, value


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One to three faults: bytes, or a value, a key or an item of the JSON."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = _bytes(data, draw) if draw.random() < 0.3 else _json(data, draw)
    return data


def _bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    how = draw.randrange(4)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + draw.choice(RAW) + data[at:]
    if how == 2:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data[:at] + data[draw.randrange(len(data) + 1) :]


def _json(data: bytes, draw: random.Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, draw)
    holder: Any = None
    place: Any = None
    inside = tree
    while isinstance(inside, dict | list) and inside and (holder is None or draw.random() < 0.85):
        holder, place = inside, draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        inside = holder[place]
    if holder is None:
        return _bytes(data, draw)
    how = draw.randrange(6)
    if how == 0:
        del holder[place]
    elif how == 1 and isinstance(holder, list):
        holder.insert(place, holder[draw.randrange(len(holder))])
    elif how == 2:
        for _ in range(draw.choice((2, 100, 400))):
            holder[place] = [holder[place]] if draw.random() < 0.5 else {"body": holder[place]}
    elif how == 3 and isinstance(inside, int | float) and not isinstance(inside, bool):
        holder[place] = draw.choice(
            (inside + 1, inside - 1, -inside, inside * 1000, inside / 3 if abs(inside) < 1e300 else 0)
        )
    elif how == 4 and isinstance(holder, dict):
        holder[str(draw.choice(HOSTILE))[:20]] = holder.pop(place)
    else:
        holder[place] = draw.choice(HOSTILE)
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return _bytes(data, draw)


@cache
def saved(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Kind → (its file, what reads it)."""
    w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
    one, stages = folder / "one.json", folder / "stages.json"
    autopar.parallelize(step, cluster="cpu:4").plan(w, x).save(one)
    spec = folder / "cluster.json"
    spec.write_text(to_json(cluster_from_text("dgx-h100:2")))
    kept = folder / "cache"
    options: Any = {"stages": 2, "layers": 2, "num_microbatches": 2, "cache": kept}
    autopar.parallelize(step, cluster="cpu:4", **options).plan(w, x).save(stages)
    (layouts, *_), (pipeline, *_) = sorted(kept.glob("**/layouts-*")), sorted(kept.glob("**/pipeline-*"))
    root = folder / "saves"
    state = {"w": w, "n": (x, jnp.int32(3))}
    autopar.save(root, state, step=1).wait()
    owner = (root / OWNER).read_bytes()
    checkpoint.release(root)
    (root / OWNER).write_bytes(owner)
    hosts = folder / "hosts"
    hosts.write_text("node1 address=10.0.0.1 devices=8\nme@node2 python=/opt/bin/python  # here\n")
    reach = Reach(rsh="ssh", python="python", environment={"A": "b"})
    record(Cluster(name="mine", hosts=(Host(name="a", address="b"),), reach=reach, ports=Ports()))
    node = folder_of("mine", "a")
    node.mkdir(parents=True)
    write_node(node, 1, {"temporary": "/no/such"})
    target = jax.eval_shape(lambda: state)

    def shown(path: Path) -> None:
        load_plan(path)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said := io.StringIO()):
            for words in (["inspect", str(path)], ["diff", str(path), str(one)]):
                assert main(words) in (0, 1), (words, said.getvalue())
            main(["simulate", str(path)])

    def entry(path: Path, of: type) -> None:
        load(path.parent, of, path.stem.partition("-")[2])

    return {
        "plan": (one, lambda: shown(one)),
        "plan of stages": (stages, lambda: shown(stages)),
        "cluster": (spec, lambda: cluster_from_file(spec)),
        "layouts": (layouts, lambda: entry(layouts, StoredLayouts)),
        "pipeline": (pipeline, lambda: entry(pipeline, StoredPipeline)),
        "hosts": (hosts, lambda: hosts_from_text(files.read_text(hosts), "hosts")),
        "record": (folder_of("mine") / "cluster.json", lambda: recorded("mine")),
        "node": (node / "node.json", lambda: read_node(node)),
        "tree": (next(root.glob("1/**/_METADATA")), lambda: autopar.restore(root, target)),
        "marker": (next(root.glob("1/*commit_success*")), lambda: autopar.restore(root, target)),
        "owner": (root / OWNER, lambda: (checkpoint.owner.own(root), checkpoint.release(root))),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_HOME", str(made / "home"))
        yield made


KINDS = (
    "plan", "plan of stages", "cluster", "layouts", "pipeline", "hosts", "record", "node", "tree", "marker", "owner",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(FULL // len(KINDS) + 1, marks=[pytest.mark.full])])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused_or_read(folder: Path, kind: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    path, read = saved(folder)[kind]
    whole = WHOLE[path] = WHOLE.get(path) or path.read_bytes()
    path.write_bytes(whole)
    read()
    outcomes: list[str] = []
    try:
        for seed in range(count):
            path.write_bytes(damaged(whole, random.Random(f"{kind} {seed}")))
            started_s = time.monotonic()
            try:
                read()
                outcomes.append("read")
            except (AutoparError, files.DamagedError) as error:
                assert str(error) and len(str(error)) < 5_000
                outcomes.append("refused")
            except BaseException as error:
                error.add_note(f"{kind} {seed}")
                raise
            assert time.monotonic() - started_s < WITHIN_S
            caplog.clear()
    finally:
        path.write_bytes(whole)
    read()
    path.write_bytes(whole)
    assert "refused" in outcomes or kind in ("owner", "layouts", "pipeline")  # these are made again
