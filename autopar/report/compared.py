"""Two plans beside each other as one HTML page, without a script: `compared_page`.

In: plans. Out: the text of the file: what each is, its figures, where the time and the memory of both go on one scale,
and the tables of `ir.diff.differences`, as `autopar diff` prints them.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from autopar.ir.diff import Difference, differences
from autopar.ir.in_words import in_words
from autopar.ir.plan import Plan
from autopar.ir.plan_text import predicted_facts
from autopar.ir.pretty import cluster_text
from autopar.ir.serde import digest
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, seconds_text
from autopar.report.page import static_text


def compared_page(a: Plan, b: Plan, names: tuple[str, str] = ("a", "b")) -> str:
    """The file's text. ``names``: what the plans are called there, their files' names say."""
    found = differences(a, b)
    parts = [_head((a, b), names), *_bars((a, b), names)]
    parts += [_table(each) for each in found] or ["<p>The plans are equal, but for the time that planning took.</p>"]
    return static_text("compared.html") % {
        "title": html.escape(f"{names[0]} → {names[1]}: autopar"),
        "css": static_text("page.css"),
        "name": html.escape(f"{names[0]} → {names[1]}"),
        "words": html.escape(f"{in_words(a)} → {in_words(b)}"),
        "body": "\n".join(parts),
    }


def _head(plans: tuple[Plan, Plan], names: tuple[str, str]) -> str:
    """Figures of both, a row each."""
    rows: dict[str, list[str]] = {}
    for at, plan in enumerate(plans):
        told = [("plan of", plan.name), ("parallelism", in_words(plan)), ("cluster", cluster_text(plan.cluster))]
        told += [(name.strip(), text) for name, text in predicted_facts(plan)]
        for name, text in [*told, ("digest", digest(plan)[:16])]:
            cells = rows.setdefault(name, ["", ""])
            cells[at] = f"{cells[at]}; {text}" if cells[at] else text
    lines = (
        f"<tr{' class=picked' if old != new else ''}>{_cells((name, old, new))}</tr>"
        for name, (old, new) in rows.items()
    )
    titles = _cells(("", *names), "th")
    return f'<section><table class="both"><tr>{titles}</tr>{"".join(lines)}</table></section>'


def _bars(plans: tuple[Plan, Plan], names: tuple[str, str]) -> list[str]:
    """Where time and memory of both go."""
    time = [{row.what: row.seconds for row in spending(plan).rows} for plan in plans]
    fullest = (max(plan.predictions.workers, key=lambda w: w.peak_bytes / w.limit_bytes) for plan in plans)
    held = [{kind: float(size) for kind, size in worker.held} for worker in fullest]
    return [_pairs("Time of a step", time, names, seconds_text), _pairs("Memory at the peak", held, names, _bytes)]


def _bytes(size: float) -> str:
    return bytes_text(round(size))


def _pairs(
    heading: str, found: Sequence[dict[str, float]], names: tuple[str, str], text: Callable[[float], str]
) -> str:
    """A bar for each plan of each kind, all on one scale."""
    kinds = dict.fromkeys((*found[0], *found[1]))
    whole = max((size for of in found for size in of.values()), default=0.0) or 1.0
    rows: list[str] = []
    for kind in kinds:
        for at, of in enumerate(found):
            size = of.get(kind, 0.0)
            texts = kind if at == 0 else "", text(size), ""
            spans = "".join(f"<span>{html.escape(each)}</span>" for each in texts)
            rows.append(f'<div class="bar">{spans}<i class="of{at}" style="width:{100 * size / whole:.2f}%"></i></div>')
    legend = "".join(f'<span><i class="of{at}"></i>{html.escape(name)}</span>' for at, name in enumerate(names))
    return f'<section><h2>{heading}</h2><p class="legend">{legend}</p>{"".join(rows)}</section>'


def _table(found: Difference) -> str:
    heading = f"<h2>{html.escape(found.heading)}</h2>"
    titles = f"<tr>{_cells(found.titles, 'th', found.right)}</tr>" if found.titles else ""
    rows = "".join(f"<tr>{_cells(row, 'td', found.right)}</tr>" for row in found.rows)
    return f"<section>{heading}<table>{titles}{rows}</table></section>" if rows else f"<section>{heading}</section>"


def _cells(texts: Sequence[str], tag: str = "td", right: Sequence[int] = ()) -> str:
    sides = (' class="n"' if at in right else "" for at in range(len(texts)))
    return "".join(f"<{tag}{side}>{html.escape(text)}</{tag}>" for side, text in zip(sides, texts, strict=True))
