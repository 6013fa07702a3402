"""Ledgers beside runs: what of a file is believed, and which frontier is used again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import support
from lensruns import write_lens_runs

from kvlens.engine.models import load
from kvlens.ledger import ofrun
from kvlens.ledger.account import LossLedger, Share
from kvlens.ledger.frontier import Frontier
from kvlens.ledger.ofrun import measure_ledger
from kvlens.ledger.storage import FILE, store_ledger, stored_ledger
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest

SHARES = (Share("stale", 3.0, 3.0, 1, 0.1, (0, 1, 2), True), Share("refused", 1.0, 1.0, 1, 0.1, None))
LEDGER = LossLedger((0, 2), 5.0, -1.0, SHARES, 2.0, 4, 0.5)
FRONTIER = Frontier(1000, 10_000, 3, 6, 8)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path, write_lens_runs(tmp_path).lost


def test_a_ledger_comes_back_as_it_was_stored(run: tuple[Path, str]) -> None:
    store_ledger(*run, LEDGER, FRONTIER)
    assert stored_ledger(*run) == (LEDGER, FRONTIER)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("ledger", "rest", "x"),
        ("ledger", "rest", 1e9),
        ("ledger", "rest", float("nan")),
        ("ledger", "lead_full", -1.0),
        ("ledger", "seconds", None),
        ("ledger", "more", 1),
        ("share", "cause", "<b>x"),
        ("share", "logits", True),
        ("share", "missed", float("inf")),
        ("frontier", "resident_bytes", 0),
        ("frontier", "resident_bytes", 20_000),
        ("frontier", "pages", 0.5),
        ("frontier", "end", -1),
    ],
)
def test_a_damaged_file_is_no_ledger(run: tuple[Path, str], part: str, name: str, value: Any) -> None:
    store_ledger(*run, LEDGER, FRONTIER)
    path = run[0] / run[1] / FILE
    fields = json.loads(path.read_text())
    target = fields["ledger"]["shares"][0] if part == "share" else fields[part]
    target[name] = value
    path.write_text(json.dumps(fields))
    assert stored_ledger(*run) is None


def test_a_frontier_serves_answers_that_end_where_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, _ = support.task_prompt(load("demo"), "multikey", 512, 0.5, 3)
    request = RunRequest(model="demo", method="streaming_llm", budget="12%", max_new=24, against=True)
    uid = carry_out(request, prompt.source, tmp_path, lambda *_: None, lambda: False)[0]
    found: list[int] = []

    def search(trials: Any, end: int, report: Any) -> Frontier:
        found.append(end)
        return Frontier(1000, 10_000, 3, end, 8)

    monkeypatch.setattr(ofrun, "_frontier", search)

    def measure(frontier: bool | Frontier) -> Frontier | None:
        return measure_ledger(tmp_path, uid, lambda *_: None, frontier=frontier)[1]

    own = measure(True)
    assert own is not None
    assert measure(False) == own, "a stored frontier stays"
    assert measure(own) == own
    assert found == [own.end]
    assert measure(Frontier(1, 10_000, 1, own.end + 1, 8)) == own, "found for another end of the answer"
    assert found == [own.end, own.end]
