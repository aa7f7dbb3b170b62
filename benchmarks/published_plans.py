"""A `Case` → its plan: the options that force a published run's own layout, and nothing else.

Every step is planned in stages (one, where the run has no pipeline), for these say what layers compute again. Stages
hold equal numbers of blocks; where these do not divide, the first and the last, which have the embedding and the scores
of words, hold one less, as Megatron-LM's users do. Degrees of parallelism are `tensor=`, `sequence=`, `experts=` and
`zero=`; that heads, inner values and words are split over the tensor axis, and residuals over it or not, are
constraints (`layout_pins`), for a degree alone also allows weights that are gathered for each use.

State that is split over a part of the replicas (`Case.shard`) is pinned leaf by leaf on a mesh of replicas, shards and
the tensor axis.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.inter_op.pipeline_plan import pipeline_plan
from autopar.inter_op.pipeline_search import plan_pipeline
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layers import LayeredGraph
from autopar.ir.options import settled
from autopar.ir.plan import Plan
from autopar.ir.planned_step import PlannedStep
from autopar.ir.progress import Watch
from autopar.step.asked import pipeline_options
from autopar.step.options import asked
from benchmarks.published_clusters import cluster_of
from benchmarks.published_models import (
    INNER,
    KEYS,
    LOGITS,
    NORMED,
    QUERIES,
    RESIDUAL,
    WEIGHT,
    WEIGHT_AGAIN,
    gathers_again,
    step_of,
)
from benchmarks.published_rows import Case, Model, RowError

FREE = P.UNCONSTRAINED
NO_LIMIT_BYTES = 10**14


class Planner:
    """Plans cases one after the other: a step is traced again only where it is another than the one before."""

    def __init__(self) -> None:
        self._of: tuple[Hashable, ...] | None = None
        self._step: PlannedStep | None = None

    def plan(self, case: Case) -> Plan:
        """The plan, without a limit of memory.

        Raises:
            RowError: the case asks for what no option says.
            AutoparError: there is no such plan.
        """
        cluster = cluster_of(case)
        options = options_of(case, cluster)
        if self._of == traced_as(case) and self._step is not None:
            return _again(self._step, cluster, options)
        self._of = self._step = None  # what it holds is large
        step, args = step_of(case)
        plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, **options).plan(*args).data
        self._of, self._step = traced_as(case), plan.step
        return plan


def traced_as(case: Case) -> tuple[Hashable, ...]:
    """What the traced step follows from: cases that agree in it share one."""
    return (
        case.model, case.batch, case.microbatches, case.compute, case.adafactor, case.masters_apart,
        case.fused_attention, case.platform, case.zero == 3, gathers_again(case),
    )  # fmt: skip


def _again(step: PlannedStep, cluster: ClusterSpec, options: Mapping[str, Any]) -> Plan:
    """As `autopar.step.again.plan_again`, with other constraints too."""
    config = asked(settled(options)).stages
    assert config is not None and isinstance(step.graph, LayeredGraph)
    found = plan_pipeline(step.graph, cluster, pipeline_options(config, 1), dict(step.user_rules), None, Watch())
    return pipeline_plan(step, cluster, config, found, trace_s=0.0, jax_version=jax.__version__)


def options_of(case: Case, cluster: ClusterSpec) -> dict[str, Any]:
    """The options of `autopar.parallelize`."""
    stages = case.pipeline * case.virtual
    per_stage = case.devices // case.pipeline
    hosts, per_host = -(-per_stage // case.devices_per_host), min(per_stage, case.devices_per_host)
    if hosts * per_host != per_stage:
        raise RowError(f"stages of {per_stage} devices do not fill hosts of {case.devices_per_host}")
    forced: dict[str, Any] = {
        "memory_bytes": NO_LIMIT_BYTES, "num_microbatches": case.microbatches, "recompute": case.recompute,
        "stages": stages, "virtual_stages": case.virtual, "stage_starts": starts(case.model.layers, stages),
        "layers": "names", "submeshes": [(hosts, per_host)] * stages, "schedule": case.schedule, "workers": 1,
    }  # fmt: skip
    whole = {"whole_examples": True} if case.sequence_parallel is False and case.context == 1 else {}
    forced |= whole
    shards = shards_of(case)
    if shards < case.data or (case.zero == 3 and case.context == case.experts == 1):
        return forced | shards_and_replicas(case, shards)
    degrees: dict[str, Any] = {"zero": case.zero}
    for name, degree in (("tensor", case.tensor), ("sequence", case.context), ("experts", case.experts)):
        if degree > 1:
            degrees[name] = degree
    pins = layout_pins(case, "tensor") | tensor_pins(case)
    forbid = ("all-to-all",) if case.tensor > 1 and case.context == case.experts == 1 else ()
    return forced | degrees | {"constraints": pins or None, "forbid": forbid}


def starts(blocks: int, stages: int) -> list[int]:
    """The first layer of each stage: layer 0 is the embedding, 1 … ``blocks`` the blocks, then the scores of words."""
    if blocks % stages and (blocks + 2) % stages == 0 and stages > 1:
        each = (blocks + 2) // stages
        sizes = [each - 1, *[each] * (stages - 2), each - 1]
    elif blocks >= stages:
        each, more = divmod(blocks, stages)
        sizes = [each + (0 < s <= more) for s in range(stages)]
    else:
        raise RowError(f"{blocks} blocks for {stages} stages")
    first = [1]
    for size in sizes[:-1]:
        first.append(first[-1] + size)
    return [0, *first[1:]]


def layout_pins(case: Case, tensor: str) -> dict[str, P]:
    """Constraints of Megatron-LM's layout (Narayanan et al., 2021; Korthikanti et al., 2022) over axis ``tensor``:
    products read whole positions, or those of a context, and heads, inner values and words are split."""
    if case.tensor == 1:
        return {}
    model, seq = case.model, "sequence" if case.context > 1 else None
    heads = tensor if model.kv_heads % case.tensor == 0 else None
    pins = {f"name:{NORMED}": P(FREE, seq, None), f"name:{LOGITS}": P(FREE, seq, tensor)}
    if heads is not None or (model.heads // model.kv_heads) % case.tensor == 0:
        pins[f"name:{QUERIES}"] = P(FREE, FREE, heads, None if heads else tensor, None)
        pins[f"name:{KEYS}"] = P(FREE, FREE, heads, None)
    if not model.experts:
        pins[f"name:{INNER}"] = P(FREE, seq, tensor)
    if case.sequence_parallel is not None:
        over = tensor if case.sequence_parallel else None
        pins[f"name:{RESIDUAL}"] = P(FREE, tuple(x for x in (seq, over) if x) or None, None)
    return pins


def tensor_pins(case: Case) -> dict[str, P]:
    """Constraints of the parameters, and what the optimizer has of each: split over ``tensor`` as `layout_pins`."""
    if case.tensor == 1 or case.experts > 1 or case.adafactor:
        return {}
    leaves = _leaves(case.model, 0, case.tensor)
    return {
        f"args[0]*['{name}']": P(*("tensor" if axis else FREE for axis in dims))
        for name, dims in leaves.items()
        if any(dims)
    }


def shards_of(case: Case) -> int:
    """Over how many of the replicas state is split that ZeRO splits: as the case says, but no more than divide the
    hidden size (Megatron-LM flattens state, and splits it over any number)."""
    if case.zero == 0 or case.context > 1 or case.experts > 1:
        return case.data
    return math.gcd(case.shard if case.zero == 3 else case.data, case.model.hidden)


def shards_and_replicas(case: Case, shards: int) -> dict[str, Any]:
    """Options of a mesh of replicas x shards (x tensor), or hosts x devices of each (x tensor) where there are no
    replicas: state is split over the shards, the batch over all. Under ``zero`` 3 a weight is split until it is read,
    so that each microbatch gathers it."""
    if case.context > 1 or case.experts > 1:
        raise RowError(f"replicas of {shards} shards beside cp {case.context}, ep {case.experts}: no option says it")
    replicas, sharded = case.data // shards, ("shards",)
    within = case.devices_per_host // case.tensor
    if replicas == 1 and case.platform == "gpu" and within and case.data % within == 0:
        replicas, sharded = case.data // within, ("replicas", "shards")
    sizes = {"replicas": replicas, "shards": case.data // replicas, "tensor": case.tensor}
    names = dict(zip((role for role, size in sizes.items() if size > 1), "xyz", strict=False))
    over = tuple(names[role] for role in sharded if role in names)

    def pins_of(split: int) -> dict[str, P]:
        leaves = _leaves(case.model, split, case.tensor)
        roles = {"y": over or None, "z": names.get("tensor"), None: None}
        return {name: P(*(roles[axis] for axis in dims)) for name, dims in leaves.items()}

    def named(pins: dict[str, P], where: str) -> dict[str, P]:
        return {where.format(name): pin for name, pin in pins.items()}

    of_weights = pins_of(shards if case.zero == 3 else 0)
    pins = named(of_weights, "args[0][0]*['{}']")
    if not case.adafactor:  # whose rows and columns of moments are of other ranks
        pins |= named(pins_of(shards), "args[0][1]*['{}']")
    if case.zero == 3 and not case.model.experts:
        read = {name: pin for name, pin in of_weights.items() if name != "positions"}
        table = {"table": read["embed"]}
        if not case.model.tied:
            del read["embed"]
        pins |= named(read | table, f"name:{WEIGHT}{{}}")
        pins |= named(read, f"name:{WEIGHT_AGAIN}{{}}") if gathers_again(case) else {}
    asked = {"mesh": tuple(sizes[role] for role in names) or (1,), "constraints": pins}
    asked["constraints"] |= layout_pins(case, names.get("tensor", ""))
    asked |= {"zero": case.zero} if shards == case.data else {}  # sums of gradients too, which no pin reaches
    return asked | {"batch_axis": [tuple(names[role] for role in ("replicas", "shards") if role in names)]}


def _leaves(model: Model, shards: int, tensor: int) -> dict[str, list[str | None]]:
    """Name of a parameter → axes of its dimensions: ``z`` as `layout_pins` wants it, ``y`` the first other dimension
    that the shards divide, beginning with the hidden one; no ``shards``: none."""
    d, g, h, k = model.hidden, model.kv_heads, model.heads // model.kv_heads, model.head_dim
    f = model.expert_ffn if model.experts else model.ffn
    e, x = ([model.experts], 1) if model.experts else ([], 0)
    sizes: dict[str, tuple[list[int], int, int]] = {  # sizes, the tensor axis' dimension, the hidden one
        "query": ([d, g, h, k], 1, 0), "key": ([d, g, k], 1, 0), "value": ([d, g, k], 1, 0),
        "project": ([g, h, k, d], 0, 3), "up": ([*e, d, f], x + 1, x), "down": ([*e, f, d], x, x + 1),
        "embed": ([model.vocab, d], 0, 1),
    }  # fmt: skip
    if model.gated:
        sizes["gate"] = sizes["up"]
    else:
        sizes["positions"] = ([model.seq, d], 0, 1)
    if not model.tied:
        sizes["head"] = ([d, model.vocab], 1, 0)
    out: dict[str, list[str | None]] = {}
    for name, (shape, split, hidden) in sizes.items():
        dims: list[str | None] = [None] * len(shape)
        if tensor > 1 and shape[split] % tensor == 0:
            dims[split] = "z"
        for i in (hidden, *range(len(shape))):
            if shards and dims[i] is None and shape[i] % shards == 0:
                dims[i] = "y"
                break
        out[name] = dims
    return out
