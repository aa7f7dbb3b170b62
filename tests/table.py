"""A pytest plugin that keeps what ran, cell by cell, as Markdown: ``pytest -p tests.table --table FILE [files]``.

A line per file of tests: what came of it, at which commit, and how long its tests took together; for tests whose
parameter is a cell of the cover (``model-mesh-plan-microbatches``) a table as well, models by combinations. Lines of
files that did not run, or not to their end, stay as they are.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest

CELL = re.compile(r"^.*/(?P<file>\w+)\.py::(?P<test>\w+)\[(?P<model>\w+)-(?P<cell>[\dx]+-\w+-(?:whole|split))\]$")
ROW = re.compile(r"^\| (?P<file>tests/\S+\.py) \| (?P<outcome>.*?) \| (?P<minutes>[\d.]+) \| (?P<commit>\S+) \|$")
COUNT = re.compile(r"(\d+) (\w+)")
SIGNS = {"passed": "✓", "failed": "FAILED", "skipped": "–"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="the Markdown file that keeps what ran")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--table")
    if not path or hasattr(config, "workerinput"):  # of xdist's processes, the one that collects the reports
        return
    if config.getoption("-m") or config.getoption("-k") or any("::" in arg for arg in config.args):
        raise pytest.UsageError("--table: a line is of all tests of a file, so choose by files alone, not by -m or -k")
    config.pluginmanager.register(_Table(Path(str(path))))


@dataclass
class _File:
    """What ran of one."""

    collected: set[str] = field(default_factory=set[str])
    outcome: dict[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0


class _Table:
    def __init__(self, path: Path) -> None:
        self.path, self.commit = path, _commit()
        self.files: dict[str, _File] = defaultdict(_File)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected(ids)

    def _collected(self, ids: Sequence[str]) -> None:
        for nodeid in ids:
            self.files[nodeid.partition("::")[0]].collected.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self.files[report.nodeid.partition("::")[0]]
        file.seconds += report.duration
        if report.when == "teardown" and report.passed:
            file.outcome.setdefault(report.nodeid, "passed")
        elif not report.passed and file.outcome.get(report.nodeid) != "failed":
            file.outcome[report.nodeid] = report.outcome
        if report.when == "teardown" and file.collected <= file.outcome.keys():
            self._keep(report.nodeid.partition("::")[0], file)

    def _keep(self, name: str, file: _File) -> None:
        """What came of a file is written down as it ends: a run may be ended before its own end."""
        rows, sections = self._kept()
        counts = Counter(file.outcome.values())
        rows[name] = f"| {name} | {_counts(counts)} | {file.seconds / 60:.1f} | {self.commit} |"
        sections |= _cells(file.outcome)
        total: Counter[str] = Counter()
        for row in rows.values():
            match = ROW.match(row)
            assert match is not None, row
            total.update({what: int(count) for count, what in COUNT.findall(match["outcome"])})
        lines = [
            "# Every combination",
            "",
            f"Kept by `make test-all` (`ARGS=` names files, to run some anew): {_counts(total)}, "
            f"jax {jax.__version__}, Python {platform.python_version()}. "
            "Minutes are of a file's tests one after the other.",
            "",
            "| file | outcome | minutes | commit |",
            "|---|---|---|---|",
            *(row for _, row in sorted(rows.items())),
        ]
        for title, table in sorted(sections.items()):
            lines += ["", f"## {title}", "", *table]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _kept(self) -> tuple[dict[str, str], dict[str, list[str]]]:
        """The lines that are there, by file, and of files that have one the tables, by title."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        head, *parts = text.split("\n## ")
        matches = filter(None, map(ROW.match, head.splitlines()))
        rows = {match["file"]: match[0] for match in matches if Path(match["file"]).exists()}
        sections: dict[str, list[str]] = {}
        for part in parts:
            title, *table = part.strip().splitlines()
            if title.partition("::")[0] in {Path(file).name for file in rows}:
                sections[title] = [line for line in table if line]
        return rows, sections


def _cells(outcome: dict[str, str]) -> dict[str, list[str]]:
    """A table for each test of cells."""
    cells: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for nodeid, found in outcome.items():
        if match := CELL.match(nodeid.partition("@")[0]):
            cells[f"{match['file']}.py::{match['test']}"][match["model"]][match["cell"]] = found
    tables: dict[str, list[str]] = {}
    for test, models in cells.items():
        columns = sorted({cell for row in models.values() for cell in row})
        tables[test] = [f"| model | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for model, row in models.items():
            tables[test].append(f"| {model} | {' | '.join(SIGNS.get(row.get(c, ''), ' ') for c in columns)} |")
    return tables


def _commit() -> str:
    """The commit that is tested, with a + where files differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "autopar", "tests") else "")


def _counts(count: Counter[str]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
