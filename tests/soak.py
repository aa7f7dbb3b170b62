"""``python -m tests.soak [--cases N] [--steps N] [--seed N] [--table FILE]``: many runs of JAX's own cases and of
fuzzed steps in two worker processes, and a table of what came of them. Ends with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import platform
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tests.conftest  # noqa: F401 -- eight CPU devices, before jax is imported
from tests.outcome import FAULTS, OUTCOMES, REFUSED, SKIPPED, UPSTREAM, Outcome
from tests.worker import Worker

WORKERS = 2
SLOWEST = 10


class Result(NamedTuple):
    """``group`` is a row of the table."""

    group: str
    job: Any
    outcome: Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="runs of JAX's own cases")
    parser.add_argument("--steps", type=int, default=2000, help="fuzzed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="write a Markdown table here")
    options = parser.parse_args()
    started_s = time.monotonic()
    results = _cases(options.cases, options.seed) + _steps(options.steps, options.seed)
    minutes = (time.monotonic() - started_s) / 60
    table = _table(results, options.seed, minutes)
    print(table)
    if options.table:
        options.table.write_text(table, encoding="utf-8")
    return int(any(r.outcome.kind in FAULTS for r in results))


def _in_parallel(share: Callable[[int], Iterable[Result]]) -> list[Result]:
    """What ``share(k)`` gives, of each worker; faults are printed as they come."""
    done: list[Result] = []
    lock = threading.Lock()

    def run(k: int) -> None:
        for result in share(k):
            with lock:
                done.append(result)
                if result.outcome.kind in FAULTS:
                    print(f"{result.job}\n{result.outcome.kind}: {result.outcome.detail}\n", flush=True)
                if len(done) % 250 == 0:
                    print(f"{len(done)}: {dict(Counter(r.outcome.kind for r in done))}", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(run, range(WORKERS)))
    return done


def _cases(count: int, seed: int) -> list[Result]:
    from tests.jax_cases.run import counted_runs, shares

    def share(k: int) -> Iterator[Result]:
        mine = count // WORKERS + (k < count % WORKERS)
        with Worker("tests.jax_cases.run:run") as worker:
            for job, outcome in counted_runs(shares(WORKERS)[k], mine, WORKERS * seed + k, worker):
                yield Result(job.group, job, outcome)

    return _in_parallel(share)


def _steps(count: int, seed: int) -> list[Result]:
    from tests import fuzz
    from tests.outcome import outcome_within

    jobs = fuzz.drawn(count, seed)

    def share(k: int) -> Iterator[Result]:
        with Worker("tests.fuzz:run") as worker:
            for job in jobs[k::WORKERS]:
                yield Result(_kind(job), job, outcome_within(worker, job, fuzz.LIMIT_S))

    return _in_parallel(share)


def _kind(job: Any) -> str:
    return "fuzzed train steps" if job.program.gradient else "fuzzed functions"


def _table(results: list[Result], seed: int, minutes: float) -> str:
    import jax

    kinds = (*OUTCOMES, *((SKIPPED,) if any(r.outcome.kind == SKIPPED for r in results) else ()))
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for r in results:
        groups[r.group][r.outcome.kind] += 1
        groups["**all**"][r.outcome.kind] += 1
    lines = [
        "# Many runs",
        "",
        f"Written by `make soak` with seed {seed}: {len(results)} runs in {minutes:.0f} minutes, "
        f"jax {jax.__version__}, Python {platform.python_version()}.",
        "Each is one of JAX's own test cases (itself, vmapped, in a scan, or its gradient) or a fuzzed step, "
        "under a random plan or the planner's own, beside plain `jax.jit`.",
        "",
        f"| group | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 1) + "|",
        *(f"| {g} | {' | '.join(str(n[k] or '') for k in kinds)} |" for g, n in sorted(groups.items())),
        *_counted("Upstream faults", (r.outcome.detail for r in results if r.outcome.kind == UPSTREAM)),
        *_counted("Refusals", (_reason(r.outcome.detail) for r in results if r.outcome.kind == REFUSED)),
        *_faults([r for r in results if r.outcome.kind in FAULTS]),
        *_slowest(results),
    ]
    return "\n".join(lines) + "\n"


def _counted(title: str, texts: Iterable[str]) -> list[str]:
    count = Counter(texts)
    rows = [f"| {text} | {n} |" for text, n in count.most_common()]
    return ["", f"## {title}", "", *(["| what | runs |", "|---|---|", *rows] if rows else ["None."])]


def _reason(text: str) -> str:
    """The refusal's first sentence, numbers left out."""
    return re.sub(r"\d+", "…", text.split(". ")[0]).replace("|", "/").replace("\n", " ")[:160]


def _faults(results: list[Result]) -> list[str]:
    lines = ["", "## Faults", ""]
    for r in results:
        lines += [f"- {r.outcome.kind}: `{r.job}`", "", "```", r.outcome.detail, "```", ""]
    return lines if results else [*lines, "None."]


def _slowest(results: list[Result]) -> list[str]:
    slowest = sorted(results, key=lambda r: -r.outcome.seconds)[:SLOWEST]
    rows = [f"| {r.outcome.seconds:.1f} | {r.group} | {getattr(r.job, 'case', '')} |" for r in slowest]
    return ["", "## Slowest", "", "| seconds | group | case |", "|---|---|---|", *rows]


if __name__ == "__main__":
    raise SystemExit(main())
