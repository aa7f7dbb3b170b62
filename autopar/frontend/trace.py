"""A JAX function and example arguments → `Traced`: an inlined jaxpr and the Graph that mirrors it.

No backend is started: tracing works on shapes alone (`jax.jit(f).trace`). The jaxpr is normalised (`normalise`) so
that what is planned is what XLA will see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AxisType, use_abstract_mesh
from jax.tree_util import GetAttrKey, SequenceKey

from autopar.frontend.normalise import normalise
from autopar.frontend.opened_calls import planned_for
from autopar.frontend.state import Leaves, argument_text, result_text, with_state
from autopar.frontend.to_graph import to_graph
from autopar.garbage import collection_paused
from autopar.ir.errors import TraceError
from autopar.ir.graph import Graph
from autopar.ir.warned import warn
from autopar.jax_compat import ClosedJaxpr, JaxprEqn, abstract_mesh, lacks_mesh


@dataclass(frozen=True, kw_only=True)
class Traced:
    """``jaxpr.jaxpr.eqns[i]`` is node i of ``graph``. ``jaxpr.consts`` are arrays the function closed over: the
    graph's first ``len(consts)`` inputs. ``donated`` flags each flat argument. ``notes`` are on what could be the new
    value of another argument."""

    graph: Graph
    jaxpr: ClosedJaxpr
    in_tree: Any
    out_tree: Any
    donated: tuple[bool, ...]
    out_avals: tuple[Any, ...]
    notes: tuple[str, ...]

    @property
    def closed_over(self) -> Sequence[Any]:
        """Arrays that the function closed over."""
        return self.jaxpr.consts


@collection_paused()
def trace(
    fun: Callable[..., Any],
    *args: Any,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    donate_argnames: Sequence[str] = (),
    expand: Callable[[JaxprEqn], ClosedJaxpr | None] | None = None,
    keep_remat: bool = True,
    platform: str | None = None,
    **kwargs: Any,
) -> Traced:
    """Traces ``fun`` on arrays or ShapeDtypeStructs.

    ``expand`` gives the body of equations that are to be inlined beside `INLINED` (the gradient marker).
    ``keep_remat`` False inlines rematerialised bodies, for compilers that would undo them anyway.
    ``platform`` (``cpu``, ``gpu``, ``tpu``) chooses among branches by platform; None keeps them all.

    Raises:
        TraceError: jax could not trace the function; the message holds jax's own.
        LoweringError: there is no branch for the platform.
    """
    with planned_for(platform):
        made = staged(fun, args, kwargs, static_argnums, donate_argnums)
        closed, consts = normalise(made.jaxpr, expand, keep_remat)
    call = made.call
    graph = to_graph(
        closed.jaxpr,
        arg_paths=tuple(f"const[{i}]" for i in range(len(consts))) + call.arg_paths,
        out_paths=call.out_paths,
    )
    graph, notes = with_state(graph, len(consts), call.given, call.made, call.donated)
    return Traced(
        graph=graph,
        jaxpr=closed,
        in_tree=call.in_tree,
        out_tree=call.out_tree,
        donated=call.donated,
        out_avals=tuple(made.jaxpr.out_avals),
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """How flat arguments and outputs relate to the call: ``given`` and ``made``. Static arguments are left out;
    ``donated`` flags the others."""

    given: Leaves
    made: Leaves
    donated: tuple[bool, ...]

    @property
    def in_tree(self) -> Any:
        """The tree of (positional arguments, keyword arguments)."""
        return self.given.tree

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return self.made.tree

    @cached_property
    def arg_paths(self) -> tuple[str, ...]:
        """Paths of the flat arguments as text, in order."""
        return tuple(map(argument_text, self.given.paths))

    @cached_property
    def out_paths(self) -> tuple[str, ...]:
        """Paths of the flat results as text, in order."""
        return tuple(map(result_text, self.made.paths))


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A call's jaxpr, of its flat arguments."""

    jaxpr: ClosedJaxpr
    call: Call


