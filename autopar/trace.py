"""A JAX function and example arguments → `Traced`: an inlined jaxpr and the Graph that mirrors it.

No backend is started: tracing works on shapes alone (`jax.jit(f).trace`). The jaxpr is normalised so that
what is planned is what XLA will see: ``jit``, ``custom_jvp``, ``custom_vjp`` and autopar's own gradient
marker are inlined; repeated equations are merged and unused ones dropped (XLA would do both, and
its collectives would then differ from the plan's); ``scan``, ``while``, ``cond`` and ``remat`` keep
their bodies, normalised likewise. Node.id is the equation's index in that jaxpr.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.hoist import hoist_invariants
from autopar.ir.errors import TraceError
from autopar.ir.graph import Constant, Graph, Node, Operand, Phase, TensorType
from autopar.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    dce,
    fresh_var,
    name_stack,
    scan_counts,
    source_line,
)

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}
"""Primitives whose body replaces them → the parameter that holds it."""

BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
"""Primitives kept with their bodies → the parameters that hold them."""


RESHAPES = frozenset({"reshape", "squeeze", "broadcast_in_dim"})

POINTWISE = frozenset(
    """
    abs add add_any and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor ge gt integer_pow is_finite
    le log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n sign sin sqrt square sub tan tanh
    xor
    """.split()
)
"""Operators on single elements past which the compiler moves a reshape."""


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
    ``keep_remat`` False inlines rematerialised bodies outside loops, for compilers that would undo them anyway.

    Raises:
        TraceError: jax could not trace the function; the message holds jax's own.
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
    closed, consts = _inline_top(traced.jaxpr, expand, keep_remat)
    flat_info, _ = jax.tree_util.tree_flatten(traced.args_info)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[0])[0]]
    positions = [p[0].idx for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[0])[0]]
    kw_paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(traced.args_info[1])[0]]
    static = {s % len(args) if args else s for s in static_argnums}
    dynamic = [i for i in range(len(args)) if i not in static]
    positions = [dynamic[p] for p in positions] + [-1] * len(kw_paths)
    names = [f"args[{dynamic[_leading(p)]}]{p[p.index(']') + 1 :]}" for p in paths] + [f"kwargs{p}" for p in kw_paths]
    out_paths = [f"out{jax.tree_util.keystr(p)}" for p, _ in jax.tree_util.tree_flatten_with_path(traced.out_info)[0]]
    donated = tuple(bool(info.donated) for info in flat_info)
    graph = to_graph(
        closed.jaxpr,
        arg_paths=tuple(f"const[{i}]" for i in range(len(consts))) + tuple(names),
        out_paths=tuple(out_paths),
    )
    graph = _with_donation(graph, len(consts), donated)
    return Traced(
        graph=graph,
        jaxpr=closed,
        in_tree=jax.tree_util.tree_structure(traced.args_info),
        out_tree=jax.tree_util.tree_structure(traced.out_info),
        donated=donated,
        arg_positions=tuple(positions),
        out_avals=tuple(traced.jaxpr.out_avals),
    )


def _leading(path: str) -> int:
    return int(path[1 : path.index("]")])


# --- normalising the jaxpr -------------------------------------------------------------------------------


def _inline_top(closed: ClosedJaxpr, expand: Any, keep_remat: bool) -> tuple[ClosedJaxpr, list[Any]]:
    consts: dict[Any, tuple[Var, Any]] = {}
    inliner = _Inliner(expand, consts, keep_remat)
    jaxpr = closed.jaxpr
    eqns: list[JaxprEqn] = []
    env: dict[Var, Any] = {v: inliner.const(v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    env.update({v: v for v in jaxpr.invars})
    outs = inliner.run(jaxpr, env, eqns, {})
    constvars = [v for v, _ in consts.values()]
    values = [c for _, c in consts.values()]
    inner = jaxpr.replace(constvars=[], invars=[*constvars, *jaxpr.invars], outvars=outs, eqns=eqns)
    inner = dce(inner)
    used = {v for e in inner.eqns for v in e.invars if isinstance(v, Var)} | {
        v for v in inner.outvars if isinstance(v, Var)
    }
    keep = [i for i, v in enumerate(constvars) if v in used]
    inner = inner.replace(invars=[constvars[i] for i in keep] + list(jaxpr.invars))
    kept = [values[i] for i in keep]
    return ClosedJaxpr(inner.replace(constvars=inner.invars[: len(kept)], invars=list(jaxpr.invars)), kept), kept


@dataclass
class _Inliner:
    expand: Any
    consts: dict[Any, tuple[Var, Any]]
    keep_remat: bool

    def const(self, var: Var, value: Any) -> Any:
        """The variable that stands for a closed-over array; equal small arrays share one."""
        key: Any = id(value)
        if (
            getattr(value, "nbytes", 1 << 20) < 1 << 16
            and hasattr(value, "__array__")
            and not tensor_type(var.aval).is_key
        ):
            key = (str(var.aval), np.asarray(value).tobytes())
        if key not in self.consts:
            self.consts[key] = (fresh_var(var), value)
        return self.consts[key][0]

    def body(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Jaxpr:
        """A body, normalised; arrays that it closed over become array literals."""
        env: dict[Var, Any] = {v: v for v in jaxpr.invars}
        env.update({v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)})
        eqns: list[JaxprEqn] = []
        inner = _Inliner(self.expand, {}, True)
        outs = inner.run(jaxpr, env, eqns, {})
        if inner.consts:
            literal = {v: Literal(c, v.aval) for v, c in inner.consts.values()}
            eqns = [e.replace(invars=[literal.get(v, v) if isinstance(v, Var) else v for v in e.invars]) for e in eqns]
            outs = [literal.get(v, v) if isinstance(v, Var) else v for v in outs]
        return jaxpr.replace(constvars=[], outvars=outs, eqns=eqns)

    def run(self, jaxpr: Jaxpr, env: dict[Var, Any], eqns: list[JaxprEqn], seen: dict[Any, Any]) -> list[Any]:
        """Appends ``jaxpr``'s equations to ``eqns``, inlined, repeated ones merged; returns its outputs."""

        def read(atom: Any) -> Any:
            return env[atom] if isinstance(atom, Var) else atom

        negated = seen.setdefault("negated", {})
        reshapes = seen.setdefault("reshapes", {})
        for eqn in jaxpr.eqns:
            invars = [read(a) for a in eqn.invars]
            inner = self._inlined(eqn)
            if inner is not None:
                body, consts = inner.jaxpr, inner.consts
                inner_env = dict(zip(body.invars, invars, strict=True))
                inner_env.update({v: self.const(v, c) for v, c in zip(body.constvars, consts, strict=True)})
                outs = self.run(body, inner_env, eqns, seen)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            same = _identity(eqn, invars, negated)
            if same is not None:
                env[eqn.outvars[0]] = same
                continue
            params = self._params(eqn)
            key = None if eqn.effects or eqn.primitive.name in BODIES else _key(eqn, invars)
            twin = None if key is None or key in seen else _before_reshape(eqn, invars, seen, reshapes)
            if twin is not None:  # the compiler would move the reshape after the operator and merge the two
                invars, eqn = twin
                key = _key(eqn, invars)
                params = eqn.params
            if key is not None and key in seen:
                env.update(zip(eqn.outvars, seen[key], strict=True))
                continue
            outvars = [fresh_var(v) for v in eqn.outvars]
            new = eqn.replace(invars=invars, outvars=outvars, params=params)
            if eqn.primitive.name == "scan":
                before, new = hoist_invariants(new, lambda e: e.primitive.name in BODIES)
                for moved in before:
                    self.append(moved, eqns, seen)
                new = new.replace(
                    invars=[seen.get("renamed", {}).get(v, v) if isinstance(v, Var) else v for v in new.invars]
                )
            eqns.append(new)
            env.update(zip(eqn.outvars, outvars, strict=True))
            if eqn.primitive.name == "neg" and isinstance(invars[0], Var):
                negated[outvars[0]] = invars[0]
            if key is not None:
                seen[key] = outvars
            if eqn.primitive.name in RESHAPES and isinstance(invars[0], Var) and _keeps_order(eqn):
                reshapes[outvars[0]] = new
        return [read(a) for a in jaxpr.outvars]

    def append(self, eqn: JaxprEqn, eqns: list[JaxprEqn], seen: dict[Any, Any]) -> None:
        """Appends an equation that was moved out of a loop, or finds the equal one that is there."""
        renamed: dict[Var, Var] = seen.setdefault("renamed", {})
        invars = [renamed.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        key = _key(eqn, invars)
        if key is not None and key in seen:
            renamed.update(zip(eqn.outvars, seen[key], strict=True))
            return
        eqns.append(eqn.replace(invars=invars))
        if key is not None:
            seen[key] = eqn.outvars

    def _inlined(self, eqn: JaxprEqn) -> ClosedJaxpr | None:
        name = eqn.primitive.name
        if name in INLINED:
            return eqn.params[INLINED[name]]
        if name in ("remat2", "checkpoint") and not (self.keep_remat and eqn.params.get("differentiated", True)):
            return ClosedJaxpr(eqn.params["jaxpr"], [])
        return self.expand(eqn) if self.expand is not None else None

    def _params(self, eqn: JaxprEqn) -> dict[str, Any]:
        fields = BODIES.get(eqn.primitive.name)
        if fields is None:
            return eqn.params
        params = dict(eqn.params)
        for field in fields:
            value = params[field]
            if isinstance(value, ClosedJaxpr):
                params[field] = ClosedJaxpr(dce(self.body(value.jaxpr, value.consts)), [])
            elif isinstance(value, Jaxpr):
                params[field] = dce(self.body(value, []))
            else:
                params[field] = tuple(ClosedJaxpr(dce(self.body(b.jaxpr, b.consts)), []) for b in value)
        return params


def _is_scalar(atom: Any, value: float) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and bool(atom.val == value)


def _identity(eqn: JaxprEqn, invars: Sequence[Any], negated: dict[Var, Var]) -> Any:
    """The value that ``eqn`` returns unchanged, or None. XLA drops such operators, and two reshardings, of the operand
    and of the result, would become one. ``negated`` maps the results of ``neg`` to their operands."""
    name, params = eqn.primitive.name, eqn.params
    if not invars or len(eqn.outvars) != 1 or not hasattr(invars[0].aval, "shape") or eqn.effects:
        return None
    a, out = invars[0], eqn.outvars[0].aval
    if isinstance(a, Literal) or a.aval.shape != out.shape or a.aval.dtype != out.dtype:
        return None
    match name:
        case "convert_element_type" | "copy" | "copy_p" | "reshape" | "squeeze" | "stop_gradient" | "slice":
            return a if params.get("dimensions") in (None, ()) and params.get("sharding") is None else None
        case "transpose":
            kept = [d for d in params["permutation"] if out.shape[d] != 1]
            return a if kept == sorted(kept) else None
        case "rev":
            return a if all(out.shape[d] == 1 for d in params["dimensions"]) else None
        case "pad":
            return a if all(config == (0, 0, 0) for config in params["padding_config"]) else None
        case "concatenate" | "dynamic_slice":
            return a
        case "broadcast_in_dim":
            return a if tuple(params["broadcast_dimensions"]) == tuple(range(len(out.shape))) else None
        case "mul" | "div" | "pow":
            return a if _is_scalar(invars[1], 1) else None
        case "add" | "sub":
            return a if _is_scalar(invars[1], 0) else None
        case "neg":
            return negated.get(a)
        case "reduce_sum" | "reduce_max" | "reduce_min" | "reduce_and" | "reduce_or":
            return a if not params["axes"] else None
        case "integer_pow":
            return a if params["y"] == 1 else None
        case _:
            return None


def _keeps_order(eqn: JaxprEqn) -> bool:
    """True where a reshape, squeeze or broadcast gives the same elements in the same order."""
    return eqn.invars[0].aval.size == eqn.outvars[0].aval.size and eqn.params.get("sharding") is None


def _before_reshape(
    eqn: JaxprEqn, invars: Sequence[Any], seen: dict[Any, Any], reshapes: dict[Var, JaxprEqn]
) -> tuple[list[Any], JaxprEqn] | None:
    """Where ``eqn`` works element by element on reshaped values and is known of the values themselves: that result, and
    the reshape of it that replaces ``eqn``."""
    if eqn.primitive.name not in POINTWISE or len(eqn.outvars) != 1:
        return None
    arrays = [v for v in invars if v.aval.shape]
    makers = [reshapes.get(v) if isinstance(v, Var) else None for v in arrays]
    if not arrays or None in makers or len({m.invars[0].aval.shape for m in makers if m is not None}) != 1:
        return None
    known = seen.get(_key(eqn, [reshapes[v].invars[0] if v.aval.shape else v for v in invars]))
    if known is None:
        return None
    return known, reshapes[arrays[0]].replace(outvars=eqn.outvars)


def _key(eqn: JaxprEqn, invars: Sequence[Any]) -> Any:
    """A hashable identity of what ``eqn`` computes; None where a parameter cannot be hashed."""
    key = (eqn.primitive, tuple(_atom_key(v) for v in invars), tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _atom_key(atom: Any) -> Any:
    if isinstance(atom, Var):
        return atom
    value = np.asarray(atom.val) if not hasattr(atom.val, "dtype") or np.ndim(atom.val) == 0 else None
    if value is None:
        return ("array", id(atom.val))
    return (str(atom.aval), value.tobytes())


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
    for index, eqn in enumerate(jaxpr.eqns):
        operands = tuple(operand(v) for v in eqn.invars)
        results = tuple(define(v) for v in eqn.outvars)
        bodies = tuple(to_graph(b) for b in _bodies(eqn))
        params = _params_json(eqn)
        node = Node(
            id=index,
            primitive=eqn.primitive.name,
            params=params,
            operands=operands,
            results=results,
            operand_types=tuple(values[o] if isinstance(o, int) else o.type for o in operands),
            result_types=tuple(values[r] for r in results),
            bodies=bodies,
            phase=_phase(name_stack(eqn)),
            source=source_line(eqn),
            digest=_node_digest(eqn.primitive.name, params, operands, [values[r] for r in results], bodies),
        )
        nodes.append(node)
        digest.update(node.digest.encode())
        if node.primitive == "broadcast_in_dim" and isinstance(operands[0], Constant) and operands[0].value is not None:
            uniform[eqn.outvars[0]] = Constant(type=values[results[0]], value=operands[0].value)
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


def _node_digest(
    primitive: str,
    params: dict[str, Any],
    operands: Sequence[Operand],
    results: Sequence[TensorType],
    bodies: Sequence[Graph],
) -> str:
    inputs = [o if isinstance(o, int) else (str(o.type), o.value) for o in operands]
    text = repr((primitive, params, inputs, [str(t) for t in results], [b.fingerprint for b in bodies]))
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


def _phase(stack: str) -> Phase:
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"


def _params_json(eqn: JaxprEqn) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in eqn.params.items():
        converted = _json(value)
        if converted is not _SKIP:
            out[key] = converted
    if eqn.primitive.name == "scan":
        num_consts, num_carry = scan_counts(eqn)
        out = {"num_consts": num_consts, "num_carry": num_carry, "length": eqn.params["length"]}
    if eqn.primitive.name == "sharding_constraint":
        out["pin"] = _pin(eqn.params["sharding"])
    return out


def _pin(sharding: Any) -> Any:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    dims: list[Any] = []
    for entry in spec:
        if entry is None:
            dims.append(())
        elif isinstance(entry, str):
            dims.append((entry,))
        elif isinstance(entry, tuple):
            dims.append(tuple(entry))
        else:
            dims.append(None)  # unconstrained
    mesh = getattr(sharding, "mesh", None)
    return {"dims": tuple(dims), "mesh": tuple((str(n), int(s)) for n, s in mesh.shape.items()) if mesh else ()}


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


def _with_donation(graph: Graph, num_consts: int, donated: tuple[bool, ...]) -> Graph:
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
