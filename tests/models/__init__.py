"""Small models for tests: ``build(name, dtype)`` → `Model`; ``MODELS`` and ``UNEVEN`` list the names.

For ``float64`` call under ``jax.enable_x64(True)``.
"""

from __future__ import annotations

from tests.models import libraries, plain, vision
from tests.models.base import Model

LARGE = plain.LARGE | vision.LARGE | libraries.LARGE
BUILDERS = plain.MODELS | vision.MODELS | libraries.MODELS | plain.UNEVEN | vision.UNEVEN
MODELS = (*plain.MODELS, *vision.MODELS, *libraries.MODELS)
"""Sizes that 8 devices divide."""
UNEVEN = (*plain.UNEVEN, *vision.UNEVEN)
"""The same kinds of model with sizes that do not divide: batch 6, hidden 30, vocabulary 53."""


def build(name: str, dtype: str = "float32", *, large: bool = False) -> Model:
    """The model ``name`` with float parameters of ``dtype``; ``large``: in sizes where values outweigh a
    compiler's fixed costs."""
    return (LARGE if large else BUILDERS)[name](dtype)
