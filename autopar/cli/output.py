"""Printing of results: headings in bold on a terminal, the bare text through a pipe."""

from __future__ import annotations

import sys


def show(text: str) -> None:
    """Prints sectioned text (a heading in column 0, rows indented) on stdout."""
    bold = sys.stdout.isatty()
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    for line in text.splitlines():
        heading = bool(line) and not line[0].isspace()
        print(f"\x1b[1m{line}\x1b[0m" if bold and heading else line)
