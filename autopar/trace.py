"""A JAX function and example arguments → `Traced`: an inlined jaxpr and the Graph that mirrors it.

No backend is started: tracing works on shapes alone (`jax.jit(f).trace`). The jaxpr is normalised (`normalise`) so
that what is planned is what XLA will see. Node.id is the equation's index in that jaxpr.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.garbage import collection_paused
from autopar.ir.errors import TraceError
from autopar.ir.graph import Constant, Graph, Node, Operand, Phase, TensorType
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    manual_axes,
    name_stack,
    scan_counts,
    source_line,
)
from autopar.normalise import BODIES, inlined_body, normalise

_CALLED = {"composite": "jaxpr", "custom_partitioning": "call", "custom_vmap_call": "call"}
"""Opaque calls → the parameter that holds their body, which is counted and not planned."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """``jaxpr.jaxpr.eqns[i]`` is node i of ``graph``. ``jaxpr.consts`` are arrays the function closed over: the
    graph's first ``len(consts)`` inputs. ``donated`` flags each flat argument; ``arg_index`` is each flat
    argument's position among the call's arguments (static ones left out of the flat list)."""

    graph: Graph
    jaxpr: ClosedJaxpr
    in_tree: Any
    out_tree: Any
    donated: tuple[bool, ...]
    arg_positions: tuple[int, ...]
    out_avals: tuple[Any, ...]


@collection_paused()
def trace(
    fun: Callable[..., Any],
    *args: Any,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    donate_argnames: Sequence[str] = (),
    expand: Callable[[JaxprEqn], ClosedJaxpr | None] | None = None,
    keep_remat: bool = True,
    **kwargs: Any,
) -> Traced:
    """Traces ``fun`` on arrays or ShapeDtypeStructs.

    ``expand`` gives the body of equations that are to be inlined beside `INLINED` (the gradient marker).
    ``keep_remat`` False inlines rematerialised bodies, for compilers that would undo them anyway.

    Raises:
        TraceError: jax could not trace the function; the message holds jax's own.
    """
    traced = staged(fun, args, kwargs, static_argnums, donate_argnums)
    closed, consts = normalise(traced.jaxpr, expand, keep_remat)
    call = describe(traced, len(args), static_argnums)
    graph = to_graph(
        closed.jaxpr,
        arg_paths=tuple(f"const[{i}]" for i in range(len(consts))) + call.arg_paths,
        out_paths=call.out_paths,
    )
    graph = with_donation(graph, len(consts), call.donated)
    return Traced(
        graph=graph,
        jaxpr=closed,
        in_tree=call.in_tree,
        out_tree=call.out_tree,
        donated=call.donated,
        arg_positions=call.arg_positions,
        out_avals=tuple(traced.jaxpr.out_avals),
    )


@dataclass(frozen=True, kw_only=True)
class Call:
    """How flat arguments and outputs relate to the call: see `Traced`."""

    in_tree: Any
    out_tree: Any
    arg_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    donated: tuple[bool, ...]
    arg_positions: tuple[int, ...]


def staged(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
) -> Any:
    """What ``jax.jit(fun).trace`` makes of the call.

    Raises:
        TraceError: see `trace`.
    """
    jitted = jax.jit(fun, static_argnums=tuple(static_argnums), donate_argnums=tuple(donate_argnums))
    try:
        traced = jitted.trace(*args, **kwargs)
    except (TypeError, jax.errors.JAXTypeError, jax.errors.JAXIndexError, jax.errors.UnexpectedTracerError) as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TraceError(
            f"{name} cannot be traced: {type(error).__name__}: {error}\n"
            "autopar plans the jaxpr that jax.jit sees: make the step work under jax.jit first "
            "(arrays as arguments, Python values through static_argnums, no branching on array values)."
        ) from error
    return traced


def describe(traced: Any, num_args: int, static_argnums: Sequence[int]) -> Call:
    """Names of the arguments and outputs of what `staged` gives, for a call of ``num_args`` positional arguments."""
    flat_info, _ = jax.tree_util.tree_flatten(traced.args_info)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[0])[0]]
    positions = [p[0].idx for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[0])[0]]
    kw_paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[1])[0]]
    static = {s % num_args if num_args else s for s in static_argnums}
    dynamic = [i for i in range(num_args) if i not in static]
    positions = [dynamic[p] for p in positions] + [-1] * len(kw_paths)
    names = [f"args[{dynamic[_leading(p)]}]{p[p.index(']') + 1 :]}" for p in paths] + [f"kwargs{p}" for p in kw_paths]
    out_paths = [f"out{jax.tree_util.keystr(p)}" for p, _ in jax.tree_util.tree_flatten_with_path(traced.out_info)[0]]
    return Call(
        in_tree=jax.tree_util.tree_structure(traced.args_info),
        out_tree=jax.tree_util.tree_structure(traced.out_info),
        arg_paths=tuple(names),
        out_paths=tuple(out_paths),
        donated=tuple(bool(info.donated) for info in flat_info),
        arg_positions=tuple(positions),
    )


def _leading(path: str) -> int:
    return int(path[1 : path.index("]")])


# --- the graph that mirrors it ---------------------------------------------------------------------------


def to_graph(jaxpr: Jaxpr, arg_paths: tuple[str, ...] = (), out_paths: tuple[str, ...] = ()) -> Graph:
    """The Graph of a normalised jaxpr; constvars come first among its inputs. A broadcast scalar literal is a
    Constant to its readers: each device makes its part of it, whatever the sharding."""
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
    digest = hashlib.sha256()
    shared = _Shared()
    for index, eqn in enumerate(jaxpr.eqns):
        operands = tuple(operand(v) for v in eqn.invars)
        results = tuple(define(v) for v in eqn.outvars)
        bodies = tuple(to_graph(b) for b in _bodies(eqn))
        params, params_text = shared.params(eqn)
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
            digest=_node_digest(eqn.primitive.name, params_text, operands, results_text, bodies),
            hidden=hidden,
            hidden_runs=hidden_runs,
            flops=_given_flops(eqn),
        )
        nodes.append(node)
        digest.update(node.digest.encode())
        if node.primitive == "broadcast_in_dim" and isinstance(operands[0], Constant) and operands[0].value is not None:
            uniform[eqn.outvars[0]] = Constant(type=result_types[0], value=operands[0].value)
    outputs = tuple(operand(v) for v in jaxpr.outvars)
    digest.update(repr((inputs, [o if isinstance(o, int) else str(o) for o in outputs], arg_paths)).encode())
    digest.update("".join(str(values[i]) for i in inputs).encode())
    return Graph(
        values=tuple(values),
        nodes=tuple(nodes),
        inputs=inputs,
        outputs=outputs,
        arg_paths=arg_paths,
        out_paths=out_paths,
        fingerprint=digest.hexdigest(),
    )


class _Shared:
    """Parameters and types of a graph's nodes, with their text for digests; equal ones are one object, converted and
    spelled out once."""

    def __init__(self) -> None:
        self.by_identity: dict[int, tuple[Any, tuple[dict[str, Any], str]]] = {}
        """With the object itself, so that nothing else gets its id."""
        self.by_text: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
        self.by_types: dict[tuple[int, ...], tuple[tuple[TensorType, ...], str]] = {}

    def params(self, eqn: JaxprEqn) -> tuple[dict[str, Any], str]:
        """The equation's parameters as plain JSON."""
        original = eqn.params
        known = self.by_identity.get(id(original))
        if known is None:
            params = _params_json(eqn)
            text = repr(params)
            known = (original, self.by_text.setdefault((eqn.primitive.name, text), (params, text)))
            self.by_identity[id(original)] = known
        return known[1]

    def types(self, types: list[TensorType]) -> tuple[tuple[TensorType, ...], str]:
        """``types`` as a tuple."""
        key = tuple(map(id, types))
        found = self.by_types.get(key)
        if found is None:
            found = self.by_types[key] = (tuple(types), repr([str(t) for t in types]))
        return found


