"""A plan of one program → a Python module that lays the step out so under plain JAX: `exported`.

The module says the mesh, how each leaf of arguments and results lies, by path, and how named values do. What it cannot
say is how operators run, and which collectives there are: XLA chooses them from where arguments, results and named
values lie (GSPMD, or Shardy), and may choose others than were planned; what is recomputed is not said either.

Leaves that differ in an index only are one row of its table. For flax the dimensions have logical names, made of their
sizes and of the axes that split them, so that as few rules as there are such pairs say it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.ir.errors import OptionError
from autopar.ir.graph import Graph
from autopar.ir.in_words import in_words
from autopar.ir.plan import ArgPlan, OneProgram, Plan
from autopar.ir.pretty import fold_paths
from autopar.ir.serde import digest
from autopar.ir.sharding import ShardingSpec
from autopar.ir.sharding_plan import RegionPlan, ShardingPlan

STYLES = ("jit", "flax", "equinox")

_HEAD = '''"""How {name} lies on {devices} devices: {words}.

Made by autopar {version} from the plan with digest {digest}, for {cluster}. Where
arguments, results and named values lie is as planned; how operators run between them, and with which collectives, is
XLA's choice{again}.
"""

from __future__ import annotations

import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

SHAPE, AXES = {shape!r}, {axes!r}
DEVICE_IDS = {devices_order}
"""Of all devices, those of the mesh, in its order."""

ARGUMENTS = {{
{arguments}
}}
"""Path of an argument's leaves → how they lie; * stands for any index."""

RESULTS = {{
{results}
}}

NAMED = {{{named}}}
"""Values that `jax.ad_checkpoint.checkpoint_name` names: give them to `constrained`."""

DONATED = {donated!r}
"""Arguments whose leaves all give their memory to a result."""


def mesh(devices=None) -> Mesh:
    """The mesh; ``devices``: all that there are (default: `jax.devices()`)."""
    devices = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    return Mesh(devices[list(DEVICE_IDS)].reshape(SHAPE), AXES)


def spec(path: str, table=ARGUMENTS) -> P:
    """How the leaf at ``path`` lies."""
    for pattern, found in table.items():
        if re.fullmatch(re.escape(pattern).replace(r"\\*", r"\\d+"), path):
            return found
    raise KeyError(f"{{path}}: the plan is of a step without it")


def shardings(tree, root: str, on: Mesh, table=ARGUMENTS):
    """A tree of NamedShardings for ``tree``, which is argument ``root`` (``args[0]``), or a result (``out``)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(on, spec(root + jax.tree_util.keystr(path), table)), tree
    )


def constrained(x, name: str, on: Mesh):
    """``x`` where the plan has the value of that name."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(on, NAMED[name]))
'''

_JIT = '''

def jit(step, on: Mesh, *args):
    """`jax.jit` of ``step``, whose arguments are like ``args`` (arrays or shapes), as the plan lays them out."""
    results = jax.eval_shape(step, *args)
    return jax.jit(
        step,
        in_shardings=tuple(shardings(arg, f"args[{i}]", on) for i, arg in enumerate(args)),
        out_shardings=shardings(results, "out", on, RESULTS),
        donate_argnums=DONATED,
    )
'''

_FLAX = '''
LOGICAL = {{
{logical}
}}
"""Path of an argument's leaves → logical names of their dimensions, for `flax.linen.with_logical_partitioning`."""

RULES = (
{rules}
)
"""(logical name, mesh axes): for `flax.linen.logical_axis_rules` and `logical_to_mesh_sharding`."""


def logical(path: str) -> P:
    """Logical names of the leaf at ``path``."""
    return spec(path, LOGICAL)


def logical_shardings(tree, root: str, on: Mesh):
    """As `shardings`, by flax's rules."""
    import flax.linen as nn

    names = jax.tree_util.tree_map_with_path(
        lambda path, leaf: logical(root + jax.tree_util.keystr(path)), tree
    )
    return nn.logical_to_mesh_sharding(names, on, RULES)
'''

_EQUINOX = '''

def shard(tree, root: str, on: Mesh):
    """``tree``, argument ``root``, with its arrays where the plan has them; works inside `equinox.filter_jit`, too."""
    import equinox as eqx

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(eqx.filter_shard(arrays, shardings(arrays, root, on)), rest)


def filter_jit(step, on: Mesh):
    """`equinox.filter_jit` of ``step``: what it takes and gives lies as planned."""
    import equinox as eqx

    @eqx.filter_jit(donate="all" if DONATED else "none")
    def run(*args):
        args = tuple(shard(arg, f"args[{i}]", on) for i, arg in enumerate(args))
        results, rest = eqx.partition(step(*args), eqx.is_array)
        return eqx.combine(eqx.filter_shard(results, shardings(results, "out", on, RESULTS)), rest)

    return run
