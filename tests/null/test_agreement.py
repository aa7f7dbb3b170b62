"""What several processes decide together: `autopar.processes.decided`, on a store in the place of JAX's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from autopar import processes
from autopar.processes import decided

LATE_S = 0.3


@dataclass
class Store:
    """What JAX's coordination service keeps."""

    said: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass(frozen=True)
class Member:
    """One process of a group of threads."""

    index: int
    count: int
    store: Store

    def put(self, key: str, value: str) -> None:
        with self.store.changed:
            assert key not in self.store.said, f"{key} was put twice"
            self.store.said[key] = value
            self.store.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> str:
        with self.store.changed:
            if not self.store.changed.wait_for(lambda: key in self.store.said, timeout_s):
                raise TimeoutError(f"nothing within {timeout_s:g} s")
            return self.store.said[key]

    def forget(self, prefix: str) -> None:
        with self.store.changed:
            for key in [k for k in self.store.said if k == prefix or k.startswith(f"{prefix}/")]:
                del self.store.said[key]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    monkeypatch.setattr(processes, "_ROUNDS", {})
    store = Store()
    return [Member(i, 3, store) for i in range(3)]


def together(members: list[Member], *says: Any, timeout_s: float = 20.0) -> list[Any]:
    """What each hears when all ask; process i would say ``says[i]``, or raise it."""

    def ask(member: Member) -> Any:
        def decide() -> str:
            if isinstance(says[member.index], Exception):
                raise says[member.index]
            return says[member.index]

        try:
            return decided(member, "step", decide, timeout_s)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(ask, members))


def test_all_go_by_what_the_first_sees(three: list[Member]) -> None:
    for turn in range(5):
        assert together(three, f"{turn}", "older", "older") == [f"{turn}"] * 3
    assert len(three[0].store.said) <= 2 * 3, "what was decided is never forgotten"


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1, 2])
def test_a_call_that_not_all_make_misleads_nobody(three: list[Member], alone: int) -> None:
    """An extra restore in one process is an error there, and the next of all hear the newest."""
    assert together(three, "1", "", "") == ["1"] * 3
    for turn in range(2, 6):
        [error] = (
            together([three[alone]], f"{turn}", "", "", timeout_s=LATE_S)
            if alone == 0
            else [_given(three[alone], LATE_S)]
        )
        assert isinstance(error, TimeoutError)
        assert together(three, f"{turn}", "", "") == [f"{turn}"] * 3


def _given(member: Member, timeout_s: float) -> Any:
    try:
        return decided(member, "step", lambda: "none of its business", timeout_s)
    except TimeoutError as error:
        return error


def test_an_answer_that_comes_too_late_is_not_the_next_ones(three: list[Member]) -> None:
    """Process 1 gives up while process 0 still decides; what that says is not heard the next time."""
    gave_up = threading.Event()

    def slowly() -> str:
        assert gave_up.wait(20)
        return "old"

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(decided, three[0], "step", slowly, 20)
        second = pool.submit(decided, three[2], "step", str, 20)
        time.sleep(0.05)
        assert isinstance(_given(three[1], LATE_S), TimeoutError)
        gave_up.set()
        assert first.result() == second.result() == "old"
    assert together(three, "new", "", "") == ["new"] * 3


def test_what_fails_in_the_first_fails_in_all(three: list[Member]) -> None:
    first, *others = together(three, ValueError("another driver"), "", "")
    assert isinstance(first, ValueError)
    assert [str(error) for error in others] == ["process 0: ValueError: another driver"] * 2
    assert together(three, "4", "", "") == ["4"] * 3


def test_the_one_that_is_missing_is_named(three: list[Member]) -> None:
    first, second = together(three[:2], "1", "", timeout_s=LATE_S)
    assert str(first) == "process 2 did not ask within 0.3 s"
    assert isinstance(second, TimeoutError)
