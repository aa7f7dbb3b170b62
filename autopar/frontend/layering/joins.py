"""Sums, maxima and ands over what many layers make, as one contribution a layer and one exchange.

The norm of all gradients is a chain of additions, one for each leaf of the parameters. Cut into layers as it stands,
each layer would have another piece of the chain, and no two layers were equal any more: each would be planned for
itself. Chains and trees of one operator over scalars, and reductions of scalars that were stacked, become

    c_k   = what layer k has of the leaves, in the order in which they come
    total = join(c_0, …, c_n)                      an operator of its own, `primitives.elementwise.JOIN`
    root  = total and what is no one layer's       (rows of stacked arguments, scalars that every layer computes)

The join is a part at each layer, as a reduction over rows of a stacked argument is (`inter_op.update_rounds`). Sums of
floating-point numbers are so taken in another order than the step's; integers, maxima and ands do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.interpreters import mlir

from autopar.frontend.layering.surgery import fresh_var, plain
from autopar.jax_compat import Jaxpr, JaxprEqn, Primitive, Var
from autopar.jax_compat import Literal as JaxprLiteral
from autopar.primitives.elementwise import JOIN
from autopar.primitives.record import JoinedBy

Owner: TypeAlias = "Callable[[Any], int | None]"
"""The layer that makes a variable; None where several do, or none."""
_BINARY: dict[str, JoinedBy] = {
    "add": "add_any", "add_any": "add_any", "max": "max", "min": "min", "and": "min", "or": "max",
}  # fmt: skip
"""Of booleans the last two."""
_REDUCTIONS: dict[str, JoinedBy] = {
    "reduce_sum": "add_any", "reduce_max": "max", "reduce_min": "min", "reduce_and": "min", "reduce_or": "max",
}  # fmt: skip
_APPLIED: Mapping[JoinedBy, Callable[[Any, Any], Any]] = {
    "add_any": jax.lax.add, "max": jax.lax.max, "min": jax.lax.min,
}  # fmt: skip
_PLACED = ("broadcast_in_dim", "reshape", "expand_dims")

join_p = Primitive(JOIN)
"""Scalars of one type → all of them by the operator ``op``; ``owners[i]`` is the layer that makes operand i."""


def _joined(*operands: Any, op: JoinedBy, owners: tuple[int, ...]) -> Any:
    del owners
    total = operands[0]
    for each in operands[1:]:
        total = _APPLIED[op](total, each)
    return total


join_p.def_impl(_joined)
join_p.def_abstract_eval(lambda *operands, op, owners: operands[0])
mlir.register_lowering(join_p, mlir.lower_fun(_joined, multiple_results=False))


def with_joins(jaxpr: Jaxpr, owner: Owner) -> Jaxpr:
    """``jaxpr`` with joins for its trees of scalars over several layers; itself where there are none."""
    return _Trees(jaxpr, owner).rewritten()


@dataclass(frozen=True, slots=True)
class _Tree:
    op: JoinedBy
    root: JaxprEqn
    leaves: tuple[Any, ...]
    inner: frozenset[int]
    """Identities of the equations that it consists of, the root's included."""


