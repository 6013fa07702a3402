"""The notebooks: valid files without outputs, whose code runs from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvlens
from kvlens import methods

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    found = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    assert isinstance(found, list)
    return found


def executed(name: str) -> dict[str, Any]:
    """The names that a notebook has defined when all its code has run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
    return names


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with its runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVLENS_RUNS", raising=False)
    return tmp_path


def test_notebooks_are_of_the_format_and_have_no_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for name in NOTEBOOKS:
        whole = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
        assert len({cell["id"] for cell in whole["cells"]}) == len(whole["cells"])
        for cell in whole["cells"]:
            assert cell["cell_type"] in ("markdown", "code")
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.slow
def test_the_first_loss(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_MODEL", "smollm2")
    names = executed("01-first-loss.ipynb")
    assert names["run"].verdict.outcome == "lost"
    assert names["held"].restored is True
    assert "48213" in names["held"].output
    assert (elsewhere / "first-loss.html").stat().st_size > 10_000
    assert len(kvlens.runs()) == 3, "full KV, the loss and the repeat, in ./runs"


@pytest.mark.slow
def test_compare_and_tune(elsewhere: Path) -> None:
    names = executed("02-compare-and-tune.ipynb")
    assert names["loser"].verdict.right is False
    assert names["least"].restored is True
    budgets = names["budgets"]
    assert budgets["right"].tolist()[0] is False
    assert budgets["right"].tolist()[-1] is True
    assert budgets["peak_bytes"].is_monotonic_increasing


@pytest.mark.slow
def test_your_own_method(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registered", {})
    try:
        names = executed("03-your-own-method.ipynb")
        assert names["run"].meta.method == "short_keys"
        assert names["wide"].meta.config["window"] == 32
        assert names["run"].reader.self_checks()["passed"].all()
        assert names["race"].table()["state"].tolist() == ["completed"] * 3
    finally:
        methods.registry.cache_clear()


def test_a_registered_method_takes_no_other_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvlens.RequestError):
        kvlens.run("a text", method=type("Other", (methods.get("snapkv"),), {}))
    with pytest.raises(kvlens.RequestError):
        kvlens.run("a text", method=int)  # type: ignore[arg-type]
