"""How fast is a plan's page? A Chromium that is there opens reports, pans and zooms them. Needs no device.

    python -m benchmarks.report_page [--plan PLAN.json …] [--rounds N]

Without ``--plan`` it is that of a Llama-405B on 2,048 H100 (planned here, some tens of seconds), and a made-up plan
whose model has 10,000 rows. Bars: a report of at most 5 MB; first paint within 1 s of opening; and while the model is
dragged and zoomed no frame longer than 50 ms, in the median of rounds of the longest of each. Also: seconds of
``autopar inspect`` on the file, the process's start included (bar: 1 s). Exit status 1 where one is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.ir.plan import OneProgram, Plan
from autopar.ir.serde import load_plan, save_plan
from autopar.report.page import page

SIZE, PAINT_S, FRAME_S, INSPECT_S = 5e6, 1.0, 0.05, 1.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ROWS = 10_000
WATCH = """() => {
  window.stop = false;
  window.longest = new Promise((done) => {
    let last = 0, longest = 0;
    const frame = (now) => {
      if (last) longest = Math.max(longest, now - last);
      last = now;
      window.stop ? done(longest) : requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
}"""
"""Script: from now on the longest frame's milliseconds are found out, until it is told to stop."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table; 1 where a bar is missed, 2 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="+", type=Path, default=None, metavar="PLAN.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print("no Chromium is installed", file=sys.stderr)
        return 2
    table = Table("plan", "MB", "first paint s", "longest frame ms, dragged", "zoomed", "inspect s")
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in _plans(options.plan):
            path = Path(folder, "plan.json")
            save_plan(plan, path)
            report = path.with_suffix(".html")
            report.write_text(page(plan), encoding="utf-8")
            paint_s, dragged_s, zoomed_s = _used(browser, report, options.rounds)
            inspect_s = statistics.median(_inspected(path) for _ in range(options.rounds))
            figures = (report.stat().st_size, paint_s, dragged_s, zoomed_s, inspect_s)
            bars = (SIZE, PAINT_S, FRAME_S, FRAME_S, INSPECT_S)
            missed |= any(figure > bar for figure, bar in zip(figures, bars, strict=True))
            shown = (figures[0] / 1e6, paint_s, 1e3 * dragged_s, 1e3 * zoomed_s, inspect_s)
            table.add_row(name, *(f"{x:.3g}" for x in shown))
    Console().print(table)
    return int(missed)


def _plans(paths: Sequence[Path] | None) -> list[tuple[str, Plan]]:
    if paths is not None:
        return [(path.name, load_plan(path)) for path in paths]
    import autopar
    from benchmarks.full_size import step_of

    step, args = step_of("llama-405b", 2048)
    large = autopar.parallelize(step, cluster="dgx-h100:256", num_microbatches=64, donate_argnums=0).plan(*args).data
    return [("llama-405b on 2,048 H100", large), (f"{ROWS:,} rows", _wide())]


def _wide() -> Plan:
    """A plan with many rows."""
    import autopar
    from benchmarks.models import mlp

    step, args = mlp(width=256, batch=256)
    plan = autopar.parallelize(step, cluster="cpu:8", mesh=(2, 4), num_microbatches=1).plan(*args).data
    (row, *_), sharding = plan.sharding.operators, plan.sharding
    rows = tuple(
        replace(row, source=f"model.py:{k // 12}", primitive=f"operator_{k % 12}", time_s=1e-6 * (1 + k % 7), count=1,
                phase="forward" if k < ROWS // 2 else "backward")
        for k in range(ROWS)
    )  # fmt: skip
    return replace(plan, body=OneProgram(sharding=replace(sharding, operators=rows)))


def _used(browser: str, report: Path, rounds: int) -> tuple[float, float, float]:
    """Seconds to the first paint, and of the longest frame while the model is dragged and while it is zoomed: medians
    of rounds."""
    from playwright.sync_api import sync_playwright

    found: list[tuple[float, float, float]] = []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(rounds):
            tab = running.new_page(viewport={"width": 1300, "height": 900})
            tab.goto(report.as_uri())
            tab.wait_for_function("document.documentElement.dataset.ready === 'yes'")
            paint_ms = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            canvas = tab.locator("#model canvas")
            canvas.scroll_into_view_if_needed()
            box: Any = canvas.bounding_box()
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            tab.mouse.move(x, y)
            tab.mouse.wheel(0, -600)
            dragged_s, zoomed_s = _longest(tab, partial(_drag, tab, x, y)), _longest(tab, partial(_zoom, tab))
            found.append((paint_ms / 1e3, dragged_s, zoomed_s))
            tab.close()
        running.close()
    paint_s, dragged_s, zoomed_s = (statistics.median(column) for column in zip(*found, strict=True))
    return paint_s, dragged_s, zoomed_s


def _longest(tab: Any, act: Callable[[], None]) -> float:
    """Seconds of the longest frame while ``act`` acts."""
    tab.evaluate(WATCH)
    act()
    tab.evaluate("() => { window.stop = true; }")
    return float(tab.evaluate("() => window.longest")) / 1e3


def _drag(tab: Any, x: float, y: float) -> None:
    tab.mouse.down()
    for k in range(60):
        tab.mouse.move(x + 200 * (k % 20) / 20 - 100, y)
    tab.mouse.up()


def _zoom(tab: Any) -> None:
    for k in range(40):
        tab.mouse.wheel(0, -120 if k < 20 else 120)


def _inspected(path: Path) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "autopar", "inspect", str(path)], capture_output=True, check=True)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
