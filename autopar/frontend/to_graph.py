"""A normalised jaxpr → the Graph that mirrors it: `to_graph`. Node.id is the equation's index in the jaxpr."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import jax
import numpy as np

from autopar.cost.roofline import flops
from autopar.frontend.opened_calls import BODIES, INLINED
from autopar.frontend.pallas_flops import kernel_flops
from autopar.frontend.parameters import parameters
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
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, manual_axes, name_stack, source_line


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
        params=parameters(eqn, set(eqn.outvars)),
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
            params = parameters(eqn, read)
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
