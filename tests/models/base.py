"""What a test model is, and the train step that most of them share.

In: a loss function with its parameters and batch. Out: a `Model`: a step, concrete arguments, and the loss with
gradients alone. State is ``{"params": …, "opt": …}``, donated; the second argument is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

import autopar

Array = Any
Tree = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """``step(*args) -> (new state, loss or (loss, metrics))``; ``kwargs`` go to `autopar.parallelize`.

    ``loss_and_grad(*grad_args) -> (loss or (loss, aux), gradients)`` is the step without its optimizer,
    ``loss(*grad_args)`` without gradients.
    ``microbatches`` lists the numbers of microbatches that the batch can be cut into.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=lambda: {"donate_argnums": (0,)})
    loss_and_grad: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    microbatches: tuple[int, ...] = (1, 4)

    @property
    def grad_args(self) -> tuple[Any, ...]:
        """Arguments of ``loss_and_grad``."""
        return (self.args[0]["params"], *self.args[1:])

    def next_args(self, out: Any) -> tuple[Any, ...]:
        """Arguments of the step after one that returned ``out``."""
        return (out[0], *self.args[1:])

    def fresh_args(self) -> tuple[Any, ...]:
        """Copies of the arguments, so that donation cannot take ``args`` away."""
        return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, self.args)


def adamw(learning_rate: float = 1e-2) -> optax.GradientTransformation:
    """Adam with weight decay behind a clip by the global norm. ``eps`` keeps gradients that are rounding noise
    (those of the part of a bias that softmax ignores) from becoming whole steps."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, eps=1e-6))


def train_model(
    name: str,
    loss_fn: Callable[..., Any],
    params: Tree,
    *inputs: Any,
    tx: optax.GradientTransformation | None = None,
    has_aux: bool = False,
    microbatches: tuple[int, ...] = (1, 4),
) -> Model:
    """The Model whose step is ``loss_fn(params, *inputs)`` (with ``has_aux``: → loss, aux), its gradient, and
    ``tx`` (Adam unless given)."""
    tx = optax.adam(1e-2, eps=1e-6) if tx is None else tx

    def loss_and_grad(params: Tree, *inputs: Any) -> Any:
        return autopar.value_and_grad(loss_fn, has_aux=has_aux)(params, *inputs)

    def step(state: Tree, *inputs: Any) -> Any:
        loss, grads = loss_and_grad(state["params"], *inputs)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = jax.tree.map(jax.numpy.asarray, params)
    state = {"params": params, "opt": jax.jit(tx.init)(params)}
    inputs = jax.tree.map(lambda x: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x, inputs)
    return Model(
        name=name, step=step, args=(state, *inputs), loss_and_grad=loss_and_grad, loss=loss_fn,
        microbatches=microbatches,
    )  # fmt: skip


class Init:
    """Seeded numpy initialisers of one dtype."""

    def __init__(self, dtype: str, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def normal(self, *shape: int, scale: float | None = None) -> Array:
        """Gaussian; scale defaults to 1/sqrt of the product of all dimensions but the last."""
        scale = float(np.prod(shape[:-1])) ** -0.5 if scale is None else scale
        return (self.rng.standard_normal(shape) * scale).astype(self.dtype)

    def zeros(self, *shape: int) -> Array:
        """Zeros."""
        return np.zeros(shape, self.dtype)

    def ones(self, *shape: int) -> Array:
        """Ones."""
        return np.ones(shape, self.dtype)

    def ints(self, high: int, *shape: int) -> Array:
        """int32 in [0, high)."""
        return self.rng.integers(0, high, shape, dtype=np.int32)
