"""What a user asks of a pipeline against the step, the cluster and itself: `check_options`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from autopar.inter_op.schedules import SCHEDULES, plain_schedule
from autopar.inter_op.submesh import Submesh, logical_meshes, submeshes
from autopar.ir.cluster import ClusterSpec, LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import OptionError
from autopar.ir.layers import REMAT, LayeredGraph
from autopar.ir.pipelined import PipelineOptions


def check_options(layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions) -> tuple[str, ...]:
    """The schedules to try, in the order of `SCHEDULES` where the user named none.

    Raises:
        OptionError: an option has a value that it cannot have, or contradicts the step, the cluster or another one.
    """
    _values(options)
    schedules = _of_virtual_stages(_schedules(layered, options), options.virtual_stages)
    stages = _num_stages(layered, cluster, options, schedules)
    allowed = _meshes(cluster, options, stages, schedules)
    _batch_axes(layered, cluster, options, allowed)
    return schedules


def _values(options: PipelineOptions) -> None:
    if options.memory_bytes is not None and not options.memory_bytes > 0:
        raise OptionError(f"memory_bytes: {options.memory_bytes} is not above 0")
    if options.workers is not None and options.workers < 1:
        raise OptionError(f"workers: {options.workers} processes; at least 1")
    unknown = [name for name in options.remat if name not in REMAT]
    if unknown or not options.remat:
        raise OptionError(f"recompute: {unknown[0] if unknown else 'nothing'!r} is not one of {', '.join(REMAT)}")


def _schedules(layered: LayeredGraph, options: PipelineOptions) -> tuple[str, ...]:
    trains = layered.loss >= 0
    possible = tuple(name for name, kind in SCHEDULES.items() if kind.trains == trains)
    if options.schedules is None:
        return possible
    if not options.schedules:
        raise OptionError(f"schedule: none is allowed; there are {', '.join(possible)}")
    for name in options.schedules:
        if name not in SCHEDULES:
            near = difflib.get_close_matches(name, SCHEDULES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise OptionError(f"schedule: there is no {name!r}{hint}; there are {', '.join(SCHEDULES)}")
        if SCHEDULES[name].trains != trains:
            if trains:
                raise OptionError(f"schedule: {name} has no backward pass, but {layered.name} takes gradients")
            does = "splits the backward pass" if SCHEDULES[name].splits_backward else "has a backward pass"
            raise OptionError(
                f"schedule: {name} {does}, but {layered.name} has none: it takes no gradients by "
                f"autopar.value_and_grad. For a step that only infers: {', '.join(possible)}"
            )
    return options.schedules


def _of_virtual_stages(schedules: tuple[str, ...], wanted: int | None) -> tuple[str, ...]:
    """Those of ``schedules`` that have so many stages on each mesh."""
    if wanted is None:
        return schedules
    if wanted < 1:
        raise OptionError(f"virtual_stages: {wanted} stages on each mesh; at least 1")
    left = tuple(name for name in schedules if SCHEDULES[name].chunked == (wanted > 1))
    if not left:
        chunked = ", ".join(name for name, kind in SCHEDULES.items() if kind.chunked)
        several = f"several stages on a mesh take {chunked}" if wanted > 1 else "these have several stages on a mesh"
        raise OptionError(f"virtual_stages: {wanted}, under {', '.join(schedules)}: {several}")
    return left


def _num_stages(
    layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, schedules: Sequence[str]
) -> int | None:
    layers, starts, devices = len(layered.layers), options.starts, cluster.num_devices
    least, most = options.stages or (1, None)
    if starts is not None and not least <= len(starts) <= (most or len(starts)):
        raise OptionError(
            f"stages is {least if least == most else (least, most)}, but stage_starts names {len(starts)} stages "
            f"({', '.join(map(str, starts))}); leave one of them out"
        )
    if least < 1 or (most is not None and most < least):
        raise OptionError(f"stages: {least if least == most else (least, most)}; a number of 1 or more, or two of them")
    if starts is not None and not starts:
        raise OptionError("stage_starts: 0 stages; at least 1")
    stages = len(starts) if starts is not None else options.num_stages
    if (stages or least) > layers:
        stages = stages or least
        raise OptionError(
            f"{stages} stages, but {layered.name} has {layers} layers: a stage needs at least one. Cut it into more "
            f"layers (layers={stages}), or ask for at most {layers} stages"
        )
    if stages is None:
        return None
    if starts is not None:
        if starts[0] != 0 or list(starts) != sorted(set(starts)):
            raise OptionError(f"stage_starts: {', '.join(map(str, starts))} must ascend from layer 0")
        if starts[-1] >= layers:
            raise OptionError(f"stage_starts: {starts[-1]} is past the last of {layers} layers (0 to {layers - 1})")
    if stages > devices and not any(SCHEDULES[name].chunked for name in schedules):
        chunked = ", ".join(name for name, kind in SCHEDULES.items() if kind.chunked)
        raise OptionError(
            f"{stages} stages on the {devices} devices of cluster {cluster.name}: each needs a mesh of its own, "
            f"but under {chunked}, which is not allowed"
        )
    plain = plain_schedule(trains=layered.loss >= 0).name
    if stages == 1 and plain not in schedules:
        raise OptionError(
            f"schedule: a single stage runs one task after the other; allow {plain} beside {schedules[0]}"
        )
    return stages


def _meshes(
    cluster: ClusterSpec, options: PipelineOptions, stages: int | None, schedules: Sequence[str]
) -> tuple[Submesh, ...]:
    """The submeshes that are allowed."""
    every = submeshes(cluster)
    allowed = every
    if options.submeshes is not None:
        there = {(s.hosts, s.devices) for s in every}
        for hosts, devices in options.submeshes:
            if (hosts, devices) not in there:
                names = dict.fromkeys(f"{s.hosts}x{s.devices}" for s in every)
                raise OptionError(
                    f"submeshes: {hosts}x{devices} (hosts x devices of each) is no part of cluster {cluster.name}; "
                    f"there are {', '.join(names)}"
                )
        allowed = tuple(s for s in every if (s.hosts, s.devices) in set(options.submeshes))
        if not allowed:
            raise OptionError("submeshes: none is allowed")
    if options.degrees.names is not None:
        sized, degrees = allowed, options.degrees
        allowed = tuple(s for s in sized if degrees.shape(s.size) is not None)
        if not allowed:
            sizes = ", ".join(dict.fromkeys(str(s.size) for s in sized))
            raise OptionError(f"{degrees}: divides none of the submeshes that are allowed, of {sizes} devices")
    elif options.logical_shapes is not None:
        allowed = _shaped(allowed, options.logical_shapes)
    chunked = any(SCHEDULES[name].chunked for name in schedules)
    if stages is None or chunked:
        return allowed
    given = options.submeshes if options.starts is not None and len(options.submeshes or ()) == stages else None
    if given is not None and options.uniform and len(set(given)) > 1:
        raise OptionError("uniform_stages: the stages' submeshes are not equal: " + _listed(given))
    needed = sum(h * d for h, d in given) if given is not None else stages * min(s.size for s in allowed)
    if needed > cluster.num_devices:
        what = _listed(given) if given is not None else f"{stages} x {min(allowed, key=lambda s: s.size)} at least"
        raise OptionError(
            f"submeshes: {stages} stages on {what} take {needed} devices; cluster {cluster.name} has "
            f"{cluster.num_devices}"
        )
    return allowed


def _batch_axes(
    layered: LayeredGraph, cluster: ClusterSpec, options: PipelineOptions, allowed: Sequence[Submesh]
) -> None:
    bound, starts, degrees = options.batch_axes, options.starts, options.degrees
    if (bound is not None or options.whole_examples or degrees) and not layered.examples:
        what = str(degrees) if degrees else "whole_examples" if bound is None else "batch_axis"
        raise OptionError(
            f"{what}: no layer of {layered.name} reads examples of a "
            "batch; say in batch_argnums which arguments carry it"
        )
    meshes = [mesh for s in allowed for mesh in logical_meshes(cluster, s, options)]
    if bound is None:
        if degrees and not any(batch_divides(layered, mesh, None, degrees) for mesh in meshes):
            raise OptionError(f"{degrees}: {_undivided(layered, meshes)}, so many as the data's axis leaves")
        return
    if len(bound) != 1 and (starts is None or len(bound) != len(starts)):
        stages = f"stage_starts names {len(starts)} stages" if starts is not None else "no stage_starts is given"
        raise OptionError(f"batch_axis has {len(bound)} entries, but {stages}; give one for all stages, or one each")
    for axes in bound:
        if axes is None:
            continue
        if any(a < 0 for a in axes) or len(set(axes)) < len(axes):
            raise OptionError(f"batch_axis: {axes} are no positions of mesh axes, each once, from 0")
        if not any(batch_divides(layered, mesh, axes) for mesh in meshes):
            raise OptionError(f"batch_axis: {_undivided(layered, meshes, f'axes {_bound(axes)} that')}")


def _undivided(layered: LayeredGraph, meshes: Sequence[LogicalMesh], axes: str = "") -> str:
    v, dim = layered.examples[0]
    listed = ", ".join(dict.fromkeys(_shape(mesh.shape) for mesh in meshes))
    has = f"has {axes} divide" if axes else "divides"
    examples = layered.values[v].shape[dim]
    return f"no logical mesh that is allowed ({listed}) {has} the {examples} examples of a microbatch"


def batch_divides(
    layered: LayeredGraph, mesh: LogicalMesh, axes: Sequence[int] | None, degrees: Degrees | None = None
) -> bool:
    """True where the mesh has the axes at these positions and their sizes divide the examples of a microbatch; ``axes``
    None asks for nothing, but for what ``degrees`` do."""
    if axes is None and degrees:
        names = mesh.axis_names
        axes = [names.index(name) for name in degrees.batch_axes(names)]
    if axes is None:
        return True
    if any(a >= len(mesh.axes) for a in axes):
        return False
    parts = math.prod(mesh.axes[a].size for a in axes)
    return all(layered.values[v].shape[dim] % parts == 0 for v, dim in layered.examples)


def _bound(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes))


def _shaped(allowed: Sequence[Submesh], wanted: Sequence[tuple[int, ...]]) -> tuple[Submesh, ...]:
    """Those submeshes that have a logical mesh of a wanted shape."""
    sizes = sorted({s.size for s in allowed})
    for shape in wanted:
        if math.prod(shape) not in sizes or (1 in shape and shape != (1,)):
            tight = tuple(size for size in shape if size > 1) or (1,)
            hint = f"leave axes of one device out: {_shape(tight)}" if math.prod(shape) in sizes else (
                f"these have {', '.join(map(str, sizes))} devices"
            )  # fmt: skip
            raise OptionError(f"mesh: {_shape(shape)} is no logical mesh of an allowed submesh; {hint}")
    return tuple(s for s in allowed if s.size in map(math.prod, wanted))


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _listed(given: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(_shape, given))
