"""What texts of plans are made of: clusters, meshes, folded paths, sums of collectives, facts in columns.

Rows of a pytree that differ only in an index (``['layers'][0]['wq']``) are folded into one (`fold_paths`) where the
rest of the row is equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.cluster import ClusterSpec, HostGroup, LogicalMesh, shape_text
from autopar.ir.graph import TensorType, itemsize_bits
from autopar.ir.sharding import ShardingSpec
from autopar.ir.strategy import Collective
from autopar.ir.text import bytes_text, link_text


def cluster_text(cluster: ClusterSpec) -> str:
    """One line: name, hosts, devices, links."""
    return f"{cluster.name}: " + "; ".join(map(_group_text, cluster.groups))


def _group_text(group: HostGroup) -> str:
    domains, rate = group.hosts // group.domain_hosts, f"{bytes_text(group.intra_host.bytes_per_s)}/s"
    text = f"{group.hosts} host{'s' if group.hosts > 1 else ''} x {group.devices_per_host} {group.device.name} "
    text += f"({bytes_text(group.device.memory_bytes)} each), "
    between = f"{group.nics_per_host} x {bytes_text(group.nic.bytes_per_s)}/s"
    if group.torus is not None:
        rings = [n for n, wraps in zip(group.torus.shape, group.torus.wraps, strict=True) if wraps]
        text += f"{shape_text(group.torus.shape)} chips, links of {rate}"
        text += f", rings of {', '.join(map(str, dict.fromkeys(rings)))}" if rings else ""
        return text + (f"; {domains} slices, {between} a host between them" if domains > 1 else "")
    if domains == 1:
        return text + rate
    if group.domain_hosts == 1:
        return text + f"{rate} inside, {between} between hosts"
    return text + f"{rate} inside domains of {group.domain_hosts} hosts, {between} a host between them"


def mesh_text(mesh: LogicalMesh) -> str:
    """One line: shape, and each axis with its link."""
    axes = "; ".join(f"{a.name}={a.size} ({link_text(a.link)})" for a in mesh.axes)
    return f"{'x'.join(map(str, mesh.shape))}: {axes}"


def shard_bytes(value_type: TensorType, spec: ShardingSpec, mesh: LogicalMesh) -> int:
    """Bytes of one device's part of a value; dimensions that the axes do not divide are padded."""
    sizes = {a.name: a.size for a in mesh.axes}
    dims = zip(value_type.shape, spec.dims, strict=True)
    local = math.prod(-(-n // math.prod(sizes[a] for a in axes)) for n, axes in dims)
    return (local * itemsize_bits(value_type.dtype) + 7) // 8


# Folding of pytree paths ------------------------------------------------------------------------------

# A run of digits that is an index: a whole component (`[3]`, `/3/`), a suffix (`layer_3`), or a numbered
# component with something under it (`h3/wq`); `w1` at the end of a path is a name.
_INDEX = re.compile(r"(?<![0-9.])[0-9]+(?=[\]/'\"]|\.[A-Za-z_]|$)")


def _split_path(path: str) -> tuple[str, tuple[int, ...]]:
    """(pattern with one ``{}`` per index, the indices)."""
    indices: list[int] = []

    def keep(match: re.Match[str]) -> str:
        before = path[: match.start()]
        last = not re.search(r"[A-Za-z_]", path[match.end() :])
        if last and before and before[-1].isalpha():
            return match.group()
        indices.append(int(match.group()))
        return "\0"

    return _INDEX.sub(keep, path), tuple(indices)


@dataclass(frozen=True, slots=True)
class FoldedPath:
    """A path with ``*`` (every index there is) or ``{0-3,7}`` in place of the indices that vary; the
    positions in the folded sequence that it stands for."""

    path: str
    rows: tuple[int, ...]


def fold_paths(rows: Sequence[tuple[str, Hashable]]) -> tuple[FoldedPath, ...]:
    """Folds rows (path, what must be equal) whose paths differ in indices only, in the order of each fold's first
    row."""
    split = [_split_path(path) for path, _ in rows]
    everywhere: dict[tuple[str, int], set[int]] = {}
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for row, (pattern, indices) in enumerate(split):
        groups.setdefault((pattern, rows[row][1]), []).append(row)
        for position, index in enumerate(indices):
            everywhere.setdefault((pattern, position), set()).add(index)
    folded: list[FoldedPath] = []
    for (pattern, _), members in groups.items():
        pieces = pattern.split("\0")
        columns = [sorted({split[m][1][p] for m in members}) for p in range(len(pieces) - 1)]
        if math.prod(map(len, columns)) != len(members):  # not a full grid: saying so briefly would be wrong
            folded += [FoldedPath(rows[m][0], (m,)) for m in members]
            continue
        text = pieces[0]
        for position, (column, piece) in enumerate(zip(columns, pieces[1:], strict=True)):
            whole = len(column) > 1 and len(column) == len(everywhere[pattern, position])
            text += ("*" if whole else _ranges(column)) + piece
        folded.append(FoldedPath(text, tuple(members)))
    return tuple(sorted(folded, key=lambda f: f.rows[0]))


def _ranges(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


# Collectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """All collectives of one kind over the same axes. ``runs`` executions in a step move ``bytes`` operand
    bytes per device in ``time_s``; ``assumed`` where some of these are in loops of unknown length."""

    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    ops: int
    runs: int
    bytes: int
    time_s: float
    assumed: bool


def runs_of(collective: Collective) -> int:
    """How often it runs in a step."""
    return collective.count * collective.trips


def sum_collectives(collectives: Iterable[Collective]) -> tuple[CollectiveSum, ...]:
    """Collectives by (kind, axes), the dearest first. `Collective.time_s` is a whole row's: all its executions."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    sums = [
        CollectiveSum(
            kind=kind,
            axes=axes,
            dtypes=tuple(sorted({c.dtype for c in group})),
            ops=sum(c.count for c in group),
            runs=sum(map(runs_of, group)),
            bytes=sum(c.operand_bytes * runs_of(c) for c in group),
            time_s=math.fsum(c.time_s for c in group),
            assumed=any(c.trips_assumed for c in group),
        )
        for (kind, axes), group in groups.items()
    ]
    return tuple(sorted(sums, key=lambda s: (-s.time_s, s.kind, s.axes)))


# Rows -------------------------------------------------------------------------------------------------


def facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    """(name, text) rows as indented lines, the texts in a column."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {text}".rstrip() for name, text in rows]


def clip(rows: list[list[str]], limit: int | None, what: str) -> tuple[list[list[str]], list[str]]:
    """A table's heading and at most ``limit`` of its rows (None: all); a line that says how many ``what`` are left
    out."""
    if limit is None or len(rows) - 1 <= limit:
        return rows, []
    return rows[: limit + 1], [f"  ... {len(rows) - 1 - limit} more {what} (--all shows them)"]
