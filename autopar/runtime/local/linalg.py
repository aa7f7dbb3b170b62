"""Local lowerings of linear algebra and fft: none. Only batch dimensions and right-hand sides are split and no
parameter holds their sizes, so they bind unchanged on local operands."""

from __future__ import annotations

from autopar.runtime.local.context import LocalRule

LOCAL: dict[str, LocalRule] = {}
