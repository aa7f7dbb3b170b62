"""Starts of an elastic run: the step planned for what is there, and compiled there (`elastic`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError, OptionError
from autopar.ir.presets import cluster_from_text
from autopar.runtime.on_ray.ray_cluster import Cluster, named
from autopar.step.step import Step


@dataclass(frozen=True, slots=True)
class Shapes:
    """A step, and the shapes of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


class Starter:
    """Makes starts, on devices of this process or on a Ray; a plan is kept for as long as the cluster is the same.

    Args:
        shapes: the step, and the shapes that it is planned for.
        cluster: as `parallelize` takes it.
        plan_for: says at each start what to plan for; None: see `spec`.
        deadline_s: on a Ray, for one step.
        options: `parallelize`'s.

    Raises:
        OptionError: ``deadline_s`` is given, and steps run in this process.
        ClusterError: ``cluster`` is malformed, or "ray" and this process is connected to none.
    """

    def __init__(
        self, shapes: Shapes, cluster: ClusterSpec | Cluster | str | None, plan_for: Callable[[], ClusterSpec] | None,
        deadline_s: float | None, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._ray = cluster if isinstance(cluster, Cluster) else named("ray") if cluster == "ray" else None
        if self._ray is None and deadline_s is not None:
            raise OptionError("deadline_s: only steps on a Ray have one; give cluster= what autopar.init returned")
        self._shapes, self._plan_for, self._deadline_s = shapes, plan_for, deadline_s
        self._given = cluster_from_text(cluster) if self._ray is None and isinstance(cluster, str) else cluster
        if self._ray is not None:
            self._first, self._hosts = self._ray.spec, _hosts()
        self._options = dict(options)
        self._planned: tuple[ClusterSpec | None, Step[..., Any]] | None = None

    @property
    def on_ray(self) -> bool:
        """True where steps run on a Ray's workers."""
        return self._ray is not None

    def spec(self) -> ClusterSpec | None:
        """What to plan for now: what ``plan_for`` says; else of a Ray its cluster at first, less the hosts that it has
        lost since; else what was given, or None for this process's devices. Raises ClusterError as `without_hosts`."""
        if self._plan_for is not None:
            return self._plan_for()
        if self._ray is not None:
            return without_hosts(self._first, self._hosts - _hosts())
        assert not isinstance(self._given, Cluster | str)
        return self._given

    def start(self) -> Step[..., Any]:
        """The step, planned for what is there now and compiled. Raises what planning and compiling raise."""
        spec = self.spec()
        if self._planned is None or self._planned[0] != spec:
            first = {} if self._ray is None else {"stages": (1, None)}
            step = Step(self._shapes.step, {**first, **self._options, "cluster": spec})
            if self._ray is not None:  # planned for what is left of it
                plan = step.plan(self._shapes.state, self._shapes.batch)
                step = step.with_options(cluster=self._ray, plan=plan, deadline_s=self._deadline_s)
            self._planned = spec, step
        step = self._planned[1]
        step.plan(self._shapes.state, self._shapes.batch)
        step.compiled()
        return step


def _hosts() -> int:
    from autopar.runtime.on_ray.live_nodes import alive_hosts

    return alive_hosts()


def without_hosts(spec: ClusterSpec, lost: int) -> ClusterSpec:
    """A cluster with fewer hosts.

    Args:
        spec: the cluster.
        lost: how many hosts fewer.

    Returns:
        The cluster that is left; ``spec`` itself where none is lost.

    Raises:
        ClusterError: no host is left, or there are several groups of hosts.
    """
    if lost <= 0:
        return spec
    if len(spec.groups) != 1:
        raise ClusterError(
            f"{spec.name}: {lost} hosts are gone, and nothing says of which of its {len(spec.groups)} groups. Give a "
            "function that returns the ClusterSpec of what is there (plan_for=)"
        )
    (group,) = spec.groups
    if lost >= group.hosts:
        raise ClusterError(f"{spec.name}: of {group.hosts} hosts {lost} are gone; none is left to train on")
    left, domain = group.hosts - lost, group.domain_hosts
    if left % domain == 0:
        return replace(spec, groups=(replace(group, hosts=left),))
    domain = left if domain == group.hosts else 1  # of several domains nothing says which are whole
    return replace(spec, groups=(replace(group, hosts=left, domain_hosts=domain, torus=None),))
