"""The app inside Streamlit's own test runner: no browser, no JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import streamlit as st
from plotly import basedatatypes
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest, local_script_runner
from uiruns import ROOT, Runs, Visit, write_runs

from kvlens.app.ui.common.widgets import FAILED
from kvlens.app.ui.home import reading


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session", autouse=True)
def closed() -> Iterator[None]:
    """Readers that the app's cache holds are let go before the interpreter ends: DuckDB reports what is alive then."""
    yield
    st.cache_resource.clear()


@pytest.fixture(scope="session", autouse=True)
def scanned_once() -> Iterator[None]:
    """Each AppTest reads what every installed package says of itself, to find components that packages bring: a third
    of its time. What is installed does not change, and no package brings one that is used here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture(scope="session", autouse=True)
def waited_for() -> Iterator[None]:
    """AppTest asks every millisecond whether the script has ended, and takes time from it: here its thread is waited
    for first."""
    plain = local_script_runner.require_widgets_deltas

    def wait(runner: local_script_runner.LocalScriptRunner, timeout: float = 3) -> None:
        thread = runner._script_thread
        if thread is not None:
            thread.join(timeout)
        plain(runner, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_script_runner, "require_widgets_deltas", wait)
        yield


@pytest.fixture(scope="session", autouse=True)
def paths_read_once() -> Iterator[None]:
    """Plotly reads the same few hundred names of properties anew each time: an eighth of what a page costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basedatatypes, "_str_to_dict_path_full", cache(basedatatypes._str_to_dict_path_full))
        yield


@pytest.fixture(autouse=True)
def read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of runs is read whole before it is shown, however busy the machine is: a second is not enough then."""
    monkeypatch.setattr(reading, "LOOK_S", 60.0)


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> Visit:
    """Opens a page on a folder of runs: visit(folder, "replay", run=uid, step=3)."""

    def opened(folder: Path, page: str = "", **params: object) -> AppTest:
        monkeypatch.setenv("KVLENS_RUNS", str(folder))
        monkeypatch.chdir(ROOT)
        st.cache_resource.clear()
        app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=600)
        for name, value in params.items():
            app.query_params[name] = str(value)
        if page:
            app.switch_page(f"pages/{page}.py")
        app.run()
        assert not app.exception, app.exception
        assert not [box.value for box in app.error if box.value.startswith(FAILED)]
        return app

    return opened
