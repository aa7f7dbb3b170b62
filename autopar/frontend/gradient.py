"""A loss function → one equation that marks it, with the loss, the auxiliary values and the gradients as results.

`value_and_grad` and `grad` mean what ``jax.value_and_grad`` and ``jax.grad`` mean. They trace the loss
without differentiating it and bind one primitive, ``autopar_grad``, that carries the undifferentiated
jaxpr; whoever plans the step sees where the part that accumulates over microbatches begins and ends, and
can cut the forward before it is differentiated. Everywhere else (jit, eager, vmap, jvp) the primitive
evaluates itself through ``jax.vjp``.

One difference from jax: a loss called outside ``jit`` is traced too, so it cannot branch on the *values* of
the arguments that it is differentiated by.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from autopar.jax_compat import ClosedJaxpr, JaxprEqn, Primitive, dce, jaxpr_as_fun, open_constants

grad_p = Primitive("autopar_grad")
"""Parameters: ``jaxpr`` (the loss, closed, without constants: results loss, then auxiliary leaves) and ``wrt`` (the
operands differentiated by, as indices). Results: loss, auxiliary leaves, one gradient per entry of ``wrt``."""
grad_p.multiple_results = True


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """``jax.value_and_grad``, and a mark on what accumulates over microbatches.

    Args:
        fun: returns a real scalar, or (scalar, auxiliary pytree) with ``has_aux``.
        argnums: the positional argument, or arguments, to differentiate by: pytrees of floating-point arrays.
        has_aux: ``fun`` returns a pair.
        holomorphic: arguments and result are complex and ``fun`` is holomorphic.
        allow_int: integer, bool and key leaves are let through; their gradients have dtype ``float0``.

    Returns:
        A function with ``fun``'s arguments that returns (loss, gradients), or ((loss, aux), gradients).

    Raises:
        TypeError: ``fun`` cannot be called; from the returned function, where jax raises it.
    """
    if not callable(fun):
        raise TypeError(f"Expected a callable value, got {fun!r}")
    single = not isinstance(argnums, Sequence)
    positions = tuple(operator.index(a) for a in ((argnums,) if single else argnums))

    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        wanted = _positions(positions, argnums, len(args))
        leaves, tree = jax.tree_util.tree_flatten(tuple(args[i] for i in wanted))
        for leaf in leaves:
            _check_input(leaf, holomorphic, allow_int)
        out_tree: Any = None

        def flat_loss(*flat: Any) -> list[Any]:
            nonlocal out_tree
            full = list(args)
            for i, value in zip(wanted, jax.tree_util.tree_unflatten(tree, flat), strict=True):
                full[i] = value
            loss, aux = _split_aux(fun(*full, **kwargs), has_aux)
            _check_output(loss, holomorphic)
            flat_aux, out_tree = jax.tree_util.tree_flatten(aux)
            return [loss, *flat_aux]

        closed = jax.make_jaxpr(flat_loss)(*leaves)
        consts = list(closed.consts)
        body = ClosedJaxpr(open_constants(closed.jaxpr), ())
        inexact = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
        wrt = tuple(len(consts) + i for i in inexact)
        out = grad_p.bind(*consts, *leaves, jaxpr=body, wrt=wrt)
        num_aux = len(body.jaxpr.outvars) - 1
        loss, flat_aux, found = out[0], out[1 : 1 + num_aux], iter(out[1 + num_aux :])
        flat_grads = [
            next(found) if i in set(inexact) else np.zeros(jnp.shape(leaf), jax.dtypes.float0)
            for i, leaf in enumerate(leaves)
        ]
        grads = jax.tree_util.tree_unflatten(tree, flat_grads)
        aux = jax.tree_util.tree_unflatten(out_tree, flat_aux)
        return ((loss, aux) if has_aux else loss), (grads[0] if single else grads)

    return _named_like(value_and_grad_fun, fun, "value_and_grad")


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """``jax.grad``, marked as `value_and_grad` does.

    Args:
        fun: the loss, a function to a scalar; with ``has_aux`` to (scalar, aux).
        argnums: positions of the arguments to differentiate by.
        has_aux: True where ``fun`` also returns what is not differentiated.
        holomorphic: True where ``fun`` is holomorphic.
        allow_int: True to allow integer arguments, whose gradients are of dtype float0.

    Returns:
        A function to the gradients, or to (gradients, aux) with ``has_aux``. It raises what `value_and_grad`'s does.
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return _named_like(grad_fun, fun, "grad")


def evaluate(*operands: Any, jaxpr: ClosedJaxpr, wrt: tuple[int, ...]) -> list[Any]:
    """The marker's meaning: loss, auxiliary leaves and gradients of ``jaxpr`` at ``operands``, by ``jax.vjp``."""

    def loss_of(*chosen: Any) -> tuple[Any, list[Any]]:
        full = list(operands)
        for i, value in zip(wrt, chosen, strict=True):
            full[i] = value
        loss, *aux = jaxpr_as_fun(jaxpr)(*full)
        return loss, aux

    loss, pullback, aux = jax.vjp(loss_of, *(operands[i] for i in wrt), has_aux=True)
    return [loss, *aux, *pullback(jnp.ones((), loss.dtype))]


