"""A search that a time limit or Ctrl-C ends: what it gives, what it says of it, and what it leaves behind."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.inter_op import layer_layouts, refinement
from autopar.ir.errors import SolverTimeoutError
from autopar.ir.plan_text import explain_text, plan_text
from autopar.ir.progress import Progress, Watch
from autopar.ir.serde import load_plan, save_plan
from autopar.step import choice
from tests.null.test_planner_choice import FAST, apart, chain

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """As in a program that a terminal runs: what runs in the background may be told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ends_after(monkeypatch: pytest.MonkeyPatch, layouts: int) -> None:
    """Watches with a limit are over once so many layouts were solved."""
    solve, count = layer_layouts.StageProblem.solve, 0
    left = Watch.left_s.fget
    assert left is not None

    def counting(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        return solve(self, *args, **{**more, "left_s": math.inf})

    def left_s(self: Watch) -> float:
        return -1.0 if count >= layouts and self._deadline_s < math.inf else left(self)

    monkeypatch.setattr(layer_layouts.StageProblem, "solve", counting)
    monkeypatch.setattr(Watch, "left_s", property(left_s))


def planned(**options: Any) -> Any:
    step, args = chain(width=16, examples=64)
    how: dict[str, Any] = {"cluster": apart(), "stages": (1, None), "num_microbatches": 4, "workers": 1, **options}
    return autopar.parallelize(step, **how).plan(*args)


@pytest.mark.slow
def test_a_search_that_is_cut_gives_a_plan_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = planned()
    assert whole.provenance.ended is None and "not searched" not in plan_text(whole.data)
    ends_after(monkeypatch, 20)
    cut = planned(time_limit_s=100.0)
    ended, step_s = cut.provenance.ended, cut.predictions.step_s
    assert ended is not None and ended.why == "the time limit of 100 s passed"
    assert 0 < ended.bound_s <= whole.predictions.step_s <= step_s
    assert ended.gap(step_s) == 1 - ended.bound_s / step_s
    assert "not searched to the end: the time limit of 100 s passed; the step in any stages" in explain_text(cut.data)
    save_plan(cut.data, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").provenance.ended == ended


@pytest.mark.slow
def test_nothing_of_a_search_that_is_cut_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        ends_after(patched, 20)
        assert planned(time_limit_s=100.0, cache=tmp_path).provenance.ended is not None
    assert not list(tmp_path.glob("pipeline-*"))
    assert len(list(tmp_path.glob("layouts-*"))) == 1  # of the mesh that was done
    whole = planned(time_limit_s=100.0, cache=tmp_path)
    assert whole.provenance.ended is None and list(tmp_path.glob("pipeline-*"))
    assert planned(cache=tmp_path).data.body == whole.data.body  # of any limit
    assert dict(planned(cache=tmp_path).provenance.seconds).keys() >= {"cache"}


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [0, 2])
@pytest.mark.parametrize(("stages", "devices"), [((1, None), [2]), ((2, 2), [1, 1])])
def test_however_little_time_there_is_all_devices_have_a_plan(
    layouts: int, stages: tuple[int, int | None], devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_after(monkeypatch, layouts)
    plan = planned(time_limit_s=100.0, stages=stages)
    assert [mesh.num_devices for mesh in plan.data.meshes] == devices
    assert plan.provenance.ended is not None


def test_of_all_devices_two_axes_and_nothing_is_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the search had ended")

    ends_after(monkeypatch, 0)
    monkeypatch.setattr(refinement.Space, "every", never)
    monkeypatch.setattr(refinement._Refiner, "_neighbours", never)
    plan = planned(time_limit_s=100.0, cluster=FAST)
    assert [mesh.shape for mesh in plan.data.meshes] == [(2, 2)]


def test_a_deep_step_that_is_out_of_time_is_not_planned_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the whole step was planned")

    ends_after(monkeypatch, 0)
    monkeypatch.setattr(choice, "DEEP_NODES", 10)
    monkeypatch.setattr(choice, "DEEP_SHARE", 0.9)
    monkeypatch.setattr(choice, "plan_program", never)
    with pytest.raises(SolverTimeoutError, match=r"^time_limit_s=100: no stages: the search ended before"):
        planned(time_limit_s=100.0, stages=None, memory_bytes=1000)


@pytest.mark.slow
def test_what_fits_was_not_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_after(monkeypatch, 0)
    with pytest.raises(SolverTimeoutError, match=r"^time_limit_s=100: the search ended before .*Give it more time"):
        planned(time_limit_s=100.0, memory_bytes=1000)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_gives_the_best_plan_so_far_and_a_second_one_ends(workers: int) -> None:
    def press(now: Progress) -> None:
        if now.phase == "simulation" and now.done == 3:
            signal.raise_signal(signal.SIGINT)

    cut = planned(progress=press, workers=workers)
    assert cut.provenance.ended is not None and cut.provenance.ended.why == "Ctrl-C came"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def twice(now: Progress) -> None:
        if now.phase == "simulation":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        planned(progress=twice, workers=workers)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_anything_was_found() -> None:
    def press(now: Progress) -> None:
        if now.phase.startswith("layouts"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        planned(progress=press)


def test_one_program_that_is_cut_has_two_axes_and_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(now: Progress) -> None:
        if now.phase == "meshes of the whole step" and now.done == 0:
            signal.raise_signal(signal.SIGINT)

    step, args = chain(width=16, examples=64)
    how: dict[str, Any] = {"cluster": FAST, "stages": 1, "num_microbatches": 1, "progress": press}
    ended = autopar.parallelize(step, **how).plan(*args).provenance.ended
    assert ended is not None and ended.what == "the step as one program on mesh 2x2 (x, y)" and ended.bound_s > 0


@pytest.mark.slow
def test_progress_is_told_and_no_part_of_the_plan() -> None:
    told: list[Progress] = []
    with_it, without = planned(progress=told.append), planned()
    assert with_it.data.config == without.data.config and with_it.data.body == without.data.body
    phases = list(dict.fromkeys(now.phase for now in told))
    assert phases == ["cutting into layers", "layouts of layers, meshes", "stages", "simulation", "refinement"]
    layouts = [(now.done, now.total) for now in told if now.phase.startswith("layouts")]
    assert layouts == [(0, 2), (1, 2)]
    assert told[-1].best_s == min(now.best_s for now in told if now.best_s is not None)
    assert told[-1].left_s is None and told[-1].elapsed_s > 0


def test_a_watch_with_a_limit() -> None:
    told: list[Progress] = []
    watch = Watch(100.0, told.append)
    part = watch.part(0.5)
    watch.tell("x", 1, 2)
    assert 49 < part.left_s < 50 < 99 < watch.left_s < 100 and not watch.over() and not watch.cut
    assert 99 < (told[0].left_s or 0) < 100 and str(told[0]) == "x 1/2, 0 s, at most 100 s left"
    longer = watch.part(0.0).without_limit()
    assert not longer.over() and longer.left_s == math.inf
    assert watch.part(0.0).over() and watch.cut and longer.cut and not watch.over()
    ended = threading.Event()
    ended.set()
    assert Watch(100.0, stop=ended).without_limit().over()


def test_only_the_main_thread_takes_ctrl_c() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with Watch().interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
