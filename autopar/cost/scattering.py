"""Which reduce-scatters XLA for TPUs leaves as they are; of others it makes an all-reduce and a slice, twice the bytes.

In: the shape of what one device gets. Found by compiling some two hundred for v5e (libtpu 0.0.42), the devices' parts
as a dimension of their own in front (`runtime.one_program.reductions`): as [parts, rows, 128 lanes] all stay that give
a device at least two tiles of 8 rows. Others need no such copy (`stays_as_it_is`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LANES = 128
_TILES = 2 * 8 * LANES
"""Elements of two tiles."""


def stays_scattered(part: Sequence[int]) -> bool:
    """True where a reduce-scatter that gives each device a part of that shape stays one."""
    return stays_as_it_is(part) or stays_in_rows(part)


def stays_in_rows(part: Sequence[int]) -> bool:
    """True where it does with its parts as rows of `LANES` elements."""
    count = math.prod(part)
    return count >= _TILES and count % LANES == 0


def stays_as_it_is(part: Sequence[int]) -> bool:
    """True where it does whatever the layout: parts of two or three dimensions, the first of 16 and more, the second
    not of 8."""
    if not 2 <= len(part) <= 3 or part[0] < 16 or math.prod(part) < _TILES:
        return False
    return len(part) == 2 or (part[1] != 8 and part[2] >= 16)
