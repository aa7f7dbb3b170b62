"""A pytest plugin that writes what became of each step, as Markdown: ``pytest -p tests.ecosystem.table
--ecosystem-table FILE``."""

from __future__ import annotations

import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest

CASE = re.compile(r"\[(?P<module>\w+)-(?P<step>\w+)\]")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ecosystem-table", metavar="FILE", help="write a Markdown table of the ecosystem's steps")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--ecosystem-table")
    if path and not hasattr(config, "workerinput"):  # of xdist's processes, the one that collects the reports
        config.pluginmanager.register(_Table(Path(str(path))))


class _Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = CASE.search(report.nodeid)
        if case and (report.when == "call" or report.failed):
            known = dict(report.user_properties)
            result = known.get("result", "")
            if report.failed:
                result = f"FAILED: {_message(report)}"
            self.rows.append(
                {"result": result, **case.groupdict(), **{k: v for k, v in known.items() if k != "result"}}
            )

    def pytest_sessionfinish(self) -> None:
        rows = sorted(self.rows, key=lambda r: (r["module"], r["step"], r.get("layout", "")))
        packages = sorted({p for r in rows for p in r.get("packages", "").split()})
        timed = [r for r in rows if "lowering_s" in r]
        plan_s, lowering_s = (sum(r[name] for r in timed) for name in ("plan_s", "lowering_s"))
        results = [r["result"].partition(":")[0] for r in rows]
        counts = ", ".join(f"{results.count(kind)} {kind}" for kind in sorted(set(results)))
        total = ["sum", str(len(timed)), "", str(len(packages)), "", f"{plan_s:.1f}", f"{lowering_s:.1f}"]
        lines = [
            "# Other people's packages",
            "",
            f"Written by `make ecosystem`: {len(rows)} train steps, {counts}; on mesh 2x4 of 8 CPU devices where no "
            f"other layout is named, two steps each beside plain `jax.jit`. jax {jax.__version__}, Python "
            f"{platform.python_version()}.",
            "",
            "Planning is tracing and planning, in seconds; lowering is what `plan()` takes beside them to see that the "
            "plan runs, and its share is of planning; of pipelines it is not known.",
            "",
            f"Versions: {', '.join(f'{p} {version(p)}' for p in packages)}.",
            "",
            "| tests/ecosystem | step | layout | packages | result | planning | lowering | share |",
            "|---|---|---|---|---|---|---|---|",
            *map(_row, rows),
            f"| {' | '.join([*total, _share(plan_s, lowering_s)])} |",
        ]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())[:160].replace("|", "\\|")


def _row(row: dict[str, Any]) -> str:
    cells = [
        row["module"],
        row["step"],
        row.get("layout", ""),
        row.get("packages", "").replace(" ", ", "),
        row["result"],
    ]
    times = ["", "", ""]
    if "plan_s" in row:
        times[0] = f"{row['plan_s']:.2f}"
    if "lowering_s" in row:
        times[1:] = f"{row['lowering_s']:.2f}", _share(row["plan_s"], row["lowering_s"])
    return f"| {' | '.join(cells + times)} |"


def _share(plan_s: float, lowering_s: float) -> str:
    return f"{lowering_s / plan_s:.0%}" if plan_s else ""
