"""`autopar cluster check | up | status | down | spec`, and `autopar run`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from autopar.cli.output import show
from autopar.ir import files
from autopar.ir.errors import ClusterError
from autopar.ir.presets import cluster_from_text
from autopar.ir.serde import encode, replace_file
from autopar.ir.text import table
from autopar.launch.cluster import Cluster, check, down, recorded, run, running, states
from autopar.launch.hosts import Host, hosts_from_text, spec_of
from autopar.launch.sessions import SSH, Reach, environment_from, this_machine
from autopar.runtime.on_ray.ports import Ports, ports_from


def add_parser(commands: Any) -> None:
    """Adds `cluster` and `run` to argparse's ``commands``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "cluster",
        help="check, start and end Ray on hosts",
        description="Checks hosts, starts Ray on them, and ends it. Without --hosts: this machine alone, or for status "
        "and down the cluster that was launched from here.",
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, function, text in (
        (
            "check",
            _check,
            "say what is wrong with hosts: versions, names, ports, clocks, limits. Exit code 1: something is",
        ),
        ("up", _up, "check hosts and start Ray on them; it runs until `autopar cluster down`"),
        ("status", _status, "which nodes run. Exit code 1: not all"),
        ("down", _down, "end what `up` started, and nothing else"),
    ):
        command = parts.add_parser(name, help=text.partition(".")[0], description=text[0].upper() + text[1:] + ".")
        add_options(command)
        if name == "check":
            command.add_argument(
                "--running", action="store_true", help="Ray runs there: ports must be reached, not free"
            )
        if name == "up":
            command.add_argument("--force", action="store_true", help="start although something is wrong")
        command.set_defaults(run=function)
    spec = parts.add_parser(
        "spec", help="a ClusterSpec file, to edit",
        description="Writes a preset as a ClusterSpec file, to edit and to plan for; with --hosts those of a file in "
        "place of its own. `autopar profile` measures devices and links instead.",
    )  # fmt: skip
    spec.add_argument("--hosts", metavar="FILE", help="as many as this file has (default: as many as --like says)")
    spec.add_argument("--like", metavar="C", required=True, help="a preset, a TPU slice, or a ClusterSpec file")
    spec.add_argument("--out", metavar="CLUSTER.json", required=True, help="where it is saved")
    spec.set_defaults(run=_spec)
    runs: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a script on a cluster",
        description="Runs a Python script on the head's host, where `autopar.init()` joins the cluster. With --hosts "
        "or --here Ray is started for the script and ends with it; without, the script joins what `autopar cluster up` "
        "started.",
    )
    add_options(runs)
    runs.add_argument("--here", action="store_true", help="start Ray on this machine for the script")
    runs.add_argument("--force", action="store_true", help="start although something is wrong")
    runs.add_argument("--workdir", metavar="DIR", default=None, help="folder there to run it in (default: this one)")
    runs.add_argument("script", metavar="SCRIPT.py", help="or -m module, after --")
    runs.add_argument("arguments", metavar="…", nargs=argparse.REMAINDER)
    runs.set_defaults(run=_run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds options of ``parser`` that say which cluster it is, and how its hosts are reached."""
    add = parser.add_argument
    add("--hosts", metavar="FILE", help="a line for each host, the head first: name [address=A] [devices=N] [python=P]")
    add("--name", metavar="NAME", default="default", help="of the cluster (default: %(default)s)")
    add("--rsh", metavar="COMMAND", default=None,
        help=f"starts a command on a host; {{}} stands for its name, else it comes last (default: {SSH})")  # fmt: skip
    add("--python", metavar="P", default=None, help="interpreter on the hosts (default: this one's path)")
    add("--env", metavar="KEY[=VALUE]", action="append", default=[],
        help="a variable for nodes, workers and script; without =VALUE this machine's (repeatable)")  # fmt: skip
    add("--port-base", metavar="N", type=int, default=None,
        help=f"first of Ray's {Ports().last_worker - Ports().head + 1} ports (default: {Ports().head})")  # fmt: skip


def cluster_of(options: argparse.Namespace, *, launched: bool) -> Cluster:
    """The cluster that the options mean; ``launched``: True: without --hosts, the one that runs under this name. Raises
    ClusterError where there is none such, the hosts file is wrong, or options do not go together."""
    if options.hosts is None and launched:
        found = recorded(options.name)
        if found is None:
            raise ClusterError(
                f"no cluster {options.name!r} was launched from here: start one (`autopar cluster up`), or give --hosts"
            )
        return found
    if options.hosts is None:
        if options.rsh is not None:
            raise ClusterError("--rsh reaches other hosts: list them in a file (--hosts)")
        hosts, rsh = (this_machine(),), ""
    else:
        hosts = _hosts_of(options.hosts)
        rsh = SSH if options.rsh is None else options.rsh
    reach = Reach(
        rsh=rsh, python=sys.executable if options.python is None else options.python,
        environment=environment_from(options.env),
    )  # fmt: skip
    ports = Ports() if options.port_base is None else ports_from(options.port_base)
    return Cluster(name=options.name, hosts=hosts, reach=reach, ports=ports)


def _hosts_of(path: str) -> tuple[Host, ...]:
    """What a hosts file lists. Raises ClusterError where it cannot be read, or has a mistake."""
    try:
        return hosts_from_text(files.read_text(path), path)
    except OSError as fault:
        raise ClusterError(f"hosts file {path}: cannot be read: {fault.strerror or fault}") from None
    except files.DamagedError as fault:
        raise ClusterError(f"hosts file {path}: {fault}") from None


def _check(options: argparse.Namespace) -> int:
    cluster = cluster_of(options, launched=False)
    problems = check(cluster, running=options.running)
    for problem in problems:
        show(str(problem))
    if not problems:
        show(f"{_hosts(len(cluster.hosts))}: nothing wrong")
    return 1 if problems else 0


def _up(options: argparse.Namespace) -> int:
    cluster = cluster_of(options, launched=False)
    with _asked_to_end(), running(cluster, detached=True, force=options.force) as token_path:
        pass
    _note(f"Ray runs on {_hosts(len(cluster.hosts))}; end it by: autopar cluster down{_name(options)}")
    show(f"address  {cluster.address}\ntoken    {cluster.hosts[0].name}:{token_path}")
    _note(f"autopar run{_name(options)} script.py runs a script on it, in which autopar.init() joins")
    return 0


def _status(options: argparse.Namespace) -> int:
    cluster = cluster_of(options, launched=True)
    found = states(cluster)
    rows = [["host", "address", "process", "role"]]
    for host in cluster.hosts:
        node = found[host.name]
        role = "head" if host is cluster.hosts[0] else "worker"
        rows.append([host.name, host.address, str(node["pid"]) if node else "does not run", role])
    show("\n".join([f"cluster {cluster.name}, {cluster.address}", *table(rows)]))
    return 0 if all(found.values()) else 1


def _down(options: argparse.Namespace) -> int:
    cluster = cluster_of(options, launched=True)
    missing = down(cluster)
    ended = len(cluster.hosts) - len(missing)
    show(f"ended Ray on {_hosts(ended)}" + (f"; none ran on {', '.join(missing)}" if missing else ""))
    return 0


def _spec(options: argparse.Namespace) -> int:
    spec = cluster_from_text(options.like)
    if options.hosts is not None:
        spec = spec_of(_hosts_of(options.hosts), spec, Path(options.hosts).stem)
    replace_file(options.out, json.dumps(encode(spec), indent=2, allow_nan=False) + "\n")
    _note(f"saved {options.out}: {_hosts(sum(group.hosts for group in spec.groups))}, {spec.num_devices} devices")
    return 0


def _run(options: argparse.Namespace) -> int:
    starts = options.here or options.hosts is not None
    cluster = cluster_of(options, launched=not starts)
    script = [options.script, *options.arguments]
    if script[0] == "--":
        script = script[1:]
    folder = os.getcwd() if options.workdir is None else options.workdir
    with _asked_to_end():
        if starts:
            with running(cluster, detached=False, force=options.force) as token_path:
                return run(cluster, token_path, script, folder)
        head = states(cluster)[cluster.hosts[0].name]
        if head is None:
            raise ClusterError(f"cluster {cluster.name} has ended; start it again by `autopar cluster up`")
        return run(cluster, head["token_path"], script, folder)


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """SIGTERM ends the block as an interrupt does: with what it has started, which is waited for. Who asked may start
    the next one as soon as this one has ended."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _name(options: argparse.Namespace) -> str:
    return "" if options.name == "default" else f" --name {options.name}"


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
