"""A plan as one HTML file that needs nothing else: `page`.

In: a plan, and what else is known of it. Out: the text of the file. Its values stand in a block of JSON, from which a
script builds what is shown as text nodes, so that no name in a plan becomes markup. Canvas, zoom and scales are D3's
(Bostock, Ogievetsky, Heer, 2011; static/d3.min.js, BSD-3-Clause).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources

from autopar.ir.glance import glance
from autopar.ir.in_words import in_words
from autopar.ir.plan import Plan
from autopar.ir.plan_text import predicted_facts
from autopar.ir.serde import JsonData
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, seconds_text
from autopar.report.facts import page_facts


def page(plan: Plan, more: Mapping[str, JsonData] | None = None) -> str:
    """The file's text. ``more``: facts beside the plan's: ``live`` ([time, bytes] of one program), ``verified`` (rows:
    name, planned, compiled, how far apart, True where that is within its tolerance), ``measured`` ([name, timeline] of
    steps that ran, `facts.timeline_facts`)."""
    facts = {**page_facts(plan), **(more or {})}
    return static_text("page.html") % {
        "title": html.escape(f"{plan.name}: autopar"),
        "css": static_text("page.css"),
        "text": html.escape(glance(plan)),
        "facts": _in_script(json.dumps(facts, separators=(",", ":"), allow_nan=False)),
        "d3": static_text("d3.min.js"),
        "js": static_text("page.js"),
    }


def first_screen(plan: Plan) -> str:
    """A plan in brief as HTML without scripts, for notebooks: its words, its figures, where time and memory go."""
    fullest = max(plan.predictions.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    times = [(row.what, row.seconds, seconds_text(row.seconds)) for row in spending(plan).rows]
    held = [(kind, size, bytes_text(size)) for kind, size in fullest.held]
    rows = [("plan of", plan.name), ("that is", in_words(plan)), ("cluster", plan.cluster.name), *predicted_facts(plan)]
    cells = "".join(f"<tr><td>{html.escape(a.strip())}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    bars = [("time", times, plan.predictions.step_s), ("memory", held, fullest.peak_bytes)]
    return f"<table>{cells}</table>" + "".join(_bars(*each) for each in bars)


def _bars(heading: str, rows: Sequence[tuple[str, float, str]], whole: float) -> str:
    """A table with a bar for each part of a whole."""
    bar = '<div style="background:#5b9bd5;height:10px;width:{}px"></div>'
    lines = (
        f"<tr><td>{html.escape(what)}</td><td>{text}</td>"
        f"<td>{bar.format(round(200 * min(1.0, size / whole)) if whole else 0)}</td></tr>"
        for what, size, text in rows
    )
    return f"<table><tr><th>{heading}</th></tr>{''.join(lines)}</table>"


def _in_script(text: str) -> str:
    """JSON that nothing in it ends, or opens a comment of, the element that it stands in."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")


def static_text(name: str) -> str:
    """A file of ``static/``."""
    return resources.files("autopar.report").joinpath("static", name).read_text(encoding="utf-8")
