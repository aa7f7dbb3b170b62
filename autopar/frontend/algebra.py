"""Equations that XLA's algebraic simplifier removes or finds equal to others, found the same way before planning.

A plan must not reshard two values where the compiler sees one, or a constant where the compiler sees none: those
collectives would be in the plan and not in the program. Known here, for each variable: whether it is one scalar
everywhere (``uniform``), and of what it is a mere reshape (``roots``), the negative or a transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from autopar.jax_compat import JaxprEqn, Literal, Var, primitives, scalar_literal

RESHAPES = frozenset({"reshape", "squeeze", "broadcast_in_dim"})
REDUCTIONS = frozenset({"reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
MOVES = frozenset(
    """
    reshape squeeze broadcast_in_dim transpose slice rev dynamic_slice copy copy_p stop_gradient reduce_max reduce_min
    reduce_and reduce_or
    """.split()
)
"""Operators whose result holds values of their first operand only."""


def _div(a: Any, b: Any) -> Any:
    """As XLA divides: integers towards zero."""
    if not np.issubdtype(a.dtype, np.integer):
        return np.divide(a, b)
    if np.any(b == 0):
        raise ValueError("division by zero")
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


FOLDED: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "ceil": np.ceil, "cos": np.cos, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "floor": np.floor, "is_finite": np.isfinite, "log": np.log, "log1p": np.log1p, "neg": np.negative,
    "not": np.invert, "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "tan": np.tan,
    "tanh": np.tanh, "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x),
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "div": _div, "rem": np.fmod, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "select_n": lambda which, *cases: np.choose(np.asarray(which).astype(int), cases),
    "convert_element_type": lambda x: x, "copy": lambda x: x,
    "complex": lambda a, b: a + 1j * b, "conj": np.conj, "real": np.real, "imag": np.imag,
}  # fmt: skip
"""Operators on single elements that NumPy evaluates as XLA does, to the last digit or two."""

FOLDED_COMPLEX = frozenset(
    """
    add add_any sub mul neg select_n convert_element_type copy conj real imag
    """.split()
)
"""Those of them that are evaluated for complex numbers too, without a question of branches."""

EMPTY = {"reduce_sum": 0, "reduce_prod": 1, "reduce_or": 0}
"""Reductions → what they make of nothing."""

POINTWISE = frozenset(FOLDED) | {"erf", "integer_pow", "round"}
"""Operators on single elements past which the compiler moves a reshape."""

Add = Callable[[JaxprEqn, Sequence[Any]], list[Any]]
Find = Callable[[JaxprEqn, Sequence[Any]], list[Any] | None]


@dataclass
class Known:
    """What is known of one body's variables: ``uniform``: the scalar that one is everywhere; ``roots``: what it is a
    mere reshape of."""

    uniform: dict[Var, Literal] = field(default_factory=dict)
    roots: dict[Var, Var] = field(default_factory=dict)
    negated: dict[Var, Any] = field(default_factory=dict)
    """The negative of what, or of booleans and integers the complement."""
    transposed: dict[Var, tuple[Var, tuple[int, ...]]] = field(default_factory=dict)
    parts: dict[Var, tuple[Any, Any]] = field(default_factory=dict)
    """The real and the imaginary part of complex numbers that were put together."""
    spread: dict[Var, JaxprEqn] = field(default_factory=dict)
    """The broadcasts of such."""

    def learn(self, eqn: JaxprEqn) -> None:
        """Notes what the result of an equation of this body is, of those with one result."""
        name = eqn.primitive.name
        if not eqn.invars or len(eqn.outvars) != 1:
            return
        a, out = eqn.invars[0], eqn.outvars[0]
        if name == "broadcast_in_dim" and isinstance(a, Var) and a in self.parts:
            self.spread[out] = eqn
        if name == "broadcast_in_dim" and _is_scalar(a):
            self.uniform[out] = a
        elif name == "complex":
            self.parts[out] = a, eqn.invars[1]
        elif name in ("neg", "not") and isinstance(a, Var):
            self.negated[out] = a
        elif name == "transpose" and isinstance(a, Var):
            self.transposed[out] = a, tuple(eqn.params["permutation"])
        elif name in RESHAPES and isinstance(a, Var) and _keeps_order(eqn, a):
            self.roots[out] = self.roots.get(a, a)

    def scalar(self, atom: Any) -> Literal | None:
        """The literal of rank 0 that every element of ``atom`` is, or None."""
        if isinstance(atom, Var):
            return self.uniform.get(atom)
        return atom if _is_scalar(atom) else None


def simplify(eqn: JaxprEqn, invars: Sequence[Any], known: Known, find: Find, add: Add) -> list[Any] | None:
    """The atoms that give the results of ``eqn`` on ``invars``, found by simpler means than ``eqn`` itself; None where
    there are none.

    Args:
        find: (equation, its operands) → the results of an equal one that is already there, or None.
        add: (equation, its operands) → its results; emits it.
    """
    if eqn.effects or any(not hasattr(getattr(v, "aval", None), "shape") for v in (*invars, *eqn.outvars)):
        return None
    if len(eqn.outvars) != 1:
        return _several(eqn, invars)
    return (
        _uniform(eqn, invars, known, add)
        or _same(eqn, invars, known)
        or _fewer_operands(eqn, invars, add)
        or _reshaped(eqn, invars, known, find, add)
    )


def full(eqn: JaxprEqn, scalar: Any, out: Any) -> JaxprEqn:
    """An equation that fills ``out``'s shape with ``scalar``, at the source line of ``eqn``."""
    return eqn.replace(
        primitive=primitives.broadcast_in_dim_p,
        invars=[scalar],
        outvars=[out],
        params={"shape": out.aval.shape, "broadcast_dimensions": (), "sharding": None},
        effects=frozenset(),
    )


