"""Every chart of every page hands out its numbers: the files can be made, hold rows, and name what their columns
are."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest
from uiruns import Runs, Visit

from kvlens.app.ui.common import chart as module
from kvlens.app.ui.common import download
from kvlens.app.ui.common.chart import Data, table_file
from kvlens.store.errors import TraceError

METHODS = ("sekv", "chess", "freekv", "sentkv", "compresskv")
PAGES = ("heads", "method", "memory", "spans", "compare")
FOLDS = {"compare": ("compare_quality", "compare_curves", "compare_sums")}
"""whose content is made when they are opened"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Data]:
    """key -> data of every chart that was drawn."""
    found: dict[str, Data] = {}
    real = module._menu

    def menu(data: Data, name: str, key: str, *more: object) -> None:
        found[key] = data
        real(data, name, key, *more)

    monkeypatch.setattr(module, "_menu", menu)
    return found


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with one real, short run per method that has a view of its own, and their ids."""
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.text.prompts import PromptText

    folder = tmp_path_factory.mktemp("method-runs")
    source = PromptText(make_prompt("multikey", 500, 0.5, 1, demo_encode()).text)
    uids = {}
    for name in METHODS:
        request = RunRequest(
            model="demo", method=name, budget="100%" if name == "chess" else "40%", max_new=12, ignore_eos=True
        )
        uids[name], status, _ = carry_out(request, source, folder, lambda phase, done, total: None, lambda: False)
        assert status == "completed"
    return folder, uids


def check(app: AppTest, asked: dict[str, Data]) -> None:
    """Each chart's files have rows and named columns."""
    assert len(asked) >= len(app.get("plotly_chart")) > 0
    for key, data in asked.items():
        table = pq.read_table(io.BytesIO(table_file(data, "parquet")))
        written = pd.read_csv(io.BytesIO(table_file(data, "csv")))
        assert table.num_rows == len(written) > 0, key
        assert list(written.columns) == table.column_names, key
        assert not {"value", "0", "1"} & set(table.column_names) or "index" in table.column_names, (
            key,
            table.column_names,
        )


@pytest.mark.parametrize("page", PAGES)
def test_every_chart_of_a_page_hands_out_csv_and_parquet(
    visit: Visit, runs: Runs, asked: dict[str, Data], page: str
) -> None:
    app = visit(runs.folder, page, run=runs.whole, layer=1, head=5, step=7)
    for fold in FOLDS.get(page, ()):
        app.session_state[fold] = True
    check(app.run(), asked)


@pytest.mark.parametrize("method", METHODS)
def test_every_chart_of_a_method_hands_out_csv_and_parquet(
    visit: Visit, methods: tuple[Path, dict[str, str]], asked: dict[str, Data], method: str
) -> None:
    folder, uids = methods
    check(visit(folder, "method", run=uids[method], layer=1, head=5), asked)


def test_files_lie_ready_when_a_menu_is_open_and_are_not_made_before(
    visit: Visit, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = module.table_file
    monkeypatch.setattr(module, "table_file", lambda data, ending: (made.append(ending), real(data, ending))[1])
    app = visit(runs.folder, "heads", run=runs.whole, layer=1, head=5)
    before = len(app.get("download_button"))
    assert made == []
    app.session_state["spread_menu"] = True
    buttons = app.run().get("download_button")
    assert made == ["csv", "parquet"]
    assert len(buttons) == before + 2
    assert not any(button.proto.deferred_file_id for button in buttons), "no file waits for its click to be made"
    monkeypatch.setattr(download, "MANY", 0)
    assert len(app.run().get("download_button")) == 2, "a large table's wait for their menu too"
    app.session_state["download_menu"] = True
    names = [button.proto.label for button in app.run().get("download_button")]
    assert {"Per-head statistics as CSV", "Per-head statistics as Parquet"} < set(names)


def test_an_error_in_an_open_menu_is_its_sentence_there(
    visit: Visit, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(data: Data, name: str, key: str) -> None:
        raise TraceError("gone.")

    app = visit(runs.folder, "heads", run=runs.whole, layer=1, head=5)
    monkeypatch.setattr(module, "_buttons", gone)
    app.session_state["spread_menu"] = True
    app.run()
    assert not app.exception
    assert [error.value for error in app.error] == ["gone\\."]