def _node_digest(
    primitive: str, params_text: str, operands: Sequence[Operand], results_text: str, bodies: Sequence[Graph]
) -> str:
    inputs = [o if isinstance(o, int) else (str(o.type), o.value) for o in operands]
    text = f"({primitive!r}, {params_text}, {inputs!r}, {results_text}, {[b.fingerprint for b in bodies]!r})"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


_types: dict[Any, TensorType] = {}


def tensor_type(aval: Any) -> TensorType:
    """The TensorType of an abstract value."""
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
        value = item if isinstance(item, (bool, int, float)) else None
    elif t.shape != () and not t.is_key and not np.any(np.asarray(atom.val)):
        value = 0
    return Constant(type=t, value=value)


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    out: list[Jaxpr] = []
    for field in BODIES.get(eqn.primitive.name, ()):
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
    elif name in _CALLED:
        body = eqn.params[_CALLED[name]]
    else:
        return None, 1
    jaxpr, consts = (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
    return to_graph(inlined_body(jaxpr, consts)), runs


def _given_flops(eqn: JaxprEqn) -> float | None:
    """FLOPs of the whole call, where the user said them: by `autopar.sharding_rule` or by pallas' cost estimate."""
    if eqn.primitive.name == "autopar_kernel":
        return eqn.params["flops"]
    estimate = eqn.params.get("cost_estimate") if eqn.primitive.name == "pallas_call" else None
    return float(estimate.flops) if estimate is not None else None


def _phase(stack: str) -> Phase:
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"


def _params_json(eqn: JaxprEqn) -> dict[str, Any]:
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
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f: _json(getattr(value, f)) for f in value._fields}
    if isinstance(value, (tuple, list)):
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
        return float(value)
    if isinstance(value, (ClosedJaxpr, Jaxpr)) or callable(value):
        return _SKIP
    if isinstance(value, dict):
        return {str(k): v for k, v in ((k, _json(v)) for k, v in value.items()) if v is not _SKIP}
    if hasattr(value, "__dataclass_fields__"):
        pairs = ((f, _json(getattr(value, f, None))) for f in value.__dataclass_fields__)
        return {f: v for f, v in pairs if v is not _SKIP}
    return _SKIP


