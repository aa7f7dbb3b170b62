"""A train step → the plain-JAX step that runs its gradients one microbatch at a time: `serial`.

What is inside ``autopar.value_and_grad`` or ``autopar.grad`` runs per microbatch, its gradients added up and its
auxiliary results combined by what they are; everything else runs once. The step is traced at the full batch and at
one microbatch; what the batch is in every value follows from comparing the two (`analyse`), for single examples or
groups of them (`units`). Where a microbatch is one example or group, its trace follows from two larger ones
(`one_unit`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from autopar.frontend.gradient import grad_p
from autopar.frontend.microbatch.accumulate import MarkerPlan, run_marker
from autopar.frontend.microbatch.batch_args import BatchArgnums, batch_leaves, is_operand
from autopar.frontend.microbatch.inline import CALLS, bodies, holds_marker
from autopar.frontend.microbatch.one_unit import cannot_trace
from autopar.frontend.microbatch.replay import bind_as
from autopar.frontend.microbatch.same_program import where
from autopar.frontend.microbatch.units import plan_in_units
from autopar.ir.errors import MicrobatchError
from autopar.jax_compat import Jaxpr, JaxprEqn, Literal


def serial(step: Callable[..., Any], num_microbatches: int, batch_argnums: BatchArgnums = None) -> Callable[..., Any]:
    """What a step with microbatches means, in plain JAX: traceable under ``jax.jit``, callable eagerly.

    Microbatch j holds the examples j, j+n, j+2n, … so that a batch sharded over devices is split where it lies. Where
    the step treats groups of g examples that follow one another as one (experts that route the tokens of several), it
    holds the groups j, j+n, j+2n, ….

    Args:
        step: a train step, ``step(state, batch, …)``, that takes its gradients by ``autopar.value_and_grad``.
        num_microbatches: n; 1 gives ``step`` itself.
        batch_argnums: which arguments carry the batch: a sequence of positions, or a mapping from position (or
            keyword) to the batch dimension: an int, or a pytree prefix of the argument with ints (None: that part
            carries no batch). Default: dimension 0 of every leaf of the second argument that has a dimension.

    Returns:
        A function of ``step``'s arguments. It raises `MicrobatchError` when called if the batch cannot be divided, or
        if the result would not be exactly the step's.

    Raises:
        MicrobatchError: ``num_microbatches`` is less than 1.
    """
    if num_microbatches < 1:
        raise MicrobatchError(f"num_microbatches must be at least 1, got {num_microbatches}.")
    if num_microbatches == 1:
        return step

    @functools.wraps(step)
    def serial_step(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        dims, batch = batch_leaves(args, kwargs, batch_argnums, num_microbatches)
        operands = [x for x in leaves if is_operand(x)]
        dims = [d for x, d in zip(leaves, dims, strict=True) if is_operand(x)]
        out_trees: list[Any] = []

        def flat_step(*values: Any) -> list[Any]:
            given = iter(values)
            mixed = [next(given) if is_operand(x) else x for x in leaves]
            full_args, full_kwargs = jax.tree_util.tree_unflatten(tree, mixed)
            out, out_tree = jax.tree_util.tree_flatten(step(*full_args, **full_kwargs))
            out_trees.append(out_tree)
            return out

        full = jax.make_jaxpr(flat_step)(*operands)
        out_tree = out_trees[0]
        if not holds_marker(full.jaxpr):
            raise MicrobatchError(
                f"{_name(step)} has num_microbatches={num_microbatches} but no autopar.value_and_grad or autopar.grad: "
                "nothing says which part runs once per microbatch. Replace jax.value_and_grad by "
                "autopar.value_and_grad (same arguments) around the loss."
            )

        @functools.cache
        def traced(size: int) -> Jaxpr:
            try:
                return jax.make_jaxpr(flat_step)(*_structs(operands, dims, size)).jaxpr
            except (TypeError, ValueError) as error:
                raise cannot_trace(_name(step), num_microbatches, batch, size, error) from error

        plans = _plan_markers(full.jaxpr, traced, num_microbatches, batch)
        out = _replay(full.jaxpr, full.consts, operands, plans)
        return jax.tree_util.tree_unflatten(out_tree, out)

    return serial_step


def _name(step: Callable[..., Any]) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _structs(operands: Sequence[Any], dims: Sequence[int | None], size: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of ``operands`` with ``size`` examples."""
    structs: list[jax.ShapeDtypeStruct] = []
    for value, dim in zip(operands, dims, strict=True):
        aval = jax.typeof(value)
        shape = tuple(size if d == dim else s for d, s in enumerate(aval.shape))
        weak = isinstance(aval, ShapedArray) and aval.weak_type
        structs.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak))
    return structs


def _inner(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of a call that is inlined because a gradient marker is in it."""
    parameter = CALLS.get(eqn.primitive.name)
    return eqn.params[parameter].jaxpr if parameter is not None and holds_marker(eqn.params[parameter].jaxpr) else None


def _markers(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        body = _inner(eqn)
        if eqn.primitive is grad_p:
            yield eqn
        elif body is not None:
            yield from _markers(body)
        elif any(holds_marker(b) for b in bodies(eqn)):
            raise MicrobatchError(
                f"{where(eqn)} holds an autopar.value_and_grad in its body: microbatches inside loops and branches are "
                "not supported. Move the loop out of the step, or use num_microbatches=1."
            )


def _plan_markers(full: Jaxpr, traced: Callable[[int], Jaxpr], n: int, batch: int) -> list[MarkerPlan]:
    in_full = list(_markers(full))

    def one(number: int, size: int) -> JaxprEqn:
        in_small = list(_markers(traced(size)))
        if len(in_full) != len(in_small):
            raise MicrobatchError(
                f"the step has {len(in_full)} autopar.value_and_grad at the full batch and {len(in_small)} with {size} "
                "examples: do not branch on the batch size."
            )
        return in_small[number]

    return [plan_in_units(a, functools.partial(one, i), n, batch)[1] for i, a in enumerate(in_full)]


def _replay(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], plans: Sequence[MarkerPlan]) -> list[Any]:
    """Evaluates the full step, its markers by their plans, in program order."""
    remaining = iter(plans)

    def run(inner: Jaxpr, values: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inner.constvars, constants, strict=True))
        env.update(zip(inner.invars, values, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in inner.eqns:
            invals = [read(a) for a in eqn.invars]
            body = _inner(eqn)
            if eqn.primitive is grad_p:
                outs = run_marker(next(remaining), invals)
            elif body is not None:
                outs = run(body, invals, eqn.params[CALLS[eqn.primitive.name]].consts)
            else:
                outs = bind_as(eqn, invals)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in inner.outvars]

    return run(jaxpr, operands, consts)
