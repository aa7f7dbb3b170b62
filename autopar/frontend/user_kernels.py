"""The primitive behind `autopar.sharding_rule`: a function as one equation that carries its rule, and its gradient.

A call binds ``autopar_kernel``; under a plan the function is traced again on local shapes, inside shard_map, so that
block sizes and result shapes follow. Its derivative is opaque too. Differentiating binds

    (results, residuals) = kernel forward(operands)          what `jax.vjp` of the function computes and keeps
    tangents' results    = tangent(residuals, operands, tangents)

the second of which is linear in the tangents and transposes to

    cotangents' results  = kernel backward(residuals, cotangents)

Rules of both follow from the function's. An operand's gradient has the operand's dimensions; a dimension that the
cotangents have and it lacks is summed over (the weights of a norm). Residuals that are operands or results have their
dimensions; of the others a dimension is called by the name whose size it follows, which tracing with another size for
each name tells (`_own_names`). Where that says nothing, because a dimension follows two names or the function cannot be
traced at another size, nothing is kept but the operands, and the backward kernel computes what it needs again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import ad, batching, mlir

from autopar.jax_compat import Primitive, Var
from autopar.primitives.custom import WHOLE, RuleText, parse_rule, spelled

Struct = tuple[tuple[int, ...], Any, bool]
"""Shape, dtype, whether weakly typed."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Kernel:
    """A function of flat operands; equal where function, argument structure and static arguments are."""

    fun: Any
    in_tree: Any
    static: tuple[tuple[str, Hashable], ...]

    def __call__(self, *operands: Any) -> Any:
        args = jax.tree_util.tree_unflatten(self.in_tree, operands)
        return self.fun(*args, **dict(self.static))

    def flat(self, *operands: Any) -> list[Any]:
        """The flat results of the function on its flat operands."""
        return jax.tree_util.tree_leaves(self(*operands))


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class _Mapped:
    """A kernel under vmap; ``batched`` flags the operands that have the new leading dimension."""

    kernel: Any
    batched: tuple[bool, ...]

    def flat(self, *operands: Any) -> list[Any]:
        return jax.vmap(self.kernel.flat, in_axes=tuple(0 if b else None for b in self.batched))(*operands)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class _Forward:
    """A kernel that gives, beside its results, those residuals of its derivative by the operands ``by`` that are
    neither operands nor results: ``own`` are their positions."""

    kernel: Any
    by: tuple[int, ...]
    own: tuple[int, ...]

    def flat(self, *operands: Any) -> list[Any]:
        outs, residuals, _ = _pulled_back(self.kernel, self.by, operands)
        return [*outs, *(residuals[i] for i in self.own)]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class _Backward:
    """Cotangents of the operands ``by`` of a kernel, of its residuals and of the cotangents of its floating results.

    ``names`` are those of the dimensions of both, ``primals`` the kernel's own operands and their dimensions' names:
    residuals are in the order that tracing at the sizes of the moment has them. ``again``: there are no residuals but
    the operands.
    """

    kernel: Any
    by: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    primals: tuple[tuple[Struct, tuple[str, ...]], ...]
    residuals: int
    again: bool

    def flat(self, *operands: Any) -> list[Any]:
        kept, cotangents = operands[: self.residuals], iter(operands[self.residuals :])
        if self.again:
            outs, pullback = jax.vjp(_by(self.kernel, self.by, kept), *(kept[i] for i in self.by))
        else:
            sizes = {n: d for names, x in zip(self.names, operands) for n, d in zip(names, x.shape) if n != WHOLE}
            structs = [_struct((_sized(s[0], names, sizes), *s[1:])) for s, names in self.primals]
            outs, pullback = _abstract_pullback(self.kernel, self.by, structs, kept)
        given = [next(cotangents) if _inexact(x.dtype) else np.zeros(x.shape, jax.dtypes.float0) for x in outs]
        return list(pullback(given))


def _by(kernel: Any, by: Sequence[int], operands: Sequence[Any]) -> Any:
    """The kernel as a function of the operands ``by``."""

    def run(*chosen: Any) -> list[Any]:
        values = list(operands)
        for i, x in zip(by, chosen, strict=True):
            values[i] = x
        return kernel.flat(*values)

    return run


