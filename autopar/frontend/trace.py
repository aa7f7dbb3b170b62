"""A JAX function and example arguments → `Traced`: an inlined jaxpr and the Graph that mirrors it.

No backend is started: tracing works on shapes alone (`jax.jit(f).trace`). The jaxpr is normalised (`normalise`) so
that what is planned is what XLA will see. Node.id is the equation's index in that jaxpr.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, use_abstract_mesh
from jax.tree_util import SequenceKey

from autopar.cost.roofline import flops
from autopar.frontend.fused import fused_into_readers
from autopar.frontend.loops import known_trips
from autopar.frontend.normalise import normalise
from autopar.frontend.opened_calls import BODIES, INLINED, planned_for
from autopar.frontend.pallas_flops import kernel_flops
from autopar.frontend.pallas_grids import split_axes
from autopar.frontend.state import Leaves, argument_text, result_text, with_state
from autopar.garbage import collection_paused
from autopar.ir.errors import TraceError
from autopar.ir.graph import (
    Constant,
    Graph,
    Node,
    Operand,
    Phase,
    TensorType,
    graph_fingerprint,
    node_digest,
    one_nan,
    types_text,
)
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    abstract_mesh,
    manual_axes,
    name_stack,
    scan_counts,
    source_line,
)


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
    graph, notes = with_state(fused_into_readers(graph), len(consts), call.given, call.made, call.donated)
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
    are put together of tracers alone, as jit does: their classes may look at what they are given.

    Raises:
        TraceError: see `trace`.
    """
    count = len(args)
    static, donated = ({i % count for i in nums if -count <= i < count} for nums in (static_argnums, donate_argnums))
    dynamic = [i for i in range(count) if i not in static]
    with_paths, in_tree = jax.tree_util.tree_flatten_with_path((tuple(args[i] for i in dynamic), kwargs))
    positions = tuple(dynamic[path[1].idx] if path[0].idx == 0 else -1 for path, _ in with_paths)
    paths = tuple(
        (path[0], SequenceKey(at), *path[2:]) if at >= 0 else path
        for (path, _), at in zip(with_paths, positions, strict=True)
    )
    out: list[tuple[Any, tuple[Any, ...]]] = []

    def flat(*leaves: Any) -> list[Any]:
        given, named = jax.tree_util.tree_unflatten(in_tree, leaves)
        full = list(args)
        for i, x in zip(dynamic, given, strict=True):
            full[i] = x
        outs, out_tree = jax.tree_util.tree_flatten_with_path(fun(*full, **named))
        out.append((out_tree, tuple(path for path, _ in outs)))
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
    out_tree, out_paths = out[-1]
    call = Call(
        given=Leaves(tree=in_tree, paths=paths),
        made=Leaves(tree=out_tree, paths=out_paths),
        donated=tuple(at in donated for at in positions),
    )
    return Staged(jaxpr=traced.jaxpr, call=call)


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


# --- the graph that mirrors it ---------------------------------------------------------------------------


