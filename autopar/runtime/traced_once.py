"""Equal parts of the layers of stages, traced once: for stages that are only checked (`runtime.part.check_stages`).

A deep stage runs the same operators for every layer. What evaluates a part of a layer on a device's shards (`Run`) is
called by a key that says what it does: under `in_place`, what runs on devices is traced, every time; under `TracedOnce`
a second call by a key that it knows is one call in the stage's jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax

from autopar.runtime.one_program.collective_order import Order
from autopar.runtime.one_program.lowering import Held

Env: TypeAlias = "dict[int, Held]"
"""Value → its versions on this device."""
Run: TypeAlias = "Callable[[Order, Mapping[int, Held], Env], list[Any]]"
"""(the order of its collectives, what it reads, what learns what it makes) → its results."""
Once: TypeAlias = "Callable[[Hashable, Run, Order, Mapping[int, Held], Env], list[Any]]"
"""A `Run`'s key, it, and what it is called with."""


def in_place(key: Hashable, run: Run, order: Order, reads: Mapping[int, Held], env: Env) -> list[Any]:
    """Traces ``run`` where it is called."""
    return run(order, reads, env)


class TracedOnce:
    """Runs of equal keys are traced once, as long as shapes and versions of what they read are the same; their
    collectives are in an order of their own. What they learn of the versions of what they read stays with them."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, run: Run, order: Order, reads: Mapping[int, Held], env: Env) -> list[Any]:
        """As `in_place`."""

        def call(reads: Mapping[int, Held]) -> tuple[list[Any], Env]:
            made: Env = {}
            return run(order.body(), reads, made), made

        results, made = self._calls.setdefault(key, jax.jit(call))(dict(reads))
        env.update(made)
        return results


def _flat(held: Held) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    known = held.base, held.type, tuple(held.arrays), tuple(held.copies), held.constant, held.fill, held.dtype
    return tuple(held.arrays.values()), known


def _held(known: tuple[Any, ...], arrays: tuple[Any, ...]) -> Held:
    base, value_type, paths, copies, constant, fill, dtype = known
    return Held(base, value_type, dict(zip(paths, arrays, strict=True)), list(copies), constant, fill, dtype)


jax.tree_util.register_pytree_node(Held, _flat, _held)
