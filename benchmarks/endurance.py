"""Does training outlive what happens to it, and come to the same numbers? Needs root; hosts are network namespaces.

    python -m benchmarks.endurance [--steps 500] [--least 5] [--most 30] [--seed 0]

A GPT on two of three hosts, started as users start it (`autopar cluster up`, `autopar run`, `autopar.run_elastic`).
Every 5 to 30 steps something happens, drawn with a seed in rounds of all kinds:

    worker       a worker is killed                    node         a host's processes are all killed
    driver       the driver is killed                  cut          a host's link is cut
    sigterm      `autopar run` is asked to end         stall        a worker stops
    full         no room on the checkpoints' disk      undeletable  an old checkpoint cannot be removed

What a supervisor or an operator would do is done here: a driver that ended is started again, a lost host's node too, a
disk gets room again, a link is joined. Checked at the end: each step's loss, as often as it was computed, and the final
state, are an undisturbed run's bit for bit; each batch is in the state once; and no process, folder, socket or file is
left. Exit status 1 where something is otherwise, 2 where it cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from benchmarks.namespaces import NamespaceError, NetworkHost
from tests.cluster.namespaces import Network, hosts

ROOT = Path(__file__).parent.parent
KINDS = ("worker", "driver", "sigterm", "full", "node", "cut", "stall", "undeletable")
HOSTS = 3
BATCH = 8
SAVE_EVERY, KEEP = 4, 2
DISK_BYTES = 48 << 20
"""Of the checkpoints' disk: a dozen checkpoints."""
STALLED_S = 20.0
"""The deadline of a step, which takes some 50 ms."""
PATIENCE_S = 180.0
"""For training to go on: a driver that starts waits for Ray, workers and programs."""
LOOK_S = 0.02
END_S = 60.0
"""For a driver to end, and for a node to come back."""


