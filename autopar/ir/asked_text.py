"""What a plan was asked for, in one line: `config_text`."""

from __future__ import annotations

from dataclasses import fields

from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan import PlanConfig
from autopar.ir.sharding import Pin, ShardingSpec
from autopar.ir.text import bytes_text, seconds_text


def pin_text(pin: Pin) -> str:
    """``[x,?]``: as a sharding, with ? for a dimension that is left to the planner."""
    return str(ShardingSpec(dims=tuple(("?",) if axes is None else axes for axes in pin.dims)))


def config_text(config: PlanConfig) -> str:
    """What was asked for, in one line, defaults left out."""
    default = PlanConfig()
    parts = [f"method {config.method}"] if config.stages is None or config.method != default.method else []
    for field in fields(PlanConfig):
        value = getattr(config, field.name)
        if field.name == "method" or value == getattr(default, field.name):
            continue
        match field.name:
            case "mesh_shape":
                parts.append("mesh " + _shape(value))
            case "memory_bytes":
                parts.append(f"memory {bytes_text(value)}")
            case "num_microbatches":
                parts.append(f"{value} microbatch{'es' if value != 1 else ''}")
            case "forbid":
                parts.append("forbid " + ", ".join(value))
            case "pins":
                parts += [f"pin {pin.target} {pin_text(pin)}" for pin in config.pins]
            case "mesh_axes":
                parts.append(f"meshes of up to {value} axes")
            case "axis_names":
                parts.append("axes " + ", ".join(value))
            case "time_limit_s":
                parts.append(f"time limit {seconds_text(value)}")
            case "layers":
                parts.append("layers by name" if value == "names" else f"{value} layers")
            case "degrees":
                parts.append(str(value))
            case "stages":
                parts += _stage_options(value)
            case _:
                parts.append(f"{field.name} {value}")
    return "; ".join(parts)


def _stage_options(options: PipelineOptions) -> list[str]:
    parts = ["in stages"]
    if options.schedules is not None:
        parts.append("schedules " + ", ".join(options.schedules))
    if options.stages is not None:
        least, most = options.stages
        parts.append(
            f"{least} stage{'s' if least > 1 else ''}" if least == most else f"{least} to {most or 'any'} stages"
        )
    if options.virtual_stages is not None:
        parts.append(f"{options.virtual_stages} stage{'s' if options.virtual_stages > 1 else ''} on a mesh")
    if options.starts is not None:
        parts.append("stages from layers " + ", ".join(map(str, options.starts)))
    if options.submeshes is not None:
        parts.append("submeshes " + ", ".join(map(_shape, options.submeshes)))
    if options.logical_shapes is not None:
        parts.append("mesh shapes " + ", ".join(map(_shape, options.logical_shapes)))
    if options.mesh_axes != PipelineOptions().mesh_axes:
        parts.append(f"meshes of up to {options.mesh_axes} axes")
    if options.batch_axes is not None:
        parts.append("batch " + ", ".join(map(_bound, options.batch_axes)))
    if options.whole_examples:
        parts.append("whole examples")
    if options.uniform:
        parts.append("uniform stages")
    if options.resharding != "auto":
        parts.append(f"resharding {options.resharding}")
    if options.remat != PipelineOptions().remat:
        parts.append("remat " + ", ".join(options.remat))
    return parts


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _bound(axes: tuple[int, ...] | None) -> str:
    """What the batch is bound to, as `autopar plan --batch-axis` takes it."""
    return "free" if axes is None else "+".join(map(str, axes)) or "whole"
