"""Files of plans of either kind: `Plan` (one mesh) and `PipelineFile` (stages).

A pipeline plan's file says ``"kind": "pipeline"`` at its top level. `load_any` reads what is there;
`pipeline_digest` is what equal inputs give equally: everything but ``provenance`` and the number of planning processes.
"""

from __future__ import annotations

import os

from autopar.ir.errors import ClusterError, PlanFormatError, VerifyError
from autopar.ir.pipeline_file import PipelineFile
from autopar.ir.plan import SCHEMA_VERSION, Plan
from autopar.ir.serde import (
    JsonData,
    check_version,
    decode,
    digest_without,
    encode,
    file_text,
    is_pipeline,
    parse,
    plan_from_data,
    read_text,
    replace_file,
)


def pipeline_digest(plan: PipelineFile) -> str:
    """SHA-256 (hex) of the plan's canonical JSON without its provenance: equal inputs give equal digests."""
    return digest_without(plan, "provenance", "config.options.workers")


def save_pipeline(plan: PipelineFile, path: str | os.PathLike[str]) -> None:
    """Writes ``plan`` to ``path``, replacing a file there in one step. Raises PlanFormatError where the file
    cannot be written; what was there before then stays."""
    replace_file(path, file_text(encode(plan)))


def load_pipeline(path: str | os.PathLike[str]) -> PipelineFile:
    """The pipeline plan in ``path``. Raises PlanFormatError where the file cannot be read, is damaged, holds a plan of
    one mesh, is of another schema version, or contradicts itself."""
    plan = load_any(path)
    if isinstance(plan, Plan):
        raise PlanFormatError(
            f"{os.fspath(path)}: holds a plan of one mesh, without stages. For a pipeline: autopar plan --pipeline"
        )
    return plan


def load_any(path: str | os.PathLike[str]) -> Plan | PipelineFile:
    """The plan in ``path``, of either kind. Raises PlanFormatError where the file cannot be read, is damaged, is of
    another schema version, or contradicts itself; the message names the file and the place."""
    try:
        data = parse(read_text(path))
        return _pipeline_from_data(data) if is_pipeline(data) else plan_from_data(data)
    except PlanFormatError as fault:
        raise PlanFormatError(f"{os.fspath(path)}: {fault}") from None


def _pipeline_from_data(data: JsonData) -> PipelineFile:
    check_version(data, SCHEMA_VERSION)
    plan = decode(PipelineFile, data)
    try:
        plan.verify()
    except (VerifyError, ClusterError) as fault:
        raise PlanFormatError(f"contradicts itself: {fault}. Was it edited by hand? Plan again") from None
    return plan
