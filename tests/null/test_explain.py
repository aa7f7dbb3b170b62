"""Questions to plans: what was chosen is found again, and what another way adds is what solving again with it says."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli import main
from autopar.explain.alternatives import explained
from autopar.explain.names import Named, found
from autopar.explain.posed import Posed, posed
from autopar.explain.what_if import CLOSE, Change, Times, changed, rate_from_text, shape_of, smallest_changes, what_if
from autopar.explain.why_not import pin_from_text, why_not
from autopar.intra_op.decisions import Decisions
from autopar.intra_op.extract import collectives
from autopar.ir.errors import ClusterError, OptionError, PlanFormatError
from autopar.ir.pipelined import Pipelined
from autopar.ir.plan import OneProgram, Plan
from autopar.ir.presets import cluster_from_text
from autopar.ir.serde import load_plan, save_plan
from autopar.ir.sharding import Pin
from benchmarks.models import gpt, mlp
from tests.clusters import SLOW_8
from tests.models.alpa_cases import moe
from tests.null.handmade import handmade_plan
from tests.null.test_imports import run_python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("explain")]  # they share plans
GPT = {"layers": 2, "hidden": 128, "heads": 4, "seq": 64, "vocab": 256, "batch": 32}


def _planned(make: Callable[[], tuple[Any, tuple[Any, ...]]], **options: Any) -> Plan:
    step, args = make()
    return autopar.parallelize(step, **{"donate_argnums": 0, "cluster": SLOW_8, **options}).plan(*args).data


def _moe() -> tuple[Any, tuple[Any, ...]]:
    model = moe(batch=32, seq=16, hidden=32, experts=8)
    return model.step, model.args


PLANS: dict[str, Callable[[], Plan]] = {
    "gpt": lambda: _planned(functools.partial(gpt, **GPT), mesh=(2, 4), num_microbatches=1),
    "scanned": lambda: _planned(functools.partial(gpt, scan=True, **GPT), mesh=(8,), num_microbatches=2, stages=1),
    "pipeline": lambda: _planned(
        functools.partial(gpt, **GPT), stages=2, num_microbatches=4, submeshes=["1x4"], workers=1
    ),
    "degrees": lambda: _planned(
        functools.partial(gpt, **GPT), stages=2, num_microbatches=4, tensor=2, zero=1, submeshes=["1x4"], workers=1
    ),
    "experts": lambda: _planned(_moe, mesh=(8,), num_microbatches=1, batch_argnums=1),
}


@functools.cache
def plan_of(name: str) -> Plan:
    return PLANS[name]()


@functools.cache
def posed_of(name: str) -> tuple[Posed, ...]:
    return posed(plan_of(name))


# --- the plan's choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_the_choice_that_a_plan_is_is_found_again(name: str) -> None:
    plan = plan_of(name)
    problems = posed_of(name)
    if isinstance(plan.body, OneProgram):
        assert problems[0].chosen.step_s == pytest.approx(plan.predictions.step_s, rel=1e-12)
        assert problems[0].chosen.peak == plan.predictions.peak_memory_bytes
        assert tuple(collectives(problems[0].chosen.out)) == plan.body.sharding.collectives
    else:
        for mine, sharding in zip(problems, plan.pipelined.shardings, strict=True):
            assert tuple(collectives(mine.chosen.out)) == sharding.collectives
        assert [k for mine in problems for k in mine.layers] == list(range(len(plan.pipelined.layers)))


@pytest.mark.full
def test_a_plan_that_recomputes() -> None:
    make = functools.partial(gpt, **GPT)
    free = _planned(make, cluster="dgx-a100", mesh=(8,), num_microbatches=1)
    limit = round(0.7 * free.predictions.peak_memory_bytes)
    tight = _planned(make, cluster="dgx-a100", mesh=(8,), num_microbatches=1, memory_bytes=limit)
    assert isinstance(tight.body, OneProgram) and tight.body.sharding.recompute
    (mine,) = posed(tight)
    assert mine.chosen.step_s == pytest.approx(tight.predictions.step_s, rel=1e-9)
    assert mine.chosen.peak == tight.predictions.peak_memory_bytes
    answer = explained(found([mine], "args[0].params['embed']")[0], tries=4)
    assert answer.alternatives and all(a.adds_s is None or a.peak_bytes <= limit for a in answer.alternatives)


def test_a_plan_that_is_none_of_its_problems_choices() -> None:
    plan = plan_of("gpt")
    table = plan.sharding.strategies
    other = replace(table[0], factor_axes=(("nowhere", ("x",)),))
    broken = replace(plan, body=OneProgram(sharding=replace(plan.sharding, strategies=(other, *table[1:]))))
    with pytest.raises(PlanFormatError, match="in no way that this autopar knows: plan again"):
        posed(broken)
    with pytest.raises(OptionError, match="has no graph: what else was possible cannot be told"):
        posed(replace(plan, step=None))


# --- names ---------------------------------------------------------------------------------------------------------


def test_names_are_of_arguments_operators_lines_and_layers() -> None:
    problems = posed_of("gpt")
    graph = problems[0].problem.source
    node = next(n for n in graph.nodes if n.primitive == "dot_general" and n.source)
    for name in (node.primitive, node.source, f"{node.primitive} ({node.source})", f"node {node.id}"):
        assert any(_is(one, node.id) for one in found(problems, name)), name
    path = next(p for p in graph.arg_paths if "embed" in p)
    (argument,) = found(problems, path)
    assert path in argument.title and argument.phase == ""
    assert found(problems, "embed")[0].phase == "", "arguments come first"
    with pytest.raises(OptionError, match=r"nothing in the plan is called 'dot_generol'; near to that: dot_general"):
        found(problems, "dot_generol")
    with pytest.raises(OptionError, match="the plan has no layer 3"):
        found(problems, "layer 3")
    assert {one.posed.what for one in found(posed_of("pipeline"), "layer 1")} == {
        mine.what for mine in posed_of("pipeline") if 1 in mine.layers
    }


def _is(named: Named, node_id: int) -> bool:
    this, flat = named.posed.problem.graph.classes[named.c], named.posed.problem.flat
    return any((node := flat.node[n]) is not None and node.id == node_id for n in this.members)


# --- alternatives --------------------------------------------------------------------------------------------------


def _some(name: str, count: int) -> list[tuple[Named, int]]:
    """``count`` random operators, each with one of its other ways."""
    rng = random.Random(name)
    every = [one for mine in posed_of(name) for one in found([mine], "*") if one.phase]
    return [(one, rng.randrange(1 << 30)) for one in rng.sample(every, min(count, len(every)))]


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PLANS)
def test_what_another_way_adds_is_what_solving_again_with_it_says(name: str, count: int) -> None:
    """By another solver, of the problem posed anew with that way alone."""
    anew = posed(plan_of(name))
    tried = 0
    for one, number in _some(name, count):
        answer = explained(one, tries=3)
        if not answer.alternatives:
            continue
        other = answer.alternatives[number % len(answer.alternatives)]
        (mine,) = [m for m in anew if m.what == one.posed.what]
        this = mine.problem.graph.classes[one.c]
        masks = {**mine.allowed}
        for more in (mine.held, {this.cluster: this.follow == other.number}):
            masks |= {k: mask & masks.get(k, True) for k, mask in more.items()}
        exact = mine.problem.solve(mine.problem.problem, 60.0, "highs", masks=masks)
        assert (other.adds_s is not None) == exact.report.fits
        if other.adds_s is not None:
            best = mine.problem.counted(exact.choice).step_s
            assert other.adds_s == pytest.approx(best - mine.chosen.step_s, abs=2e-3 * mine.chosen.step_s)
            assert sum(s for _, s in other.through) >= other.adds_s - 1e-3 * mine.chosen.step_s
            tried += 1
    assert tried >= count // 3


def test_a_layer_takes_and_gives_as_planned_whatever_is_asked() -> None:
    asked = 0
    for mine in posed_of("pipeline"):
        graph, flat, chosen = mine.problem.graph, mine.problem.flat, mine.chosen.out
        ports = [n for n, kind in enumerate(flat.kind) if kind in ("recv", "send")]

        def codes(out: Decisions, ports: list[int] = ports, graph: Any = graph, flat: Any = flat) -> list[int]:
            kinds = [(graph.class_of[n], flat.kind[n]) for n in ports]
            return [out.result_code(c, 0) if kind == "recv" else out.operand_code(c, 0) for c, kind in kinds]

        for one in [named for named in found([mine], "*") if "dot_general" in named.title]:
            this = graph.classes[one.c]
            for other in explained(one, tries=3).alternatives:
                best = mine.solved({this.cluster: this.follow == other.number})
                assert isinstance(best, str) or codes(best.out) == codes(chosen)
                asked += not isinstance(best, str)
    assert asked >= 10


def test_an_argument_pinned_otherwise_adds_what_planning_again_says() -> None:
    plan, problems = plan_of("gpt"), posed_of("gpt")
    asked = 0
    for one in found(problems, "args[0]"):
        if one.phase or one.count > 1:
            continue
        answer = explained(one, tries=2)
        for other in answer.alternatives:
            path = next(p for p in problems[0].paths if p in one.title)
            (spec,) = other.way.results
            again, _ = why_not(plan, Pin(target=path, dims=spec.dims))
            assert other.adds_s is not None
            more = again.predictions.step_s - plan.predictions.step_s
            assert other.adds_s == pytest.approx(more, abs=1e-3 * plan.predictions.step_s), (path, spec)
            asked += 1
    assert asked >= 4


def test_what_follows_says_whom() -> None:
    answers = [explained(one, tries=1) for one in found(posed_of("gpt"), "tanh")]
    assert answers and all(answer.follows for answer in answers)


def test_kernels_are_called_as_their_rules_name_them() -> None:
    blend = autopar.sharding_rule("blend", "b n+, n+ m -> b m")(lambda x, w: jnp.tanh(x @ w))

    def step(w: Any, x: Any) -> Any:
        return blend(x, w).sum()

    args = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    plan = autopar.parallelize(step, cluster=SLOW_8, mesh=(2, 4)).plan(*args).data
    (one,) = found(posed(plan), "blend")
    assert one.title.startswith("blend (node ") and found(posed(plan), "bl*d")[0].c == one.c
    assert "blend" in [row.primitive for row in plan.sharding.operators]


# --- why not, what if ----------------------------------------------------------------------------------------------


def test_pins_are_read_from_text() -> None:
    assert pin_from_text("args[0].w1: data, None") == Pin(target="args[0].w1", dims=(("data",), ()))
    assert pin_from_text("name:hidden: x+y, ?, _") == Pin(target="name:hidden", dims=(("x", "y"), None, ()))
    assert pin_from_text("args[0]['a:b']: [x·y,_]") == Pin(target="args[0]['a:b']", dims=(("x", "y"), ()))
    with pytest.raises(OptionError, match="write a path and the mesh axes of each dimension"):
        pin_from_text("args[0]")


def test_why_not_says_where_the_time_goes() -> None:
    plan = plan_of("gpt")
    again, changes = why_not(plan, Pin(target="args[0]*", dims=()))
    more = again.predictions.step_s - plan.predictions.step_s
    assert more > 0 and changes
    hidden = (again.predictions.hidden_s or 0.0) - (plan.predictions.hidden_s or 0.0)
    assert sum(s for _, s in changes) == pytest.approx(more + hidden, abs=1e-6)
    assert all(place.spec.dims == ((),) * len(a.type.shape) for a in again.inputs[:3] for place in a.places)


def test_what_if_there_were_less_memory_more_hosts_or_slower_links() -> None:
    plan = plan_of("gpt")
    same = what_if(plan, Change(memory_bytes=plan.cluster.groups[0].device.memory_bytes))
    assert same.sharding.root == plan.sharding.root
    slow = plan.cluster.groups[0].intra_host.bytes_per_s / 10
    slower = what_if(plan, Change(links={"intra": slow}))
    assert slower.predictions.step_s > plan.predictions.step_s
    assert slower.cluster.name == f"{plan.cluster.name} with intra {slow / 1e9:.4g} GB/s"
    larger = what_if(plan, Change(hosts=2 * plan.cluster.groups[0].hosts))
    assert larger.sharding.mesh.num_devices == 2 * plan.sharding.mesh.num_devices
    with pytest.raises(OptionError, match="as it was traced, in one microbatch, without a loop"):
        what_if(plan, Change(microbatches=2))
    with pytest.raises(ClusterError, match="must be at least 1"):
        what_if(plan, Change(hosts=0))


@pytest.mark.full
def test_what_if_a_pipeline_had_another_batch() -> None:
    plan = plan_of("pipeline")
    assert what_if(plan, Change(microbatches=4)).body == plan.body
    more = what_if(plan, Change(microbatches=8))
    more.verify()
    assert isinstance(more.body, Pipelined) and more.body.plan.schedule.num_microbatches == 8
    sizes = {a.path: a.type.shape for a in plan.inputs if a.role == "batch"}
    assert {a.path: a.type.shape for a in more.inputs if a.role == "batch"} == {
        path: (2 * shape[0], *shape[1:]) for path, shape in sizes.items()
    }
    step, args = gpt(**{**GPT, "batch": 64})
    traced = _planned(lambda: (step, args), stages=2, num_microbatches=8, submeshes=["1x4"], workers=1)
    assert more.predictions.step_s == pytest.approx(traced.predictions.step_s, rel=1e-9)
    assert more.fingerprint != traced.fingerprint, "a step with that batch is another one"


def _rows(examples: int, axis: int = 0, scaled: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Two products with dropout; the loss of each example is a result, too. ``scaled``: a mean of the whole batch is
    taken off before."""

    def loss(w: Any, x: Any, key: Any) -> Any:
        y = jnp.moveaxis(x, axis, 0) @ w["up"]
        y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0) @ w["down"]
        each = jnp.sum(y**2, 1)
        return jnp.mean(each), each

    def step(w: Any, x: Any, key: Any) -> Any:
        x = x - jnp.mean(x) if scaled else x
        (value, each), grads = autopar.value_and_grad(loss, has_aux=True)(w, x, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value, each

    f32 = jnp.float32
    w = {"up": jax.ShapeDtypeStruct((64, 256), f32), "down": jax.ShapeDtypeStruct((256, 64), f32)}
    x = jax.ShapeDtypeStruct((64, examples) if axis else (examples, 64), f32)
    return step, (w, x, jax.eval_shape(lambda: jax.random.key(0)))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda batch: mlp(width=256, batch=batch), {}),
        pytest.param(lambda batch: gpt(**{**GPT, "batch": batch}), {}, marks=pytest.mark.full),
        pytest.param(lambda batch: gpt(scan=True, **{**GPT, "batch": batch}), {}, marks=pytest.mark.full),
        (_rows, {"batch_argnums": 1}),
        (functools.partial(_rows, axis=1), {"batch_argnums": {1: 1}}),
    ],
    ids=["mlp", "gpt", "scanned", "rows", "columns"],
)
def test_what_if_one_program_had_another_batch(make: Any, options: Any) -> None:
    """As planned from the step with that batch."""

    def planned(batch: int, microbatches: int) -> Plan:
        return _planned(lambda: make(batch), mesh=(8,), num_microbatches=microbatches, **options)

    plan = planned(32, 2)
    for count in (4, 6):
        more, traced = what_if(plan, Change(microbatches=count)), planned(16 * count, count)
        more.verify()
        assert [(a.path, a.type) for a in more.inputs] == [(a.path, a.type) for a in traced.inputs]
        assert [o.type for o in more.outputs] == [o.type for o in traced.outputs]
        assert more.predictions.step_s == pytest.approx(traced.predictions.step_s, rel=1e-9)
        assert more.predictions.peak_memory_bytes == traced.predictions.peak_memory_bytes
        assert more.sharding.root == traced.sharding.root and more.fingerprint != traced.fingerprint


