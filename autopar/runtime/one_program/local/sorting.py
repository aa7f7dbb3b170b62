"""Local lowerings of sort and top_k: none. No parameter holds a shape, so they bind unchanged on local operands."""

from __future__ import annotations

from autopar.runtime.one_program.local.context import LocalRule

LOCAL: dict[str, LocalRule] = {}
