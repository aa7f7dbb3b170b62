"""The options of `autopar.parallelize` (`ir.options`), checked, as what planning sees of them: `of_options`; and what
a plan was asked for as options again: `as_options`.

Every option has one name, for plans of one program and of stages alike. What an option cannot be is refused for the
combination, with the reason. Values are plain: `step.options` makes them of JAX's. Runs where jax cannot be imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, get_args

from autopar.cost.logical_meshes import default_axis_names, mesh_shape_from_text
from autopar.intra_op.solvers import CHOICES as SOLVER_CHOICES
from autopar.ir.asked_text import config_text
from autopar.ir.degrees import OF_METHODS, ZERO, Degrees
from autopar.ir.errors import OptionError
from autopar.ir.layers import REMAT
from autopar.ir.options import OPTIONS, is_given, settled
from autopar.ir.pipelined import PipelineOptions
from autopar.ir.plan import MESH_AXES, METHODS, Plan, PlanConfig
from autopar.ir.strategy import CollectiveKind
from autopar.resharding.transfer_strategies import STRATEGIES

ON_UNSUPPORTED = ("replicate", "error")
"""What becomes of operators that nobody has described."""
Shape = int | Sequence[int] | str
"""8, (2, 4) or "2x4"."""
_HARMLESS = ("solver", "time_limit_s", "workers")
"""Fields of what is asked for that say nothing of a plan that is there."""
_SAID_BY = {
    "mesh_shape": "mesh", "axis_names": "mesh", "pins": "constraints", "schedules": "schedule",
    "starts": "stage_starts", "logical_shapes": "mesh", "batch_axes": "batch_axis", "uniform": "uniform_stages",
    "remat": "recompute", "degrees": "zero, tensor, sequence, experts",
}  # fmt: skip
"""A field of what is asked for → the option that says it, where that has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMesh:
    """A mesh whose axes have names of the user's."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What may be planned: the step as one program, in stages, or either.

    Attributes:
        program, stages: what is fixed of a plan of that kind; None: there is to be none.
        auto: the number of microbatches is the planner's to choose; the configurations have 1.
        no_stages: why stages were not asked for, where nobody said that there be none.
    """

    program: PlanConfig | None = None
    stages: PlanConfig | None = None
    auto: bool = False
    no_stages: str = ""

    def __post_init__(self) -> None:
        assert self.program is not None or self.stages is not None

    @property
    def config(self) -> PlanConfig:
        """Of the only kind, or of one program."""
        found = self.program or self.stages
        assert found is not None
        return found


def of_plan(config: PlanConfig) -> Asked:
    """What a plan was asked for, as it is."""
    return Asked(program=config) if config.stages is None else Asked(stages=config)


def check_given(plan: Plan, asked: Asked) -> None:
    """Raises OptionError where ``asked`` says otherwise than a plan that is given."""
    made = plan.config
    if made.stages is None:
        mesh = plan.sharding.mesh
        made = replace(made, mesh_shape=mesh.shape, axis_names=mesh.axis_names)
    config = asked.program if made.stages is None else asked.stages
    if config is None:
        kinds = ("one program", "stages") if made.stages is None else ("stages", "one program")
        raise OptionError(f"plan: the one that is given is of {kinds[0]}, and other options ask for {kinds[1]}")
    for wanted, has in ((config, made), (config.stages, made.stages)):
        for field in () if wanted is None else fields(wanted):
            value, known = getattr(wanted, field.name), getattr(has, field.name)
            said = field.name not in _HARMLESS and not isinstance(value, PipelineOptions)
            if said and value not in (known, getattr(type(wanted)(), field.name)):
                name = _SAID_BY.get(field.name, field.name)
                raise OptionError(
                    f"{name}: the plan that is given was made with {config_text(made)}; leave it out, or plan again"
                )


