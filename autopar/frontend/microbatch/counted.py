"""Whether a value counts how often each group occurs in a key that is sorted, groups in the order of the sort.

What jax.numpy makes of ``bincount(key)``, ``zeros(n).at[key].add(1)`` and ``one_hot(key).sum(0)`` is followed from the
sizes back to the key; on the way each element may go through elementwise operators with constants (clipping, negative
indices), or into the order of a sort. The key itself takes few values, known from what made it (`top_k`, `argmax`), and
the group of each is evaluated: groups must not descend, and what is in none must come behind all others.

The way back, each sorted row's group by the sizes, is what jax.numpy makes of ``repeat(groups, sizes)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.frontend.algebra import evaluated
from autopar.frontend.microbatch.constants import Constants
from autopar.jax_compat import JaxprEqn
from autopar.primitives import record_of
from autopar.primitives.kinds import Numbers, Sorting, Sum

MOST_GROUPS = 1 << 20
"""Of keys with more values it is not asked (guessed: nobody has so many experts)."""

_SAME_ELEMENTS = frozenset({"reshape", "squeeze", "transpose", "copy"})


def counts(sizes: Any, key: Any, constants: Constants) -> bool:
    """True where ``sizes[g]`` is the number of elements of ``key`` that are of group g, and groups follow one another
    as sorted keys do."""
    root = _root(key, constants)
    values = _range(root, constants)
    groups = sizes.aval.shape[0]
    if values is None or not _can_count(sizes, root.aval.size):
        return False
    found = _groups(_cast(sizes, constants), root, np.arange(values[0], values[1] + 1), constants)
    if found is None:
        return False
    found = np.where((found < 0) | (found >= groups), groups, found)
    return bool(np.all(np.diff(found) >= 0))


def _can_count(atom: Any, rows: int) -> bool:
    dtype = atom.aval.dtype
    return bool(np.issubdtype(dtype, np.integer)) and np.iinfo(dtype).max >= rows


def _root(atom: Any, constants: Constants) -> Any:
    """What ``atom`` has the elements of, in another shape or order."""
    atom, eqn, _ = constants.origin(atom)
    same = eqn is not None and eqn.invars and eqn.invars[0].aval.size == atom.aval.size
    if eqn is not None and same and eqn.primitive.name in (*_SAME_ELEMENTS, "broadcast_in_dim"):
        return _root(eqn.invars[0], constants)
    return atom


def _cast(atom: Any, constants: Constants) -> Any:
    """``atom`` before it was given another dtype."""
    atom, eqn, _ = constants.origin(atom)
    return atom if eqn is None or eqn.primitive.name != "convert_element_type" else _cast(eqn.invars[0], constants)


def _range(atom: Any, constants: Constants) -> tuple[int, int] | None:
    """The least and the largest value of an integer array, by what makes it; None where that is not known."""
    known = constants.scalar(atom)
    if known is not None:
        return int(known), int(known)
    atom, eqn, _ = constants.origin(atom)
    if eqn is None:
        return None
    match eqn.primitive.name:
        case "top_k" | "approx_top_k" if atom is eqn.outvars[1]:
            dim = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1))
            top = eqn.invars[0].aval.shape[dim] - 1
        case "argmax" | "argmin":
            top = max(eqn.invars[0].aval.shape[a] for a in eqn.params["axes"]) - 1
        case name:
            of = {"select_n": eqn.invars[1:], "convert_element_type": eqn.invars, "broadcast_in_dim": eqn.invars}
            inner = of.get(name, eqn.invars if name in _SAME_ELEMENTS else ())
            ranges = [_range(a, constants) for a in inner]
            found = [r for r in ranges if r is not None]
            if not found or len(found) < len(ranges) or not np.issubdtype(atom.aval.dtype, np.integer):
                return None
            low, top = min(r[0] for r in found), max(r[1] for r in found)
            info = np.iinfo(atom.aval.dtype)
            return (low, top) if info.min <= low and top <= info.max and top - low < MOST_GROUPS else None
    return (0, top) if top < min(MOST_GROUPS, np.iinfo(atom.aval.dtype).max) else None


def _groups(sizes: Any, root: Any, keys: npt.NDArray[Any], constants: Constants) -> npt.NDArray[Any] | None:
    """The group that each of ``keys`` is counted in; None where ``sizes`` counts nothing of the kind."""
    sizes, eqn, _ = constants.origin(sizes)
    if eqn is None or len(sizes.aval.shape) != 1:
        return None
    if eqn.primitive.name == "scatter-add":
        zeros, index, ones = eqn.invars
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"].name
        scalar = numbers.scatter_dims_to_operand_dims == numbers.inserted_window_dims == (0,)
        if (
            not scalar
            or index.aval.size != root.aval.size
            or constants.scalar(zeros) != 0
            or constants.scalar(ones) != 1
        ):
            return None
        found = _of_key(index, root, keys, constants)
        clips = mode in ("CLIP", "ONE_HOT")
        return found if found is None or not clips else np.clip(found, 0, sizes.aval.shape[0] - 1)
    if eqn.primitive.name == "reduce_sum":
        _, flags, _ = constants.origin(_cast(eqn.invars[0], constants))
        rank = len(eqn.invars[0].aval.shape)
        if flags is None or flags.primitive.name != "eq" or tuple(sorted(eqn.params["axes"])) != tuple(range(rank - 1)):
            return None
        for key, line in (flags.invars, flags.invars[::-1]):
            groups = constants.value(line)
            if groups is not None and _is_line(groups, sizes.aval.shape[0]) and _is_column(key, root, constants):
                return _of_key(key, root, keys, constants)
    return None


def _is_line(groups: npt.NDArray[Any], count: int) -> bool:
    return groups.shape[-1:] == (count,) and bool(np.all(groups == np.arange(count)))


def _is_column(key: Any, root: Any, constants: Constants) -> bool:
    """True where each element of ``root`` is there once, or all along the last dimension."""
    if key.aval.shape[-1] == 1:
        return key.aval.size == root.aval.size
    key, eqn, _ = constants.origin(key)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    spread = len(key.aval.shape) - 1 not in eqn.params["broadcast_dimensions"]
    return spread and key.aval.size == root.aval.size * key.aval.shape[-1]


def _of_key(atom: Any, root: Any, keys: npt.NDArray[Any], constants: Constants) -> npt.NDArray[Any] | None:
    """What elementwise operators make of each of ``keys``, the values of ``root``; None where anything else happens.
    Operands of one that are in different orders are not told apart: these are `Coupled`."""
    atom, eqn, _ = constants.origin(atom)
    if atom is root:
        return keys
    constant = constants.scalar(atom)
    if constant is not None:
        return np.asarray(constant)
    if eqn is None:
        return None
    if eqn.primitive.name in (*_SAME_ELEMENTS, "broadcast_in_dim"):
        return _of_key(eqn.invars[0], root, keys, constants)
    if eqn.primitive.name == "sort" and len(atom.aval.shape) == 1:
        return _of_key(eqn.invars[eqn.outvars.index(atom)], root, keys, constants)
    if eqn.primitive.name == "gather" and eqn.invars[0].aval.shape == atom.aval.shape == eqn.invars[1].aval.shape[:1]:
        order = constants.kind(eqn.invars[1])
        own = isinstance(order, Numbers) and order.values.is_own
        return _of_key(eqn.invars[0], root, keys, constants) if own else None
    traits = record_of(eqn.primitive.name).traits
    operands = [_of_key(a, root, keys, constants) for a in eqn.invars] if traits.elementwise else [None]
    known = [x for x in operands if x is not None]
    return evaluated(eqn, known) if len(known) == len(operands) else None


def sorted_by_group(eqn: JaxprEqn, constants: Constants) -> Sorting | None:
    """The sort in whose order the result of ``eqn`` has one more than each row's group; None where it is not known to.

    ``eqn`` sums up a 1 at each row that is the first of a group, of all groups that sizes tell.
    """
    if not _sums_up(eqn):
        return None
    size = eqn.outvars[0].aval.size
    _, ones, _ = constants.origin(eqn.invars[0])
    if ones is None or ones.primitive.name != "scatter-add" or ones.params["mode"].name != "FILL_OR_DROP":
        return None
    zeros, at, one = ones.invars
    if constants.scalar(zeros) != 0 or constants.scalar(one) != 1 or at.aval.shape[1:] != (1,):
        return None
    starts = _not_negative(_root(at, constants), constants)
    sizes = _starts_of(starts, constants) if _can_count(at, size) and _can_count(starts, size) else None
    if sizes is None or not isinstance(constants.kind(sizes), Sum):
        return None
    return next((s for s in constants.sorts() if s.size == size and counts(sizes, s.key, constants)), None)


def _sums_up(eqn: JaxprEqn) -> bool:
    line = eqn.primitive.name == "cumsum" and len(eqn.outvars[0].aval.shape) == 1
    return line and not eqn.params["reverse"]


def _not_negative(atom: Any, constants: Constants) -> Any:
    """What an index is made of, of some dtype, that counts from the end where it is negative; it never is, here."""
    atom, eqn, _ = constants.origin(_cast(atom, constants))
    if eqn is None or eqn.primitive.name != "select_n":
        return atom
    which, index, _ = eqn.invars
    _, less, _ = constants.origin(which)
    if less is None or less.primitive.name != "lt" or constants.scalar(less.invars[1]) != 0:
        return atom
    same = constants.origin(less.invars[0])[0] is constants.origin(index)[0]
    return _not_negative(index, constants) if same else atom


def _starts_of(atom: Any, constants: Constants) -> Any:
    """The sizes, if ``atom`` is the sum of those before each: of all but the last, behind one that is set to 0."""
    _, eqn, _ = constants.origin(atom)
    if eqn is None or not _sums_up(eqn):
        return None
    _, first, _ = constants.origin(eqn.invars[0])
    if first is None or first.primitive.name != "scatter" or any(constants.scalar(a) != 0 for a in first.invars[1:]):
        return None
    _, turned, _ = constants.origin(first.invars[0])
    if turned is None or turned.primitive.name != "concatenate" or len(turned.invars) != 2:
        return None
    _, rest, _ = constants.origin(turned.invars[1])
    if rest is None or rest.primitive.name != "slice" or rest.params["start_indices"] != (0,):
        return None
    sizes, _, _ = constants.origin(rest.invars[0])
    alike = sizes.aval.shape == atom.aval.shape and rest.params["strides"] in (None, (1,))
    return sizes if alike and rest.outvars[0].aval.size == sizes.aval.size - 1 else None
