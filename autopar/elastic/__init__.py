"""Training that outlives its workers: `run_elastic` (`loop`), and how each start plans and compiles (`start`)."""

from __future__ import annotations

from autopar.elastic.loop import run_elastic

__all__ = ["run_elastic"]