def of_options(options: Mapping[str, Any]) -> Asked:
    """All options (`settled`) as what planning sees of them. Where one says something of stages, there are to be
    some; where one says something of a whole step's mesh, there are to be none.

    Raises:
        OptionError: an option's value is none of its own, or cannot be together with another.
        ClusterError: a mesh's text is no shape.
    """
    because = [name for name, option in OPTIONS.items() if option.asks_stages and is_given(name, options)]
    check_values(options)
    auto = options["num_microbatches"] == "auto"
    if because == ["stages"] and _numbers(options["stages"]) == (1, 1):
        return Asked(program=one_program(options, "stages=1"), auto=auto)
    if because:
        return Asked(stages=in_stages(options, because[0]), auto=auto)
    whole = [name for name in ("mesh", "method", "batch_axis") if is_given(name, options)]
    if whole:
        reason = f"{whole[0]}= says how one mesh has the step; with stages=(2, None) there are stages"
        return Asked(program=one_program(options, f"{whole[0]}="), auto=auto, no_stages=reason)
    return Asked(program=one_program(options), stages=in_stages(options, "stages"), auto=auto)


def as_options(config: PlanConfig) -> dict[str, Any]:
    """The options, all (`settled`), of which `one_program` or `in_stages` makes ``config`` again."""
    stages = config.stages
    shared: dict[str, Any] = {
        "memory_bytes": config.memory_bytes,
        "num_microbatches": config.num_microbatches,
        "constraints": config.pins or None,
        "forbid": config.forbid,
        "method": config.method,
        "time_limit_s": config.time_limit_s,
        "solver": config.solver,
    }
    if stages is None:
        names, shape = config.axis_names, config.mesh_shape
        mine: dict[str, Any] = {
            "mesh": NamedMesh(shape=shape, names=names) if shape is not None and names is not None else shape,
            "mesh_axes": config.mesh_axes,
            "batch_axis": config.batch_axis,
            "recompute": config.recompute,
        }
    else:
        mine = {
            "mesh": stages.logical_shapes,
            "mesh_axes": stages.mesh_axes,
            "batch_axis": stages.batch_axes,
            "recompute": stages.remat,
            "whole_examples": stages.whole_examples,
            "stages": stages.stages,
            "stage_starts": stages.starts,
            "layers": config.layers,
            "submeshes": stages.submeshes,
            "virtual_stages": stages.virtual_stages,
            "schedule": stages.schedules,
            "uniform_stages": stages.uniform,
            "resharding": stages.resharding,
        }
    degrees = config.degrees if config.method == "auto" else Degrees()  # of stages a method says them
    given = {field.name: getattr(degrees, field.name) for field in fields(Degrees)}
    return settled({**shared, **mine, **given})


def check_values(options: Mapping[str, Any]) -> None:
    """Raises OptionError for a value that is none of its option's, though of its type."""
    n = options["num_microbatches"]
    if n != "auto" and n < 1:
        raise OptionError(f'num_microbatches: {n!r} is no number of microbatches; at least 1, or "auto"')
    for kind in _texts(options["forbid"]):
        _check_choice("forbid", kind, get_args(CollectiveKind))
    _check_choice("method", options["method"], METHODS)
    _check_choice("mesh_axes", options["mesh_axes"], MESH_AXES)
    if options["mesh"] is not None and is_given("mesh_axes", options):
        raise OptionError("mesh_axes: mesh= says which meshes there are; leave one of them out")
    _check_degrees(options)
    _check_choice("solver", options["solver"], SOLVER_CHOICES)
    _check_choice("resharding", options["resharding"], ("auto", *STRATEGIES))
    _check_choice("on_unsupported", options["on_unsupported"], ON_UNSUPPORTED)
    for name in ("memory_bytes", "time_limit_s", "deadline_s"):
        value = options[name]
        if value is not None and not value > 0:
            raise OptionError(f"{name} must be above 0, got {value!r}")


def _memory_bytes(options: Mapping[str, Any]) -> int | None:
    """A limit of whole bytes: ``1e9`` is one, too."""
    return None if options["memory_bytes"] is None else int(options["memory_bytes"])


def _degrees(options: Mapping[str, Any]) -> Degrees:
    return Degrees(**{field.name: options[field.name] for field in fields(Degrees)})


