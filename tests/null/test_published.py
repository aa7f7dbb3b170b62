"""`benchmarks.published`: rows as cases, their clusters and options, summaries, and one small plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published_clusters import GPUS, OMNI_PATH, cluster_of, network
from benchmarks.published_compared import Compared, Found, ordered, summary_of
from benchmarks.published_facts import facts
from benchmarks.published_plans import Planner, options_of, shards_of, starts
from benchmarks.published_rows import Case, RowError, Run, read_runs, read_trials, run_of
from benchmarks.published_trials import eager_peak_bytes, kept_apart, memory_counts

DATA = Path("../shared/data/published_runs")
there = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data/published_runs")
ROW: dict[str, str | None] = {
    "id": "small", "source": "nobody", "quality": "A", "hw_key": "A100_80GB", "devices": "16", "devices_per_host": "8",
    "interconnect": "8x200Gb/s HDR IB", "model": "small", "layers": "4", "hidden": "256", "heads": "4",
    "kv_heads": "2", "head_dim": "64", "ffn": "512", "gated": "1", "vocab": "1000", "tied_emb": "0", "seq": "128",
    "dtype": "bf16", "optimizer": "adam", "gbs_seq": "32", "mbs": "2", "tp": "2", "pp": "2", "cp": "1", "dp": "4",
    "zero": "1", "seq_parallel": "yes", "recompute": "full", "flash": "no", "schedule": "1F1B", "step_s": "0.5",
}  # fmt: skip


def case(**cells: str | None) -> Case:
    found = run_of({**ROW, **cells})
    assert found.case is not None, found.why
    return found.case


def test_a_row() -> None:
    run = run_of(ROW)
    assert (run.kind, run.step_s, run.assumed, run.why) == ("dense", 0.5, (), "")
    mine = case()
    assert (mine.data, mine.microbatches, mine.masters_apart, mine.sequence_parallel) == (4, 4, True, True)
    assert (mine.model.vocab, mine.family) == (1024, "TP+PP")  # padded to 128 x tp


def test_what_a_row_does_not_say() -> None:
    run = run_of({name: ROW[name] for name in ("layers", "hidden", "heads", "ffn", "seq", "devices", "gbs_seq")})
    assert run.case is not None
    assert run.assumed == (
        "ZeRO 1", "fused attention", "vocab 51200", "tied embedding", "one microbatch", "recompute none"
    )  # fmt: skip
    assert (run.step_s, run.case.microbatches, run.case.recompute, run.case.compute) == (None, 1, "none", "bfloat16")


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"layers": ""}, "layers is blank"),
        ({"tp": "3"}, "tp 3 x pp 2 x cp 1 do not divide 16 devices"),
        ({"mbs": "3"}, "mbs 3 x dp 4 do not divide gbs 32"),
        ({"ep": "8"}, "ep 8 does not divide dp 4"),
        ({"layers": "4.5"}, "layers 4.5 is no whole number"),
    ],
)
def test_rows_that_cannot_be(cells: dict[str, str], why: str) -> None:
    run = run_of({**ROW, **cells})
    assert (run.case, run.why) == (None, why)


def test_kinds_that_are_apart() -> None:
    kinds = [run_of({**ROW, **cells}).kind for cells in ({"dtype": "fp8"}, {"experts": "8"}, {"cp": "2"})]
    assert kinds == ["fp8", "moe", "context"]
    assert case(dtype="fp16").compute == "float16"
    assert case(dtype="fp8-cs").compute == "float8"


def test_networks() -> None:
    host = GPUS["A100_80GB"]
    said = {
        "NVSwitch in host, 8x200Gb/s HDR IB": (8, 200), "4x Omni-Path 100Gb/s per 8-GPU host": (4, 100),
        "1600Gb/s RoCE per node": (8, 200), "400Gb/s RDMA per GPU": (8, 400), "InfiniBand NDR": (8, 400),
        "200Gb/s NICs x4 per host": (4, 200), "EFA 3200Gb/s per host": (8, 400), "not stated": (8, 200),
    }  # fmt: skip
    assert {text: network(text, host, 8) for text in said} == said
    clusters = [cluster_of(case(interconnect=text)) for text in ("4x Omni-Path 100Gb/s", "4x100Gb/s")]
    assert [c.groups[0].nic.bytes_per_s for c in clusters] == [OMNI_PATH * 12.5e9, 12.5e9]
    with pytest.raises(RowError, match="hardware 'Z80' is not known"):
        cluster_of(case(hw_key="Z80"))


def test_stages_of_equal_blocks() -> None:
    assert starts(8, 4) == [0, 3, 5, 7]
    assert starts(22, 8) == [0, 3, 6, 9, 12, 15, 18, 21]  # two, six times three, two
    assert starts(7, 3) == [0, 3, 6]
    assert starts(2, 4) == [0, 1, 2, 3]
    with pytest.raises(RowError, match="3 blocks for 4 stages"):
        starts(3, 4)


def test_options() -> None:
    options = options_of(case(), cluster_of(case()))
    assert (options["zero"], options["tensor"], options["stages"], options["submeshes"]) == (1, 2, 2, [(1, 8)] * 2)
    assert "args[0]*['query']" in options["constraints"]
    odd = case(hidden="96", heads="2", head_dim="48", devices="48", gbs_seq="48", tp="1", pp="1", mbs="1")
    assert (odd.data, shards_of(odd)) == (48, 48)
    odd = replace(odd, devices=40, batch=40)
    assert (shards_of(odd), options_of(odd, cluster_of(odd))["mesh"]) == (8, (5, 8))


@pytest.mark.slow
def test_a_small_plan_and_the_next_of_its_trace() -> None:
    planner = Planner()
    first = planner.plan(case())
    assert [stage.layers for stage in first.pipelined.plan.stages] == [range(3), range(3, 6)]
    told = facts(first)
    assert json.loads(json.dumps(told))["step_s"] == first.predictions.step_s
    (block,) = (s for s in told["shardings"] if isinstance(s, dict) and s["layers"] == 4)  # pyright: ignore
    products = [row[2] for row in block["operators"] if row[1] == "dot_general"]  # pyright: ignore
    assert "bfloat16[2,128,1,2,64]" in products  # queries: two examples, one of two groups of heads
    kinds = {(c["kind"], *c["axes"]) for c in block["collectives"]}  # pyright: ignore
    sums = {("reduce-scatter", axis) in kinds or ("all-reduce", axis) in kinds for axis in ("tensor", "data")}
    assert ("all-gather", "tensor") in kinds and sums == {True}  # which of the two is cheaper hangs on sizes
    again = planner.plan(case(zero="0"))
    assert again.predictions == Planner().plan(case(zero="0")).predictions != first.predictions


def _run(step_s: float | None, found_s: float) -> Compared:
    run = Run(id="", source="", quality="A", hardware="", kind="dense", group=("",), step_s=step_s, case=None)
    return Compared(run=run, found=Found(step_s=found_s))


def test_summaries() -> None:
    assert summary_of([-0.1, 0.3, 0.2]) == pytest.approx((0.2, 0.28, 0.2))
    assert all(map(math.isnan, summary_of([])))
    rows = [_run(1.0, 1.1), _run(2.0, 3.0), _run(3.0, 2.0), _run(3.1, 0.5)]
    assert ordered(rows) == (2, 5)  # the last two are within 5 %
    assert ordered(rows[:3]) == (0, 0)  # too few for a group


def test_memory() -> None:
    trials = [(True, 70e9), (True, 79e9), (False, 70e9), (False, 90e9)]
    counts = memory_counts(trials, 0.92)
    assert (counts.balanced, counts.wrong_fits) == (0.5, 0.5)
    assert memory_counts(trials, 1.0).balanced == 0.75
    assert kept_apart(["c", "a", "b", "a"]) == {"b"}


@pytest.mark.parametrize(
    ("cells", "kernel", "more"),
    [  # 2 microbatches of 2 examples in flight at the first of two stages, of 2 blocks each; the last has 1024 words
        ({}, "rms kernel", (4 * 256 * 2 * 128, 1024 * (20 - 8 / 2) * 2 * 128)),
        ({"seq_parallel": "no"}, "", (12 * 256 * 2 * 128, (12 * 256 + 1024 * (20 - 8 / 2)) * 2 * 128)),
        ({"seq_parallel": "no", "recompute": "none"}, "", (12 * 256 * 2 * 128 * 4, 0)),
        ({"recompute": "none"}, "rms kernel", (4 * 256 * 2 * 128 * 4, 0)),
    ],
)
def test_what_eager_frameworks_hold(cells: dict[str, str], kernel: str, more: tuple[float, float]) -> None:
    run = replace(run_of({**ROW, **cells}), kernel=kernel)
    for stage in range(2):
        if more[stage]:
            peaks = [1e12 if stage == s else 0.0 for s in range(2)]
            told = json.dumps({"worker_peak_bytes": peaks, "in_flight": [2, 1]})
            found = eager_peak_bytes(Compared(run=run, found=Found(facts=told))) - 1e12
            gathered = 4 * 256 * 2 * 128 if stage == 1 and cells.get("seq_parallel") != "no" else 0.0
            assert found == pytest.approx(more[stage] + gathered)


@there
def test_all_rows_are_read() -> None:
    runs, trials = read_runs(DATA / "runs.csv"), read_trials(DATA / "layout_trials.csv")
    assert (len(runs), len(trials)) == (344, 839)
    assert [(run.id, run.why) for run in runs + trials if run.case is None] == [
        ("megatron-bridge-perf-summary-008", "ep 32 does not divide dp 16")
    ]
    for run in runs:
        if run.case is not None:
            cluster = cluster_of(run.case)
            cluster.verify()
            assert cluster.num_devices == run.case.devices
            options_of(run.case, cluster)


def test_help() -> None:
    with pytest.raises(SystemExit) as ended:
        published.main(["--help"])
    assert ended.value.code == 0
