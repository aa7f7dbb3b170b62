"""`autopar what-if plan.json …`: a plan planned again as if something were otherwise. Runs where jax cannot be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.numbers import gigabytes, whole
from autopar.cli.output import show
from autopar.cli.progress import shown
from autopar.garbage import collection_paused
from autopar.ir.errors import OptionError
from autopar.ir.in_words import in_words
from autopar.ir.plan import Plan
from autopar.ir.plan_text import ended_text, how_text, rates_text
from autopar.ir.presets import cluster_from_text
from autopar.ir.serde import load_plan, save_plan
from autopar.ir.text import bytes_text, percent_text, seconds_text, table

if TYPE_CHECKING:
    from autopar.explain.what_if import Times


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "what-if",
        help="a plan for other hosts, links, memory or batch, from the plan alone",
        description="Plans the step of a plan again, as it was asked for but for what is given here, and says what "
        "that changes. Nothing is traced: microbatches keep their size, so that other numbers of them are another "
        "batch. Needs no jax.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("--memory-gb", metavar="G", type=gigabytes, help="gigabytes of a device that plans may take")
    parser.add_argument("--hosts", metavar="N", type=whole, help="so many hosts of the kind that there is")
    parser.add_argument(
        "--link", metavar="NAME=RATE", action="append", default=[],
        help="bandwidth of one link, in one direction: intra (of a host's devices) or between (a host's NIC), as "
        "between=100Gb (bits a second), intra=300GB (bytes) or between=0.5x; repeatable",
    )  # fmt: skip
    parser.add_argument("--cluster", metavar="C", help="another cluster, as `autopar plan` takes it")
    parser.add_argument("--microbatches", metavar="N", type=whole, help="so many, of the size they have")
    parser.add_argument(
        "--smallest-change", action="store_true",
        help="the smallest change of bandwidth, memory or batch that makes it another plan (plans it some dozens of "
        "times)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="PLAN.json", type=Path, help="where the new plan is saved")
    parser.set_defaults(run=run, usage_error=parser.error)


def run(options: argparse.Namespace) -> int:
    """Prints what changes; returns 0. Raises PlanFormatError where the file is no plan, OptionError and ClusterError
    for what cannot be, and what planning raises."""
    from autopar.explain.what_if import Change, what_if  # here, for numpy: `inspect` runs without it

    with collection_paused():
        plan = load_plan(options.plan)
    if options.smallest_change:
        show(_smallest(plan))
        return 0
    change = Change(
        memory_bytes=options.memory_gb,
        hosts=options.hosts,
        links=dict(map(_link, options.link)),
        cluster=None if options.cluster is None else cluster_from_text(options.cluster),
        microbatches=options.microbatches,
    )
    if change == Change():
        options.usage_error("say what is otherwise: --memory-gb, --hosts, --link, --cluster, --microbatches")
    with shown(f"planning {plan.name} again") as tell:
        again = what_if(plan, change, tell)
        if options.out is not None:
            save_plan(again, options.out)
    show(_compared(plan, again))
    return 0


def _link(text: str) -> tuple[str, float | Times]:
    from autopar.explain.what_if import LINKS, rate_from_text  # here, as above

    name, equals, rate = text.partition("=")
    if not equals or name not in LINKS:
        raise OptionError(f"--link {text}: write {LINKS[0]}=RATE or {LINKS[1]}=RATE")
    return name, rate_from_text(rate)


def _compared(plan: Plan, again: Plan) -> str:
    before, after = plan.predictions, again.predictions
    rows = [
        ("cluster", plan.cluster.name, again.cluster.name),
        ("that is", in_words(plan), in_words(again)),
        ("runs as", how_text(plan), how_text(again)),
        ("step time", seconds_text(before.step_s), seconds_text(after.step_s)),
        ("", rates_text(plan), rates_text(again)),
        ("peak memory", bytes_text(before.peak_memory_bytes), bytes_text(after.peak_memory_bytes)),
    ]
    lines = [f"step of {plan.name}: {percent_text(after.step_s, before.step_s)} of its time"]
    for name, was, then in rows:
        lines.append(f"  {name.ljust(11)}  {was}")
        lines += [f"           →   {then}"] if then != was else []
    lines += [f"  {said}"] if (said := ended_text(again)) else []
    return "\n".join(lines) + "\n"


def _smallest(plan: Plan) -> str:
    from autopar.explain.what_if import RANGE, smallest_changes  # here, as above

    with shown(f"planning {plan.name} again and again") as tell:
        found = list(smallest_changes(plan, tell))
    rows = [["", "times", "then"]]
    for number, one in enumerate(found):
        way = "less" if number % 2 == 0 else "more"
        if one.infeasible:
            rows.append([f"{way} {one.what}", f"{one.factor:.3g}", "no plan fits"])
        elif one.plan is None:
            far = RANGE if way == "more" else 1 / RANGE
            rows.append([f"{way} {one.what}", f"to {far:.3g}", "the same"])
        else:
            then = f"{in_words(one.plan)}, {seconds_text(one.plan.predictions.step_s)} a step"
            rows.append([f"{way} {one.what}", f"{one.factor:.3g}", then])
    return "\n".join([f"smallest changes that make {plan.name} another plan", *table(rows, right=(1,))]) + "\n"
