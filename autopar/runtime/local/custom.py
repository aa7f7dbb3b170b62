"""Local lowerings of users' kernels, of ffi calls that have a rule, and of a user's own shard_map.

A kernel's function is called, and so traced again, on local operands. An ffi call is bound with
the local types of its results. A user's shard_map cannot be nested in the plan's: every device runs all of
its shards, as a vmap over its mesh axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params

from autopar.ir.errors import RuleError
from autopar.jax_compat import Literal, bind
from autopar.runtime.local.context import LocalContext, LocalRule
from autopar.trace import INLINED


def _kernel(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    outs = list(eqn.params["kernel"].flat(*operands))
    for i, out in enumerate(outs):
        expected, wanted = ctx.result_shape(i), ctx.node.result_types[i].dtype
        if tuple(out.shape) != expected or str(out.dtype) != wanted:
            raise RuleError(
                f"{ctx.node} {eqn.params['name']!r}: on local operands "
                f"{', '.join(str(tuple(x.shape)) for x in operands)} the kernel gave result {i} as "
                f"{out.dtype}{tuple(out.shape)}, expected {wanted}{expected} by its sharding rule "
                f"{eqn.params['rule']!r}; take sizes from the operands' shapes inside the function, or write '_' "
                "for dimensions that must stay whole"
            )
    return outs


def _ffi_call(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    avals = tuple(jax.core.ShapedArray(ctx.result_shape(i), a.dtype) for i, a in enumerate(eqn.params["result_avals"]))
    return bind(eqn, *operands, result_avals=avals)


def _shard_map(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    params = eqn.params
    mesh_shape = dict(params["mesh"].shape)

    def run(*shards: Any) -> list[Any]:
        return _evaluate(str(ctx.node), params["jaxpr"], shards)

    stacked, used = zip(*(_stack(x, spec, mesh_shape) for x, spec in zip(operands, params["in_specs"], strict=True)))
    for axis in reversed(mesh_shape):  # the innermost vmap is the last mesh axis
        in_axes = tuple(0 if axis in axes else None for axes in used)
        run = jax.vmap(run, in_axes=in_axes, out_axes=0, axis_name=axis, axis_size=mesh_shape[axis])
    outs = run(*stacked)
    return [_unstack(out, spec, mesh_shape) for out, spec in zip(outs, params["out_specs"], strict=True)]


_VARYING = {
    "psum_invariant": lambda x, params: lax.psum(x, params["axes"]),
    "pvary": lambda x, params: x,
    "reduced_vary_cast_p": lambda x, params: x,
    "vary_unreduced_cast_p": lambda x, params: x,
}
"""What shard_map's check_vma makes of collectives, which vmap cannot map → the plain form."""


def _evaluate(where: str, jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Binds the equations of a user's shard_map one by one, outside the mesh that they were traced for."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in INLINED:
            inner = eqn.params[INLINED[name]]
            outs = _evaluate(where, inner.jaxpr, values, inner.consts)
        elif name in _VARYING:
            outs = [_VARYING[name](v, eqn.params) for v in values]
        else:
            if any(f"{v}[" in str(b) for b in jaxprs_in_params(eqn.params) for v in _VARYING):
                raise RuleError(
                    f"{where}: the shard_map's {name} has collectives that check_vma marked, and autopar runs a user's "
                    "shard_map as a vmap, which cannot map those; pass check_vma=False to that shard_map"
                )
            outs = bind(eqn, *values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _entries(spec: Any, rank: int) -> list[tuple[str, ...]]:
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in spec]
    return parts + [()] * (rank - len(parts))


def _stack(x: Any, spec: Any, mesh_shape: dict[str, int]) -> tuple[Any, set[str]]:
    """The shards of ``x``, one leading dimension per mesh axis that splits it, in the mesh's order; and those axes."""
    entries = _entries(spec, x.ndim)
    shape: list[int] = []
    place: dict[str, int] = {}
    rest: list[int] = []
    for axes, n in zip(entries, x.shape, strict=True):
        for axis in axes:
            place[axis] = len(shape)
            shape.append(mesh_shape[axis])
            n //= mesh_shape[axis]
        rest.append(len(shape))
        shape.append(n)
    order = [place[a] for a in mesh_shape if a in place]
    return jnp.reshape(x, shape).transpose(*order, *rest), set(place)


def _unstack(x: Any, spec: Any, mesh_shape: dict[str, int]) -> Any:
    """The inverse of `_stack` for a result that has a leading dimension for every mesh axis."""
    local: Sequence[int] = x.shape[len(mesh_shape) :]
    entries = _entries(spec, len(local))
    axes_used = [a for axes in entries for a in axes]
    kept = [a for a in mesh_shape if a in axes_used]
    x = x[tuple(slice(None) if a in axes_used else 0 for a in mesh_shape)]
    order: list[int] = []
    shape: list[int] = []
    for d, axes in enumerate(entries):
        order += [kept.index(a) for a in axes] + [len(kept) + d]
        n = local[d]
        for a in axes:
            n *= mesh_shape[a]
        shape.append(n)
    return jnp.reshape(x.transpose(order), shape)


LOCAL: dict[str, LocalRule] = {
    "autopar_kernel": _kernel,
    "ffi_call": _ffi_call,
    "shard_map": _shard_map,
}
