"""What a driver hands to its workers of the user's own: by cloudpickle, refused here where they could not have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from autopar.ir.errors import AutoparError, TraceError


def pickled(what: Any, refusal: Callable[[Exception], AutoparError]) -> bytes:
    """``what`` for `ray.cloudpickle.loads`. Raises what ``refusal`` makes of the error where it cannot be pickled."""
    try:
        return cloudpickle.dumps(what)
    except Exception as error:
        raise refusal(error) from error


def check_nodes(tree: Any) -> None:
    """Raises TraceError for a pytree's class that the script itself defines: it would be pickled by value, and not how
    it was registered."""
    data = tree.node_data()
    if data is None:  # a leaf
        return
    kind = data[0]
    if kind.__module__ == "__main__" and not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise TraceError(
            f"{kind.__name__} is defined in the script that runs (__main__): workers would get it without what makes "
            "it a pytree. Define it in a module that the script imports, and that the workers' hosts have too"
        )
    for child in tree.children():
        check_nodes(child)