def reshape(eqn: JaxprEqn, source: Any, out: Any) -> JaxprEqn:
    """An equation that gives ``source`` the shape of ``out``, at the source line of ``eqn``."""
    return eqn.replace(
        primitive=primitives.reshape_p,
        invars=[source],
        outvars=[out],
        params={"new_sizes": out.aval.shape, "dimensions": None, "sharding": None},
        effects=frozenset(),
    )


def _several(eqn: JaxprEqn, invars: Sequence[Any]) -> list[Any] | None:
    if eqn.primitive.name == "sort" and invars[0].aval.shape[eqn.params["dimension"]] == 1:
        return list(invars)
    return None


def _uniform(eqn: JaxprEqn, invars: Sequence[Any], known: Known, add: Add) -> list[Any] | None:
    """Results that hold one and the same number, or none at all."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0]
    dtype = out.aval.dtype
    filled = name == "broadcast_in_dim" and isinstance(invars[0], Literal) and not np.ndim(invars[0].val)
    if filled or not isinstance(dtype, np.dtype):
        return None
    value: Any = None
    if not out.aval.size:
        value = 0
    elif name == "iota":
        value = 0 if params["shape"][params["dimension"]] == 1 else None
    elif name in ("argmax", "argmin") and all(invars[0].aval.shape[d] == 1 for d in params["axes"]):
        value = 0
    elif name == "pad" and not _shows(invars[0].aval.shape, out.aval.shape, params["padding_config"]):
        return add(full(eqn, invars[1], out), [invars[1]])
    elif invars:
        scalars = [known.scalar(v) for v in invars]
        size = invars[0].aval.size
        if name in MOVES and scalars[0] is not None and size:
            value = scalars[0].val
        elif name in EMPTY and not size:
            value = EMPTY[name]
        elif name == "reduce_sum" and scalars[0] is not None:
            value = _folded("mul", [np.asarray(scalars[0].val, dtype), np.asarray(size // out.aval.size, dtype)], dtype)
        elif name in ("concatenate", "pad") and None not in scalars:
            values = [np.asarray(s.val) for s in scalars if s is not None]
            value = values[0] if len({v.tobytes() for v in values}) == 1 else None
        elif name == "integer_pow" and not params["y"]:
            value = 1
        elif name == "integer_pow" and scalars[0] is not None:
            value = np.power(np.asarray(scalars[0].val, dtype), params["y"]) if dtype.kind == "f" else None
        elif name in FOLDED and None not in scalars:
            value = _folded(name, [np.asarray(s.val, s.aval.dtype) for s in scalars if s is not None], dtype)
    if value is None:
        return None
    literal = scalar_literal(np.asarray(value, dtype), out.aval)
    return [literal] if out.aval.shape == () else add(full(eqn, literal, out), [literal])


def _shows(shape: Sequence[int], padded: Sequence[int], config: Sequence[tuple[int, int, int]]) -> bool:
    """True where something of a padded array is left (negative padding cuts off)."""
    return all(
        any(0 <= low + i * (1 + interior) < size for i in range(n))
        for n, size, (low, _, interior) in zip(shape, padded, config, strict=True)
    )


def evaluated(eqn: JaxprEqn, values: Sequence[Any]) -> Any:
    """The result of an elementwise operator on NumPy arrays of equal shapes, or scalars, in the equation's dtype; None
    where NumPy would not give what XLA does."""
    name = eqn.primitive.name
    if name not in FOLDED or len(eqn.outvars) != 1 or not isinstance(eqn.outvars[0].aval.dtype, np.dtype):
        return None
    return _folded(name, values, eqn.outvars[0].aval.dtype)


def _folded(name: str, values: Sequence[Any], dtype: Any) -> Any:
    if name not in FOLDED_COMPLEX and any(np.iscomplexobj(v) for v in values):
        return None
    with np.errstate(all="ignore"):
        try:
            return np.asarray(FOLDED[name](*values)).astype(dtype)
        except (TypeError, ValueError):  # NumPy has no such operator for this dtype, or for these values
            return None


def _same(eqn: JaxprEqn, invars: Sequence[Any], known: Known) -> list[Any] | None:
    """An operand that is the result."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if not invars:
        return None

    def is_result(v: Any) -> bool:
        return isinstance(v, Var) and v.aval.shape == out.shape and v.aval.dtype == out.dtype

    a = invars[0]
    if name == "select_n":
        which = known.scalar(a)
        alike = all(v is invars[1] for v in invars[1:])
        case = invars[1] if alike else None if which is None else invars[1 + int(which.val)]
        return [case] if case is not None and is_result(case) else None
    if name in ("real", "imag") and isinstance(a, Var) and a in known.parts:
        part = known.parts[a][name == "imag"]
        return [part] if is_result(part) else None
    if name in ("add", "add_any", "mul") and is_result(invars[1]):
        if _is(known.scalar(a), 1 if name == "mul" else 0):
            return [invars[1]]
    if not is_result(a):
        return None
    match name:
        case "convert_element_type" | "copy" | "copy_p" | "reshape" | "squeeze" | "stop_gradient" | "slice":
            same = params.get("dimensions") in (None, ()) and params.get("sharding") is None
        case "transpose":
            kept = [d for d in params["permutation"] if out.shape[d] != 1]
            same = kept == sorted(kept)
        case "broadcast_in_dim":
            same = tuple(params["broadcast_dimensions"]) == tuple(range(len(out.shape)))
        case "rev":
            same = all(out.shape[d] == 1 for d in params["dimensions"])
        case "pad":
            same = all(tuple(config) == (0, 0, 0) for config in params["padding_config"])
        case "concatenate" | "dynamic_slice":
            same = True
        case "sort":
            same = out.shape[params["dimension"]] == 1
        case "mul" | "div" | "pow":
            same = _is(known.scalar(invars[1]), 1)
        case "add" | "add_any" | "sub":
            same = _is(known.scalar(invars[1]), 0)
        case "max" | "min" | "and" | "or":
            same = a is invars[1]
        case "neg" | "not":
            return [known.negated[a]] if a in known.negated else None  # a is a variable
        case "integer_pow":
            same = params["y"] == 1
        case _:
            same = name in REDUCTIONS and not params["axes"]
            same = same or (name in CUMULATIVE and out.shape[params["axis"]] == 1)
    return [a] if same else None