def _check_degrees(options: Mapping[str, Any]) -> None:
    """Raises OptionError where a degree is none, or another option says what it does."""
    degrees = _degrees(options)
    if degrees.zero is not None:
        _check_choice("zero", degrees.zero, ZERO)
    for name in ("tensor", "sequence", "experts"):
        given = options[name]
        if given is not None and given < 1:
            raise OptionError(f"{name}: {given!r} is no number of devices; at least 1")
    if not degrees:
        return
    says = {"method": "a method says how all state lies"}
    if degrees.names is not None:
        says |= {
            "mesh": f"degrees make the mesh, of axes {', '.join(degrees.names)}",
            "mesh_axes": "degrees say which axes a mesh has",
            "batch_axis": f"with degrees the batch is split over {' and '.join(degrees.batch_axes(degrees.names))}",
        }
    if degrees.sequence is not None:
        says["whole_examples"] = "sequence= splits examples"
    for name, why in says.items():
        if is_given(name, options):
            raise OptionError(f"{name}: beside {degrees}: {why}; leave one of them out")
    bound = options["batch_axis"]
    if degrees.zero is not None and isinstance(bound, Sequence) and any(axes in (None, (), []) for axes in bound):
        raise OptionError("zero: says what is split over the batch's axes, and batch_axis leaves these open, or none")


def one_program(options: Mapping[str, Any], because: str = "") -> PlanConfig:
    """What all options fix of a plan of one program. ``because``: what asks for one and no other, if anything does.
    Raises as `of_options`."""
    for name, option in OPTIONS.items():
        if because and option.no_program and is_given(name, options):
            raise OptionError(
                f"{name}: {because} asks for one program, and {option.no_program}; stages=(1, None) plans stages"
            )
    mesh, recompute, axis = options["mesh"], options["recompute"], options["batch_axis"]
    if isinstance(recompute, str) or (recompute is not None and not isinstance(recompute, bool)):
        raise OptionError(
            f"recompute: {recompute!r} says what layers keep, and one program has none; without stages= it is None, "
            "True or False"
        )
    names = mesh.names if isinstance(mesh, NamedMesh) else None
    shapes = _shapes(mesh)
    if shapes is not None and len(shapes) != 1:
        raise OptionError(f"mesh: {mesh!r}: several shapes are for stages; one program has one mesh")
    shape = None if shapes is None else shapes[0]
    if isinstance(axis, int) and not isinstance(axis, bool):
        known = names or default_axis_names(axis + 1 if shape is None else len(shape))
        if not 0 <= axis < len(known):
            raise OptionError(f"batch_axis: {axis} is no position of the mesh's {len(known)} axes")
        axis = known[axis]
    if axis is not None and not isinstance(axis, str):
        raise OptionError(f"batch_axis: {axis!r}: several axes are for stages; one program takes one")
    return PlanConfig(
        mesh_shape=shape,
        axis_names=names,
        mesh_axes=options["mesh_axes"],
        memory_bytes=_memory_bytes(options),
        num_microbatches=_count(options),
        method=options["method"],
        forbid=_texts(options["forbid"]),
        batch_axis=axis,
        degrees=_degrees(options),
        pins=tuple(options["constraints"] or ()),
        solver=options["solver"],
        time_limit_s=options["time_limit_s"],
        recompute=recompute,
    )


def in_stages(options: Mapping[str, Any], because: str) -> PlanConfig:
    """What all options fix of a plan of stages, for which ``because`` asks. Raises as `of_options`."""
    if isinstance(options["mesh"], NamedMesh):
        raise OptionError("mesh: a jax.sharding.Mesh is one, and every stage has its own; give shapes, and cluster=")
    degrees, method = _degrees(options), options["method"]
    if method in OF_METHODS:
        degrees = OF_METHODS[method]
    elif method != "auto":
        raise OptionError(
            f"method: {because}= asks for stages, whose meshes may differ in size, and {method!r} does not say how "
            "many devices share a weight; write tensor="
        )
    stages = PipelineOptions(
        schedules=None if options["schedule"] is None else _texts(options["schedule"]),
        stages=None if _numbers(options["stages"]) == (1, None) else _numbers(options["stages"]),
        virtual_stages=options["virtual_stages"],
        starts=None if options["stage_starts"] is None else tuple(int(s) for s in options["stage_starts"]),
        submeshes=_submeshes(options["submeshes"]),
        logical_shapes=_shapes(options["mesh"]),
        mesh_axes=options["mesh_axes"],
        batch_axes=_batch_axes(options["batch_axis"]),
        degrees=degrees,
        whole_examples=options["whole_examples"],
        uniform=options["uniform_stages"],
        resharding=options["resharding"],
        memory_bytes=_memory_bytes(options),
        remat=_kept(options["recompute"]),
        forbid=_texts(options["forbid"]),
        pins=tuple(options["constraints"] or ()),
        solver=options["solver"],
        time_limit_s=options["time_limit_s"],
    )
    return PlanConfig(
        num_microbatches=_count(options), layers=options["layers"], memory_bytes=_memory_bytes(options), method=method,
        forbid=stages.forbid, pins=stages.pins, degrees=degrees, solver=stages.solver,
        time_limit_s=stages.time_limit_s, stages=stages,
    )  # fmt: skip


