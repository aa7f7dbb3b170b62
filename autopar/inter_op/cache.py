"""Layouts of layers and whole pipelines on disk, by what they follow from: planning the same again solves nothing.

An entry is a JSON file (`ir.serde`) named after a digest of its key. Layouts follow from the layers' graphs, the mesh,
what is forbidden and the prices; a pipeline from the step in layers, the cluster and the user's options; both from the
version of autopar. Equal keys give equal entries, so that none is ever out of date; a folder may be deleted at any
time, and shared by processes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autopar.ir import files
from autopar.ir.errors import PlanFormatError, VerifyError
from autopar.ir.layer_sharding import LayerShardings
from autopar.ir.pipeline import Layout, PipelinePlan, ScalarExchange
from autopar.ir.plan import ArgPlan
from autopar.ir.serde import from_json, to_json

log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayouts:
    """``layouts[n]`` of each distinct layer; ``unit_s`` is the price of a byte at rate 1."""

    key: str
    unit_s: float
    layouts: tuple[tuple[Layout, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPipeline:
    """A planned pipeline, its fields as in `pipeline_search.Pipeline`; program and timeline are made again from
    them."""

    key: str
    plan: PipelinePlan
    exchange: ScalarExchange | None
    layouts: tuple[Layout, ...]
    shardings: LayerShardings
    inputs: tuple[ArgPlan, ...]
    outputs: tuple[ArgPlan, ...]
    simulated: tuple[tuple[str, int, float], ...]
    distinct: tuple[str, ...]


Entry = TypeVar("Entry", StoredLayouts, StoredPipeline)
NAMES: dict[type, str] = {StoredLayouts: "layouts", StoredPipeline: "pipeline"}


def key_of(parts: Sequence[object]) -> str:
    """BLAKE2b digest (32 hex digits) of the ``repr`` of each of ``parts``, in order."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(repr(part).encode())
        state.update(b"\0")
    return state.hexdigest()


def load(folder: Path, of: type[Entry], key: str) -> Entry | None:
    """The entry of class ``of`` and that key; None where there is none, or it cannot be read (a warning is logged, and
    the caller makes it again)."""
    path = folder / f"{NAMES[of]}-{key}.json"
    try:
        found = from_json(of, files.read_text(path))
        if isinstance(found, StoredPipeline):
            found.plan.verify()
            for sharding in found.shardings.distinct:
                sharding.verify()
    except FileNotFoundError:
        return None
    except (OSError, files.DamagedError, PlanFormatError, VerifyError) as error:
        log.warning("%s is damaged (%s); it is made again", path, error)
        return None
    return found if found.key == key else None


def store(folder: Path, entry: StoredLayouts | StoredPipeline) -> None:
    """Writes an entry, replacing a file there in one step. Where the folder cannot be written a warning is logged, and
    planning goes on."""
    path = folder / f"{NAMES[type(entry)]}-{entry.key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(path, to_json(entry))
    except OSError as error:
        log.warning("%s cannot be written (%s)", path, error)
