"""`autopar verify PLAN.json TARGET`: a plan beside its programs as a real compiler makes them. No accelerator."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from autopar.cli.output import show
from autopar.cli.progress import shown
from autopar.cli.target import keywords_from_texts, step_and_args
from autopar.ir.plan import Plan
from autopar.ir.progress import Progress
from autopar.ir.serde import load_plan
from autopar.verify.environment import COMPILERS, compiler_of, environment


def add_parser(commands: Any) -> None:
    """Adds this command to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="hold a plan against its compiled programs",
        description="Compiles a plan's programs ahead of time for its own devices, and shows what was planned beside "
        "what was compiled: collectives, memory, FLOPs, memory traffic, time. TARGET as for `autopar plan`. Exit code "
        "1: a figure is past its tolerance. Compilers for GPUs and TPUs come with the extras verify-cuda, verify-tpu.",
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan that was saved")
    parser.add_argument("target", metavar="TARGET", help="the plan's step, as of plan")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], nargs="+", help="keywords of TARGET")
    parser.add_argument("--compiler", choices=COMPILERS, help="default: that of the plan's cluster")
    parser.add_argument("--json", action="store_true", help="as JSON, SI units in the names")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; returns 0, or 1 where a figure is past its tolerance. Raises CompilerError where the
    compiler is not installed or fails, PlanFormatError where the file is no plan, PlanMismatchError where the plan is
    not TARGET's, TargetError."""
    plan = load_plan(options.plan)
    keywords = keywords_from_texts([text for texts in options.set for text in texts])
    if "jax" in sys.modules:  # it has read its environment
        return _elsewhere(options, plan)
    os.environ.update(_environment(options, plan))
    from autopar.verify.verifying import step_of, verify_step  # here, for jax: the other commands run without it

    with shown(f"loading {options.target}") as tell:
        target, args = step_and_args(options.target, keywords)
        tell(Progress(phase=f"compiling for {plan.cluster.name}", elapsed_s=0.0))
        found = verify_step(step_of(target, plan), *args, compiler=options.compiler)
    if options.json:
        print(json.dumps(found.facts, indent=1))
    else:
        show(str(found))
    return 0 if found.agrees else 1


def _environment(options: argparse.Namespace, plan: Plan) -> dict[str, str]:
    """What JAX is to find when it is imported."""
    return environment(options.compiler or compiler_of(plan.cluster), plan.cluster)


def _elsewhere(options: argparse.Namespace, plan: Plan) -> int:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "autopar", "verify", options.plan, options.target]
    for texts in options.set:
        command += ["--set", *texts]
    if options.compiler:
        command += ["--compiler", options.compiler]
    if options.json:
        command += ["--json"]
    done = subprocess.run(
        command, env={**os.environ, **_environment(options, plan)}, capture_output=True, text=True, check=False
    )
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode
