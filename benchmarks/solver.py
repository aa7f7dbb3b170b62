"""How good is the solver, how fast, and with how much memory? Needs no device.

    python -m benchmarks.solver [--instances [DIR]] [--graphs] [--only NAME,…] [--time-limit S] [--save DIR]

Two tables, both unless one is asked for. ``--instances``: the contest's instance files of a directory, each with the
contest's time limit (counted from the start of solving: reading has a column of its own), judged in exact integers.
``--graphs``: autopar's own train steps, folded and not, without a memory limit and with one that binds (see
`own_graphs.limited`); ``--save`` writes these problems too, pickled. Every row is measured in a process of its own;
peak memory is that process's, imports and reading included, or that of all processes it starts together. Exit status 1
where a solution is infeasible or a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import solver_instances
from benchmarks.child import ROOT
from benchmarks.instances import InstanceError

INSTANCES = ROOT.parent / "shared" / "data" / "iopddl"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``--one`` is the side of `child.ask`'s child."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--instances", metavar="DIR", nargs="?", const=INSTANCES, type=Path, help="the first table")
    parser.add_argument("--graphs", action="store_true", help="the second table")
    parser.add_argument("--only", metavar="NAME,…", help="instances, and graphs by name or its start: A, gpt-2x4")
    parser.add_argument("--time-limit", metavar="S", type=float, help="seconds for each, instead of its own limit")
    parser.add_argument("--save", metavar="DIR", type=Path, help="write the graphs' problems there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.one:
        print(json.dumps(_answer(json.load(sys.stdin))))
        return 0

    console = Console(width=None if sys.stdout.isatty() else 180)
    both = flags.instances is None and not flags.graphs
    names = None if flags.only is None else [name.strip() for name in flags.only.split(",")]
    files: dict[str, Path] = {}
    cases: tuple[Any, ...] = ()
    if both or flags.instances is not None:
        try:
            files = solver_instances.instance_files(flags.instances or INSTANCES)
        except InstanceError as error:
            if not both:
                parser.error(str(error))
            console.print(f"no first table: {error}")
    if both or flags.graphs:
        cases = _graphs().CASES
    if names is not None:
        known = (*files, *(case.name for case in cases))
        unknown = [n for n in names if not any(_selects(n, other) for other in known)]
        if unknown:
            parser.error(f"--only: no {', '.join(unknown)} among {', '.join(known)}")
        files = {name: path for name, path in files.items() if any(_selects(n, name) for n in names)}
        cases = tuple(case for case in cases if any(_selects(n, case.name) for n in names))
    missed: list[str] = []
    if files:
        missed += solver_instances.run_table(console, files, flags.time_limit)
    if cases:
        missed += _graphs().run_table(console, cases, flags.time_limit, flags.save)
    for line in missed:
        console.print(f"missed: {line}")
    return 1 if missed else 0


def _selects(name: str, other: str) -> bool:
    return other == name or other.startswith(f"{name}-")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    match request["kind"]:
        case "instance":
            return solver_instances.solve_one(Path(request["path"]), request["time_limit_s"])
        case "judge":
            return solver_instances.judge_one(Path(request["path"]), request["choice"])
        case _:
            directory = None if request["save"] is None else Path(request["save"])
            return _graphs().solve_one(_graphs().case_of(request["case"]), request["time_limit_s"], directory)


def _graphs() -> Any:
    """The module of the second table. It imports jax, which the first does not need and its peak memory would show."""
    from benchmarks import solver_graphs

    return solver_graphs


if __name__ == "__main__":
    raise SystemExit(main())