def with_donation(graph: Graph, num_consts: int, donated: tuple[bool, ...]) -> Graph:
    """Pairs each donated input with the first output of its type and path suffix, else of its type."""
    taken: set[int] = set()
    paired: set[int] = set()
    pairs: list[tuple[int, int]] = []
    out_types = [graph.values[o] if isinstance(o, int) else o.type for o in graph.outputs]
    suffix: dict[str, list[int]] = {}
    for j, path in enumerate(graph.out_paths):
        for cut in range(len(path)):
            if path[cut] in "[.":
                suffix.setdefault(path[cut:], []).append(j)
    by_type: dict[TensorType, list[int]] = {}
    for j, t in enumerate(out_types):
        by_type.setdefault(t, []).append(j)
    for exact in (True, False):
        for position, flag in enumerate(donated):
            i = position + num_consts
            if not flag or i in paired:
                continue
            value_type = graph.values[graph.inputs[i]]
            path = graph.arg_paths[i]
            tail = path[path.index("]") + 1 :] if "]" in path else ""
            candidates = suffix.get(tail, []) if exact and tail else ([] if exact else by_type.get(value_type, []))
            for j in candidates:
                if j not in taken and out_types[j] == value_type:
                    taken.add(j)
                    paired.add(i)
                    pairs.append((i, j))
                    break
    return Graph(**{**{f: getattr(graph, f) for f in graph.__dataclass_fields__}, "donated": tuple(sorted(pairs))})