def _pulled_back(kernel: Any, by: Sequence[int], operands: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """Results, residuals and the tree of the pullback that these are the leaves of."""
    outs, pullback = jax.vjp(_by(kernel, by, operands), *(operands[i] for i in by))
    residuals, tree = jax.tree_util.tree_flatten(pullback)
    return outs, residuals, tree


def _abstract_pullback(kernel: Any, by: Sequence[int], structs: Sequence[Any], residuals: Sequence[Any]) -> Any:
    """Types of the results, and the pullback with ``residuals``, of a kernel on operands of these shapes."""
    trees: list[Any] = []

    def forward(*operands: Any) -> list[Any]:
        outs, _, tree = _pulled_back(kernel, by, operands)
        trees.append(tree)
        return outs

    outs = jax.eval_shape(forward, *structs)
    return outs, jax.tree_util.tree_unflatten(trees[0], list(residuals))


# --- the derivative's rules --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derivative:
    """What differentiating a call of a kernel binds. ``sources`` say of each residual whether it is an operand, a
    result or one of the forward kernel's own, and which."""

    forward: Any
    forward_rule: str
    sources: tuple[tuple[str, int], ...]
    backward: Any
    backward_rule: str


@lru_cache(maxsize=256)
def _derivative(kernel: Any, rule: str, by: tuple[int, ...], operands: tuple[Struct, ...]) -> _Derivative:
    structs = [_struct(s) for s in operands]
    results = jax.eval_shape(kernel.flat, *structs)
    text = spelled(parse_rule(rule), structs, results)
    floating = tuple(names for names, x in zip(text.results, results, strict=True) if _inexact(x.dtype))
    sources, own = _sources(kernel, by, structs)
    names = None if own and text.sums else _own_names(kernel, by, own, structs, text) if own else ()
    again = names is None
    if names is None:
        sources, own, names = tuple(("operand", i) for i in range(len(structs))), (), ()
    homes = {"operand": text.operands, "result": text.results, "own": names}
    kept = tuple(homes[kind][i] for kind, i in sources)
    backward = _Backward(
        kernel=kernel, by=by, names=(*kept, *floating), primals=tuple(zip(operands, text.operands, strict=True)),
        residuals=len(sources), again=again,
    )  # fmt: skip
    return _Derivative(
        forward=_Forward(kernel=kernel, by=by, own=own) if own else kernel,
        forward_rule=str(replace(text, results=(*text.results, *(_only(t, text.split_names) for t in names)))),
        sources=sources,
        backward=backward,
        backward_rule=str(_backward_rule(text, (*kept, *floating), by)),
    )


def _backward_rule(text: RuleText, operands: tuple[tuple[str, ...], ...], by: tuple[int, ...]) -> RuleText:
    """The rule of cotangents of the operands ``by``: what splits the function splits them, and where one lacks a name
    that residuals or cotangents have, it is the sum of all slices' parts."""
    operands = tuple(_only(t, text.split_names) for t in operands)
    there = {n for t in operands for n in t if n != WHOLE}
    results = tuple(_only(text.operands[i], there) for i in by)
    lacked = {n for n in there if any(n not in t for t in results)}
    return RuleText(operands=operands, results=results, sums=tuple(sorted(lacked)))


def _only(names: tuple[str, ...], among: Set[str]) -> tuple[str, ...]:
    return tuple(n if n in among else WHOLE for n in names)


def _sources(
    kernel: Any, by: tuple[int, ...], structs: Sequence[Any]
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Where each residual comes from (see `_Derivative`), and the positions of those that are the forward's own."""
    counts: list[int] = []

    def forward(*operands: Any) -> list[Any]:
        outs, residuals, _ = _pulled_back(kernel, by, operands)
        counts.append(len(outs))
        return [*outs, *residuals]

    jaxpr = jax.make_jaxpr(forward)(*structs).jaxpr
    outs, residuals = jaxpr.outvars[: counts[0]], jaxpr.outvars[counts[0] :]
    sources: list[tuple[str, int]] = []
    own: list[int] = []
    for position, atom in enumerate(residuals):
        if isinstance(atom, Var) and atom in jaxpr.invars:
            sources.append(("operand", jaxpr.invars.index(atom)))
        elif isinstance(atom, Var) and atom in outs:
            sources.append(("result", outs.index(atom)))
        else:
            sources.append(("own", len(own)))
            own.append(position)
    return tuple(sources), tuple(own)


def _own_names(
    kernel: Any, by: tuple[int, ...], own: tuple[int, ...], structs: Sequence[Any], text: RuleText
) -> tuple[tuple[str, ...], ...] | None:
    """Names of the dimensions of residuals that follow the size of a name; None where one follows two, or tracing at
    other sizes fails."""
    forward = _Forward(kernel=kernel, by=by, own=own)

    def shapes(changed: Mapping[str, int]) -> list[tuple[int, ...]] | None:
        resized = [
            jax.ShapeDtypeStruct(_sized(s.shape, names, changed), s.dtype, weak_type=s.weak_type)
            for s, names in zip(structs, text.operands, strict=True)
        ]
        try:
            found = jax.eval_shape(forward.flat, *resized)
        except (TypeError, ValueError, NotImplementedError):  # this size does not suit it
            return None
        return [x.shape for x in found[len(found) - len(own) :]]

    base = shapes({})
    assert base is not None
    names = [[WHOLE] * len(shape) for shape in base]
    sizes = {n: d for s, t in zip(structs, text.operands, strict=True) for d, n in zip(s.shape, t) if n != WHOLE}
    for name, size in sizes.items():
        if size <= 1:
            continue
        tried = [(new, shapes({name: new})) for new in ((size // 2,) if size % 2 == 0 else ()) + (2 * size,)]
        new, found = next(((new, s) for new, s in tried if s is not None), (0, None))
        if found is None or [len(s) for s in found] != [len(s) for s in base]:
            return None
        for i, (before, after) in enumerate(zip(base, found, strict=True)):
            for d, (a, b) in enumerate(zip(before, after, strict=True)):
                if a == b:
                    continue
                if names[i][d] != WHOLE or (a, b) != (size, new):
                    return None
                names[i][d] = name
    return tuple(tuple(n) for n in names)


def _sized(shape: tuple[int, ...], names: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes.get(n, d) for n, d in zip(names, shape, strict=True))


def _struct(s: Struct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(s[0], s[1], weak_type=s[2])


def _key(x: Any) -> Struct:
    aval = jax.typeof(x)
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def _inexact(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.inexact)


# --- the primitives ----------------------------------------------------------------------------------------

kernel_p = Primitive("autopar_kernel")
"""Parameters: name and rule (str), flops (of the whole call, or None), kernel (a hashable with
``flat(*operands) -> list``)."""
kernel_p.multiple_results = True


def _flat(*operands: Any, kernel: Any, **_: Any) -> list[Any]:
    return kernel.flat(*operands)


@partial(jax.jit, static_argnums=0)
def _jitted(kernel: Any, *operands: Any) -> list[Any]:
    return kernel.flat(*operands)


def _impl(*operands: Any, kernel: Any, **_: Any) -> list[Any]:
    return _jitted(kernel, *operands)


def _abstract(*avals: Any, kernel: Any, **_: Any) -> list[Any]:
    shapes = jax.eval_shape(kernel.flat, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    return [jax.core.ShapedArray(s.shape, s.dtype) for s in shapes]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, name: str, rule: str, flops: float | None, kernel: Any
) -> tuple[list[Any], list[Any]]:
    by = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    found = _derivative(kernel, rule, by, tuple(map(_key, primals)))
    made = kernel_p.bind(*primals, name=name, rule=found.forward_rule, flops=flops, kernel=found.forward)
    count = len(made) - sum(kind == "own" for kind, _ in found.sources)
    homes = {"operand": primals, "result": made[:count], "own": made[count:]}
    residuals = [homes[kind][i] for kind, i in found.sources]
    times = 3 if found.backward.again else 2
    tangent = _Tangent(
        kernel=kernel,
        by=by,
        residuals=len(residuals),
        primals=len(primals),
        backward=found.backward,
        rule=found.backward_rule,
        name=f"{name} (gradient)",
        flops=None if flops is None else times * flops,
    )
    pushed = iter(tangent_p.bind(*residuals, *primals, *(tangents[i] for i in by), tangent=tangent))
    outs = made[:count]
    types = [jax.typeof(x) for x in outs]
    return outs, [next(pushed) if _inexact(t.dtype) else ad.Zero(t.to_tangent_aval()) for t in types]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, name: str, rule: str, flops: float | None, kernel: Any
) -> tuple[list[Any], list[int]]:
    batched = tuple(d is not None for d in dims)
    moved = _to_front(operands, dims)
    mapped = _Mapped(kernel=kernel, batched=batched)
    if flops is not None:
        flops *= next(x.shape[0] for x, b in zip(moved, batched, strict=True) if b)
    outs = kernel_p.bind(*moved, name=name, rule=str(parse_rule(rule).with_batch(batched)), flops=flops, kernel=mapped)
    return outs, [0] * len(outs)


def _to_front(operands: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    return [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]


kernel_p.def_impl(_impl)
kernel_p.def_abstract_eval(_abstract)
ad.primitive_jvps[kernel_p] = _jvp
batching.primitive_batchers[kernel_p] = _batch
mlir.register_lowering(kernel_p, mlir.lower_fun(_flat, multiple_results=True))


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class _Tangent:
    """Tangents of a kernel's floating results, of ``residuals`` residuals, ``primals`` operands and the tangents of the
    operands ``by``; its transpose is the kernel ``backward``. ``batched`` flags residuals and primals under vmaps, the
    outermost first; tangents have the new dimension always."""

    kernel: Any
    by: tuple[int, ...]
    residuals: int
    primals: int
    backward: Any
    rule: str
    name: str
    flops: float | None
    batched: tuple[tuple[bool, ...], ...] = ()

    def flat(self, *operands: Any) -> list[Any]:
        """Forward mode: the function itself is differentiated."""
        run = self._one
        for flags in reversed(self.batched):
            axes = [0 if b else None for b in flags] + [0] * len(self.by)
            run = jax.vmap(run, in_axes=tuple(axes))
        return run(*operands)

    def _one(self, *operands: Any) -> list[Any]:
        given = operands[self.residuals :]
        primals, tangents = given[: self.primals], given[self.primals :]
        outs, pushed = jax.jvp(_by(self.kernel, self.by, primals), tuple(primals[i] for i in self.by), tuple(tangents))
        return [t for x, t in zip(outs, pushed, strict=True) if _inexact(x.dtype)]


tangent_p = Primitive("autopar_kernel_tangent")
"""Operands: residuals, primals, tangents. Parameter: ``tangent``, a `_Tangent`. Linear in the tangents."""
tangent_p.multiple_results = True


def _tangent(*operands: Any, tangent: _Tangent) -> list[Any]:
    return tangent.flat(*operands)


def _tangent_abstract(*avals: Any, tangent: _Tangent) -> list[Any]:
    """As the results."""
    primals = avals[tangent.residuals : tangent.residuals + tangent.primals]
    flags = zip(*(f[tangent.residuals :] for f in tangent.batched)) if tangent.batched else [()] * len(primals)
    shapes = [a.shape[sum(f) :] for a, f in zip(primals, flags, strict=True)]
    structs = (jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, primals, strict=True))
    over = avals[-1].shape[: len(tangent.batched)]
    found = jax.eval_shape(tangent.kernel.flat, *structs)
    return [jax.core.ShapedArray((*over, *x.shape), x.dtype) for x in found if _inexact(x.dtype)]


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, tangent: _Tangent) -> list[Any]:
    fixed = tangent.residuals + tangent.primals
    given = [ad.instantiate_zeros(c) for c in cotangents]
    found = kernel_p.bind(
        *operands[: tangent.residuals], *given, name=tangent.name, rule=tangent.rule, flops=tangent.flops,
        kernel=tangent.backward,
    )  # fmt: skip
    return [None] * fixed + list(found)


def _tangent_batch(operands: Sequence[Any], dims: Sequence[Any], *, tangent: _Tangent) -> tuple[list[Any], list[int]]:
    fixed = tangent.residuals + tangent.primals
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    moved = _to_front(operands, dims)
    moved[fixed:] = [
        x if d is not None else jax.numpy.broadcast_to(x, (size, *x.shape))
        for x, d in zip(moved[fixed:], dims[fixed:], strict=True)
    ]
    flags = tuple(d is not None for d in dims[:fixed])
    text = parse_rule(tangent.rule)
    over = (*flags[: tangent.residuals], *[True] * (len(text.operands) - tangent.residuals))
    mapped = _Tangent(
        kernel=tangent.kernel, by=tangent.by, residuals=tangent.residuals, primals=tangent.primals,
        backward=_Mapped(kernel=tangent.backward, batched=over), rule=str(text.with_batch(over)), name=tangent.name,
        flops=None if tangent.flops is None else tangent.flops * size, batched=(flags, *tangent.batched),
    )  # fmt: skip
    outs = tangent_p.bind(*moved, tangent=mapped)
    return outs, [0] * len(outs)


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, tangent: _Tangent) -> Any:
    """A second derivative opens the function up."""
    return jax.jvp(partial(_tangent, tangent=tangent), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


tangent_p.def_impl(jax.jit(_tangent, static_argnames="tangent"))
tangent_p.def_abstract_eval(_tangent_abstract)
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
