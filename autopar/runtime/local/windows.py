"""Local lowerings of the windowed operators: none. No parameter holds a shape, and their rules split only
dimensions whose windows lie within one shard, so they bind unchanged on local operands."""

from __future__ import annotations

from autopar.runtime.local.context import LocalRule

LOCAL: dict[str, LocalRule] = {}
