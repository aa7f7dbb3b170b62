"""A train step that somebody wrote with a package, and the shapes that it is tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optax

import autopar


@dataclass(frozen=True, kw_only=True)
class Made:
    """``step(state, *rest)`` returns the new state, then whatever it likes; it is called twice. ``splits``: True where
    its gradient is `autopar.value_and_grad`'s, and ``rest`` the batch."""

    step: Callable[..., tuple[Any, ...]]
    state: Any
    rest: tuple[Any, ...] = ()
    splits: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """``make()`` builds the step, under ``float64`` with 64-bit numbers.

    Attributes:
        packages: distributions that it is written with.
        float64: True where the step amplifies rounding: adaptive step sizes, line searches, accepted proposals, Adam on
            gradients that are zero but for rounding.
        rounding: of the least precise dtype that it computes in, where that is below float32's.
        refused: what the error at plan time says, of a step that has no plan.
        options: of `autopar.parallelize`.
    """

    make: Callable[[], Made]
    packages: tuple[str, ...]
    float64: bool = False
    rounding: float = 0.0
    refused: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def close(self) -> dict[str, float]:
        """How close results are to be: see `tests.compare.assert_close`."""
        if self.float64:
            return {"tolerance": 1e-9, "least_norm": 1.0}
        return {"tolerance": max(2e-5, self.rounding), "least_norm": 1e-2}


def steps(
    *packages: str, float64: bool = False, rounding: float = 0.0, refused: str = "", **options: Any
) -> Callable[..., list[Step]]:
    """``steps("flax", "optax")(mlp, cnn)``: a `Step` for each."""
    known = {"packages": packages, "float64": float64, "rounding": rounding, "refused": refused, "options": options}
    return lambda *makes: [Step(make=make, **known) for make in makes]


def trained(
    loss: Callable[..., Any],
    params: Any,
    *batch: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> Made:
    """The usual loop's body: gradients of ``loss(params, *batch)``, updated by an optax optimizer."""
    optimizer = optimizer or optax.adamw(1e-3)

    def step(state: Any, *batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        value, grads = autopar.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return Made(step=step, state=(params, optimizer.init(params)), rest=batch, splits=True)
