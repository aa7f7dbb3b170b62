"""Printing of results: colour on a terminal, lines cut at its width; the bare text through a pipe."""

from __future__ import annotations

import os
import sys

_STYLES = ((r"^[^\s].*$", "bold"), (r"█+", "cyan"), (r"\[[^\[\]]*\]", "green"), (r"does not fit|missed", "red"))
"""Pattern of a part of a line → its style on a terminal: headings, bars, shardings, what is wrong."""


def show(text: str) -> None:
    """Prints sectioned text (a heading in column 0, rows indented) on stdout."""
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    if not sys.stdout.isatty():
        print(text.removesuffix("\n"))
        return
    from rich.console import Console  # here: a pipe needs neither
    from rich.text import Text

    console = Console(highlight=False)
    for line in text.splitlines():
        styled = Text(line, overflow="ellipsis", no_wrap=True)
        for pattern, style in _STYLES:
            styled.highlight_regex(pattern, style)
        console.print(styled)


def saved(path: str | os.PathLike[str]) -> None:
    """Says on stderr that a file was written."""
    print(f"saved {path}", file=sys.stderr)
