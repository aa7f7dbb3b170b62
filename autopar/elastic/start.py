"""Starts of an elastic run: the step planned for what is there, and compiled there (`elastic`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.api import parallelize
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError, OptionError
from autopar.ir.presets import cluster_from_text
from autopar.pipeline_step import PipelineStep


@dataclass(frozen=True, slots=True)
class Shapes:
    """A step, and the shapes of its state and batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


Given = ClusterSpec | str | Callable[[], ClusterSpec] | None


def _spec(given: Given) -> ClusterSpec | None:
    if callable(given):
        given = given()
    return cluster_from_text(given) if isinstance(given, str) else given


class Local:
    """Starts on devices of this process."""

    def __init__(self, shapes: Shapes, cluster: Given, options: Mapping[str, Any]) -> None:
        self._shapes, self._cluster, self._options = shapes, cluster, options

    def start(self) -> LocalStep:
        """Plans and compiles."""
        step = parallelize(self._shapes.step, cluster=_spec(self._cluster), **self._options)
        step.plan(self._shapes.state, self._shapes.batch)
        return LocalStep(step)


class LocalStep:
    """A step on devices of this process."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._step(state, batch)

    def init(self, init_fn: Callable[[], Any]) -> Any:
        """The state, made where the step wants it."""
        return self._step.init(init_fn)

    def abstract(self, init_fn: Callable[[], Any]) -> Any:
        """What `init` would return, with nothing made."""
        return self._step.abstract(init_fn)

    def close(self) -> None:
        """There is nothing to end."""


class OnRay:
    """Starts on a Ray cluster. A plan is kept for as long as the hosts stay the same."""

    def __init__(
        self, shapes: Shapes, ray: Any, cluster: Given, deadline_s: float | None, options: Mapping[str, Any]
    ) -> None:
        if cluster is None:
            raise OptionError("cluster: on Ray, say what to plan for: a preset, a ClusterSpec or a file")
        self._shapes, self._ray, self._cluster, self._deadline_s = shapes, ray, cluster, deadline_s
        self._options = {"pipeline": True, **options}
        self._hosts = alive_hosts()
        self._planned: tuple[ClusterSpec, PipelineStep] | None = None

    def start(self) -> RemoteStep:
        """Plans, where the cluster is another than at the last start, and starts a gang."""
        spec = _spec(self._cluster)
        assert spec is not None
        if not callable(self._cluster):
            spec = without_hosts(spec, self._hosts - alive_hosts())
        if self._planned is None or self._planned[0] != spec:
            self._planned = spec, parallelize(self._shapes.step, cluster=spec, **self._options)
        plan = self._planned[1].plan(self._shapes.state, self._shapes.batch)
        return RemoteStep(plan.compile(cluster=self._ray, deadline_s=self._deadline_s))


class RemoteStep:
    """A step on a gang of workers."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._step(state, batch)

    def init(self, init_fn: Callable[[], Any]) -> Any:
        """The state, made by the workers."""
        return self._step.init(init_fn)

    def abstract(self, init_fn: Callable[[], Any]) -> Any:
        """What a checkpoint of the state is restored as."""
        return self._step.abstract(init_fn)

    def close(self) -> None:
        """Kills the workers."""
        self._step.close()


def alive_hosts() -> int:
    """Hosts that Ray has now."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def without_hosts(spec: ClusterSpec, lost: int) -> ClusterSpec:
    """The cluster with fewer hosts.

    Raises ClusterError where none is left, or there are hosts of several kinds.
    """
    if lost <= 0:
        return spec
    if len(spec.groups) > 1:
        raise ClusterError(
            f"{spec.name}: {lost} hosts are gone, and nothing says of which of its {len(spec.groups)} groups. Give a "
            "function that returns the ClusterSpec of what is there (cluster=)"
        )
    (group,) = spec.groups
    if lost >= group.hosts:
        raise ClusterError(f"{spec.name}: of {group.hosts} hosts {lost} are gone; none is left to train on")
    return replace(spec, groups=(replace(group, hosts=group.hosts - lost),), torus=None)
