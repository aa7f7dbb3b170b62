"""Numbers on the command line, as argparse takes them: each raises ArgumentTypeError for any other text."""

from __future__ import annotations

import argparse
import re


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return number


def gigabytes(text: str) -> int:
    """Bytes of so many gigabytes."""
    return round(positive(text) * 1e9)


def whole(text: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