def expand_marker(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr of `evaluate` for a marker's operands (loss, auxiliary leaves, gradients), without unused equations."""
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    closed = jax.make_jaxpr(lambda *operands: evaluate(*operands, **eqn.params))(*structs)
    return ClosedJaxpr(dce(closed.jaxpr), closed.consts)


class Reached(BaseException):
    """A trace has come to the marker at which it is to end, of ``operands`` (types) and ``params``. No Exception: the
    user's code may catch those."""

    def __init__(self, operands: Sequence[Any], params: dict[str, Any]) -> None:
        super().__init__()
        self.operands, self.params = tuple(operands), params


class Markers:
    """The losses of the markers that become equations of traces while these are watched, in order; what ``end`` is the
    number of ends tracing (`Reached`). Of a function under `jax.jit` that was traced before, none do."""

    def __init__(self, end: int | None = None) -> None:
        self.losses: list[ClosedJaxpr] = []
        self._end = end

    def number(self, marker: JaxprEqn) -> int | None:
        """Which of them ``marker`` is."""
        return next((i for i, loss in enumerate(self.losses) if loss is marker.params["jaxpr"]), None)

    def __enter__(self) -> Markers:
        self._token = _WATCHED.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _WATCHED.reset(self._token)

    def met(self, operands: Sequence[Any], params: dict[str, Any]) -> None:
        """A marker becomes an equation."""
        if len(self.losses) == self._end:
            raise Reached(operands, params)
        self.losses.append(params["jaxpr"])


_WATCHED: ContextVar[Markers | None] = ContextVar("markers", default=None)


# --- the primitive's rules ---------------------------------------------------------------------------------


def _abstract(*operands: Any, jaxpr: ClosedJaxpr, wrt: tuple[int, ...]) -> tuple[list[Any], Any]:
    if (markers := _WATCHED.get()) is not None:
        markers.met(operands, {"jaxpr": jaxpr, "wrt": wrt})
    outs = [v.aval for v in jaxpr.jaxpr.outvars]
    grads = [jaxpr.jaxpr.invars[i].aval.strip_weak_type() for i in wrt]
    return [*outs, *grads], jaxpr.jaxpr.effects


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    mapped = jax.vmap(lambda *xs: evaluate(*xs, **params), in_axes=tuple(dims), out_axes=0)
    out = mapped(*operands)
    return out, [0] * len(out)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *xs: evaluate(*xs, **params), tuple(primals), tuple(dense))


grad_p.def_impl(evaluate)
grad_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(grad_p, mlir.lower_fun(evaluate, multiple_results=True))
batching.primitive_batchers[grad_p] = _batch
ad.primitive_jvps[grad_p] = _jvp


# --- jax's checks ------------------------------------------------------------------------------------------


def _positions(positions: tuple[int, ...], argnums: Any, count: int) -> tuple[int, ...]:
    if max(positions, default=0) >= count or min(positions, default=0) < -count:
        raise TypeError(
            f"differentiating with respect to argnums={argnums} requires at least {max(positions) + 1} positional "
            f"arguments to be passed by the caller, but got only {count} positional arguments."
        )
    return tuple(p % count for p in positions)


def _dtype(leaf: Any) -> Any:
    return jax.typeof(leaf).dtype


def _is_inexact(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(_dtype(leaf), np.inexact)


def _check_input(leaf: Any, holomorphic: bool, allow_int: bool) -> None:
    dtype = _dtype(leaf)
    if holomorphic and not jax.dtypes.issubdtype(dtype, np.complexfloating):
        raise TypeError(f"grad with holomorphic=True requires inputs with complex dtype, but got {dtype.name}.")
    if not jax.dtypes.issubdtype(dtype, np.inexact) and not allow_int:
        raise TypeError(
            "grad requires real- or complex-valued inputs (input dtype that is a sub-dtype of np.inexact), but got "
            f"{dtype.name}. If you want to use Boolean- or integer-valued inputs, use vjp or set allow_int to True."
        )


def _check_output(loss: Any, holomorphic: bool) -> None:
    try:
        aval = jax.typeof(loss)
    except TypeError as error:
        raise TypeError(f"Gradient only defined for scalar-output functions. Output was {loss}.") from error
    if aval.shape != ():
        raise TypeError(f"Gradient only defined for scalar-output functions. Output had shape: {aval.shape}.")
    if holomorphic:
        if not jax.dtypes.issubdtype(aval.dtype, np.complexfloating):
            raise TypeError(
                f"grad with holomorphic=True requires outputs with complex dtype, but got {aval.dtype.name}."
            )
    elif not jax.dtypes.issubdtype(aval.dtype, np.floating):
        raise TypeError(
            "grad requires real-valued outputs (output dtype that is a sub-dtype of np.floating), but got "
            f"{aval.dtype.name}. For holomorphic differentiation, pass holomorphic=True; for functions with integer "
            "outputs, use jax.vjp directly."
        )


def _split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, ()
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"with has_aux=True the function must return a pair (loss, aux), but got {type(out).__name__}")
    return out[0], out[1]


def _named_like(wrapper: Callable[..., Any], fun: Callable[..., Any], how: str) -> Callable[..., Any]:
    wrapper.__name__ = f"{how}({getattr(fun, '__name__', type(fun).__name__)})"
    wrapper.__doc__ = fun.__doc__
    return wrapper
