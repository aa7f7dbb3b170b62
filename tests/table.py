"""A pytest plugin that writes what ran, cell by cell, as Markdown: ``pytest -p tests.table --table FILE``.

Tests whose parameter is a cell of the cover (``model-mesh-plan-microbatches``) get a table, models by combinations;
all others a line per file.
"""

from __future__ import annotations

import platform
import re
import time
from collections import Counter, defaultdict
from pathlib import Path

import jax
import pytest

CELL = re.compile(r"^.*/(?P<file>\w+)\.py::(?P<test>\w+)\[(?P<model>\w+)-(?P<cell>[\dx]+-\w+-(?:whole|split))\]$")
SIGNS = {"passed": "✓", "failed": "FAILED", "skipped": "–"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="write a Markdown table of what ran")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--table")
    if path and not hasattr(config, "workerinput"):  # of xdist's processes, the one that collects the reports
        config.pluginmanager.register(_Table(Path(str(path))))


class _Table:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.started_s = time.monotonic()
        self.outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            if self.outcome.get(report.nodeid) != "failed":
                self.outcome[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        cells: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        others: dict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, outcome in self.outcome.items():
            match = CELL.match(nodeid.partition("@")[0])
            if match:
                cells[f"{match['file']}.py::{match['test']}"][match["model"]][match["cell"]] = outcome
            others[nodeid.partition("::")[0]][outcome] += 1
        minutes = (time.monotonic() - self.started_s) / 60
        total = Counter(self.outcome.values())
        lines = [
            "# Every combination",
            "",
            f"Written by `make test-all`: {_counts(total)} in {minutes:.0f} minutes, jax {jax.__version__}, "
            f"Python {platform.python_version()}.",
            "",
            "| file | outcome |",
            "|---|---|",
            *(f"| {name} | {_counts(count)} |" for name, count in sorted(others.items())),
        ]
        for test, models in sorted(cells.items()):
            columns = sorted({cell for row in models.values() for cell in row})
            lines += ["", f"## {test}", "", f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            for model, row in models.items():
                lines.append(f"| {model} | {' | '.join(SIGNS.get(row.get(c, ''), ' ') for c in columns)} |")
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _counts(count: Counter[str]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
