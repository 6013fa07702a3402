"""A composed method in the app: a stored run of one is named, marked, explained and run again as a plain method's, and
the form takes a composed name."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pages import words
from uiruns import Visit

from kvlens import methods
from kvlens.app.figures.methodmarks import mark
from kvlens.app.report import run as report
from kvlens.app.ui import method as methodview
from kvlens.app.ui.common import data, sentences
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.spans.cuts import own_parameters
from kvlens.lens.method_reasons import MethodReasons
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText
from tests.synthetic import write_synthetic

NAME = "chunk:snapkv+kivi"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    runs = tmp_path_factory.mktemp("runs")
    text = "The farmer carried the copper kettle to the old harbor. " * 8
    request = RunRequest(model="demo", method=NAME, budget="60%", max_new=3, overrides={"kernel": "3"})
    return runs, carry_out(request, PromptText(text), runs, lambda *told: None, lambda: False)[0]


def test_the_form_runs_a_stored_composed_method_again(visit: Visit, made: tuple[Path, str]) -> None:
    runs, uid = made
    app = visit(runs, "run", like=uid)
    assert not app.error
    assert app.selectbox(key="form_method").value == NAME
    assert next(box for box in app.number_input if box.label.startswith("kernel")).value == 3


def test_the_form_takes_a_composed_name(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.text_input(key="form_composed").set_value("adakv:keydiff").run()
    assert not app.error
    assert app.selectbox(key="form_method").value == "adakv:keydiff"
    assert any(box.label.startswith("floor") for box in app.number_input)
    app.text_input(key="form_composed").set_value("adakv:quest").run()
    assert len(app.error) == 1
    assert app.selectbox(key="form_method").value == "adakv:keydiff"


def test_a_stored_composed_run_has_title_mark_and_parameters(visit: Visit, made: tuple[Path, str]) -> None:
    runs, uid = made
    app = visit(runs, "method", run=uid)
    assert app.subheader[0].value == plain(methods.get(NAME).title)
    assert sentences.METHOD_NOT_LISTED not in words(app)
    assert mark(NAME) == mark("snapkv")
    assert data.row_title({"method": NAME}) == data.method_title(NAME) == methods.get(NAME).title
    with TraceReader.open(runs, uid) as reader:
        about = report.about(reader.meta)
        assert about is not None
        assert {"kernel", "page"} <= {parameter["name"] for parameter in about["parameters"]}
        parameters = own_parameters(reader)
        assert parameters is not None
        assert parameters.kernel == 3


@pytest.mark.parametrize(("name", "base"), [("freekv@chess", "freekv"), ("compresskv+kivi", "compresskv")])
def test_a_composed_method_has_view_and_reasons_of_the_method_inside(tmp_path: Path, name: str, base: str) -> None:
    assert methodview.view(name) is methodview.view(base)
    modules = []
    for method in (name, base):
        uid = write_synthetic(tmp_path, 1, 2, 1, 2, 4, method=method, lens=False)
        with TraceReader.open(tmp_path, uid) as reader:
            modules.append(MethodReasons.load(reader).module)
    assert modules[0] is modules[1] is not None