def test_another_batch_is_refused_where_the_graph_does_not_say_what_it_is() -> None:
    plan = _planned(lambda: _rows(32, scaled=True), mesh=(8,), num_microbatches=2, batch_argnums=1)
    with pytest.raises(
        OptionError, match=r"(sub|reduce_sum) \(node \d+, test_explain.py:\d+\) is about the whole batch"
    ):
        what_if(plan, Change(microbatches=4))
    with pytest.raises(OptionError, match="a loop over 2 microbatches: for one, plan from the step"):
        what_if(plan, Change(microbatches=1))


def test_the_smallest_change_is_where_the_plan_changes() -> None:
    """An MLP in ZeRO-3 or data parallelism as memory allows: less memory is the smallest change."""
    plan = _planned(functools.partial(mlp, width=512, batch=1024), mesh=(8,), num_microbatches=1)
    limit = 1.1 * plan.predictions.peak_memory_bytes
    tight = what_if(plan, Change(memory_bytes=round(limit)))
    found = {(one.what, one.factor < 1): one for one in smallest_changes(tight)}
    less = found["memory", True]
    assert less.infeasible or (less.plan is not None and shape_of(less.plan) != shape_of(tight))
    assert 1 / 4 <= less.factor < 1
    almost = Change(memory_bytes=round(limit * less.factor * CLOSE * 1.01))
    assert shape_of(what_if(tight, almost)) == shape_of(tight), "a little more memory, and it is the same"
    for (what, _), one in found.items():
        if what == "bandwidth intra" and one.plan is not None:
            rate = one.factor * plan.cluster.groups[0].intra_host.bytes_per_s
            assert shape_of(what_if(tight, Change(links={"intra": rate}))) != shape_of(tight)