'''


def exported(plan: Plan, style: str = "jit") -> str:
    """The module's text; ``style`` is one of STYLES. Raises OptionError for another, and for a plan of stages: they are
    programs of their own, which no one program's shardings say."""
    if style not in STYLES:
        raise OptionError(f"export: {style!r} is none of {', '.join(STYLES)}")
    if not isinstance(plan.body, OneProgram):
        raise OptionError(
            f"export: the plan of {plan.name} is a pipeline, whose stages are programs of their own. Plan with stages=1"
        )
    sharding = plan.body.sharding
    graph = plan.step.graph if plan.step is not None else None
    names = dict(_named(sharding, sharding.root, graph)) if isinstance(graph, Graph) else {}
    text = _HEAD.format(
        name=_plain(plan.name), devices=sharding.mesh.num_devices, words=_plain(in_words(plan)),
        version=_plain(plan.provenance.autopar_version), digest=digest(plan)[:16], cluster=_plain(plan.cluster.name),
        again=", and nothing is recomputed that the step does not recompute" if sharding.recompute else "",
        shape=sharding.mesh.shape, axes=sharding.mesh.axis_names, devices_order=_order(sharding.mesh.device_ids),
        arguments=_table((a.path, _spec(a.spec)) for a in plan.inputs),
        results=_table((a.path, _spec(a.spec)) for a in plan.outputs),
        named=f"\n{_table((name, _spec(spec)) for name, spec in names.items())}\n" if names else "",
        donated=_donated(plan.inputs),
    )  # fmt: skip
    match style:
        case "flax":
            logical = {a.path: _logical(a) for a in plan.inputs}
            rules = {name: axes for a in plan.inputs for name, axes in zip(_logical(a), a.spec.dims, strict=True)}
            return text + _JIT + _FLAX.format(
                logical=_table((path, f"P({', '.join(map(repr, names))})") for path, names in logical.items()),
                rules="\n".join(f"    ({name!r}, {_axes(axes)})," for name, axes in sorted(rules.items())),
            )  # fmt: skip
        case "equinox":
            return text + _EQUINOX
        case _:
            return text + _JIT


def _plain(text: str) -> str:
    """Text of a plan that cannot end a docstring."""
    return "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Lines of a dictionary; rows that differ in an index only are one where * can say so."""
    every = list(rows)
    lines: list[str] = []
    for fold in fold_paths(every):
        paths = [fold.path] if "{" not in fold.path else [every[r][0] for r in fold.rows]
        lines += [f"    {path!r}: {every[fold.rows[0]][1]}," for path in paths]
    return "\n".join(lines)


def _axes(axes: Sequence[str]) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def _spec(spec: ShardingSpec) -> str:
    dims = list(spec.dims)
    while dims and not dims[-1]:
        dims.pop()
    return f"P({', '.join(map(_axes, dims))})"


def _logical(argument: ArgPlan) -> tuple[str, ...]:
    """``d768`` for a whole dimension of that size, ``d768_x_y`` for one that is split; a second like it in the same
    array, of which flax wants all to differ, is ``d768_again1``."""
    names: list[str] = []
    for size, axes in zip(argument.type.shape, argument.spec.dims, strict=True):
        name = "_".join((f"d{size}", *axes))
        count = sum(other == name or other.startswith(f"{name}_again") for other in names)
        names.append(name + (f"_again{count}" if count else ""))
    return tuple(names)


def _order(ids: Sequence[int]) -> str:
    return f"range({len(ids)})" if list(ids) == list(range(len(ids))) else repr(tuple(ids))


def _donated(inputs: Sequence[ArgPlan]) -> tuple[int, ...]:
    """Positions of arguments all of whose leaves are donated."""
    given: dict[str, bool] = {}
    for a in inputs:
        if a.path.startswith("args["):
            head = a.path[5 : a.path.index("]")]
            given[head] = given.get(head, True) and a.donated_to >= 0
    return tuple(int(head) for head, every in given.items() if every)


def _named(sharding: ShardingPlan, region: RegionPlan, graph: Graph) -> Iterator[tuple[str, ShardingSpec]]:
    """Named values, in bodies too; where a name has several shardings, the last."""
    if len(region.nodes) != len(graph.nodes):
        return  # what is computed again moves them: the names are where the step has them, and not told
    bodies = dict(region.bodies)
    for position, (node, row) in enumerate(zip(graph.nodes, region.nodes, strict=True)):
        if row >= 0 and node.primitive == "name":
            spec = sharding.strategies[row].results[0]
            if not spec.unreduced:
                yield str(node.params.get("name")), spec
        for body, inner in zip(bodies.get(position, ()), node.bodies, strict=False):
            yield from _named(sharding, body, inner)
