"""How groups are handed out to workers of which some die."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvlens.workers.handing import hand_out
from kvlens.workers.lanes import WorkerDied, WorkerLost


class MortalLane:
    """Returns items. Dies in an item of `deadly`, and fails in one of `failing`; may begin once `gate` is set."""

    def __init__(self, deadly: Sequence[str] = (), failing: Sequence[str] = (), gate: threading.Event | None = None):
        self._deadly, self._failing, self._gate = deadly, failing, gate
        self.died = threading.Event()

    def key(self, item: str) -> str:
        return item

    def run(self, item: str) -> str:
        if self._gate is not None:
            assert self._gate.wait(30)
        if item in self._deadly:
            self.died.set()
            raise WorkerDied(f"died in {item}")
        if item in self._failing:
            raise WorkerLost(f"failed in {item}", "model_changed")
        return item

    def close(self) -> None:
        """Holds nothing."""


GROUPS = [["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2"]]
ALL = sorted(item for group in GROUPS for item in group)


def test_what_a_dead_worker_left_goes_to_another_and_nothing_twice() -> None:
    mortal = MortalLane(["a2", "b2", "c2"])  # dies in the middle of whatever group it takes
    survivor = MortalLane(gate=mortal.died)
    rows: list[str] = []
    hand_out([mortal, survivor], GROUPS, rows.append, lambda: False)
    assert sorted(rows) == ALL


def test_a_worker_without_work_waits_for_what_the_last_worker_may_leave() -> None:
    other_ended = threading.Event()

    class LastLane(MortalLane):
        def run(self, item: str) -> str:
            assert other_ended.wait(30)
            raise WorkerDied(f"died in {item}")

    rows: list[str] = []

    def finished(row: str) -> None:
        rows.append(row)
        other_ended.set()

    hand_out([LastLane(), MortalLane()], [["a1"], ["b1"]], finished, lambda: False)
    assert sorted(rows) == ["a1", "b1"]


def test_an_item_that_kills_two_workers_is_not_handed_out_again_and_the_rest_is() -> None:
    rows: list[str] = []
    with pytest.raises(WorkerLost):
        hand_out([MortalLane(["a2"]) for _ in range(3)], GROUPS, rows.append, lambda: False)
    assert sorted(rows) == [item for item in ALL if item != "a2"]


def test_an_item_that_kills_its_worker_comes_after_all_others() -> None:
    rows: list[str] = []
    with pytest.raises(WorkerLost):
        hand_out([MortalLane(["a2"]) for _ in range(2)], GROUPS, rows.append, lambda: False)
    assert sorted(rows) == [item for item in ALL if item != "a2"]


def test_items_that_no_worker_is_left_for_are_told() -> None:
    rows: list[str] = []
    with pytest.raises(WorkerLost):
        hand_out([MortalLane(ALL) for _ in range(2)], GROUPS, rows.append, lambda: False)
    assert rows == []


def test_a_failed_item_is_not_handed_out_again() -> None:
    rows: list[str] = []
    with pytest.raises(WorkerLost) as problem:
        hand_out([MortalLane(failing=["a2"]), MortalLane(failing=["a2"])], GROUPS, rows.append, lambda: False)
    assert problem.value.code == "model_changed"
    assert "a2" not in rows
    assert len(rows) == len(set(rows))
