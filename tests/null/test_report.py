"""The page of a plan: its figures are the plan's, nothing in a plan becomes markup, and people can use it.

The tests of use drive a Chromium that is there; they are skipped where there is none.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.inter_op.program.timeline import chrome_trace, timelines_of
from autopar.ir.diff import differences
from autopar.ir.graph import TensorType
from autopar.ir.in_words import in_words
from autopar.ir.plan import Plan
from autopar.ir.plan_text import predicted_facts
from autopar.ir.serde import save_plan
from autopar.ir.spending import spending
from autopar.ir.text import bytes_text, seconds_text
from autopar.report.compared import compared_page
from autopar.report.facts import MEMORY_POINTS, page_facts, simulated, timeline_facts
from autopar.report.page import page
from autopar.step.step_plan import StepPlan
from benchmarks.models import gpt
from tests.clusters import SLOW_8
from tests.null.handmade import handmade_plan
from tests.null.pipeline_files import handmade_pipeline
from tests.null.test_imports import run_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("report")]  # they share plans and a browser
GPT = {"layers": 2, "hidden": 128, "heads": 4, "seq": 64, "vocab": 256, "batch": 32}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@functools.cache
def plans() -> dict[str, Plan]:
    step, args = gpt(**GPT)

    def planned(**options: Any) -> Plan:
        return autopar.parallelize(step, donate_argnums=0, cluster=SLOW_8, **options).plan(*args).data

    return {
        "program": planned(mesh=(2, 4), num_microbatches=1),
        "pipeline": planned(stages=2, num_microbatches=4, submeshes=["1x4"], workers=1),
    }


# --- the facts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["program", "pipeline"])
def test_the_page_has_the_plans_figures(name: str) -> None:
    plan = plans()[name]
    facts = page_facts(plan)
    assert (facts["step_s"], facts["peak_bytes"]) == (plan.predictions.step_s, plan.predictions.peak_memory_bytes)
    assert facts["words"] == in_words(plan)
    assert [(what, s) for what, s, *_ in facts["time"]] == [(r.what, r.seconds) for r in spending(plan).rows]  # type: ignore[union-attr]
    json.dumps(facts, allow_nan=False)
    total = _seconds(facts["model"])
    shardings = (
        [plan.sharding] if name == "program" else [plan.pipelined.shardings[x.sharding] for x in plan.pipelined.layers]
    )
    assert total == pytest.approx(sum(o.time_s for sharding in shardings for o in sharding.operators))


def _seconds(node: Any) -> float:
    """Of a tree of the model, counts included."""
    if "children" not in node:
        return float(node["s"])
    return node["count"] * sum(map(_seconds, node["children"]))


def test_lines_read_each_other() -> None:
    model: Any = page_facts(plans()["program"])["model"]
    lines = {(phase["name"], line["name"]) for phase in model["children"] for line in phase["children"]}
    assert model["reads"] and all({(p, a), (q, b)} <= lines for p, a, q, b in model["reads"])


def test_the_timeline_is_the_simulated_one() -> None:
    plan = plans()["pipeline"]
    timeline = simulated(plan.pipelined, plan)
    shown: Any = page_facts(plan)["timeline"]
    assert shown["makespan_s"] == timeline.makespan_s == pytest.approx(plan.predictions.step_s)
    for events, worker in zip(shown["workers"], timeline.workers, strict=True):
        assert [shown["names"][what] for _, _, what in events] == [event.what for event in worker.events]
    for curve, worker in zip(shown["memory"], timeline.workers, strict=True):
        assert len(curve) <= MEMORY_POINTS and max(b for _, b in curve) == max(b for _, b in worker.memory)


# --- the file ------------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Tags()
    parser.feed(text)
    return parser.found


def test_one_file_without_network() -> None:
    text = page(handmade_plan())
    attributes = [name for _, attrs in _tags(text) for name in attrs]
    assert not {"src", "srcset", "background"} & set(attributes)
    assert not re.search(r"@import|url\(", text.partition("</style>")[0])
    assert [tag for tag, _ in _tags(text)] == [tag for tag, _ in _tags(page(handmade_pipeline()))]


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--\u2028"


def hostile(value: Any) -> Any:
    """The same with markup in every string that is free text."""
    if isinstance(value, TensorType):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        free = {"name", "path", "source", "where", "what", "why", "primitive", "notes", "kind", "assumed"}
        changes: dict[str, Any] = {}
        for field in fields(value):
            old = getattr(value, field.name)
            if field.name in free and isinstance(old, str) and field.name != "kind":
                changes[field.name] = old + HOSTILE
            elif field.name == "notes":
                changes[field.name] = tuple(note + HOSTILE for note in old)
            elif field.name in (
                "body",
                "sharding",
                "operators",
                "collectives",
                "replicated",
                "assumptions",
                "inputs",
                "outputs",
                "provenance",
                "considered",
                "predictions",
                "workers",
                "live",
                "layers",
                "shardings",
                "recompute",
            ):
                changes[field.name] = hostile(old)
        return replace(value, **changes)
    return tuple(map(hostile, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("make", [handmade_plan, handmade_pipeline])
def test_nothing_in_a_plan_becomes_markup(make: Any) -> None:
    bad = hostile(make())
    assert bad.name.endswith(HOSTILE)
    text = page(bad)
    assert _tags(text) == _tags(page(make())), "the same elements as of a harmless plan"
    assert text.count("</script") == 3
    facts = re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)
    assert facts is not None and json.loads(facts[1])["name"] == bad.name


@pytest.mark.parametrize("make", [handmade_plan, handmade_pipeline])
def test_notebooks_show_the_first_screen(make: Any) -> None:
    plan = make()
    text = StepPlan(plan)._repr_html_()
    assert in_words(plan) in text and seconds_text(plan.predictions.step_s) in text
    assert not {tag for tag, _ in _tags(text)} & {"script", "style", "link"}
    assert _tags(StepPlan(hostile(plan))._repr_html_()) == _tags(text)


def test_a_step_shows_its_last_plan() -> None:
    step, args = gpt(**GPT)
    planned = autopar.parallelize(step, donate_argnums=0, cluster=SLOW_8, mesh=(2, 4), num_microbatches=1)
    assert "not planned yet" in planned._repr_html_()
    plan = planned.plan(*args)
    assert planned._repr_html_() == plan._repr_html_()


# --- the command line ----------------------------------------------------------------------------------------------


def test_report_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out, verified = (str(tmp_path / name) for name in ("plan.json", "report.html", "verify.json"))
    save_plan(plans()["program"], plan)
    Path(verified).write_text(json.dumps({
        "figures": [{"name": "peak memory", "unit": "bytes", "planned": 90.0, "compiled": 100.0, "agrees": True}],
        "collectives": [
            {"kind": "all-gather", "axes": ["x"], "planned_bytes": 1, "compiled_bytes": 2, "agrees": False}
        ],
    }))  # fmt: skip
    assert main(["report", plan, "-o", out, "--verified", verified]) == 0
    assert f"saved {out}" in capsys.readouterr().err
    found = re.search(r'id="facts">(.*?)</script>', Path(out).read_text(), re.DOTALL)
    assert found is not None
    facts = json.loads(found[1])
    assert facts["verified"] == [
        ["peak memory", "90 bytes", "100 bytes", "-10.0 %", True], ["all-gather over x", "1 B", "2 B", "", False]
    ]  # fmt: skip
    assert max(b for _, b in facts["live"]) == plans()["program"].predictions.peak_memory_bytes
    for bad in ("{}", "[]", "no json", '{"figures": [{}], "collectives": []}'):
        Path(verified).write_text(bad)
        assert main(["report", plan, "-o", out, "--verified", verified]) == 2
        assert "is not what `autopar verify --json` writes" in capsys.readouterr().err
    assert main(["report", plan, "-o", str(tmp_path / "no" / "report.html")]) == 2
    assert "autopar: error: cannot write" in capsys.readouterr().err


def test_measured_steps_stand_beside_the_simulated_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = plans()["pipeline"]
    timeline = simulated(pipeline.pipelined, pipeline)
    both = {"simulated": timeline, "step 0": timeline}
    again = timelines_of(chrome_trace(both))
    assert list(again) == list(both)
    for mine in again.values():
        assert mine.makespan_s == pytest.approx(timeline.makespan_s)
        for got, worker in zip(mine.workers, timeline.workers, strict=True):
            assert [e.what for e in got.events] == [e.what for e in worker.events]
            assert got.busy_s == pytest.approx(worker.busy_s)
    assert {(x.source, x.target) for x in again["step 0"].links} == {(x.source, x.target) for x in timeline.links}
    plan, other, out, trace = (str(tmp_path / name) for name in ("plan.json", "one.json", "report.html", "trace.json"))
    save_plan(pipeline, plan)
    save_plan(plans()["program"], other)
    Path(trace).write_text(json.dumps(chrome_trace(both)))
    assert main(["report", plan, "-o", out, "--measured", trace]) == 0
    found = re.search(r'id="facts">(.*?)</script>', Path(out).read_text(), re.DOTALL)
    assert found is not None and [name for name, _ in json.loads(found[1])["measured"]] == ["step 0"]
    assert main(["report", other, "-o", out, "--measured", trace]) == 2
    assert "is no trace of steps of this plan, of stages on 1 workers" in capsys.readouterr().err
    for bad in ("{}", "[]", "no json", '{"traceEvents": []}', '{"traceEvents": 3}'):
        Path(trace).write_text(bad)
        assert main(["report", plan, "-o", out, "--measured", trace]) == 2
        assert "autopar: error: --measured" in capsys.readouterr().err


@needs_browser
def test_a_measured_timeline_is_chosen(browser: Any, tmp_path: Path) -> None:
    plan = plans()["pipeline"]
    facts = timeline_facts(simulated(plan.pipelined, plan))
    slower = {**facts, "makespan_s": 2 * plan.predictions.step_s, "text": "twice"}
    tab = opened(browser, tmp_path / "report.html", page(plan, {"measured": [["step 0", slower]]}))
    assert float(tab.get_attribute("[data-makespan]", "data-makespan")) == pytest.approx(plan.predictions.step_s)
    tab.select_option("#which", label="step 0")
    assert "twice" in tab.inner_text("#timeline .controls")
    assert float(tab.get_attribute("[data-makespan]", "data-makespan")) == pytest.approx(2 * plan.predictions.step_s)
    assert tab.wrong == []


def test_it_runs_where_jax_cannot_be_imported(tmp_path: Path) -> None:
    for name, plan in plans().items():
        save_plan(plan, tmp_path / f"{name}.json")
        words = ["report", str(tmp_path / f"{name}.json"), "-o", str(tmp_path / f"{name}.html")]
        done = run_python(f"from autopar.cli import main\nsys.exit(main({words!r}))", without=("jax", "jaxlib"))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"{name}.html").stat().st_size < 5e6


# --- two plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("program", "pipeline"), ("pipeline", "program"), ("program", "program")])
def test_two_plans_beside_each_other(pair: tuple[str, str], tmp_path: Path) -> None:
    a, b = (plans()[name] for name in pair)
    text = compared_page(a, b)
    for plan in (a, b):
        told = [*predicted_facts(plan), *(("", seconds_text(row.seconds)) for row in spending(plan).rows)]
        assert [said for _, said in told if html.escape(said) not in text] == []
    for found in differences(a, b):
        assert f"<h2>{html.escape(found.heading)}</h2>" in text
        assert all(f">{html.escape(cell)}</td>" in text for row in found.rows for cell in row)
    assert ("The plans are equal" in text) == (pair[0] == pair[1])
    paths = []
    for name in pair:
        paths.append(str(tmp_path / f"{name}.json"))
        save_plan(plans()[name], paths[-1])
    words = ["diff", *paths, "-o", str(tmp_path / "diff.html")]
    done = run_python(f"from autopar.cli import main\nsys.exit(main({words!r}))", without=("jax", "jaxlib"))
    assert (done.returncode, done.stdout) == (int(pair[0] != pair[1]), ""), done.stderr
    assert (tmp_path / "diff.html").read_text() == compared_page(a, b, (paths[0], paths[1]))


@pytest.mark.parametrize("make", [handmade_plan, handmade_pipeline])
def test_nothing_in_two_plans_becomes_markup(make: Any) -> None:
    text = compared_page(replace(make(), name="other"), hostile(make()), ("a", HOSTILE))
    assert not {tag for tag, _ in _tags(text)} & {"script", "img", "link"}
    assert html.escape(HOSTILE) in text


@needs_browser
def test_two_plans_in_a_browser(browser: Any, tmp_path: Path) -> None:
    a, b = plans()["program"], plans()["pipeline"]
    (tmp_path / "diff.html").write_text(compared_page(a, b), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="dark")
    tab.goto((tmp_path / "diff.html").as_uri())
    shown = tab.inner_text("main")
    assert all(seconds_text(plan.predictions.step_s) in shown for plan in (a, b))
    longest = tab.evaluate("Math.max(...[...document.querySelectorAll('.bar i')].map(e => e.offsetWidth))")
    bars = tab.evaluate(
        "[...document.querySelectorAll('.bar')].map(e => [e.children[1].innerText, e.children[3].offsetWidth])"
    )
    most = max(row.seconds for plan in (a, b) for row in spending(plan).rows)
    assert longest > 200 and [seconds_text(most), longest] in bars
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1300


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, path: Path, text: str, **options: Any) -> Any:
    """A page that shows ``text``; what goes wrong in it fails the test."""
    path.write_text(text, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
    tab.wrong = []
    tab.on("pageerror", lambda error: tab.wrong.append(str(error)))
    tab.on("console", lambda said: tab.wrong.append(said.text) if said.type == "error" else None)
    tab.on("request", lambda request: None if request.url.startswith("file:") else tab.wrong.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.documentElement.dataset.ready === 'yes'", timeout=10_000)
    return tab


@needs_browser
@pytest.mark.parametrize("name", ["program", "pipeline"])
def test_what_is_shown_is_the_plans(name: str, browser: Any, tmp_path: Path) -> None:
    plan = plans()[name]
    tab = opened(browser, tmp_path / "report.html", page(plan))
    assert tab.inner_text("h1") == f"plan of {plan.name}" and tab.inner_text("#words") == in_words(plan)
    for row in spending(plan).rows:
        bar = tab.locator(f'[data-time="{row.what}"]')
        assert float(bar.get_attribute("data-value")) == row.seconds and seconds_text(row.seconds) in bar.inner_text()
    fullest = max(plan.predictions.workers, key=lambda w: w.peak_bytes / w.limit_bytes)
    for kind, size in fullest.held:
        assert bytes_text(size) in tab.locator(f'#glance [data-kind="{kind}"]').inner_text()
    assert "plan of" in tab.title() or plan.name in tab.title()
    assert tab.locator("#arguments tbody tr").count() == len(page_facts(plan)["arguments"])  # type: ignore[arg-type]
    if name == "pipeline":
        assert float(tab.get_attribute("[data-makespan]", "data-makespan")) == pytest.approx(plan.predictions.step_s)
    assert tab.wrong == []


@needs_browser
def test_clicks_open_zoom_and_tell(browser: Any, tmp_path: Path) -> None:
    plan = plans()["program"]
    tab = opened(browser, tmp_path / "report.html", page(plan))
    canvas = tab.locator("#model canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    whole = float(tab.get_attribute("#details [data-seconds]", "data-seconds"))
    assert whole == pytest.approx(sum(o.time_s for o in plan.sharding.operators))
    tab.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + 24 * 3 + 10)  # a line's operators
    assert "forward" in tab.inner_text("#details") or "backward" in tab.inner_text("#details")
    inside = float(tab.get_attribute("#details [data-seconds]", "data-seconds"))
    assert 0 < inside < whole
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 24 * 2 + 10)
    drawn = int(canvas.get_attribute("data-arcs"))
    assert drawn == tab.locator("#details a").count() > 0, "a line for each that it reads, and that reads it"
    tab.keyboard.press("Escape")
    assert float(tab.get_attribute("#details [data-seconds]", "data-seconds")) == pytest.approx(whole)
    tab.select_option("#colour", "sharding")
    assert tab.locator("#legend span").count() > 1
    tab.select_option("#width", "operators")
    canvas.focus()
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#details b") in ("forward", "backward", "update")
    assert tab.wrong == []


@needs_browser
def test_search_finds_operators_and_arguments(browser: Any, tmp_path: Path) -> None:
    plan = plans()["program"]
    tab = opened(browser, tmp_path / "report.html", page(plan))
    tab.keyboard.press("/")
    tab.keyboard.type("dot_general")
    many = int(re.match(r"(\d+) in the model", tab.inner_text("#hits"))[1])  # type: ignore[index]
    assert many == sum(o.primitive == "dot_general" for o in plan.sharding.operators)
    tab.keyboard.press("Enter")
    assert tab.inner_text("#details b") == "dot_general"
    tab.fill("#search", "embed")
    shown = tab.locator("#arguments tbody tr:visible")
    assert 0 < shown.count() == sum("embed" in a["path"] for a in page_facts(plan)["arguments"])  # type: ignore[union-attr,call-overload]
    tab.fill("#search", "")
    assert tab.locator("#arguments tbody tr:visible").count() == tab.locator("#arguments tbody tr").count()
    assert tab.wrong == []


@needs_browser
def test_who_holds_which_part(browser: Any, tmp_path: Path) -> None:
    plan = handmade_plan()  # args[0]['layers'][{0-1}]['w1'] is float32[64,64] as [y,_] on 2 x 4
    tab = opened(browser, tmp_path / "report.html", page(plan))
    for path in ("args[0]['layers'][0]['w1']", "args[0]['layers'][1]['w1']", "args[0]['layers'][{0-1}]['w1']"):
        if (row := tab.locator(f'[data-argument="{path}"]')).count():
            row.first.click()
            break
    parts = [cell.get_attribute("data-part") for cell in tab.locator("#held .mesh div").all()]
    assert parts == [f"{16 * (d % 4)}:{16 * (d % 4 + 1)}, :" for d in range(8)]
    assert "4 parts, 2 copies of each" in tab.inner_text("#held")
    assert tab.wrong == []


@needs_browser
@pytest.mark.parametrize("make", [handmade_plan, handmade_pipeline])
def test_hostile_names_are_text(make: Any, browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "report.html", page(hostile(make())))
    tab.fill("#search", "script")
    tab.keyboard.press("Enter")
    for row in tab.locator("#arguments tbody tr").all()[:3]:
        row.click()
    assert "owned" not in tab.evaluate("document.title")[:5] and tab.locator("img").count() == 0
    assert tab.evaluate("document.scripts.length") == 3 and HOSTILE[:20] in tab.inner_text("h1")
    assert tab.wrong == []


@needs_browser
def test_light_and_dark_and_print(browser: Any, tmp_path: Path) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        tab = opened(browser, tmp_path / "report.html", page(handmade_pipeline()), color_scheme=scheme)
        colours.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.click("#theme")
        colours.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    tab.emulate_media(media="print")
    assert not tab.locator("nav").is_visible() and tab.locator("#notes, #chosen").first.is_visible()
    assert len(tab.pdf()) > 10_000
    assert tab.wrong == []


@needs_browser
def test_without_scripts_the_text_is_there(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(handmade_plan()), encoding="utf-8")
    tab = browser.new_context(java_script_enabled=False).new_page()
    tab.goto(path.as_uri())
    assert "data parallel over x, tensor parallel over y" in tab.inner_text("noscript, main")


def test_browsers_are_looked_for_by_name() -> None:
    assert BROWSER is None or os.access(BROWSER, os.X_OK)
