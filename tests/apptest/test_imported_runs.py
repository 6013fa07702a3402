"""Every page of a run that another engine wrote: the least that a trace may have, and every table."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import write_full, write_minimal
from uiruns import Visit

from kvlens import methods
from kvlens.app.report import report_bytes
from kvlens.player.page import player_html
from kvlens.store.reader import TraceReader
from kvlens.trace.importing import import_checked

PAGES = ("replay", "heads", "spans", "memory", "method", "compare", "home", "")
MADE = {"minimal": write_minimal, "full": write_full}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of runs, and the uids of the two imported ones."""
    root = tmp_path_factory.mktemp("traces")
    return root / "runs", {name: import_checked(make(root / name), root / "runs") for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_it(visit: Visit, imported: tuple[Path, dict[str, str]], page: str, name: str) -> None:
    folder, uids = imported
    app = visit(folder, page, run=uids[name], step=1)
    assert not app.error, [box.value for box in app.error]


def test_memory_says_what_the_least_trace_lacks(visit: Visit, imported: tuple[Path, dict[str, str]]) -> None:
    folder, uids = imported
    shown = [metric.value for metric in visit(folder, "memory", run=uids["minimal"]).metric]
    peak, _, to_device, to_host, _, unused = shown[:6]  # in the order of kvlens.app.ui.memory.view.totals
    assert (peak, to_device, to_host, unused) == ("1.2 kB", *["not recorded"] * 3)
    shown = [metric.value for metric in visit(folder, "memory", run=uids["full"]).metric]
    assert shown[2:4] == ["5.12 kB", "0 B"]


@pytest.mark.parametrize("name", MADE)
def test_replay_offers_no_repeat(visit: Visit, imported: tuple[Path, dict[str, str]], name: str) -> None:
    folder, uids = imported
    app = visit(folder, "replay", run=uids[name], step=1)
    keys = {button.key for button in app.button}
    assert not keys & {"find_tip", f"ledger_{uids[name]}_start"}
    assert not [button for button in app.button if button.proto.type == "primary"]


def test_the_form_takes_its_prompt(visit: Visit, imported: tuple[Path, dict[str, str]]) -> None:
    folder, uids = imported
    app = visit(folder, "run", like=uids["full"])
    assert not app.error, [box.value for box in app.error]
    assert app.selectbox(key="form_method").value == methods.DEFAULT


@pytest.mark.parametrize("name", MADE)
def test_its_report_and_its_player_can_be_saved(imported: tuple[Path, dict[str, str]], name: str) -> None:
    folder, uids = imported
    with TraceReader.open(folder, uids[name]) as reader:
        assert uids[name].encode() in report_bytes(reader)
        assert uids[name] in player_html(reader)
