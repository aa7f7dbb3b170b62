"""What if there were less memory, more hosts, slower links? A plan is planned again from its own data: `what_if`; and
the smallest such change that makes it another plan: `smallest_changes`.

Nothing is traced, so that a step in other microbatches has them of the same size: its batch grows or shrinks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.explain.more_microbatches import in_microbatches
from autopar.ir.cluster import ClusterSpec, HostGroup, LinkSpec
from autopar.ir.errors import ClusterError, InfeasibleError, OptionError
from autopar.ir.in_words import parallelism
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import Plan
from autopar.ir.progress import Tell
from autopar.step.again import plan_again

LINKS = ("intra", "between")
"""The links of a host's devices, and a host's NICs with what joins groups of hosts."""
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kMGT]?)(b|B)(?:ps|/s|it/s)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RANGE, STEP, CLOSE = 4.0, 2.0, 1.1
"""How far a change is looked for, as a factor; from one try to the next; and how near its size is told (chosen)."""


@dataclass(frozen=True, slots=True)
class Times:
    """So many times the bandwidth that each link of a kind has."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be otherwise: ``memory_bytes`` a device that plans may take, ``hosts``, ``links`` (one of LINKS →
    bytes a second of each of them, one direction, or `Times`), another ``cluster``, ``microbatches``; None: as they
    are."""

    memory_bytes: int | None = None
    hosts: int | None = None
    links: Mapping[str, float | Times] = field(default_factory=dict[str, "float | Times"])
    cluster: ClusterSpec | None = None
    microbatches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """``what``, made ``factor`` times what it is, makes another plan, ``plan``; None: no factor up to it does, or
    (``infeasible``) from it on there is none."""

    what: str
    factor: float
    plan: Plan | None
    infeasible: bool = False


def rate_from_text(text: str) -> float | Times:
    """Bytes a second of ``100Gb`` (bits) or ``50GB/s``, or the factor of ``0.5x``. Raises OptionError for anything
    else."""
    if times := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x", text.strip()):
        if not 0 < (factor := float(times[1])) < 1e9:
            raise OptionError(f"{text!r}: a link carries more than nothing, and less than that")
        return Times(factor)
    if not (found := _RATE.fullmatch(text.strip())):
        raise OptionError(f"{text!r} is no rate: write 100Gb for bits a second, 50GB for bytes, or 0.5x")
    rate = float(found[1]) * _PREFIX[found[2]] / (8 if found[3] == "b" else 1)
    if not 0 < rate < 1e18:
        raise OptionError(f"{text!r}: a link carries more than nothing, and less than that")
    return rate


def changed(cluster: ClusterSpec, change: Change) -> ClusterSpec:
    """``cluster`` with other hosts and links. Raises ClusterError where it cannot have so many hosts."""
    cluster = change.cluster or cluster
    groups, between, names = cluster.groups, cluster.between, list[str]()
    if change.hosts is not None:
        if len(groups) > 1:
            raise ClusterError(f"{cluster.name} has {len(groups)} kinds of hosts: say --cluster, with all of them")
        groups = tuple(replace(group, hosts=change.hosts) for group in groups)
        names.append(f"{change.hosts} hosts")
    for link, rate in change.links.items():
        if link == "between" and sum(group.hosts for group in groups) == 1:
            raise ClusterError(f"{cluster.name} has one host: no link leads from it to another")
        groups = tuple(_with_link(group, link, rate) for group in groups)
        if link == "between" and between is not None:
            between = _at_rate(between, rate)
        said = f"{rate.factor:.4g} times {link}" if isinstance(rate, Times) else f"{link} {rate / 1e9:.4g} GB/s"
        names += [said] if rate != Times(1.0) else []
    if not names:
        return cluster
    made = replace(cluster, name=f"{cluster.name} with {', '.join(names)}", groups=groups, between=between)
    made.verify()
    return made


def _with_link(group: HostGroup, link: str, rate: float | Times) -> HostGroup:
    if link == "intra":
        return replace(group, intra_host=_at_rate(group.intra_host, rate))
    return replace(group, nic=_at_rate(group.nic, rate))


def _at_rate(link: LinkSpec, rate: float | Times) -> LinkSpec:
    return replace(link, bytes_per_s=rate.factor * link.bytes_per_s if isinstance(rate, Times) else rate)


def what_if(plan: Plan, change: Change, tell: Tell | None = None) -> Plan:
    """The best plan if that were so. A mesh that was asked for and no longer fills the cluster is chosen anew. Raises
    OptionError where the plan alone cannot say, ClusterError for a cluster that cannot be, and what planning raises."""
    cluster = changed(plan.cluster, change)
    options: dict[str, Any] = {"cluster": cluster} if cluster != plan.cluster else {}
    if change.memory_bytes is not None:
        options["memory_bytes"] = change.memory_bytes
    if tell is not None:
        options["progress"] = tell
    if cluster.num_devices != plan.cluster.num_devices:
        plan = replace(plan, config=replace(plan.config, mesh_shape=None, axis_names=None, devices=None))
    if change.microbatches is not None:
        plan = in_microbatches(plan, change.microbatches)
    return plan_again(plan, options)


# --- the smallest change -------------------------------------------------------------------------------------------


def shape_of(plan: Plan) -> object:
    """What makes a plan another one: purposes and sizes of mesh axes, stages, schedule, recomputation."""
    words = tuple(tuple((w.axes, re.sub(r" \(\d+ %\)", "", w.what)) for w in stage) for stage in parallelism(plan))
    meshes = tuple(mesh.shape for mesh in plan.meshes)
    if isinstance(plan.body, Pipelined):
        pipeline = plan.body.plan
        return words, meshes, pipeline.schedule.name, tuple((s.start, s.stop, s.remat) for s in pipeline.stages)
    return words, meshes, bool(plan.body.sharding.recompute)


def smallest_changes(plan: Plan, tell: Tell | None = None) -> Iterator[Smallest]:
    """For bandwidths, memory and, of a step in microbatches, the batch: the smallest factor up and down that makes
    another plan."""
    limit = min(w.limit_bytes for w in plan.predictions.workers)
    kinds: dict[str, Callable[[float], Change]] = {"memory": lambda f: Change(memory_bytes=round(limit * f))}
    for link in LINKS:
        if link == "intra" or sum(g.hosts // g.domain_hosts for g in plan.cluster.groups) > 1:
            kinds[f"bandwidth {link}"] = lambda f, link=link: Change(links={link: Times(f)})
    count = plan.config.num_microbatches
    least = 1 if isinstance(plan.body, Pipelined) else 2  # a loop has two turns at least
    try:
        in_microbatches(plan, 2 * count)
    except OptionError:
        pass  # its batch is what it is
    else:
        kinds["batch"] = lambda f: Change(microbatches=max(least, round(count * f)))
    for what, change in kinds.items():
        for direction in (1 / STEP, STEP):
            yield _smallest(plan, what, change, direction, tell)


def _smallest(
    plan: Plan, what: str, change: Callable[[float], Change], direction: float, tell: Tell | None
) -> Smallest:
    mine = shape_of(plan)

    def other(factor: float) -> Smallest | None:
        """What is another plan, or none at all; None where it is the same."""
        try:
            made = what_if(plan, change(factor), tell)
        except InfeasibleError:
            return Smallest(what=what, factor=factor, plan=None, infeasible=True)
        return Smallest(what=what, factor=factor, plan=made) if shape_of(made) != mine else None

    same, factor, found = 1.0, direction, None
    while 1 / RANGE <= factor <= RANGE and (found := other(factor)) is None:
        same, factor = factor, factor * direction
    if found is None:
        return Smallest(what=what, factor=same, plan=None)
    while max(found.factor / same, same / found.factor) > CLOSE:
        middle = (found.factor * same) ** 0.5
        if change(middle) in (change(same), change(found.factor)):
            break
        if (there := other(middle)) is None:
            same = middle
        else:
            found = there
    return found