class EnduranceError(Exception):
    """Something is not as it was before, or as it is without failures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each failure, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--least", type=int, default=5, help="steps from one failure to the next, at least")
    parser.add_argument("--most", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", nargs=2, type=Path, metavar=("FOLDER", "SAVES"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.driver:
        drive(*given.driver, given.steps)
        return 0
    started_s = time.monotonic()
    try:
        # a short name: sockets' are at most 107 characters
        with tempfile.TemporaryDirectory(prefix="e-") as folder, disk(Path(folder) / "saves"):
            told = endured(Path(folder), given.steps, random.Random(given.seed), given.least, given.most)
    except NamespaceError as fault:
        print(fault)
        return 2
    except EnduranceError as fault:
        print(fault)
        return 1
    print(f"{told}; {(time.monotonic() - started_s) / 60:.1f} minutes in all")
    return 0


# The driver, on the head's host


def drive(folder: Path, saves: Path, steps: int) -> None:
    """Trains. Writes a line for each step into ``folder``, and at the end what the state has become."""
    import jax
    import numpy as np

    import autopar
    from benchmarks.endurance import batch_at  # by its name on workers, which keep the text
    from examples.gpt.model import GPTConfig, init_state, make_train_step
    from tests.clusters import cluster

    config = GPTConfig(layers=4, hidden=64, heads=4, seq=64, learning_rate=1e-3)
    plain = make_train_step(config)

    def train(state: Any, batch: Any) -> Any:
        tokens, number = batch
        trained, loss = plain(state["trained"], tokens)
        return {"trained": trained, "seen": state["seen"].at[number].add(1)}, loss

    def init() -> Any:
        return {
            "trained": init_state(jax.random.key(0), config),
            "seen": jax.numpy.zeros((steps,), jax.numpy.int32),
        }

    def on_step(i: int, loss: Any) -> None:
        faulthandler.dump_traceback_later(PATIENCE_S - 20)
        line = {"step": i, "loss": float(loss).hex(), "workers": loss.keeper.gang.pids, "driver": os.getpid()}
        with (folder / "steps").open("a") as file:
            file.write(json.dumps(line) + "\n")

    faulthandler.dump_traceback_later(PATIENCE_S - 20)  # who looks after it tells of that
    two = cluster(1, flops_per_s=1e10, memory_bytes_per_s=1e10, latency_s=1e-8, hosts=2)
    with autopar.init(spec=two, compilation_cache=folder.parent / "compiled") as ray_cluster:
        state = autopar.run_elastic(
            train, init, functools.partial(batch_at, seq=config.seq), steps=steps, path=saves, save_every=SAVE_EVERY,
            keep=KEEP, on_step=on_step, cluster=ray_cluster, plan_for=lambda: two, deadline_s=STALLED_S,
            draw_on_hosts=True, stages=2, num_microbatches=2, workers=1, schedule="1f1b",
        )  # fmt: skip
        arrays = jax.tree.map(np.asarray, state)
    digest = sha256(b"".join(x.tobytes() for x in jax.tree.leaves(arrays))).hexdigest()
    (folder / "end").write_text(json.dumps({"seen": arrays["seen"].tolist(), "digest": digest}))


def batch_at(i: int, *, seq: int) -> Any:
    """The i-th batch, and its number for each of its rows."""
    import numpy as np

    from examples.gpt.data import sample_batch

    return sample_batch(_text(), batch=BATCH, seq=seq, seed=0, step=i), np.full(BATCH, i, np.int32)


@functools.cache
def _text() -> Any:
    from examples.gpt.data import load_corpus

    return load_corpus().train


# Whoever looks after it


@dataclass(slots=True)
class Outage:
    """What has happened, until training has gone on and it is mended."""

    kind: str
    step: int
    workers: list[int]
    since: int
    """Bytes that drivers had printed."""
    host: int = -1
    """That is lost."""
    old: Set[int] = frozenset()
    """Processes of that host."""
    folder: Path | None = None
    """That cannot be removed."""
    began_s: float = field(default_factory=time.monotonic)


def endured(folder: Path, steps: int, draw: random.Random, least: int, most: int) -> str:
    """An undisturbed run and one with failures; what to say of them. Raises EnduranceError, and NamespaceError where
    there can be no hosts."""
    net, temporary = folder / "net", folder / "t"
    net.mkdir()
    temporary.mkdir()
    with hosts(HOSTS, net, devices=1) as network:
        environment = {**network.environment(), "TMPDIR": str(temporary)}
        try:
            autopar(environment, "cluster", "up", *network.options())
            quiet = Training(folder / "quiet", folder / "quiet-saves", steps, environment)
            quiet.run(None)
            disturbed = Training(folder / "disturbed", folder / "saves", steps, environment)
            disturbed.run(Failures(disturbed, network, draw, least, most))
            autopar(environment, "cluster", "down")
            left = [f"process {pid}" for host in network.hosts for pid in inside(host)]
        finally:
            for host in network.hosts:
                end(inside(host))
        left += [str(path) for path in remains(folder)]
    if left:
        raise EnduranceError(f"left behind: {', '.join(left)}")
    return compared(quiet, disturbed, steps)


def compared(quiet: Training, disturbed: Training, steps: int) -> str:
    """What to say of both. Raises EnduranceError where they differ."""
    [want, got] = [[json.loads(line) for line in t.lines] for t in (quiet, disturbed)]
    losses = {line["step"]: line["loss"] for line in want}
    if sorted(losses) != list(range(steps)) or len(want) != steps:
        raise EnduranceError(f"the undisturbed run did {len(want)} steps")
    if missing := set(losses) - {line["step"] for line in got}:
        raise EnduranceError(f"steps {sorted(missing)} were never done")
    if others := sorted({line["step"] for line in got if line["loss"] != losses[line["step"]]}):
        raise EnduranceError(f"steps {others} have other losses than undisturbed")
    ends = [json.loads((t.folder / "end").read_text()) for t in (quiet, disturbed)]
    for end_ in ends:
        if wrong := [i for i, count in enumerate(end_["seen"]) if count != BATCH]:
            raise EnduranceError(f"batches {wrong} are not in the state once")
    if ends[0]["digest"] != ends[1]["digest"]:
        raise EnduranceError("the state is another than undisturbed")
    again, took = len(got) - steps, sorted(disturbed.took_s)
    slow = f"; training went on after {took[len(took) // 2]:.1f} s (median; most {took[-1]:.1f})" if took else ""
    same = "losses and state bit for bit"
    return f"{steps} steps, {len(disturbed.kinds)} failures, {again} steps done again: {same}{slow}"


class Training:
    """A run of the driver, as often as it has to be started.

    Args:
        folder: for what it writes, made here.
        saves: root of its checkpoints.
        environment: with the folder where the cluster's record is found.
    """

    def __init__(self, folder: Path, saves: Path, steps: int, environment: Mapping[str, str]) -> None:
        self.folder, self.saves, self.steps, self.environment = folder, saves, steps, environment
        folder.mkdir()
        (folder / "steps").touch()
        self.lines: list[str] = []
        self.kinds: list[str] = []
        self.took_s: list[float] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the driver."""
        words = ["--steps", str(self.steps), "--driver", str(self.folder), str(self.saves)]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autopar", "run", "--", "-m", "benchmarks.endurance", *words],
                env=self.environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> Path:
        """What drivers print."""
        return self.folder / "output"

    def run(self, failures: Failures | None) -> None:
        """Until all steps are done. Raises EnduranceError where training does not go on, or ends by itself."""
        self.start()
        try:
            with (self.folder / "steps").open() as file:
                self._follow(file, failures)
        finally:
            assert self.process is not None
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait()

    def _follow(self, file: TextIO, failures: Failures | None) -> None:
        last_s, rest = time.monotonic(), ""
        while True:
            assert self.process is not None
            code = self.process.poll()
            new, _, rest = (rest + file.read()).rpartition("\n")
            if new:
                last_s = time.monotonic()
                self.lines += new.splitlines()
                if failures is not None:
                    failures.seen(new.splitlines())
            if code == 0:
                if failures is not None:
                    failures.settle()
                return
            if code is not None:
                if failures is None or not failures.ends(code):
                    raise EnduranceError(f"the driver ended by itself ({code}):\n{self.said()}")
                self.start()
                last_s = time.monotonic()
            if time.monotonic() - last_s > PATIENCE_S:
                raise EnduranceError(f"no step for {PATIENCE_S:g} s:\n{self.said()}")
            time.sleep(LOOK_S)

    def said(self, since: int = 0) -> str:
        """The end of the drivers' output; ``since``: no earlier than this byte."""
        return self.output.read_bytes()[since:][-5000:].decode(errors="replace")


