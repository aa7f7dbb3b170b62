"""Two traces of one loss, at the full batch and at a smaller one, must be the same list of equations."""

from __future__ import annotations

from autopar.ir.errors import MicrobatchError
from autopar.jax_compat import Jaxpr, JaxprEqn, source_line


def where(eqn: JaxprEqn) -> str:
    """An equation as messages name it: ``reduce_sum (model.py:12)``."""
    line = source_line(eqn)
    return f"{eqn.primitive.name} ({line})" if line else eqn.primitive.name


def check_same_equations(full: Jaxpr, small: Jaxpr) -> None:
    """Raises MicrobatchError unless both have the same primitives with results of the same ranks."""
    for a, b in zip(full.eqns, small.eqns, strict=False):
        if a.primitive is not b.primitive:
            raise different(a, b, f"is {b.primitive.name} instead")
        if [len(v.aval.shape) for v in a.outvars] != [len(v.aval.shape) for v in b.outvars]:
            raise different(a, b, "has results of another rank")
    if len(full.eqns) != len(small.eqns):
        longer = max(full.eqns, small.eqns, key=len)
        extra = longer[min(len(full.eqns), len(small.eqns))]
        raise different(extra, extra, "is there at one of both sizes only")


def different(a: JaxprEqn, b: JaxprEqn, how: str) -> MicrobatchError:
    """The error to raise where ``a``, of the full batch, and ``b`` are not the same equation; ``how``: in what."""
    return MicrobatchError(
        f"{where(a)}: the loss is another program at the microbatch's size than at the full batch's: this operation "
        f"{how}. Microbatches are exact only where both traces have the same equations: do not branch on the batch "
        "size, and take sizes from the arrays' shapes, not from constants."
    )