@pytest.mark.parametrize(
    "text, rate", [("100Gb", 12.5e9), ("100Gbps", 12.5e9), ("50GB/s", 50e9), ("0.5x", Times(0.5)), ("800 Mb", 1e8)]
)
def test_rates(text: str, rate: float | Times) -> None:
    assert rate_from_text(text) == rate


def test_a_factor_is_of_what_each_link_has() -> None:
    """Hosts of two kinds keep their own bandwidths."""
    cluster = cluster_from_text("dgx-a100:1+dgx-h100:1")
    assert changed(cluster, Change(links={"intra": Times(1.0), "between": Times(1.0)})) is cluster
    half = changed(cluster, Change(links={"intra": Times(0.5), "between": Times(0.5)}))
    for was, now in zip(cluster.groups, half.groups, strict=True):
        assert now.intra_host.bytes_per_s == was.intra_host.bytes_per_s / 2
        assert now.nic.bytes_per_s == was.nic.bytes_per_s / 2
    assert cluster.between is not None and half.between is not None
    assert half.between.bytes_per_s == cluster.between.bytes_per_s / 2
    assert half.name == f"{cluster.name} with 0.5 times intra, 0.5 times between"


@pytest.mark.parametrize("text", ["fast", "100", "0x", "-1Gb", "1e3Gb", "Gb", "1.2.3x"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(OptionError):
        rate_from_text(text)


# --- the command line ----------------------------------------------------------------------------------------------


def test_explain_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    save_plan(plan_of("gpt"), path)
    assert main(["explain", path, "dot_general"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n  is        ") == 3 and "each in the best plan found that has it" in text
    assert re.search(r"\n\d+ more are called so: --all shows them", text)
    assert main(["explain", path, "args[0].params['embed']", "--all"]) == 0
    assert "  all " in capsys.readouterr().out
    assert main(["explain", path, "nobody"]) == 2
    assert "nothing in the plan is called 'nobody'; near to that: " in capsys.readouterr().err
    out = str(tmp_path / "again.json")
    assert main(["explain", path, "--why-not", "args[0].params*: None", "--out", out]) == 0
    text = capsys.readouterr().out
    assert text.startswith("with args[0].params*: None\n") and "where the time goes otherwise\n  " in text
    assert load_plan(out).config.pins == (Pin(target="args[0].params*", dims=((),)),)
    for words in (["explain", path], ["explain", path, "x", "--why-not", "y: x"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "give a NAME or --why-not, and not both" in capsys.readouterr().err


def test_both_run_where_jax_cannot_be_imported(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    save_plan(plan_of("gpt"), path)
    for words in (
        ["explain", path, "tanh"],
        ["what-if", path, "--link", "intra=0.5x"],
    ):
        done = run_python(f"from autopar.cli import main\nsys.exit(main({words!r}))", without=("jax", "jaxlib"))
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_what_if_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    save_plan(plan_of("gpt"), path)
    assert main(["what-if", path, "--link", "intra=0.1x", "--hosts", "2", "--out", out]) == 0
    text = capsys.readouterr().out
    assert re.match(r"step of \w+: \d+\.\d % of its time\n  cluster ", text) and "\n           →   " in text
    assert load_plan(out).cluster.groups[0].hosts == 2
    assert main(["what-if", path, "--link", "ring=1Gb"]) == 2
    assert "--link ring=1Gb: write intra=RATE or between=RATE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["what-if", path])
    assert "say what is otherwise" in capsys.readouterr().err
    for bad in (["--memory-gb", "nan"], ["--hosts", "0"], ["--microbatches", "-1"]):
        with pytest.raises(SystemExit):
            main(["what-if", path, *bad])
    assert re.search(r"no finite number above 0 .*\n.*'0' is not a whole number above 0 .*\n", capsys.readouterr().err)
    save_plan(handmade_plan(), path)
    assert main(["what-if", path, "--memory-gb", "1"]) == 2
    assert "has no graph: it cannot be planned again" in capsys.readouterr().err