def to_graph(jaxpr: Jaxpr, arg_paths: tuple[str, ...] = (), out_paths: tuple[str, ...] = ()) -> Graph:
    """The Graph of a normalised jaxpr; constvars come first among its inputs. A broadcast scalar literal is a Constant
    to its readers: each device makes its part of it, whatever the sharding. Raises TraceError as `tensor_type`."""
    values: list[TensorType] = []
    ids: dict[Var, int] = {}

    def define(var: Var) -> int:
        ids[var] = len(values)
        values.append(tensor_type(var.aval))
        return ids[var]

    uniform: dict[Var, Constant] = {}

    def operand(atom: Any) -> Operand:
        if not isinstance(atom, Var):
            return _constant(atom)
        return uniform.get(atom, ids[atom])

    inputs = tuple(define(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    nodes: list[Node] = []
    shared = _Shared()
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
    read.update(v for v in jaxpr.outvars if isinstance(v, Var))
    for index, eqn in enumerate(jaxpr.eqns):
        operands = tuple(operand(v) for v in eqn.invars)
        results = tuple(define(v) for v in eqn.outvars)
        bodies = tuple(to_graph(b) for b in _bodies(eqn))
        params, params_text = shared.params(eqn, read)
        operand_types, _ = shared.types([values[o] if isinstance(o, int) else o.type for o in operands])
        result_types, results_text = shared.types([values[r] for r in results])
        hidden, hidden_runs = _hidden(eqn)
        node = Node(
            id=index,
            primitive=eqn.primitive.name,
            params=params,
            operands=operands,
            results=results,
            operand_types=operand_types,
            result_types=result_types,
            bodies=bodies,
            phase=_phase(name_stack(eqn)),
            source=source_line(eqn),
            digest=node_digest(eqn.primitive.name, params_text, operands, results_text, bodies),
            hidden=hidden,
            hidden_runs=hidden_runs,
            flops=_given_flops(eqn),
        )
        nodes.append(node)
        if node.primitive == "broadcast_in_dim" and isinstance(operands[0], Constant) and operands[0].value is not None:
            uniform[eqn.outvars[0]] = Constant(type=result_types[0], value=operands[0].value)
    outputs = tuple(operand(v) for v in jaxpr.outvars)
    return Graph(
        values=tuple(values),
        nodes=tuple(nodes),
        inputs=inputs,
        outputs=outputs,
        arg_paths=arg_paths,
        out_paths=out_paths,
        fingerprint=graph_fingerprint(values, nodes, inputs, outputs, arg_paths),
    )


def node_of(eqn: JaxprEqn) -> Node:
    """An equation without bodies as a Node by itself: its operands are values 0, 1, …, all results are read."""
    count = len(eqn.invars)
    return Node(
        id=0,
        primitive=eqn.primitive.name,
        params=_params_json(eqn, set(eqn.outvars)),
        operands=tuple(i if isinstance(v, Var) else _constant(v) for i, v in enumerate(eqn.invars)),
        results=tuple(range(count, count + len(eqn.outvars))),
        operand_types=tuple(tensor_type(v.aval) for v in eqn.invars),
        result_types=tuple(tensor_type(v.aval) for v in eqn.outvars),
        source=source_line(eqn),
    )


class _Shared:
    """Parameters and types of a graph's nodes, with their text for digests; equal ones are one object, converted and
    spelled out once."""

    def __init__(self) -> None:
        self.by_identity: dict[int, tuple[Any, tuple[dict[str, Any], str]]] = {}
        """With the object itself, so that nothing else gets its id."""
        self.by_text: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
        self.by_types: dict[tuple[int, ...], tuple[tuple[TensorType, ...], str]] = {}

    def params(self, eqn: JaxprEqn, read: Container[Var]) -> tuple[dict[str, Any], str]:
        """The equation's parameters as plain JSON; ``read`` are the variables that anything reads."""
        original = eqn.params
        known = self.by_identity.get(id(original))
        if known is None or eqn.primitive.name in ("pallas_call", "while"):  # what they say hangs on more
            params = _params_json(eqn, read)
            text = repr(params)
            known = (original, self.by_text.setdefault((eqn.primitive.name, text), (params, text)))
            self.by_identity[id(original)] = known
        return known[1]

    def types(self, types: list[TensorType]) -> tuple[tuple[TensorType, ...], str]:
        """``types`` as a tuple."""
        key = tuple(map(id, types))
        found = self.by_types.get(key)
        if found is None:
            found = self.by_types[key] = (tuple(types), types_text(types))
        return found


_types: dict[Any, TensorType] = {}


def tensor_type(aval: Any) -> TensorType:
    """The TensorType of an abstract value; ``float0`` and no shape for one without a dtype (a token). Raises TraceError
    for symbolic dimensions."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return TensorType(shape=(), dtype="float0")  # tokens and other valueless types
    key = (aval.shape, dtype)
    found = _types.get(key)
    if found is None:
        name = str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name
        name = "float0" if name == "void" else name
        if any(not isinstance(d, int) for d in aval.shape):
            raise TraceError(f"symbolic dimensions are not supported: {aval}; trace with concrete shapes")
        found = _types[key] = TensorType(shape=tuple(aval.shape), dtype=name)
    return found


def _constant(atom: Literal) -> Constant:
    t = tensor_type(atom.aval)
    value = None
    if t.shape == () and not t.is_key:
        item = np.asarray(atom.val).item()
        value = one_nan(item) if isinstance(item, (bool, int, float, complex)) else None
    elif t.shape != () and not t.is_key and not np.any(np.asarray(atom.val)):
        value = 0
    return Constant(type=t, value=value)


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """An equation's bodies; calls have theirs where nothing has inlined them: in the bodies of opaque calls."""
    out: list[Jaxpr] = []
    name = eqn.primitive.name
    for field in (INLINED[name],) if name in INLINED else BODIES.get(name, ()):
        value = eqn.params[field]
        for body in value if isinstance(value, tuple) else (value,):
            out.append(body.jaxpr if isinstance(body, ClosedJaxpr) else body)
    return out


def _hidden(eqn: JaxprEqn) -> tuple[Graph | None, int]:
    """(the body of an opaque call, how often one call runs it), or (None, 1) where that is not known."""
    name, runs = eqn.primitive.name, 1
    body: Any
    if name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        if not all(isinstance(n, int) for n in grid):
            return None, 1  # its size is a value
        body, runs = eqn.params["jaxpr"], math.prod(grid)
    elif name == "shard_map":
        body = eqn.params["jaxpr"]
        runs = math.prod(n for axis, n in eqn.params["mesh"].shape.items() if axis in manual_axes(eqn))
    elif name == "autopar_kernel":
        body = jax.make_jaxpr(eqn.params["kernel"].flat)(*(v.aval for v in eqn.invars))
    else:
        return None, 1
    return to_graph(body.jaxpr if isinstance(body, ClosedJaxpr) else body), runs


def _given_flops(eqn: JaxprEqn) -> float | None:
    """FLOPs of the whole call, where the user said them (by `autopar.sharding_rule` or by pallas' cost estimate) or the
    numbers of a kernel's programs tell."""
    if eqn.primitive.name == "autopar_kernel":
        return eqn.params["flops"]
    if eqn.primitive.name != "pallas_call":
        return None
    estimate = eqn.params.get("cost_estimate")
    return kernel_flops(eqn, lambda e: flops(node_of(e))) if estimate is None else float(estimate.flops)


def _phase(stack: str) -> Phase:
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"


def _params_json(eqn: JaxprEqn, read: Container[Var]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in eqn.params.items():
        if eqn.primitive.name in ("autopar_kernel", "pallas_call") and key in ("flops", "cost_estimate"):
            continue  # what it costs, not what it computes
        converted = _json(value)
        if converted is not _SKIP:
            out[key] = converted
    if eqn.primitive.name == "scan":
        num_consts, num_carry = scan_counts(eqn)
        out = {"num_consts": num_consts, "num_carry": num_carry, "length": eqn.params["length"]}
    if eqn.primitive.name == "while":
        out["trips"] = known_trips(eqn)
    if eqn.primitive.name == "pallas_call":
        out["split"] = tuple(_json(a) for a in split_axes(eqn, [v in read for v in eqn.outvars]))
    if eqn.primitive.name == "random_bits":
        out["partitionable"] = bool(eqn.ctx.threefry_partitionable)
    if eqn.primitive.name == "sharding_constraint":
        out["pin"] = _pin(eqn.params["sharding"])
    if eqn.primitive.name == "shard_map":
        specs = ((side, eqn.params[side]) for side in ("in_specs", "out_specs"))
        out = {"mesh": _axes(eqn.params["mesh"]), "manual": tuple(sorted(manual_axes(eqn)))}
        out |= {
            side: tuple(_dims(s) if not getattr(s, "unreduced", ()) else None for s in those) for side, those in specs
        }
    return out


def _pin(sharding: Any) -> Any:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    mesh = getattr(sharding, "mesh", None)
    return {"dims": _dims(spec), "mesh": _axes(mesh) if mesh else ()}


def _dims(spec: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of a PartitionSpec; None for one that is unconstrained."""
    dims: list[Any] = []
    for entry in spec:
        if entry is None:
            dims.append(())
        elif isinstance(entry, str):
            dims.append((entry,))
        elif isinstance(entry, tuple):
            dims.append(tuple(entry))
        else:
            dims.append(None)
    return tuple(dims)


def _axes(mesh: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(n), int(s)) for n, s in mesh.shape.items())


_SKIP = object()


def _json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return one_nan(value)
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        return _fields(value, names)
    if isinstance(value, (tuple, list, range)):
        items = tuple(_json(v) for v in value)
        return _SKIP if any(i is _SKIP for i in items) else items
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return one_nan(float(value))
    if isinstance(value, (ClosedJaxpr, Jaxpr)) or callable(value):
        return _SKIP
    if isinstance(value, (complex, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return {str(k): v for k, v in ((k, _json(v)) for k, v in value.items()) if v is not _SKIP}
    if hasattr(value, "__dataclass_fields__"):
        return _fields(value, value.__dataclass_fields__)
    return _SKIP


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    converted = ((name, _json(getattr(value, name, None))) for name in names)
    return {name: v for name, v in converted if v is not _SKIP}