def pipeline_options(config: PlanConfig, workers: int | None) -> PipelineOptions:
    """What was asked of stages, and how many processes plan them."""
    assert config.stages is not None
    return replace(config.stages, workers=workers)


def _count(options: Mapping[str, Any]) -> int:
    return 1 if options["num_microbatches"] == "auto" else options["num_microbatches"]


def _check_choice(option: str, value: Any, choices: Sequence[str | int]) -> None:
    if value not in choices:
        raise OptionError(f"{option}: {value!r} is not one of {', '.join(map(str, choices))}")


def _numbers(stages: Any) -> tuple[int, int | None] | None:
    """The least and the most stages."""
    if stages is None:
        return None
    whole = isinstance(stages, int) and not isinstance(stages, bool)
    pair = (stages, stages) if whole else tuple(stages) if isinstance(stages, Sequence) else ()
    if len(pair) != 2 or not isinstance(pair[0], int) or not isinstance(pair[1], int | None):
        raise OptionError(f"stages: {stages!r} is neither a number of stages nor the least and the most, (2, None) say")
    return pair[0], pair[1]


def _texts(given: Sequence[str] | str) -> tuple[str, ...]:
    if isinstance(given, set | frozenset):  # equal options, equal digests
        return tuple(sorted(given))
    return (given,) if isinstance(given, str) else tuple(given)


def _shape(given: Shape) -> tuple[int, ...]:
    if isinstance(given, str):
        return mesh_shape_from_text(given)
    return (given,) if isinstance(given, int) else tuple(int(n) for n in given)


def _shapes(mesh: Any) -> tuple[tuple[int, ...], ...] | None:
    """The shapes that ``mesh`` names: one, or several."""
    if mesh is None:
        return None
    if isinstance(mesh, NamedMesh):
        return (mesh.shape,)
    if isinstance(mesh, str | int) or all(isinstance(each, Integral) for each in mesh):
        return (_shape(mesh),)
    return tuple(map(_shape, mesh))


def _batch_axes(given: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    """Of all stages, or of each: positions of the axes that the batch is split over, None where the planner decides."""
    if given is None:
        return None
    each: Any = (given,) if isinstance(given, int | str) else tuple(given)
    return tuple(x if x is None else tuple(map(_position, (x,) if isinstance(x, int | str) else x)) for x in each)


def _position(axis: int | str) -> int:
    if isinstance(axis, int):
        return axis
    names = default_axis_names(8)
    if axis not in names:
        raise OptionError(f"batch_axis: {axis!r} is no axis of a stage's mesh; these are {', '.join(names[:4])}, …")
    return names.index(axis)


def _kept(recompute: Any) -> tuple[str, ...]:
    """What layers may keep of their forward pass (`ir.layers.REMAT`)."""
    if recompute is None or recompute is True:
        return REMAT
    if recompute is False:
        return (REMAT[0],)
    kinds = _texts(recompute)
    for kind in kinds:
        _check_choice("recompute", kind, REMAT)
    if not kinds:
        raise OptionError(f"recompute: nothing is not one of {', '.join(REMAT)}")
    return kinds


def _submeshes(given: str | Sequence[Sequence[int] | str] | None) -> tuple[tuple[int, int], ...] | None:
    return None if given is None else tuple(map(_submesh, (given,) if isinstance(given, str) else given))


def _submesh(given: Sequence[int] | str) -> tuple[int, int]:
    shape = _shape(given)
    if len(shape) != 2:
        raise OptionError(f"submeshes: {given!r} is not (hosts, devices of each); write (1, 4) or 1x4, say")
    return shape[0], shape[1]