def staged(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
) -> Staged:
    """What ``jax.jit(fun)`` traces of the call: of its shapes, so that a trace is the same wherever arrays lie. Pytrees
    are put together of tracers alone, as jit does: their classes may look at what they are given. Warns where objects
    among the arguments, such as an NNX module, are changed and the new values are not returned.

    Raises:
        TraceError: see `trace`.
    """
    count = len(args)
    static, donated = ({i % count for i in nums if -count <= i < count} for nums in (static_argnums, donate_argnums))
    dynamic = [i for i in range(count) if i not in static]
    with_paths, in_tree = jax.tree_util.tree_flatten_with_path((tuple(args[i] for i in dynamic), kwargs))
    positions = tuple(dynamic[path[1].idx] if path[0].idx == 0 else -1 for path, _ in with_paths)
    paths = tuple(_placed(path, dynamic) for path, _ in with_paths)
    out: list[tuple[Any, tuple[Any, ...], list[str]]] = []

    def flat(*leaves: Any) -> list[Any]:
        given, named = jax.tree_util.tree_unflatten(in_tree, leaves)
        full = list(args)
        for i, x in zip(dynamic, given, strict=True):
            full[i] = x
        outs, out_tree = jax.tree_util.tree_flatten_with_path(fun(*full, **named))
        known = {id(x) for x in (*leaves, *(x for _, x in outs))}
        after = jax.tree_util.tree_leaves_with_path((given, named))
        lost = [path for path, x in after if id(x) not in known and any(isinstance(key, GetAttrKey) for key in path)]
        out.append((out_tree, tuple(path for path, _ in outs), [argument_text(_placed(p, dynamic)) for p in lost]))
        return [x for _, x in outs]

    try:
        with _auto_axes():
            traced = jax.jit(flat).trace(*(_shape(leaf) for _, leaf in with_paths))
    except (TypeError, jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TraceError(
            f"{name} cannot be traced: {type(error).__name__}: {error}\n"
            "autopar plans the jaxpr that jax.jit sees: make the step work under jax.jit first "
            "(arrays as arguments, Python values through static_argnums, no branching on array values)."
        ) from error
    except RuntimeError as error:
        if not lacks_mesh(error):
            raise
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TraceError(
            f"{name} cannot be traced: a PartitionSpec in with_sharding_constraint has no mesh that its axes are of. "
            "Give it a NamedSharding, or call the step within jax.set_mesh(mesh), either with mesh=mesh; or leave it "
            "out and pin the value, by jax.ad_checkpoint.checkpoint_name and constraints="
        ) from error
    out_tree, out_paths, lost = out[-1]
    if lost:
        warn(
            f"{getattr(fun, '__name__', type(fun).__name__)} changes its arguments and does not return the new values, "
            f"which are lost, as under jax.jit: {', '.join(lost[:3])}"
            f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}. Return them, of an NNX module its nnx.state"
        )
    call = Call(
        given=Leaves(tree=in_tree, paths=paths),
        made=Leaves(tree=out_tree, paths=out_paths),
        donated=tuple(at in donated for at in positions),
    )
    return Staged(jaxpr=traced.jaxpr, call=call)


def _placed(path: tuple[Any, ...], dynamic: Sequence[int]) -> tuple[Any, ...]:
    """A path in (dynamic positional arguments, keyword arguments) → that in all arguments."""
    return (path[0], SequenceKey(dynamic[path[1].idx]), *path[2:]) if path[0].idx == 0 else path


def _auto_axes() -> AbstractContextManager[Any]:
    """A context in which no mesh axis is explicit: shardings are the plan's, no part of values' types."""
    mesh = jax.sharding.get_abstract_mesh()
    if all(t is AxisType.Auto for t in mesh.axis_types):
        return nullcontext()
    return use_abstract_mesh(abstract_mesh(mesh.axis_sizes, mesh.axis_names))


def _shape(leaf: Any) -> Any:
    """A leaf's shape and dtype without where it lies; what is no array as it is, for jax to refuse."""
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return leaf
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