def _fewer_operands(eqn: JaxprEqn, invars: Sequence[Any], add: Add) -> list[Any] | None:
    if eqn.primitive.name != "concatenate":
        return None
    kept = [v for v in invars if v.aval.size]
    return add(eqn, kept) if 0 < len(kept) < len(invars) else None


def _reshaped(eqn: JaxprEqn, invars: Sequence[Any], known: Known, find: Find, add: Add) -> list[Any] | None:
    """Reshapes of reshapes and transposes of transposes, what is a reshape by another name, reductions of single
    elements, parts of broadcast complex numbers, and operators on reshaped values that were seen before the reshape."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0]
    if not invars:
        return None
    a = invars[0]
    if name in ("real", "imag") and isinstance(a, Var) and a in known.spread:
        spread = known.spread[a]
        whole = spread.invars[0]
        assert isinstance(whole, Var)  # `learn` keeps no other
        part = known.parts[whole][name == "imag"]
        return add(spread.replace(invars=[part], outvars=[out]), [part])

    def reshaped(source: Any) -> list[Any]:
        return [source] if source.aval.shape == out.aval.shape else add(reshape(eqn, source, out), [source])

    if name in RESHAPES and isinstance(a, Var) and (a in known.roots or name != "reshape") and _keeps_order(eqn, a):
        return reshaped(known.roots.get(a, a))
    if name == "transpose" and isinstance(a, Var) and a in known.transposed:
        source, first = known.transposed[a]
        both = tuple(first[d] for d in params["permutation"])
        return add(eqn.replace(invars=[source], params={**params, "permutation": both}), [source])
    if name in REDUCTIONS and isinstance(a, Var) and a.aval.size == out.aval.size and a.aval.dtype == out.aval.dtype:
        return reshaped(a)
    if name in POINTWISE:
        arrays = [v for v in invars if v.aval.shape]
        if len({v.aval.shape for v in arrays}) > 1:  # dimensions of size 1 are broadcast
            return None
        roots = [known.roots.get(v) if isinstance(v, Var) else None for v in arrays]
        if not arrays or None in roots or len({r.aval.shape for r in roots if r is not None}) != 1:
            return None
        results = find(eqn, [known.roots[v] if v.aval.shape else v for v in invars])
        return None if results is None else reshaped(results[0])
    return None


def _keeps_order(eqn: JaxprEqn, a: Any) -> bool:
    """True where a reshape, squeeze or broadcast gives the same elements in the same order."""
    return (
        math.prod(a.aval.shape) == math.prod(eqn.outvars[0].aval.shape)
        and eqn.params.get("sharding") is None
        and (eqn.primitive.name != "reshape" or eqn.params.get("dimensions") is None)
    )


def _is_scalar(atom: Any) -> TypeGuard[Literal]:
    if not isinstance(atom, Literal) or np.ndim(atom.val) or not isinstance(atom.aval.dtype, np.dtype):
        return False
    return isinstance(np.asarray(atom.val).item(), (bool, int, float, complex))


def _is(scalar: Literal | None, value: int) -> bool:
    return scalar is not None and bool(scalar.val == value)
