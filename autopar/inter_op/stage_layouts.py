"""What every submesh of a cluster can do with layers i to j, for the cut into stages: `StageLayouts`.

A cell is a submesh; cost[option, i, j] is of layers i to j on it, an option being a logical shape, a placement of the
batch and a price of memory (`autopar.inter_op.layer_layouts`, `inter_op.ranges`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.inter_op.candidates import Option
from autopar.inter_op.cells import Cells
from autopar.inter_op.check_options import batch_divides
from autopar.inter_op.layer_layouts import NoTable, Setting, Table, Wanted, tables
from autopar.inter_op.layer_pins import on_mesh
from autopar.inter_op.layer_problems import LayerProblems, MeshKind
from autopar.inter_op.submesh import Submesh, logical_meshes, submeshes, three_axis_meshes
from autopar.intra_op.search import PLAN
from autopar.intra_op.stage_costs import Solving
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.errors import InfeasibleError, OptionError, ShardingError, SolverTimeoutError
from autopar.ir.layers import LayeredGraph
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.progress import Watch

LAYOUTS_SHARE = 0.8
"""The part of the time that is left in which layouts are looked for; stages are searched and simulated in the rest
(guessed)."""
MOST_STAGES = 64
"""Stages that are tried at most (guessed)."""

CLOSER = replace(PLAN, accept=0.01)
"""On meshes of three axes (measured: a plan of GPT-15B is 0.04 % slower than with 0.005, which takes three times as
long)."""

Found = tuple[tuple[int, ...] | None, Table]
"""Where the batch was bound to, and what layers can do then."""


class StageLayouts:
    """The layouts of a step's layers on the submeshes of a cluster, as far as they were looked for."""

    def __init__(
        self, problems: LayerProblems, cluster: ClusterSpec, options: PipelineOptions,
        user_rules: Mapping[str, str] | None, cache: str | None, watch: Watch,
    ) -> None:  # fmt: skip
        self.problems, self.cluster, self.options, self.cache, self.watch = problems, cluster, options, cache, watch
        self.layered = problems.parts.layered
        self.rules = tuple(sorted((user_rules or {}).items()))
        self.meshes: dict[Submesh, list[LogicalMesh]] = {}
        self.found: dict[MeshKind, list[Found]] = {}
        self.no_table: NoTable | None = None
        """Why the first of the meshes is none that layers can be on as asked."""
        self.pins_refused = ""

    def look(self) -> None:
        """Looks for layouts on every submesh that is allowed.

        Raises:
            OptionError: no submesh is.
            ShardingError: constraints cannot be on any mesh.
        """
        allowed = self.options.submeshes
        most = most_stages(self.options, len(self.layered.layers), self.cluster) if allowed is None else None
        kinds = [s for s in submeshes(self.cluster, most) if allowed is None or (s.hosts, s.devices) in allowed]
        if not kinds:
            raise OptionError(f"submeshes: none of {allowed} is a part of cluster {self.cluster.name}")
        failed = self._take(kinds, lambda s: logical_meshes(self.cluster, s, self.options))
        if failed is not None:
            if not any(self.meshes.values()):
                raise failed
            self.pins_refused = f". Meshes are left out on which constraints cannot be: {failed}"
        self._solve()

    def look_closer(self, used: Mapping[Submesh, Wanted]) -> bool:
        """Looks for layouts on meshes of three axes of the submeshes ``used``, of the layers and what these keep there
        (where the batch is bound nowhere: what is bound follows from all layers); of none: of all. Whether there are
        such meshes."""
        if self.options.logical_shapes is not None or self.options.degrees.names is not None:
            return False
        before = set(self.found)
        kinds = [s for s in self.meshes if s in used or not used]
        self._take(kinds, lambda s: three_axis_meshes(self.cluster, s))
        self._solve({mesh: used[s] for s in kinds for mesh in self.meshes[s]} if used else None)
        return self.found.keys() > before

    def cells(self, *, every: bool) -> tuple[list[Cells], list[list[Option]]]:
        """What every submesh can do by the layouts that were found; which table and price each of its options is.
        ``every``: with ranges of layers that do not fit it.

        Raises:
            InfeasibleError, SolverTimeoutError: none was.
        """
        cells: list[Cells] = []
        choices: list[list[Option]] = []
        for submesh, meshes in self.meshes.items():
            mine = [x for mesh in meshes for x in self.found[mesh.axes, mesh.device]]
            if not mine:
                continue
            memory = self.options.memory_bytes or mine[0][1].mesh.device.usable_bytes
            bound = tuple(axes for axes, t in mine for _ in t.ranges.prices)
            figures = [(t.ranges.number, t.ranges.cost) for _, t in mine]
            beside_bytes = receive_bytes(self.layered) / submesh.size
            trains = None if every else self.layered.loss >= 0
            cells.append(Cells.of(submesh, float(memory), figures, beside_bytes, bound, trains=trains))
            choices.append([Option(t, p) for _, t in mine for p in range(len(t.ranges.prices))])
        if not cells and self.no_table is not None:
            if isinstance(self.no_table, SolverTimeoutError):
                raise self.no_table
            raise InfeasibleError(f"{self.no_table}. Leave one of these out: {', '.join(ruled_out_by(self.options))}")
        return cells, choices

    def _take(
        self, kinds: Collection[Submesh], shaped: Callable[[Submesh], Sequence[LogicalMesh]]
    ) -> ShardingError | None:
        """Takes the logical meshes of submeshes on which all pins can be; why not the first of the others."""
        failed: ShardingError | None = None
        for submesh in kinds:
            mine = self.meshes.setdefault(submesh, [])
            for mesh in shaped(submesh):
                try:
                    for pinned in self.problems.parts.pinned:
                        on_mesh(pinned, mesh)
                    mine.append(mesh)
                except ShardingError as error:
                    failed = failed or error
        return failed

    def _solve(self, only: Mapping[LogicalMesh, Wanted] | None = None) -> None:
        """Looks for layouts on the meshes that were taken and have none yet; of each mesh ``only`` some."""
        wanted: dict[MeshKind, LogicalMesh] = {}
        for mesh in itertools.chain(*self.meshes.values()):
            if (mesh.axes, mesh.device) not in self.found:
                wanted.setdefault((mesh.axes, mesh.device), mesh)
        order = sorted(wanted, key=lambda k: -wanted[k].num_devices)
        self.found |= {k: [] for k in order}
        solving = Solving(solver=self.options.solver, effort=PLAN if only is None else CLOSER)
        watch = self.watch.part(LAYOUTS_SHARE)
        for axes in dict.fromkeys(self.options.batch_axes or (None,)):
            setting = Setting(
                forbid=self.options.forbid,
                degrees=self.options.degrees,
                batch_axes=axes,
                whole_examples=self.options.whole_examples,
                user_rules=self.rules,
                solving=solving,
                cache=self.cache,
            )
            fitting = [k for k in order if batch_divides(self.layered, wanted[k], axes, self.options.degrees)]
            meshes, parts = [wanted[k] for k in fitting], self.problems.parts
            few = None if setting.binds else only
            made = tables(
                parts, meshes, setting, self.options.workers, self.problems, watch, few,
                always=self._always(meshes) if only is None else (),
            )  # fmt: skip
            for k, table in zip(fitting, made, strict=True):
                if isinstance(table, Table):
                    self.found[k].append((axes, table))
                elif self.no_table is None or isinstance(table, SolverTimeoutError):
                    self.no_table = table

    def _always(self, meshes: Sequence[LogicalMesh]) -> list[LogicalMesh]:
        """Of each kind of device the largest mesh that leaves as many to every stage, of these one of most axes: with
        layouts on these alone there is a plan, if one fits."""
        starts, (least, _) = self.options.starts, self.options.stages or (1, None)
        most = self.cluster.num_devices // (least if starts is None else len(starts))
        large = [mesh for mesh in meshes if mesh.num_devices <= most]
        by_size = sorted(large, key=lambda mesh: (mesh.num_devices, len(mesh.shape)))
        return list({mesh.device: mesh for mesh in by_size}.values())


