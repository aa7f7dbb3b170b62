"""Starts Ray on this host, or joins a running one: `init`.

A Ray that was started here listens on fixed ports (`Ports`) and is ended by its handle, together with all that it
started: when the `Cluster` is shut down, when the driver exits, and when the driver is killed (`on_ray.head`). A Ray
that was joined is left as it is. Nothing of Ray is ended by name.

Ray's token authentication stays on. Where the user has no token, a cluster that is started here gets one of its own, in
a file that only the user may read.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError, TraceError
from autopar.ir.plan import Plan
from autopar.ir.presets import cluster_from_text
from autopar.runtime.on_ray.node import NUM_CPUS, new_token, node_environment, start_command, token_variables, wait_up
from autopar.runtime.on_ray.ports import Ports, is_free
from autopar.versions import check_version

if TYPE_CHECKING:
    from autopar.frontend.layering.layers import Layered
    from autopar.frontend.layering.source import Source
    from autopar.frontend.trace import Traced
    from autopar.runtime.on_ray.executor import RayExecutor


class Cluster:
    """A Ray that this process is connected to; `autopar.init` returns it. Use it in a ``with``, or call `shutdown`.

    Attributes:
        address: ``host:port`` of its head.
    """

    def __init__(
        self, address: str, head: subprocess.Popen[bytes] | None, folder: Path | None, given: ClusterSpec | None = None,
        compilation_cache: str | os.PathLike[str] | bool | None = None, devices: Literal["cpu"] | None = None,
        before: Mapping[str, str | None] | None = None, worker_address: str = "",
    ) -> None:  # fmt: skip
        """`init` calls it.

        Args:
            address: ``host:port`` of its head.
            head: the head, where it was started here.
            folder: of its token, logs and sockets, where it was started here.
            given: what plans for it are made for; None: see `spec`.
            compilation_cache: see `init`.
            devices: see `init`.
            before: what variables of the environment were, that `shutdown` sets again.
            worker_address: that workers bind to; "": that of their node.
        """
        self.address, self._compilation_cache = address, compilation_cache
        self._devices: Literal["cpu"] | None = devices
        self._head, self._folder, self._given, self._before = head, folder, given, before or {}
        self._worker_address, self._closed = worker_address, False
        self._closing: weakref.WeakSet[RayExecutor] = weakref.WeakSet()
        atexit.register(self.shutdown)

    @property
    def spec(self) -> ClusterSpec:
        """The ClusterSpec that plans for it are made for, which is what `autopar.init` was told, else as many hosts as
        Ray has now, each with the devices that this process has. Raises ClusterError where no preset describes these.
        """
        if self._given is not None:
            return self._given
        from autopar.runtime.local_devices import cluster_of
        from autopar.runtime.on_ray.live_nodes import alive_hosts

        mine = cluster_of(None)
        (group,) = mine.groups
        return replace(mine, groups=(replace(group, hosts=alive_hosts(), domain_hosts=1, torus=None),))

    def compile(
        self, traced: Layered | Traced, source: Source, planned: Plan, *, rules: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> RayExecutor:  # fmt: skip
        """For tools: starts workers for a plan and compiles its step there: a process for each mesh, or for each host
        of a mesh, on devices of the plan's kind (or `autopar.init`'s): CPU devices that it makes, or GPUs and TPUs that
        Ray has.

        Args:
            traced: the step in layers, or as one program.
            source: what it was made from, which is pickled by cloudpickle.
            planned: its plan.
            rules: sharding rules of the user's.
            options: compiler options.
            environment: workers' variables beside those of `process.Process`.
            deadline_s: seconds for a step, from when it is called to when its numbers are there; default: 300 s.

        Raises:
            PlanMismatchError: the plan is of another step.
            ClusterError: this cluster was shut down, or has no devices of the plan's kind.
            NoRoomError: it has no room for the workers now.
            WorkerError: a worker died, failed, or did not answer.
            TraceError: the step cannot be pickled, or workers would not know a pytree of its.
        """
        from autopar.frontend.layering.layers import Layered
        from autopar.runtime.on_ray.compiled import settings
        from autopar.runtime.on_ray.executor import STEP_S, RayExecutor, handed
        from autopar.runtime.on_ray.messages import Job
        from autopar.runtime.on_ray.shipping import check_nodes, pickled
        from autopar.runtime.transports.wire import SECRET_BYTES

        if self._closed:
            raise ClusterError("this cluster was shut down; call autopar.init again")
        gc.collect()  # workers that nobody has any more make room
        call = traced.call if isinstance(traced, Layered) else traced
        check_nodes(call.in_tree)
        check_nodes(call.out_tree)

        def refusal(error: Exception) -> TraceError:
            return TraceError(
                f"{planned.name} cannot be sent to workers, by cloudpickle: {error}. What it uses that cannot be "
                "pickled (functions with jax.custom_vjp, open files, locks) has to be in a module that it imports"
            )

        job = Job(
            worker=0, processes=(), planned=replace(planned, step=None), source=pickled(source, refusal),
            rules=rules or {}, options=options or {}, secret=secrets.token_bytes(SECRET_BYTES),
        )  # fmt: skip
        made = RayExecutor(
            handed(traced, planned), job, settings(self._compilation_cache), environment or {},
            STEP_S if deadline_s is None else deadline_s, self._worker_address, self._devices,
        )  # fmt: skip
        self._closing.add(made)
        return made

    def shutdown(self) -> None:
        """Ends what was started here: the actors, the connection and, if it is ours, Ray itself. The second time it
        does nothing."""
        if self._closed:
            return
        import ray

        self._closed = True
        _CURRENT[:] = [cluster for cluster in _CURRENT if cluster is not self]
        atexit.unregister(self.shutdown)
        for step in list(self._closing):
            step.close()
        ray.shutdown()
        _end(self._head)
        _cleared(self._folder, self._before)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


_CURRENT: list[Cluster] = []
"""The one that this process is connected to: Ray knows one connection a process as well."""


def named(name: str) -> Cluster:
    """The cluster that ``cluster="ray"`` means: `init`'s. Raises ClusterError for other names, and where it was not
    called."""
    if name != "ray":
        raise ClusterError(f'cluster={name!r}: a step runs on "ray", or on what autopar.init returned')
    if not _CURRENT:
        raise ClusterError('cluster="ray": this process is connected to no Ray. Call autopar.init() first')
    return _CURRENT[0]


def init(
    address: str | None = None,
    *,
    spec: ClusterSpec | str | None = None,
    ports: Ports | None = None,
    node_address: str = "127.0.0.1",
    num_cpus: int | None = None,
    compilation_cache: str | os.PathLike[str] | bool | None = None,
    devices: Literal["cpu"] | None = None,
) -> Cluster:
    """Starts Ray on this host, or joins the one at ``address``.

    Args:
        address: ``host:port`` of a head; None: what RAY_ADDRESS says (`autopar run` sets it), else start one here.
        spec: what plans with ``cluster="ray"`` are made for: a ClusterSpec, preset (``"cpu:8"``) or file; default: see
            `Cluster.spec`.
        ports: of a head that is started here.
        node_address: where such a head says that it is reached.
        num_cpus: actors that it takes; default: 64, whatever the machine has.
        compilation_cache: folder where workers keep what they have compiled, on their own host, and read it when they
            start again; False: nowhere. Default: as this process's JAX is set (``jax_compilation_cache_dir``,
            ``jax_enable_compilation_cache``), or where that says nothing ``~/.cache/autopar/jax``. Who can write in it
            can have workers run what they like: one that is another user's, or open to others, is refused.
        devices: ``"cpu"``: workers have CPU devices whatever a plan is for, to try one without its cluster; default: of
            the plan's kind.

    Returns:
        The `Cluster`, which `autopar.parallelize` takes as ``cluster=``; ``"ray"`` means the same.

    Raises:
        VersionError: Ray is of a version that this was not made for.
        ClusterError: Ray is not installed, a port is taken, the head did not come up, ``spec`` names no cluster, or
            this process is connected to a Ray already.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("autopar.init needs Ray: pip install 'autopar[ray]'")
    check_version("ray")
    given = cluster_from_text(spec) if isinstance(spec, str) else spec
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray already; shut that down first (ray.shutdown())")
    head: subprocess.Popen[bytes] | None = None
    folder: Path | None = None
    lock: int | None = None
    before = {name: os.environ.get(name) for name in _AUTHENTICATION}
    address = os.environ.get("RAY_ADDRESS") or None if address is None else address
    if address is None:
        ports = Ports() if ports is None else ports
        ports.verify()
        for name, port in ports.daemons():
            if not is_free(port):
                raise ClusterError(
                    f"port {port} ({name}) is taken, perhaps by another Ray: join that one (address=), or give other "
                    "Ports"
                )
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        if mode.lower() != "token":
            raise ClusterError(
                f"RAY_AUTH_MODE={mode}: a Ray that autopar starts asks for a token, as it listens on all interfaces. "
                f"Unset it, or start Ray yourself and join it (address=)"
            )
        folder, lock = _new_folder()
    try:
        _authenticate(folder)
        if folder is not None:
            assert ports is not None and lock is not None
            address, log = f"{node_address}:{ports.head}", folder / "head.log"
            command = start_command(ports, node_address, folder, num_cpus=NUM_CPUS if num_cpus is None else num_cpus)
            with open(log, "wb") as file:
                head = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    env=node_environment(ports), pass_fds=[lock],
                )  # fmt: skip
        import ray

        if head is not None:
            assert folder is not None and address is not None
            wait_up(head, address, folder / "head.log")
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR,
            _node_ip_address=node_address if head is not None else None,
        )  # fmt: skip
    except BaseException:
        _end(head)
        _cleared(folder, before)
        raise
    finally:
        if lock is not None:  # the head has its own
            os.close(lock)
    assert address is not None
    alone = head is not None and node_address == "127.0.0.1"  # no other host can reach it
    made = Cluster(address, head, folder, given, compilation_cache, devices, before, node_address if alone else "")
    _CURRENT[:] = [made]
    return made


