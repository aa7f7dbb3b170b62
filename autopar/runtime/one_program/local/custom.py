"""Local lowerings of kernels, users' own and Pallas', of ffi calls that have a rule, and of a user's own shard_map.

A kernel's function is called, and so traced again, on local operands. An ffi call is bound with
the local types of its results. A user's shard_map cannot be nested in the plan's: where the plan has given it its own
specs, its body runs here as it is; else every device runs all of its shards, as a vmap over its mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.opened_calls import INLINED, opened
from autopar.intra_op.user_shard_map import FixedSpecs, fixed_specs
from autopar.ir.errors import RuleError
from autopar.jax_compat import ClosedJaxpr, Literal, bind, scan_counts, smaller_kernel
from autopar.runtime.one_program.local.context import LocalContext, LocalRule


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


def _pallas_call(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    """The kernel on a part of its grid: fewer programs, on the same blocks of smaller arrays."""
    grid, shards = list(eqn.params["grid_mapping"].grid), 1
    for axis in ctx.node.params["split"]:
        operand, result = axis["operands"], axis["results"]
        dims = [ctx.operand_specs[i].dims[d] for i, d in operand] or [ctx.result_specs[i].dims[d] for i, d in result]
        parts = ctx.num_shards(dims[0])
        grid[axis["axis"]] //= parts
        shards *= parts
    inputs = [ctx.operand_shape(i) for i in range(len(operands))]
    outputs = [ctx.result_shape(i) for i in range(len(eqn.outvars))]
    return bind(eqn, *operands, **smaller_kernel(eqn, grid, inputs, outputs, shards))


def _shard_map(ctx: LocalContext, eqn: Any, *operands: Any) -> list[Any]:
    params = eqn.params
    mesh_shape = dict(params["mesh"].shape)

    def run(*shards: Any) -> list[Any]:
        return _evaluate(params["jaxpr"], shards)

    fixed = fixed_specs(ctx.node, ctx.axis_sizes)
    if isinstance(fixed, FixedSpecs) and (fixed.operands, fixed.results) == (ctx.operand_specs, ctx.result_specs):
        return run(*operands)
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
    "sharding_constraint": lambda x, params: x,
    "vary_unreduced_cast_p": lambda x, params: x,
}
"""What shard_map's check_vma makes of collectives, which vmap cannot map → the plain form; and what means nothing where
all axes are manual."""


def _evaluate(jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Runs a user's shard_map body, equation by equation, outside the mesh that it was traced for.

    Bodies of loops and branches hold types of that mesh, so they are traced again.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values, name = [read(a) for a in eqn.invars], eqn.primitive.name
        if name in INLINED:
            outs = _closed(eqn.params[INLINED[name]])(*values)
        elif name in _VARYING:
            outs = [_VARYING[name](v, eqn.params) for v in values]
        elif name in _CONTROL:
            outs = _CONTROL[name](eqn, values)
        else:  # types that jax's transposition noted for the mesh of the trace, where all axes are manual
            typed = [k for k in ("out_sharding", "sharding") if eqn.params.get(k) is not None]
            outs = bind(eqn, *values, **dict.fromkeys(typed))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _closed(body: Any) -> Callable[..., list[Any]]:
    """A Jaxpr or ClosedJaxpr as a function."""
    if isinstance(body, ClosedJaxpr):
        return lambda *operands: _evaluate(body.jaxpr, operands, body.consts)
    return lambda *operands: _evaluate(body, operands)


def _scan(eqn: Any, values: list[Any]) -> list[Any]:
    params, body = eqn.params, _closed(eqn.params["jaxpr"])
    num_consts, num_carry = scan_counts(eqn)
    consts, carry, xs = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    carry, ys = lax.scan(step, carry, xs, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]


def _while(eqn: Any, values: list[Any]) -> list[Any]:
    one = opened(eqn, ("while",))
    if one is not None:
        return _closed(one)(*values)
    test, body = _closed(eqn.params["cond_jaxpr"]), _closed(eqn.params["body_jaxpr"])
    at = eqn.params["cond_nconsts"]
    upto = at + eqn.params["body_nconsts"]
    return list(
        lax.while_loop(
            lambda carry: test(*values[:at], *carry)[0],
            lambda carry: body(*values[at:upto], *carry),
            values[upto:],
        )
    )


def _cond(eqn: Any, values: list[Any]) -> list[Any]:
    return list(lax.switch(values[0], [_closed(b) for b in eqn.params["branches"]], *values[1:]))


def _remat(eqn: Any, values: list[Any]) -> list[Any]:
    return _closed(eqn.params["jaxpr"])(*values)


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond, "remat2": _remat, "checkpoint": _remat}


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
    "pallas_call": _pallas_call,
    "shard_map": _shard_map,
}
