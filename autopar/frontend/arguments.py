"""The arguments of a call: which are static, which batch, and what a plan for them is kept under.

A call is brought to one form first (`Arguments.positional`): arguments given by keyword go to their positions, so
that ``static_argnums``, ``donate_argnums``, ``batch_argnums`` and pins mean the same however the step is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from autopar.frontend.microbatch.batch_args import BatchArgnums, leaf_dims
from autopar.ir.errors import ArgumentError, OptionError, TraceError
from autopar.jax_compat import is_staged, trace_settings

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """What a call's plan and program are kept under; jax's own settings of the moment are part of it."""

    tree: Any
    avals: tuple[Hashable, ...]
    weak_types: tuple[bool, ...]
    statics: tuple[Hashable, ...]
    settings: Hashable


class Arguments:
    """What is known of a step's arguments before any call: its signature, and which are donated, static, or carry the
    batch.

    Raises:
        OptionError: an argument is donated and static, or there is none at such a position.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        name: str,
        donate_argnums: int | Sequence[int] | None,
        static_argnums: int | Sequence[int] | None,
        batch_argnums: BatchArgnums | int | str,
    ) -> None:
        self._name = name
        try:
            self._signature = inspect.signature(fun)
        except (ValueError, TypeError):  # some callables have none: their keywords stay keywords
            self._signature = None
        self.donate_argnums = _argnums(donate_argnums)
        self.static_argnums = _argnums(static_argnums)
        both = set(self.donate_argnums) & set(self.static_argnums)
        if both:
            raise OptionError(f"{name}: argument {min(both)} is in donate_argnums and in static_argnums; choose one")
        for which, numbers in (("donate_argnums", self.donate_argnums), ("static_argnums", self.static_argnums)):
            self._check_range(name, which, numbers)
        self.batch_argnums = self._by_position(
            (batch_argnums,) if isinstance(batch_argnums, int | str) else batch_argnums
        )

    def _check_range(self, name: str, which: str, numbers: Sequence[int]) -> None:
        """Raises OptionError where the signature has no such position."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [] if self._signature is None else list(self._signature.parameters.values())
        if self._signature is None or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
            return
        count = sum(p.kind in kinds for p in parameters)
        for i in numbers:
            if not -count <= i < count:
                raise OptionError(f"{which}: {name} takes {count} arguments by position; there is no argument {i}")

    def _by_position(self, batch_argnums: BatchArgnums) -> BatchArgnums:
        """``batch_argnums`` with names of positional parameters as positions."""
        if self._signature is None or not batch_argnums or not any(isinstance(k, str) for k in batch_argnums):
            return batch_argnums
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = enumerate(self._signature.parameters.values())
        position: dict[Any, Any] = {p.name: i for i, p in parameters if p.kind in kinds}
        given = batch_argnums if isinstance(batch_argnums, Mapping) else dict.fromkeys(batch_argnums, 0)
        return {position.get(key, key): dim for key, dim in given.items()}

    def positional(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The same call with its arguments by position where the signature has one. Raises TypeError, as Python does,
        where the call does not fit the signature."""
        if not kwargs or self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def split(self, args: Args) -> tuple[Args, tuple[tuple[int, Any], ...]]:
        """(``args`` with None for each static one, (position, value) of the static ones)."""
        if not self.static_argnums:
            return args, ()
        static = within(self.static_argnums, len(args))
        return tuple(None if i in static else a for i, a in enumerate(args)), tuple((i, args[i]) for i in static)

    def key(self, args: Args, kwargs: Kwargs) -> CallKey:
        """What a call's plan and program are kept under.

        Raises:
            TraceError: an argument is no array, or a static one cannot be hashed.
        """
        dynamic, statics = self.split(args)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, kwargs))
        try:
            key = CallKey(
                tree=tree,
                avals=tuple(map(_aval, leaves)),
                weak_types=tuple(map(is_weak, leaves)),
                statics=tuple((i, type(v), v) for i, v in statics),
                settings=trace_settings(),
            )
            hash(key)
        except TypeError as error:
            raise self._bad_argument(dynamic, kwargs, statics, error) from error
        return key

    def _bad_argument(self, dynamic: Args, kwargs: Kwargs, statics: Any, error: TypeError) -> TraceError:
        for i, value in statics:
            if not _hashable(value):
                return TraceError(
                    f"{self._name}: args[{i}] is static (static_argnums), but a {type(value).__name__} cannot be "
                    "hashed. Pass something that can, a tuple for a list, say"
                )
        for root, tree in (("args", dynamic), ("kwargs", kwargs)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if not _is_array(leaf):
                    return TraceError(
                        f"{self._name}: {root}{jax.tree_util.keystr(path)} is {leaf!r}, a {type(leaf).__name__}, where "
                        "an array or a number is needed. Make it an array, or pass its argument through static_argnums"
                    )
        return TraceError(f"{self._name}: {error}")

    def batch_dims(self, dynamic: Args, kwargs: Kwargs) -> list[int | None]:
        """The batch dimension of each leaf, None where it has none.

        Raises:
            MicrobatchError: ``batch_argnums`` does not fit the arguments.
        """
        return leaf_dims(dynamic, kwargs, self.batch_argnums)[0]

    def usable(self, leaves: list[Any], args: Args, kwargs: Kwargs) -> list[Any]:
        """The flat arguments, an array that is donated and comes twice copied, for its buffer goes once.

        Raises ArgumentError where one is a shape, or an array is gone already: JAX would end the process on several CPU
        devices.
        """
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        if any(x.is_deleted() for x in arrays):
            gone = self._path(args, kwargs, lambda x: isinstance(x, jax.Array) and x.is_deleted())
            raise deleted(self._name, gone)
        if len(arrays) < len(leaves) and any(map(_is_shape, leaves)):
            raise ArgumentError(
                f"{self._name}: {self._path(args, kwargs, _is_shape)} is a ShapeDtypeStruct: a call needs arrays; "
                f"{self._name}.plan takes shapes"
            )
        if not self.donate_argnums or len({id(x) for x in arrays}) == len(arrays):
            return leaves
        donated = set(within(self.donate_argnums, len(args)))
        paths = jax.tree_util.tree_flatten_with_path((self.split(args)[0], kwargs))[0]
        given = [path[0].idx == 0 and path[1].idx in donated for path, _ in paths]
        seen = {id(x) for x, gives in zip(leaves, given, strict=True) if not gives}
        out = list(leaves)
        for i, (x, gives) in enumerate(zip(leaves, given, strict=True)):
            if gives and isinstance(x, jax.Array):
                out[i] = jnp.copy(x) if id(x) in seen else x
                seen.add(id(x))
        return out

    def _path(self, args: Args, kwargs: Kwargs, is_wanted: Callable[[Any], bool]) -> str:
        """The path of the first leaf that is wanted."""
        found = jax.tree_util.tree_flatten_with_path((self.split(args)[0], kwargs))[0]
        path = next(path for path, leaf in found if is_wanted(leaf))
        return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])

    def refuse_transformed(self, call: tuple[Args, Kwargs]) -> None:
        """Raises TraceError under jax.grad, jax.vmap and the like; a surrounding jax.jit is fine."""
        for path, leaf in jax.tree_util.tree_flatten_with_path(call)[0]:
            if isinstance(leaf, jax.core.Tracer) and not is_staged(leaf):
                raise TraceError(
                    f"{self._name} is parallelized, and cannot be differentiated or batched as a whole "
                    f"({'args' if path[0].idx == 0 else 'kwargs'}{jax.tree_util.keystr(path[1:])} is a "
                    f"{type(leaf).__name__}): its plan holds for the step as it is. Take gradients inside the step, by "
                    "autopar.value_and_grad, or transform the step before autopar.parallelize"
                )


