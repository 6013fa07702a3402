"""The loss ledger on Replay, Compare and Study: drawn where it is stored, a button where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import task_prompt
from uiruns import Visit

from kvlens.app.ui.common.ledgerview import TITLE
from kvlens.engine.models import load
from kvlens.ledger.account import LossLedger, Share
from kvlens.ledger.frontier import Frontier
from kvlens.ledger.storage import store_ledger
from kvlens.runs.carrying import carry_out
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.studies import storage
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.text.prompts import PromptText

LEDGER = LossLedger(
    (3, 4),
    10.0,
    -2.0,
    (Share("evicted_after", 9.0, 9.5, 12, 1.5, (0, 0, 1), True), Share("stale", 2.0, 2.5, 1, 0.1, None, False)),
    1.0,
    4,
    2.0,
)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ledgers")
    prompt, _ = task_prompt(load("demo"), "multikey", 256, 0.5, 3)
    request = RunRequest(model="demo", method="streaming_llm", budget="12%", max_new=12, against=True)
    return folder, carry_out(request, prompt.source, folder, lambda *_: None, lambda: False)[0]


def test_replay_offers_the_ledger_of_a_lost_run_and_draws_a_stored_one(lost: tuple[Path, str], visit: Visit) -> None:
    folder, uid = lost
    page = visit(folder, "replay", run=uid)
    assert [button.key for button in page.button if button.key == f"ledger_{uid}_start"]
    store_ledger(folder, uid, LEDGER, Frontier(1000, 10000, 3, 6, 8))
    page = visit(folder, "replay", run=uid)
    assert not [button.key for button in page.button if button.key == f"ledger_{uid}_start"]
    told = " ".join(element.value for element in page.markdown)
    assert all(f"{logits:+.2f} logits" in told for logits in (9.0, 2.0, 1.0))
    assert "10.0% of full KV" in told


def test_a_ledger_without_a_lost_lead_has_neither_shares_nor_a_bar(lost: tuple[Path, str], visit: Visit) -> None:
    folder, uid = lost
    bars = f"ledger_bar_{uid}"
    store_ledger(folder, uid, LEDGER, None)
    page = visit(folder, "replay", run=uid)
    assert [chart for chart in page.get("plotly_chart") if bars in chart.proto.id]
    for lead in (-2.0, -1.0 - 2.0):
        store_ledger(folder, uid, replace(LEDGER, lead_full=lead, rest=lead + 2.0 - 11.0), None)
        page = visit(folder, "replay", run=uid)
        assert not page.error
        (told,) = [element.value for element in page.markdown if "9.00 logits" in element.value]
        assert "%" not in told
        assert not [chart for chart in page.get("plotly_chart") if bars in chart.proto.id]


def test_compare_draws_a_bar_for_every_lost_run_with_a_ledger(lost: tuple[Path, str], visit: Visit) -> None:
    folder, uid = lost
    store_ledger(folder, uid, LEDGER, None)
    with TraceReader.open(folder, uid) as reader:
        reference = str(reader.meta.reference)
    page = visit(folder, "compare", run=uid, against=reference)
    assert TITLE in [box.label for box in page.expander]
    assert not [button.key for button in page.button if str(button.key).startswith("ledgers_")]


def test_study_draws_stored_ledgers_and_measures_the_others(lost: tuple[Path, str], visit: Visit) -> None:
    folder, uid = lost
    store_ledger(folder, uid, LEDGER, Frontier(1000, 10000, 3, 6, 8))
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="streaming_llm"),), budgets=("12%",))
    info = storage.create(folder, plan, [StudyPrompt(name, PromptText("text", answer="x")) for name in "ab"])
    figures = {"right": False, "kinds": ["wrong", "lost"], "outcome": "wrong answer", "resident_bytes": 4000}
    arm = next(arm.key() for arm in plan.arms() if arm.method == "streaming_llm")
    for prompt, run in (("a", uid), ("b", "20200101-000000-000000")):
        storage.append(folder, info.id, storage.Trial(prompt, arm, "completed", run, figures=figures))
    page = visit(folder, "study", study=info.id)
    distances = next(frame.value for frame in page.dataframe if "times" in frame.value.columns)
    assert distances[["n", "frontier_share", "times"]].to_numpy().tolist() == [[1, 0.1, 4.0]]
    assert [button.label for button in page.button if button.key == f"ledgers_{info.id}_start"] == ["Measure 1 ledger"]
