"""The loss ledger on Replay, Compare and Study: drawn where it is stored, a button where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import task_prompt
from uiruns import Visit

from kvlens.engine.models import load
from kvlens.ledger.account import LossLedger, Share
from kvlens.ledger.frontier import Frontier
from kvlens.ledger.storage import store_ledger
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest

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
    store_ledger(folder, uid, LEDGER, Frontier(1000, 10000, 3, 8))
    page = visit(folder, "replay", run=uid)
    assert not [button.key for button in page.button if button.key == f"ledger_{uid}_start"]
    told = " ".join(element.value for element in page.markdown)
    assert all(f"{logits:+.2f} logits" in told for logits in (9.0, 2.0, 1.0))
    assert "10.0% of full KV" in told