class _Trees:
    def __init__(self, jaxpr: Jaxpr, owner: Owner) -> None:
        self.jaxpr, self.owner = jaxpr, owner
        self.maker: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.reads: dict[Any, int] = {}
        for v in (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars):
            if isinstance(v, Var):
                self.reads[v] = self.reads.get(v, 0) + 1

    def rewritten(self) -> Jaxpr:
        made: dict[int, list[JaxprEqn]] = {}
        gone: set[int] = set()
        seen: set[int] = set()
        for eqn in reversed(self.jaxpr.eqns):
            tree = None if id(eqn) in seen else self._tree(eqn)
            if tree is None:
                continue
            seen |= tree.inner
            new = self._by_layer(tree)
            if new is not None:
                made[id(eqn)] = new
                gone |= tree.inner
        if not made:
            return self.jaxpr
        eqns: list[JaxprEqn] = []
        for eqn in self.jaxpr.eqns:
            eqns += made.get(id(eqn), [] if id(eqn) in gone else [eqn])
        return plain(self.jaxpr, self.jaxpr.invars, self.jaxpr.outvars, eqns)

    def _tree(self, root: JaxprEqn) -> _Tree | None:
        """The largest tree of one operator that ends with an equation; None where it is none of scalars."""
        op = self._operator(root)
        if op is None:
            return None
        leaves: list[Any] = []
        inner = {id(root)}
        waiting = self._operands(root, inner)
        while waiting:
            atom = waiting.pop()
            eqn = self.maker.get(atom) if isinstance(atom, Var) else None
            if eqn is not None and self.reads[atom] == 1 and self._operator(eqn) == op:
                inner.add(id(eqn))
                waiting += self._operands(eqn, inner)
            else:
                leaves.append(atom)
        return _Tree(op, root, tuple(leaves[::-1]), frozenset(inner))

    def _operator(self, eqn: JaxprEqn) -> JoinedBy | None:
        """The operator of an equation that makes a scalar of scalars by one."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != ():
            return None
        if name in _BINARY:
            return None if name in ("and", "or") and eqn.outvars[0].aval.dtype != np.bool_ else _BINARY[name]
        if name in _REDUCTIONS and self._stacked(eqn) is not None:
            return _REDUCTIONS[name]
        return None

    def _operands(self, eqn: JaxprEqn, inner: set[int]) -> list[Any]:
        """The scalars that an equation of a tree combines, the last first; ``inner`` learns what else goes with it."""
        if eqn.primitive.name in _BINARY:
            return list(eqn.invars[::-1])
        found = self._stacked(eqn)
        assert found is not None
        inner |= found[1]
        return found[0][::-1]

    def _stacked(self, eqn: JaxprEqn) -> tuple[list[Any], set[int]] | None:
        """The scalars that a reduction's operand was stacked of, and the equations that stacked them; None where it is
        made otherwise, or read by others too."""
        (vector,) = eqn.invars
        if tuple(eqn.params["axes"]) != tuple(range(len(vector.aval.shape))):
            return None
        scalars: list[Any] = []
        inner: set[int] = set()
        waiting = [vector]
        while waiting:  # `jnp.array` of many scalars concatenates sixteen at a time, and then these
            atom = waiting.pop()
            made = self.maker.get(atom) if isinstance(atom, Var) else None
            if made is None or (made.primitive.name == "concatenate" and self.reads[atom] != 1):
                return None
            if made.primitive.name == "concatenate":
                waiting += made.invars[::-1]
            elif made.primitive.name == "stack" and made.invars[0].aval.shape == ():
                scalars += made.invars
            elif made.primitive.name in _PLACED and atom.aval.size == 1 and made.invars[0].aval.shape == ():
                scalars.append(made.invars[0])
            else:
                return None
            if self.reads[atom] == 1:
                inner.add(id(made))
        return (scalars, inner) if len(scalars) > 1 else None

    def _by_layer(self, tree: _Tree) -> list[JaxprEqn] | None:
        """The equations of a tree, by layers; None where no two layers have leaves."""
        mine: dict[int, list[Any]] = {}
        rest: list[Any] = []
        for leaf in tree.leaves:
            layer = self.owner(leaf) if isinstance(leaf, Var) else None
            if layer is not None:
                mine.setdefault(layer, []).append(leaf)
            elif not _neutral(leaf, tree.op):
                rest.append(leaf)
        if len(mine) < 2:
            return None
        result = tree.root.outvars[0]
        eqns: list[JaxprEqn] = []
        parts = [self._chain(tree, leaves, eqns) for _, leaves in sorted(mine.items())]
        total = fresh_var(result) if rest else result
        params = {"op": tree.op, "owners": tuple(sorted(mine))}
        eqns.append(
            tree.root.replace(
                primitive=join_p, invars=parts, outvars=[total], params=params, effects=frozenset[Any]()
            )
        )  # fmt: skip
        if rest:
            self._chain(tree, [total, *rest], eqns, result)
        return eqns

    def _chain(self, tree: _Tree, atoms: Sequence[Any], eqns: list[JaxprEqn], result: Any = None) -> Any:
        """Appends equations that combine ``atoms``, as ``result`` if there is one; returns what they give."""
        total = atoms[0]
        for i, each in enumerate(atoms[1:], 2):
            made = result if result is not None and i == len(atoms) else fresh_var(tree.root.outvars[0])
            eqns.append(_binary(tree.op, total, each, made, tree.root))
            total = made
        return total


def _binary(op: JoinedBy, one: Any, two: Any, result: Any, like: JaxprEqn) -> JaxprEqn:
    """``result`` = one op two, at the source line of ``like``."""
    struct = jax.ShapeDtypeStruct((), result.aval.dtype)
    (eqn,) = jax.make_jaxpr(_APPLIED[op])(struct, struct).jaxpr.eqns
    return like.replace(primitive=eqn.primitive, params=eqn.params, invars=[one, two], outvars=[result])


def _neutral(atom: Any, op: JoinedBy) -> bool:
    """True for a literal that changes nothing, as the 0 that Python's ``sum`` begins with."""
    if not isinstance(atom, JaxprLiteral):
        return False
    value = np.asarray(atom.val)
    if op == "add_any":
        return bool(value == 0)
    return value.dtype == np.bool_ and bool(value == (op == "min"))
