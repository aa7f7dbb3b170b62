"""A train step → layers: `layered`."""

from autopar.layering.layers import Layered, layered

__all__ = ["Layered", "layered"]
