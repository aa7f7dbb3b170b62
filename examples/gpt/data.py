"""Real text without a download: the source files of the Python that runs this, as bytes.

In: the standard library's folder. Out: two byte arrays (training and held-out, split by whole files) and random
windows of them as int32 batches, a pure function of seed and step number.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.gpt.model import Batch

HELD_OUT_EVERY = 16  # every 16th file is held out (of fewer files, the last)
MIN_BYTES = 200_000  # fewer means that this Python comes without sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """``train`` and ``held_out``: uint8[bytes]."""

    train: Any
    held_out: Any


def load_corpus(folder: Path | None = None) -> Corpus:
    """Top-level ``*.py`` of ``folder`` (default: this Python's standard library), in order of name.

    Raises FileNotFoundError where they are fewer than two or hold less than 200 kB, as in a Python whose library is
    packed in a zip file."""
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(folder.glob("*.py"))]
    total = sum(text.size for text in texts)
    if total < MIN_BYTES or len(texts) < 2:
        raise FileNotFoundError(
            f"{folder} holds {len(texts)} files *.py of {total} bytes together, expected at least two files and "
            f"{MIN_BYTES} bytes; try a Python that is "
            "installed with its standard library as files, or --text FOLDER"
        )
    every = min(HELD_OUT_EVERY, len(texts))
    train = [text for i, text in enumerate(texts) if i % every != every - 1]
    return Corpus(train=np.concatenate(train), held_out=np.concatenate(texts[every - 1 :: every]))


def sample_batch(text: Any, *, batch: int, seq: int, seed: int, step: int) -> Batch:
    """int32[batch, seq] windows of ``text`` (uint8[bytes]) at places drawn from (seed, step), and their successors."""
    starts = np.random.default_rng((seed, step)).integers(0, text.size - seq, size=batch)
    windows = text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return Batch(windows[:, :-1], windows[:, 1:])
