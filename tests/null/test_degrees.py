"""Degrees of parallelism that are asked for are those of the plan, of one program and of stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.cluster import LogicalMesh
from autopar.ir.degrees import Degrees
from autopar.ir.errors import OptionError, ShardingError
from autopar.ir.graph import TensorType
from autopar.ir.in_words import in_words
from autopar.ir.plan import ROLES, Plan
from autopar.ir.sharding import ShardingSpec
from examples.gpt.model import GPTConfig, make_train_step, train_step_args
from tests.clusters import SLOW_8
from tests.models.alpa_cases import moe

pytestmark = pytest.mark.xdist_group("degrees")  # they share plans
BATCH, SEQ, EXPERTS = 96, 24, 16
CONFIG = GPTConfig(vocab=64, seq=SEQ, layers=2, hidden=32, heads=8, tied=False)
STAGES = pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])


@functools.lru_cache(maxsize=None, typed=True)
def gpt(**options: Any) -> Plan:
    """A plan for 8 slow devices; of two stages, on four each."""
    if options.get("stages") == 2:
        options = {"schedule": "1f1b", "submeshes": ["1x4"], "workers": 1, "layers": 2, **options}
    step = autopar.parallelize(
        make_train_step(CONFIG), donate_argnums=(0,), cluster=SLOW_8, **{"num_microbatches": 2, **options}
    )
    return step.plan(*train_step_args(CONFIG, BATCH)).data


def of_experts(**options: Any) -> Plan:
    model = moe(batch=32, seq=16, hidden=32, experts=EXPERTS)
    args = jax.eval_shape(lambda *args: args, *model.args)
    step = autopar.parallelize(model.step, cluster=SLOW_8, **{"num_microbatches": 1, **model.kwargs, **options})
    return step.plan(*args).data


def arguments(plan: Plan, part: str) -> Iterator[tuple[str, TensorType, LogicalMesh, ShardingSpec]]:
    """Arguments whose path has ``part``, with each mesh that holds them."""
    found = False
    for argument in plan.inputs:
        if part in argument.path:
            found = True
            for place in argument.places:
                yield argument.path, place.type_of(argument.type), plan.meshes[place.stage], place.spec
    assert found


def parts(mesh: LogicalMesh, spec: ShardingSpec, *but: str) -> int:
    sizes = {axis.name: axis.size for axis in mesh.axes}
    return math.prod(sizes[a] for dim in spec.dims for a in dim if a not in but)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "stages"),
    [*((n, 1) for n in range(4)), *(pytest.param(n, 2, marks=pytest.mark.full) for n in range(4))],
)
def test_zero_says_which_state_is_split(zero: int, stages: int) -> None:
    plan = gpt(zero=zero, stages=stages)
    for path, t, mesh, spec in arguments(plan, ".params["):
        if len(t.shape) > 1:
            assert parts(mesh, spec) == (mesh.num_devices if zero == 3 else 1), f"{path} {spec}"
    for path, t, mesh, spec in arguments(plan, ".mu["):
        if len(t.shape) > 1:
            assert parts(mesh, spec) == (mesh.num_devices if zero else 1), f"{path} {spec}"
    for path, _, mesh, spec in arguments(plan, "args[1]"):
        assert parts(mesh, spec) == mesh.num_devices and spec.dims[0], f"{path} {spec}"


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
def test_more_of_zero_holds_less(stages: int) -> None:
    none, optimizer, sums = (gpt(zero=zero, stages=stages).predictions.peak_memory_bytes for zero in (0, 1, 2))
    assert none > optimizer > sums


@pytest.mark.slow
@STAGES
def test_tensor_splits_weights_and_no_example(stages: int) -> None:
    plan = gpt(tensor=2, zero=1, stages=stages)
    for mesh in plan.meshes:
        assert mesh.axis_names == ("data", "tensor")
        assert [axis.size for axis in mesh.axes] == [8 // stages // 2, 2]
    for path, t, mesh, spec in arguments(plan, ".params["):
        if len(t.shape) > 1:
            assert any("tensor" in dim for dim in spec.dims), f"{path} {spec}"
            assert parts(mesh, spec) == 2, f"{path} {spec}"
    for path, t, mesh, spec in arguments(plan, ".mu["):
        if len(t.shape) > 1:
            assert parts(mesh, spec, "tensor") == mesh.num_devices // 2, f"{path} {spec}"
    for path, _, _, spec in arguments(plan, "args[1]"):
        assert "data" in spec.dims[0] and "tensor" not in spec.dims[0], f"{path} {spec}"


@pytest.mark.slow
@STAGES
def test_sequence_splits_positions(stages: int) -> None:
    plan = gpt(sequence=2, stages=stages)
    for mesh in plan.meshes:
        assert mesh.axis_names == ("data", "sequence")
    for path, _, _, spec in arguments(plan, "args[1]"):
        assert spec.dims == (("data",), ("sequence",)), f"{path} {spec}"
    if stages == 1:
        hidden = [
            s for strategy in plan.sharding.strategies for s in strategy.results
            if len(s.dims) == 3 and s.dims[0] == ("data",)
        ]  # fmt: skip
        assert sum(s.dims[1] == ("sequence",) for s in hidden) > len(hidden) / 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"zero": 1}, {"tensor": 2}], ids=str)
def test_experts_have_their_weights_and_examples_change_places(more: dict[str, int]) -> None:
    plan = of_experts(experts=2, stages=1, **more)
    (mesh,) = plan.meshes
    assert mesh.axis_names == ("data", "experts", *(["tensor"] if "tensor" in more else []))
    for name in ("up", "down"):
        for path, _, _, spec in arguments(plan, f"['{name}']"):
            assert spec.dims[0] == ("experts",), f"{path} {spec}"
    for path, _, _, spec in arguments(plan, "args[1]"):
        assert set(spec.dims[0]) == {"data", "experts"}, f"{path} {spec}"
    moved = [c for c in plan.sharding.collectives if c.kind == "all-to-all" and c.axes == ("experts",)]
    assert sum(c.count for c in moved) >= 4  # to the experts and back, in both directions
    weight = EXPERTS * 32 * 128 * 4 // 2  # bytes of a half of the experts' weights
    assert not any(
        c.kind == "all-gather" and c.axes == ("experts",) and c.operand_bytes >= weight // 4
        for c in plan.sharding.collectives
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=pytest.mark.full) for m in ("data_parallel", "zero2", "zero3")]
)
def test_a_method_of_stages_is_a_degree_of_zero(method: str) -> None:
    plan = gpt(method=method, stages=2)
    assert plan.config.method == method and plan.config.stages is not None
    zero = {"data_parallel": 0, "zero2": 2, "zero3": 3}[method]
    assert plan.config.stages.degrees == Degrees(zero=zero)
    for path, t, mesh, spec in arguments(plan, ".mu["):
        if len(t.shape) > 1:
            assert parts(mesh, spec) == (mesh.num_devices if zero else 1), f"{path} {spec}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero": 4}, "^zero: 4 is not one of 0, 1, 2, 3"),
        ({"zero": True}, "^zero: got True, of type bool; expected int"),
        ({"tensor": 0}, "^tensor: 0 is no number of devices; at least 1"),
        ({"tensor": 2, "mesh": (2, 4)}, "^mesh: beside tensor 2: degrees make the mesh, of axes data, tensor"),
        ({"tensor": 2, "batch_axis": "x"}, "^batch_axis: beside tensor 2: .* over data"),
        ({"zero": 1, "method": "zero3"}, "^method: beside zero 1"),
        ({"sequence": 2, "stages": 2, "whole_examples": True}, "^whole_examples: beside sequence 2"),
        ({"method": "tensor_parallel", "stages": 2}, "^method: stages= asks for stages, whose meshes may differ"),
        ({"tensor": 3}, "tensor 3: does not divide the 8 devices"),
        ({"tensor": 3, "stages": 2}, "tensor 3: divides none of the submeshes"),
        ({"zero": 1, "num_microbatches": 32}, "the batch is split over 8 devices, which do not divide the 96 examples"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        gpt(**options)


@pytest.mark.slow
@STAGES
def test_a_degree_that_splits_nothing_is_refused(stages: int) -> None:
    with pytest.raises(ShardingError, match=r"^experts=2: no weights are those of experts"):
        gpt(experts=2, stages=stages)


def test_degrees_make_a_mesh() -> None:
    assert Degrees(tensor=4).shape(32) == (8, 4)
    assert Degrees(experts=2, sequence=2, tensor=2).shape(8) == (1, 2, 2, 2)
    assert Degrees(experts=2, tensor=2).names == ("data", "experts", "tensor")
    assert Degrees(tensor=3).shape(8) is None
    assert Degrees(zero=1).names is None and Degrees(zero=1).shape(8) is None
    assert not Degrees() and Degrees(zero=0)
    assert str(Degrees(zero=0, tensor=2)) == "zero 0, tensor 2"


@STAGES
@pytest.mark.parametrize(
    "options, words",
    [
        ({"zero": 0}, "data parallel over "),
        ({"zero": 1}, "ZeRO-1 over "),
        ({"zero": 2}, "ZeRO-2 over "),
        ({"zero": 3}, "ZeRO-3 over "),
        ({"zero": 1, "tensor": 2}, "ZeRO-1 over data"),
        ({"sequence": 2}, "sequence parallel with sharded weights over sequence"),
    ],
)
def test_words_are_those_that_were_asked_for(options: dict[str, int], words: str, stages: int) -> None:
    assert words in in_words(gpt(**options, stages=stages))


def test_experts_in_words() -> None:
    assert "expert parallel and ZeRO-3 over experts" in in_words(of_experts(experts=4))


def test_roles_of_arguments() -> None:
    for stages in (1, 2):
        plan = gpt(zero=1, stages=stages)
        roles = {role: [a.path for a in plan.inputs if a.role == role] for role in ROLES}
        assert roles["batch"] == ["args[1].inputs", "args[1].targets"]
        assert roles["weights"] and all(".params" in path for path in roles["weights"])
        assert roles["optimizer state"] and all(
            ".opt_state" in path or path == "args[0].step" for path in roles["optimizer state"]
        )
        assert not roles["other"]
        assert {a.role for a in plan.outputs if a.path.startswith("out[0].params")} == {"weights"}
