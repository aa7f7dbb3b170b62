"""What a planner found for a step on a cluster, with its layout written as options: the types, and their files.

A `Record` is of one model, in ``benchmarks/recorded/NAME.json``. It says what two planners found, that of one program
and that of stages: the figures that they predict, how long they took, and the layout by the options of
`autopar.parallelize` that force it. Nothing in it is of a type of autopar's, so that it can be read when
these planners are gone.

Shardings are written as ``constraints`` of `autopar.parallelize` are: a glob over argument paths → for each dimension
the mesh axes that split it. Leaves of equal layers share a line (`as_globs`): ``*`` stands for their number.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from autopar.ir.serde import decode, encode, parse

FOLDER = Path(__file__).parent / "recorded"
WIDTH = 110
"""Characters that a value may take on one line of a file."""

Spec: TypeAlias = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dimension."""
Leaf: TypeAlias = tuple[str, tuple[int, ...]]
"""Path and shape of an argument's leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What planning took: wall seconds of tracing and of all else (every mesh that was tried, the check that what was
    found can run), CPU seconds of all processes (what to compare where others used the machine too), the most bytes
    that they held at a time, wall seconds by phase (of one mesh: of the mesh that was chosen)."""

    trace_s: float
    planning_s: float
    cpu_s: float
    rss_bytes: int
    phases: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A planner that found nothing that fits, and what it said. What tracing took counts as planning."""

    why: str
    took: Took


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """Options of `autopar.parallelize`, by their names. ``constraints`` cover every leaf of the arguments;
    ``recompute`` is True where values are recomputed."""

    mesh: tuple[int, ...]
    num_microbatches: int
    recompute: bool
    constraints: dict[str, Spec]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMesh:
    """A plan of one mesh. Seconds a step, bytes a device; ``status`` and ``gap`` are the solver's. ``axes``: names of
    the mesh axes. ``recomputed``: what is recomputed, and how often that operator is."""

    options: MeshOptions
    axes: tuple[str, ...]
    recomputed: tuple[tuple[str, int], ...]
    step_s: float
    compute_s: float
    communication_s: float
    peak_bytes: float
    status: str
    gap: float
    digest: str
    took: Took


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of `autopar.parallelize` for stages, by their names. What they leave open, `Stage` and `Held` say: which
    of ``mesh`` and of ``recompute`` is where, and how arguments are sharded."""

    num_microbatches: int
    schedule: tuple[str, ...]
    stage_starts: tuple[int, ...]
    submeshes: tuple[tuple[int, int], ...]
    mesh: tuple[tuple[int, ...], ...]
    recompute: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``start`` to ``stop``, the first of which is called ``first``, on a submesh of (hosts, devices of each) as
    logical mesh ``mesh_shape`` with ``axes``. Stages of one ``worker`` share its devices.

    ``batch_axes``: positions in the mesh of the axes that split the examples of most of what the stage's layers take
    and hand on; read off the plan, which binds them nowhere. ``remat``: what each layer keeps of its forward pass."""

    start: int
    stop: int
    first: str
    worker: int
    submesh: tuple[int, int]
    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    batch_axes: tuple[int, ...]
    remat: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How each of ``stages`` shards what it holds of the arguments."""

    stages: tuple[int, ...]
    constraints: dict[str, Spec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that crosses from stage ``source`` to stage ``target``, and how it is sharded on either side. ``phase``:
    after a forward task, a backward task, the last of these, or the update."""

    source: int
    target: int
    phase: str
    name: str
    type: str
    source_spec: Spec
    target_spec: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A plan of stages, of ``num_layers`` layers. Seconds of the simulated step; the most bytes that a device holds of
    each worker; ``bubble`` is the part of the time of all devices in which they run nothing. ``simulated``: how many
    pipelines the choice was made from."""

    options: PipelineOptions
    num_layers: int
    stages: tuple[Stage, ...]
    arguments: tuple[Held, ...]
    crossings: tuple[Crossing, ...]
    step_s: float
    peak_bytes: tuple[float, ...]
    bubble: float
    simulated: int
    digest: str
    took: Took


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What both planners found for model ``name`` on the first ``devices`` of a cluster preset. ``cores``: of the
    machine that planned."""

    name: str
    cluster: str
    devices: int
    global_batch: int
    num_microbatches: int
    autopar_version: str
    jax_version: str
    cores: int
    one_mesh: OneMesh | Refused
    pipeline: Pipeline | Refused


def load(name: str) -> Record:
    """The record of a model.

    Raises:
        FileNotFoundError: there is none.
        PlanFormatError: its file is damaged; names the place.
    """
    return decode(Record, parse((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def save(record: Record) -> None:
    """Writes, or replaces, the file of a record."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{record.name}.json").write_text(lines(encode(record)) + "\n", encoding="utf-8")


def lines(value: Any, indent: int = 0) -> str:
    """JSON for people: whatever fits a line stands on one."""
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + indent <= WIDTH or not isinstance(value, dict | list):
        return short
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {lines(x, indent + 1)}" for key, x in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + lines(x, indent + 1) for x in value) + "\n" + " " * indent + "]"


def as_globs(specs: Mapping[Leaf, Spec], among: Mapping[Leaf, str]) -> dict[str, Spec]:
    """Shardings of leaves as constraints, of which the last that matches holds: a line for each glob of ``among``
    (`globs_of`), as most of its leaves have it, then one for each leaf that has it otherwise."""
    wanted: dict[str, Counter[Spec]] = {}
    for leaf, spec in specs.items():
        wanted.setdefault(among[leaf], Counter())[spec] += 1
    out = {glob: counted.most_common(1)[0][0] for glob, counted in wanted.items()}
    return out | {leaf[0]: spec for leaf, spec in specs.items() if out[among[leaf]] != spec}


def globs_of(leaves: Collection[Leaf]) -> dict[Leaf, str]:
    """Leaf → the glob that stands for it and for others of its shape whose paths differ from its own in numbers alone.
    A leaf whose glob would match one of another shape stands for itself."""
    alike: dict[Any, list[Leaf]] = {}
    for path, shape in leaves:
        alike.setdefault((re.sub(r"\[\d+\]", "[*]", path), shape), []).append((path, shape))
    out: dict[Leaf, str] = {}
    for group in alike.values():
        numbers = list(zip(*(re.findall(r"\[(\d+)\]", path) for path, _ in group), strict=True))
        kept = iter([mine[0] if len(set(mine)) == 1 else "*" for mine in numbers])
        glob = re.sub(r"\[\d+\]", lambda _, kept=kept: f"[{next(kept)}]", group[0][0])
        alone = sum(matches(glob, path) for path, _ in leaves) == len(group)
        out |= {leaf: glob if alone else leaf[0] for leaf in group}
    return out


def matches(glob: str, path: str) -> bool:
    """True where a constraint's glob means a path; brackets stand for themselves."""
    return re.fullmatch(".*".join(map(re.escape, glob.split("*"))), path, re.DOTALL) is not None