def most_stages(options: PipelineOptions, layers: int, cluster: ClusterSpec) -> int:
    """Stages of a mesh each that are tried."""
    _, most = options.stages or (1, None)
    return most or min(layers, cluster.num_devices, MOST_STAGES)


def ruled_out_by(options: PipelineOptions) -> list[str]:
    """What the user asked for that rules out layouts."""
    asked = [f"forbid={', '.join(options.forbid)}"] if options.forbid else []
    asked += ["batch_axis="] if options.batch_axes is not None else []
    asked += [str(options.degrees)] if options.degrees else []
    asked += ["whole_examples=True"] if options.whole_examples else []
    return asked + ([f"constraints of {', '.join(p.target for p in options.pins)}"] if options.pins else [])


def receive_bytes(layered: LayeredGraph) -> NDArray[np.float64]:
    """float64[start, stop]: whole bytes of what crosses into a range, both ways: one microbatch that arrives while
    another is worked on."""
    crossing = crossing_bytes(layered)
    return crossing[:-1, None] + crossing[None, :]


def crossing_bytes(layered: LayeredGraph) -> NDArray[np.float64]:
    """float64[layers + 1]: bytes of activations that cross before each layer."""
    out = np.zeros(len(layered.layers) + 1)
    for v, made in layered.makers.items():
        users = layered.users.get(v, ())
        if users:
            out[made + 1 : users[-1] + 1] += layered.values[v].size_bytes
    return out
