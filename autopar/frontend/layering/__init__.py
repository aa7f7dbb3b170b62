"""A train step → layers: `layered`."""

from autopar.frontend.layering.layers import Layered, layered

__all__ = ["Layered", "layered"]
