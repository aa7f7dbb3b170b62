"""Answers as text: `explained_text`, `changes_text`."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.explain.alternatives import Alternative, Explained, Way
from autopar.explain.posed import Refused
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

PARTS = 3
"""Operators and collectives that are named of those through which a way adds time."""

BELOW = "    what takes less was not found: searches end within 0.5 %, and layers of stages have a few layouts each"

_REFUSED: dict[Refused, str] = {
    "forbidden": "it needs what is forbidden or pinned otherwise",
    "over the limit": "none that has it fits the memory",
    "not found": "none that has it was found that fits",
}


def explained_text(answers: Sequence[Explained], more: int = 0) -> str:
    """All that was found out about what a name means; ``more`` have it, too, and were not asked about."""
    lines: list[str] = []
    for answer in answers:
        lines += [*_head(answer), *_alternatives(answer), ""]
    if more:
        lines.append(f"{more} more are called so: --all shows them, or ask for one by its line")
    return "\n".join(lines).rstrip() + "\n"


def _head(answer: Explained) -> list[str]:
    named = answer.named
    alike = f", {named.count} alike" if named.count > 1 else ""
    lines = [f"{named.title}{', ' + named.phase if named.phase else ''}{alike}", f"  is        {_way(answer.way)}"]
    if answer.follows:
        lines.append(f"  follows   {answer.follows}: its way decides this one's")
    if not named.phase:
        moved = seconds_text(answer.made_s)
        lines.append(f"  costs     {moved} to bring it to those who read it, {_of(answer)}")
    else:
        own, brought, made = map(seconds_text, (answer.compute_s, answer.brought_s, answer.made_s))
        lines.append(
            f"  costs     {own} to compute, {brought} to bring operands, {made} to reshard results, {_of(answer)}"
        )
    return lines


def _of(answer: Explained) -> str:
    """What seconds are a part of."""
    what, whole = answer.named.posed.what, seconds_text(answer.step_s)
    if not what:
        return f"of the {whole} of a step"
    return f"of the {whole} of a step that {'each of ' if what.startswith('layers') else ''}{what} takes"


def _way(way: Way) -> str:
    split = " ".join(f"{factor}:{','.join(axes)}" for factor, axes in way.split)
    specs = " ".join(map(str, way.operands))
    results = " ".join(map(str, way.results))
    return "  ".join(part for part in (split, f"{specs} -> {results}" if specs else results) if part)


def _alternatives(answer: Explained) -> list[str]:
    if answer.ways == 1:
        return [f"  there is no other way to {'run' if answer.named.phase else 'hold'} it, as it was asked for"]
    shown = len(answer.alternatives)
    if not shown:
        return [f"  {answer.ways - 1} other ways"]
    some = "all" if shown == answer.ways - 1 else f"the nearest {shown} of"
    which = "the only other way" if answer.ways == 2 else f"{some} {answer.ways - 1} other ways, each"
    lines = [f"  {which} in the best plan found that has it"]
    rows = [["adds", "", "way", "peak", "through"]]
    for other in answer.alternatives:
        rows.append([*_adds(other, answer), _way(other.way), *_through(other)])
    lines += table(rows, right=(0, 1, 3), indent="    ")
    if any(other.adds_s is not None and other.adds_s < 0 for other in answer.alternatives):
        lines.append(BELOW)
    return lines


def _adds(other: Alternative, answer: Explained) -> tuple[str, str]:
    if other.adds_s is None:
        return "no plan", ""
    sign = "+" if other.adds_s >= 0 else "-"
    return sign + seconds_text(abs(other.adds_s)), percent_text(other.adds_s, answer.step_s)


def _through(other: Alternative) -> tuple[str, str]:
    if other.adds_s is None:
        return "", _REFUSED[other.refused or "not found"]
    return bytes_text(other.peak_bytes), changes_text(other.through)


def changes_text(changes: Sequence[tuple[str, float]], most: int = PARTS) -> str:
    """``all-gather over y for dot_general (model.py:88) +1.2 ms; …``."""
    said = [f"{what} {'+' if s >= 0 else '-'}{seconds_text(abs(s))}" for what, s in changes[:most]]
    return "; ".join(said) + (f"; and {len(changes) - most} more" if len(changes) > most else "")