class Failures:
    """Makes failures, and mends what training does not mend by itself."""

    def __init__(self, training: Training, network: Network, draw: random.Random, least: int, most: int) -> None:
        self.training, self.network, self.draw, self.least, self.most = training, network, draw, least, most
        self.next, self.reached = draw.randint(least, most), -1
        self.round: list[str] = []
        self.thread, self.coming = ThreadPoolExecutor(1), list[Future[None]]()
        self.outage: Outage | None = None

    def seen(self, lines: Sequence[str]) -> None:
        """Steps were done: it may be time for the next failure, or the last one may be over. Raises EnduranceError
        where a host did not come back."""
        for back in filter(Future.done, self.coming):
            back.result()
        for line in map(json.loads, lines):
            self.reached = max(self.reached, line["step"])
            if self.outage is not None and (line["workers"] != self.outage.workers or self._warned()):
                self._over()
        if self.outage is None and self.next <= self.reached < self.training.steps - 2:
            self._fail(json.loads(lines[-1]))

    def ends(self, code: int) -> bool:
        """Whether a driver's end was to be expected; mends what has to be before it can be started again."""
        if self.outage is None:
            return False
        match self.outage.kind:
            case "full":
                if "No space left on device" not in self.training.said(self.outage.since):
                    return False
                (self.training.saves / "filler").unlink()
                return True
            case "driver" | "sigterm":
                return True
            case _:
                return False

    def settle(self) -> None:
        """Training has ended, perhaps before the last failure did anything. Raises EnduranceError where a host did not
        come back."""
        if self.outage is not None:
            self._over()
        for back in self.coming:
            back.result()

    def _fail(self, line: dict[str, Any]) -> None:
        hosts, workers = self.network.hosts, line["workers"]
        others = [i for i, host in enumerate(hosts) if i and set(inside(host)) & set(workers)]  # than the head's
        self.round = self.round or self.draw.sample(KINDS, len(KINDS))
        kind = next(kind for kind in self.round if others or kind not in ("node", "cut"))
        self.round.remove(kind)
        self.training.kinds.append(kind)
        outage = self.outage = Outage(
            kind=kind, step=line["step"], workers=workers, since=self.training.output.stat().st_size
        )  # fmt: skip
        match outage.kind:
            case "worker" | "stall":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draw.choice(workers), signal.SIGKILL if outage.kind == "worker" else signal.SIGSTOP)
            case "driver":
                os.kill(line["driver"], signal.SIGKILL)
            case "sigterm":
                assert self.training.process is not None
                self.training.process.terminate()
            case "full":
                with (self.training.saves / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(1 << 16))
            case "undeletable":
                outage.folder = min(_checkpoints(self.training.saves), key=lambda path: int(path.name))
                subprocess.run(["chattr", "+i", str(outage.folder)], check=True)
            case "node" | "cut":
                outage.host = self.draw.choice(others)
                outage.old = {*inside(hosts[outage.host])}
                if outage.kind == "node":
                    end(inside(hosts[outage.host]))
                else:
                    subprocess.run(["ip", "-n", hosts[outage.host].name, "link", "set", "nic", "down"], check=True)

    def _warned(self) -> bool:
        """An undeletable folder was met."""
        assert self.outage is not None
        said = self.training.said(self.outage.since)
        return self.outage.folder is not None and f"{self.outage.folder} cannot be removed" in said

    def _over(self) -> None:
        outage, self.outage = self.outage, None
        assert outage is not None
        took_s = time.monotonic() - outage.began_s
        self.training.took_s.append(took_s)
        print(f"step {outage.step:4d}  {outage.kind:12s} training went on after {took_s:5.1f} s", flush=True)
        if outage.folder is not None:
            subprocess.run(["chattr", "-i", str(outage.folder)], check=True)
        if outage.host >= 0:
            name = self.network.hosts[outage.host].name
            if outage.kind == "cut":
                subprocess.run(["ip", "-n", name, "link", "set", "nic", "up"], check=True)
            back = come_back, self.training.environment, name, outage.old, self.network.options()
            self.coming.append(self.thread.submit(*back))
        self.next = self.reached + self.draw.randint(self.least, self.most)


