"""A method of somebody else's package, one class in one file, installed by its entry point: run, explained, coloured,
compared, benched and shown, and nothing in the product names it. docs/adding-a-method.md prints it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
import streamlit as st
from typer.testing import CliRunner
from uiruns import ROOT, Visit
from warmprocess import WarmProcess

from kvlens import methods
from kvlens.app.figures.methodmarks import FAMILY_COLORS, mark
from kvlens.cli.main import app
from kvlens.lab.claims.check import claiming
from kvlens.lens.reasonkinds import KINDS
from kvlens.lens.verdict import verdict
from kvlens.methods.statements import list_statements
from kvlens.store.reader import TraceReader

PLUGIN = ROOT / "tests" / "plugin"
SOURCE = PLUGIN / "small_norms.py"
NAME, TITLE = "small_norms", "Small norms"
Command = Callable[..., str]
"""kvlens(*arguments): stdout"""


def install(folder: Path) -> Path:
    """What `pip install` leaves of the plugin: its module, and the entry point that its pyproject.toml announces."""
    for module in PLUGIN.glob("*.py"):
        copy(module, folder)
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {at}\n" for name, at in project["entry-points"]["kvlens.methods"].items())
    (info / "entry_points.txt").write_text(f"[kvlens.methods]\n{points}")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def here(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin is installed for this process too."""
    monkeypatch.syspath_prepend(str(installed))
    methods.forget()
    st.cache_data.clear()
    yield
    sys.modules.pop(NAME, None)
    methods.forget()
    st.cache_data.clear()


@pytest.fixture(scope="module")
def kvlens(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Commands in processes of their own, forked from one that began with the plugin installed."""
    printed = tmp_path_factory.mktemp("printed")
    with WarmProcess(installed) as process:

        def done(*arguments: str) -> str:
            ended = process.kvlens(printed, "", *arguments)
            assert ended.returncode == 0, ended.stderr[-2000:]
            return ended.stdout

        yield done


@pytest.fixture(scope="module")
def lost(installed: Path, kvlens: Command) -> tuple[Path, str]:
    """A folder of runs with one of the plugin's beside full KV, in which it loses the answer; its uid."""
    runs = installed / "runs"
    prompt = installed / "prompt.json"
    kvlens("prompt", "--task", "multikey", "--length", "512", "--seed", "3", "--json", "--out", str(prompt))
    asked = f"--method {NAME} --budget 10% --max-new 8 --against-full --oracle all"
    told = kvlens("run", str(prompt), "--runs", str(runs), *asked.split())
    return runs, told.split()[-1]


def test_a_plugin_is_short_and_the_product_does_not_name_it() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    product = [path for folder in ("kvlens", "kernels", "store", "pages") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in product if NAME in path.read_text(encoding="utf-8")] == []


def test_it_is_listed_with_its_family(kvlens: Command) -> None:
    listed = {entry["name"]: entry for entry in json.loads(kvlens("methods", "--json"))}
    assert listed[NAME]["family"] == "prompt_eviction"
    assert "window" in kvlens("methods", NAME)


def test_a_loss_of_it_is_explained(lost: tuple[Path, str], here: None) -> None:
    with TraceReader.open(*lost) as reader:
        assert reader.meta.method == NAME
        assert reader.self_checks()["passed"].all()
        found = verdict(reader)
        assert found is not None
        assert found.missed is not None
        assert found.missed.reason.kind in KINDS
        assert found.missed.reason.kind == "evicted"


def test_the_pages_show_it_in_its_colour(lost: tuple[Path, str], here: None, visit: Visit) -> None:
    runs, uid = lost
    look = mark(NAME)
    assert look.color == FAMILY_COLORS["prompt_eviction"]
    others = [mark(name) for name in methods.of_family("prompt_eviction") if name != NAME]
    assert all((other.symbol, other.dash) != (look.symbol, look.dash) for other in others)
    for page in ("replay", "method", "heads", "memory", "spans"):
        app = visit(runs, page, run=uid)
        shown = [html.body for html in app.get("html")]
        assert any(look.color in body and TITLE in body and "prompt eviction" in body for body in shown), page
    app = visit(runs, "method", run=uid)
    assert TITLE in [title.value for title in app.subheader]
    assert "What moved" in " ".join(markdown.value for markdown in app.markdown)
    app = visit(runs, "compare")
    assert any(look.color in html.body for html in app.get("html"))
    app.session_state["compare_quality"] = True
    app.run()
    assert any(look.color in chart.proto.spec for chart in app.get("plotly_chart"))
    app = visit(runs, "run")
    assert f"{TITLE} · prompt eviction" in app.selectbox(key="form_method").options


def test_the_quality_table_takes_it(installed: Path, kvlens: Command) -> None:
    out = installed / "quality.json"
    asked = f"bench quality --methods full,{NAME} --tasks needle --budgets 20% --length 256 --prompts 1"
    said = kvlens(*asked.split(), "--out", str(out), "--runs", str(installed / "runs"))
    assert TITLE in said
    lines = {line["method"]: line for line in json.loads(out.read_text(encoding="utf-8"))["lines"]}
    assert lines[NAME]["n"] == 1
    assert lines[NAME]["resident_share"] <= 0.2


def test_its_claims_can_be_checked(here: None) -> None:
    assert NAME in claiming("smollm2")
    assert list_statements(methods.get(NAME))[0].first.method == NAME


BROKEN = {
    "names itself wrongly": ('name = "small_norms"', 'name = "short_norms"', "calls itself 'short_norms' of family"),
    "was written for another kvlens": (
        "from kvlens.methods.parameters import param",
        "from kvlens.methods.parameters import parameter_of_old",
        "cannot be loaded (ImportError: cannot import name 'parameter_of_old'",
    ),
    "says too little": ('    title = "Small norms"\n', "", "plugin_refused: plugin method 'small_norms'"),
    "declares what Needs replaced": (
        "    needs = Needs()\n",
        "    peeks = False\n",
        "declares peeks: write needs = Needs(",
    ),
    "has no name": ('    name = "small_norms"\n', "", "cannot be loaded (AttributeError"),
    "is no method": (
        "class SmallNorms(PromptEviction)",
        "class SmallNorms(object)",
        "is no kvlens.methods.base.Method",
    ),
}


@pytest.fixture(params=BROKEN, ids=str)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A plugin that cannot be taken, and part of what is said of it."""
    install(tmp_path)
    module = tmp_path / "small_norms.py"
    old, new, said = BROKEN[request.param]
    assert old in module.read_text()
    module.write_text(module.read_text().replace(old, new))
    return tmp_path, said


def test_a_broken_plugin_takes_nothing_with_it(
    broken: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, visit: Visit, tmp_path: Path
) -> None:
    folder, said = broken
    monkeypatch.syspath_prepend(str(folder))
    methods.forget()
    st.cache_data.clear()
    try:
        assert methods.get("snapkv").name == "snapkv"
        with pytest.raises(methods.UnknownMethod, match=re.escape(said)):
            methods.get(NAME)
        page = visit(tmp_path / "runs", "run")
        assert any(said in re.sub(r"\\(.)", r"\1", box.value) for box in page.warning)
        assert not page.error
        assert NAME not in methods.registry()
        printed = CliRunner().invoke(app, ["methods"])
        assert (printed.exit_code, "snapkv" in printed.stdout) == (0, True)
        assert said in printed.stderr
    finally:
        sys.modules.pop(NAME, None)
        methods.forget()
        st.cache_data.clear()