def argument_spans(in_tree: Any) -> list[tuple[Any, int, int]]:
    """(tree, number of its first flat argument, of the one past its last) of each argument; ``in_tree``: of (positional
    arguments, keyword arguments)."""
    out: list[tuple[Any, int, int]] = []
    start = 0
    positional, keywords = in_tree.children()
    for tree in (*positional.children(), *keywords.children()):
        out.append((tree, start, start + tree.num_leaves))
        start += tree.num_leaves
    return out


def deleted(step: str, path: str) -> ArgumentError:
    """The error to raise for an array that is deleted; ``path``: which argument of ``step`` it is."""
    return ArgumentError(
        f"{step}: {path} has been deleted: an earlier call that it was donated to (donate_argnums) took its buffer for "
        "its result. Pass what that call returned, or a copy that was made before"
    )


def _argnums(argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(map(int, argnums))


def within(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """The positions in ``argnums`` that a call of ``count`` arguments has, ascending, negative ones counted from the
    end."""
    return tuple(sorted({i % count for i in argnums if -count <= i < count}))


def filled(fun: Callable[..., Any], statics: tuple[tuple[int, Any], ...]) -> Callable[..., Any]:
    """``fun`` with its static arguments, (position, value), in place of whatever is passed for them."""
    if not statics:
        return fun

    @functools.wraps(fun)
    def filled(*args: Any, **kwargs: Any) -> Any:
        known = dict(statics)
        return fun(*(known.get(i, a) for i, a in enumerate(args)), **kwargs)

    return filled


def without(args: Args, statics: tuple[tuple[int, Any], ...]) -> Args:
    """``args`` without the static ones."""
    static = {i for i, _ in statics}
    return tuple(a for i, a in enumerate(args) if i not in static)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_weak(leaf: Any) -> bool:
    """True for Python's numbers and what was computed from them alone: their dtype gives way to others'."""
    weak = getattr(leaf, "weak_type", None)  # NumPy's arrays, and keys, have none
    return type(leaf) in (int, float, complex) if weak is None else weak


def _aval(leaf: Any) -> Hashable:
    """Shape and dtype of what jax makes of ``leaf``; TypeError where it is no array."""
    if isinstance(leaf, jax.Array):  # tracers too
        return leaf.shape, leaf.dtype
    if not _is_array(leaf):
        raise TypeError(type(leaf).__name__)
    if not hasattr(leaf, "dtype") and isinstance(leaf, (bool, int, float, complex)):
        return (), jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
    return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
