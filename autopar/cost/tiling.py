"""What arrays take of a TPU's memory: XLA stores them in tiles of 8 rows and 128 lanes.

Which dimensions of an array are rows and lanes is the compiler's choice. It mostly takes those that pad least, or
nearly (seen in programs for v5e, libtpu 0.0.42: f32[16,16,197,197] as 197 rows of 197 lanes, a table f32[1048576,8]
as 8 rows of 1048576 lanes); what is reshaped on the way may be stored in another shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

LANES, ROWS = 128, 8
_FEW = 2**18
"""Rows up to which what is scattered into has its last dimension as lanes (seen for 8 to 200 columns)."""


def padded(shape: Sequence[int]) -> float:
    """Times as many elements as an array of that shape has are stored, at least."""
    sizes = [n for n in shape if n > 1]
    if len(sizes) < 2:
        return _lanes(sizes[0]) if sizes else 1.0
    return min(_lanes(lanes) * _rows(rows) for lanes, rows in itertools.permutations(sizes, 2))


def scattered(shape: Sequence[int]) -> float:
    """`padded`, while rows are scattered into it or looked up in it."""
    if len(shape) < 2:
        return padded(shape)
    lanes = _lanes(max(1, shape[-1]))
    return max(lanes, padded(shape)) if math.prod(shape[:-1]) <= _FEW or lanes < 2 else padded(shape)


def _lanes(n: int) -> float:
    return -(-n // LANES) * LANES / n


def _rows(n: int) -> float:
    """Tiles of fewer rows are of 2 or 4."""
    tile = ROWS if n > ROWS // 2 else 2 if n == 2 else ROWS // 2
    return -(-n // tile) * tile / n