_FOLDER, _LOCK = "autopar-ray-", "lock"


def _new_folder() -> tuple[Path, int]:
    """A folder for a Ray's token, logs and sockets, and a lock that says that it is in use for as long as a process has
    it. The head removes the folder when its driver is gone; what heads that were killed have left is removed here."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with contextlib.suppress(OSError), open(left, "rb") as file:  # another user's cannot be opened
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    new = folder / f"{_LOCK}.new"
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / _LOCK)  # nobody has found it without its lock
    return folder, lock


_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
"""Variables that a process's Ray is told by."""


def _cleared(folder: Path | None, before: Mapping[str, str | None]) -> None:
    """Removes what a Ray of this process leaves behind (logs and sockets; its daemons are gone), and sets variables as
    they were."""
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


_TOKEN: list[str] = []
"""Of clusters that this process starts, all the same: Ray reads a process's token once."""


def _authenticate(folder: Path | None) -> None:
    """Has Ray ask for the user's token, and show it. ``folder``: of a cluster that is started here, which gets a token
    where the user has none. Ray reads the mode when it is imported."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return  # of a Ray that is joined, it is who started it who says that
    has = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not has and not (Path.home() / ".ray" / "auth_token").exists():
        if folder is None:
            return
        _TOKEN[:] = _TOKEN or [new_token()]
        os.environ.update(token_variables(_TOKEN[0], folder / "token"))
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:
        from ray._raylet import Config  # pyright: ignore - what `ray.init` does where it starts a head itself

        Config.initialize("")  # reads the environment again


def _end(head: subprocess.Popen[bytes] | None) -> None:
    if head is not None and head.stdin is not None:
        head.stdin.close()
        head.wait()


__all__: Sequence[str] = ("Cluster", "Ports", "init", "named")
