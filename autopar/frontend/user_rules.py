"""`autopar.sharding_rule`: sharding rules for kernels that autopar cannot see into (pallas, ffi, cuDNN calls).

As a decorator it makes every call of a function one opaque equation that carries its rule (`frontend.user_kernels`).
As a plain call it gives a rule to a primitive, or to an ffi target, by name.
The text's grammar is that of `autopar.primitives.custom`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import jax

from autopar.frontend.user_kernels import Kernel, kernel_p
from autopar.ir.errors import RuleError
from autopar.ir.graph import Graph, Node
from autopar.primitives.custom import operator_name, parse_rule

F = TypeVar("F", bound=Callable[..., Any])

Flops = float | Callable[..., float]
"""FLOPs of a whole call: a number, or a function of the shapes of its operands, then of its results."""

_RULES: dict[str, str] = {}
_FLOPS: dict[str, Flops] = {}


def registered_rules() -> Mapping[str, str]:
    """Rules given by name so far: primitive or ffi target → text, sum dimensions marked ``+``."""
    return dict(_RULES)


def with_flops(graph: Graph) -> Graph:
    """``graph`` with the FLOPs that were given by name so far in its nodes, in bodies too."""
    if not _FLOPS:
        return graph

    def costed(node: Node) -> Node:
        flops = _FLOPS.get(operator_name(node))
        bodies = tuple(with_flops(body) for body in node.bodies)
        hidden = with_flops(node.hidden) if node.hidden is not None else None
        if flops is not None:
            shapes = [t.shape for t in (*node.operand_types, *node.result_types)]
            return replace(node, bodies=bodies, hidden=hidden, flops=_evaluated(str(node), flops, shapes))
        if hidden is node.hidden and all(a is b for a, b in zip(bodies, node.bodies, strict=True)):
            return node
        return replace(node, bodies=bodies, hidden=hidden)

    nodes = tuple(map(costed, graph.nodes))
    return graph if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)) else replace(graph, nodes=nodes)


def _evaluated(where: str, flops: Flops, shapes: Sequence[tuple[int, ...]]) -> float:
    number = flops(*shapes) if callable(flops) else flops
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        raise RuleError(
            f"{where}: flops is {number!r} for the shapes {', '.join(map(str, shapes))}; expected a number from 0 on, "
            "or a function that returns one, of one shape per operand and then per result"
        )
    return float(number)


def sharding_rule(
    name: str, text: str, reduction: Sequence[str] = (), *, flops: Flops | None = None
) -> Callable[[F], F]:
    """Gives the operator ``name`` the sharding rule ``text``.

    Two uses::

        @autopar.sharding_rule("flash", "b h s _, b h _ _, b h _ _ -> b h s _")
        def flash(q, k, v): ...                      # calls pallas, ffi, anything that jax can trace

        autopar.sharding_rule("my_ffi_target", "b n, n+ m -> b m")

    Of a decorated function, positional arguments are pytrees of arrays: the rule names their leaves in flattened
    order. Keyword arguments are static and must be hashable. The rule covers the function's gradient: what
    `jax.vjp` of the function computes and keeps is one kernel, the backward pass another, and their rules follow
    from this one (see `autopar.frontend.user_kernels`). Second derivatives, and forward mode, open the function up.

    A plain call names a primitive, or the target of `jax.ffi.ffi_call`. Its parameters may not hold
    shapes (an ffi call's result types are taken care of), for it is bound unchanged on local operands.

    Args:
        name: shown in plans; the key of a plain registration.
        text: names per dimension, for instance ``"b s d, d f -> b s f"``.
        reduction: names to be summed over, as an alternative to ``+`` in the text.
        flops: floating-point operations of one whole call: a number, or a function of the shapes of its operands and
            then of its results, in the rule's order: ``lambda q, k, v, out: 4 * q[0] * q[1] * q[2] * k[2] * q[3]``.
            Without it they are counted in what the function traces to, pallas kernels included (a kernel's own
            ``cost_estimate`` first); of an ffi call nothing can be counted, and the plan says what it assumes. The
            backward pass of a function with ``flops`` is taken to have twice as many.

    Raises:
        RuleError: the text is malformed; ``flops`` does not give a number from 0 on.
    """
    rule = str(parse_rule(text, reduction))
    before = _RULES.get(name), _FLOPS.get(name)
    if flops is not None and not callable(flops):
        _evaluated(f"sharding rule {name!r}", flops, ())
    _RULES[name] = rule
    _FLOPS.pop(name, None)
    if flops is not None:
        _FLOPS[name] = flops

    def decorate(fun: F) -> F:
        # both are the function's, and not those of a primitive of that name
        _restored(_RULES, name, before[0])
        _restored(_FLOPS, name, before[1])

        @wraps(fun)
        def call(*args: Any, **static: Any) -> Any:
            return _call(name, rule, flops, fun, args, static)

        return call  # type: ignore[return-value]

    return decorate


def _restored(registry: dict[str, Any], name: str, before: Any) -> None:
    registry.pop(name, None)
    if before is not None:
        registry[name] = before


def _call(
    name: str, rule: str, flops: Flops | None, fun: Callable[..., Any], args: tuple[Any, ...], static: dict[str, Any]
) -> Any:
    leaves, in_tree = jax.tree_util.tree_flatten(args)
    for key, value in static.items():
        if isinstance(value, jax.Array) or not isinstance(value, Hashable):
            raise RuleError(
                f"kernel {name!r}{_defined(fun)}: keyword argument {key!r} is a {type(value).__name__}; keyword "
                "arguments are static and must be hashable; pass arrays by position, so that the rule can name them"
            )
    kernel = Kernel(fun=fun, in_tree=in_tree, static=tuple(sorted(static.items())))
    results, out_tree = jax.tree_util.tree_flatten(jax.eval_shape(kernel, *leaves))
    if flops is not None:
        shapes = [tuple(jax.numpy.shape(x)) for x in (*leaves, *results)]
        flops = _evaluated(f"kernel {name!r}{_defined(fun)}", flops, shapes)
    outs = kernel_p.bind(*leaves, name=name, rule=rule, flops=flops, kernel=kernel)
    return jax.tree_util.tree_unflatten(out_tree, outs)


def _defined(fun: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