def come_back(environment: Mapping[str, str], host: str, old: Set[int], options: Sequence[str]) -> None:
    """Starts a lost host's node again, when the old one, of ``old`` processes, has ended: Ray ends what it has given
    up. Raises EnduranceError where it goes on."""
    stop_s = time.monotonic() + END_S
    while int(pid := _node(said := autopar(environment, "cluster", "status"), host) or 0) in old:
        if time.monotonic() > stop_s:
            raise EnduranceError(f"{host}: its node has not ended:\n{said}")
    if not pid:  # otherwise it was started with another that was lost
        autopar(environment, "cluster", "up", *options)


def _node(status: str, host: str) -> str | None:
    """Process of a host's node, by what `autopar cluster status` prints; None: it does not run."""
    row = re.search(rf"^ *{host} +\S+ +(\d+|does not run) ", status, re.MULTILINE)
    assert row is not None, status
    return row[1] if row[1].isdigit() else None


def autopar(environment: Mapping[str, str], *words: str) -> str:
    """Runs an `autopar` command; returns what it prints. Raises EnduranceError where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and (words[1], done.returncode) != ("status", 1):  # 1: one does not run
        raise EnduranceError(f"autopar {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


# What there is


@contextmanager
def disk(where: Path) -> Iterator[None]:
    """A small one. Raises NamespaceError where this user cannot mount any."""
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(where)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode or shutil.which("chattr") is None:
        raise NamespaceError(f"a disk needs root, and chattr: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


def inside(host: NetworkHost) -> list[int]:
    """Processes in a host."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    return [int(text) for text in listed.stdout.split()]


def end(pids: Sequence[int]) -> None:
    """Kills processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _checkpoints(saves: Path) -> list[Path]:
    return [path for path in saves.iterdir() if path.name.isdigit()]


def remains(folder: Path) -> list[Path]:
    """Files that should not be there when all has ended: of owners, of unfinished or old checkpoints, of records, of
    Ray (sockets too)."""
    found = [
        path for path in (folder / "net" / "home").rglob("*") if path.name in ("node.json", "token", "cluster.json")
    ]
    for saves in (folder / "saves", folder / "quiet-saves"):
        found += sorted(_checkpoints(saves), key=lambda path: int(path.name))[:-KEEP]
        found += [path for path in saves.iterdir() if not path.name.isdigit()]
    return [*found, *(folder / "t").iterdir(), *folder.rglob("*.partial")]


if __name__ == "__main__":
    sys.exit(main())
