"""`kvlens check-method`: the page docs/adding-a-method.md is executed, and a method that breaks a truth is caught with
its smallest case."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, random_llama, random_prompt, run
from typer.testing import CliRunner

from kvlens import methods
from kvlens.checking import check, truths
from kvlens.checking.cases import Case, cases, models, prompt_lengths
from kvlens.checking.check import TRUTHS, check_method
from kvlens.checking.models import RecordList
from kvlens.cli.main import app
from kvlens.methods.base import Method
from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import Prefilled

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-method.md"
FILES = (r"Save it as `(\w+\.py)`:\n\n```python\n(.*?)```", r"`(pyproject\.toml)`[^`]*```toml\n(.*?)```")


def blocks() -> dict[str, str]:
    """File name -> content, of the blocks that the page tells the reader to save."""
    text = PAGE.read_text(encoding="utf-8")
    found = {name: body for form in FILES for name, body in re.findall(form, text, re.DOTALL)}
    assert len(found) == text.count("```python") + text.count("```toml"), "a block without a file name"
    return found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The page's package as pip leaves it; the names of its methods."""
    saved = blocks()
    for name, body in saved.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    project = tomllib.loads(saved["pyproject.toml"])["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["kvlens.methods"]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[kvlens.methods]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))
    methods.forget()
    yield list(points)
    for target in points.values():
        sys.modules.pop(target.partition(":")[0], None)
    methods.forget()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cases in place of all: a group of 3 query heads at two lengths, and one of 4."""

    def chosen(method: type[Method]) -> Iterator[Case]:
        by_name = {model.name: model for model in models()}
        lengths = prompt_lengths(method)
        yield Case(method, by_name["random 6/2 heads"], lengths[1])
        yield Case(method, by_name["random 6/2 heads"], lengths[-1])
        yield Case(method, by_name["random 8/2 heads"], lengths[-1])

    monkeypatch.setattr(check, "cases", chosen)


def command(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["check-method", *arguments])
    return ended.exit_code, ended.stdout


def test_the_page_is_executed(installed: list[str], few: None) -> None:
    assert installed == ["small_norms", "last_glance"]
    assert {name: body for name, body in blocks().items() if name.endswith(".py")} == {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "plugin").glob("*.py")
    }
    needs = [methods.get(name).needs for name in installed]
    assert [need.queries for need in needs] == [0, 16], "one score looks at no query, and one at queries"
    for name in installed:
        status, printed = command(name, "--json")
        report = json.loads(printed)
        assert (status, report["passed"], report["method"]) == (0, True, name), printed
        assert {row["truth"] for row in report["truths"]} == set(TRUTHS)
        assert {row["status"] for row in report["truths"]} == {"pass"}


def test_lines_and_status(few: None) -> None:
    status, printed = command("streaming_llm")
    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()] == ["pass"] * len(TRUTHS)


def test_cases_cover_shapes_and_window_edges() -> None:
    found = list(cases(methods.get("snapkv")))
    groups = {case.model.engine.loaded.shape.group for case in found if case.model.name != "demo"}
    assert groups == {1, 3, 4}
    window = methods.get("snapkv").Parameters().window
    lengths = prompt_lengths(methods.get("snapkv"))
    assert {window, window + 1, window + 2} <= set(lengths), "a prompt is read to its last token but one"
    assert min(lengths) < window < max(lengths) / 2
    assert [case.prompt_tokens for case in found[:-1]] == sorted(case.prompt_tokens for case in found[:-1])
    assert found[-1].model.name == "demo"


class Broken(PromptEviction):
    """Keeps tokens at random; subclasses break one truth each."""

    name = title = paper = "broken"
    summary = "keeps random tokens"
    family = "prompt_eviction"
    Parameters = PromptEvictionParameters
    needs = Needs(peek=True)

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        return torch.rand(prompt.keys.shape[1], before, generator=torch.Generator().manual_seed(layer))


def failed(method: type[Method]) -> dict[str, check.Failure]:
    report = check_method(method)
    assert not report.passed
    return {name: found.failure for name, found in report.findings.items() if found.failure is not None}


def test_an_unseeded_method_does_not_repeat(few: None) -> None:
    class Unseeded(Broken):
        def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
            return torch.rand(prompt.keys.shape[1], before)

    found = failed(Unseeded)
    assert {"recorded", "repeat"} <= set(found)
    assert found["recorded"].mismatch.step == 0
    assert found["repeat"].prompt_tokens == found["recorded"].prompt_tokens == prompt_lengths(Unseeded)[-1]


def test_a_wrong_floor_is_caught(few: None) -> None:
    class Modest(Broken):
        @classmethod
        def floor_bytes(cls, params: Any, shape: Any, prompt_tokens: int, max_new: int) -> int:
            return super().floor_bytes(params, shape, prompt_tokens, max_new) // 2

    assert set(failed(Modest)) & {"floor", "hooks"}


def test_a_wrong_hook_names_its_case(few: None) -> None:
    class Wide(Broken):
        def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
            return torch.rand(self.context.shape.q_heads, before)

    found = failed(Wide)
    assert set(found) == {"hooks"}
    failure = found["hooks"]
    assert (failure.model, failure.mismatch.layer) == ("random 6/2 heads", 0)
    assert "broken.score" in failure.mismatch.actual


def test_a_hook_without_its_need_is_caught(few: None) -> None:
    class Deaf(Broken):
        def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
            """Take nothing."""

    assert set(failed(Deaf)) == {"needs"}


def test_a_failure_is_exit_status_1(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unseeded(Broken):
        def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
            return torch.rand(prompt.keys.shape[1], before)

    monkeypatch.setattr(methods, "get", lambda name: Unseeded)
    status, printed = command("broken")
    assert status == 1
    lines = {line.split()[0] for line in printed.splitlines()}
    assert lines == {"pass", "FAIL"}
    status, printed = command("broken", "--json")
    assert status == 1
    assert json.loads(printed)["passed"] is False


def test_every_comparison_sees_a_changed_record() -> None:
    """A truth that cannot fail proves nothing: each is shown a record with one number changed."""
    model, prompt, sink, again = random_llama(), random_prompt(80), ListSink(), ListSink()
    for kept in (sink, again):
        run(model, prompt, "streaming_llm", budget="0.5", sink=kept, max_new=4)
    shape, record = model.shape, sink.steps[2]
    assert truths.same_trace(sink, again) is None
    assert truths.masses_add_up(sink.steps, shape) is None
    assert truths.ledger_bytes(sink) is None
    assert truths.bytes_add_up(sink.steps, shape) is None
    assert truths.spans_partition(sink) is None
    assert truths.within_budget(sink.steps, record.peak_bytes * 2) is None
    record.head["mass_resident"] = record.head["mass_resident"] + np.where(np.arange(shape.q_heads) == 3, 0.5, 0)
    wrong = truths.masses_add_up(sink.steps, shape)
    assert wrong is not None
    assert (wrong.step, wrong.layer, wrong.head) == (2, 0, 3)
    changed = truths.same_trace(sink, again)
    assert changed is not None
    assert (changed.step, changed.layer, changed.head) == (2, 0, 3)
    record.kv["h2d_bytes"] = record.kv["h2d_bytes"] + 1
    assert truths.ledger_bytes(sink) is not None
    record.kv["read_bytes"] = record.kv["read_bytes"] * 0
    fewer = truths.bytes_add_up(sink.steps, shape)
    assert fewer is not None
    assert fewer.step == 2
    above = truths.within_budget(sink.steps, record.peak_bytes - 1)
    assert above is not None
    assert sink.prefilled is not None
    sink.prefilled.spans[1] = replace(sink.prefilled.spans[1], tok_start=1)
    assert truths.spans_partition(sink) is not None
    rows = [torch.zeros(3), torch.tensor([0.0, float("nan"), 0.0])]
    bad = truths.finite_logits(rows)
    assert bad is not None
    assert bad.step == 1
    unequal = truths.same_logits([torch.zeros(3)], [torch.full((3,), 0.1)], 0.05)
    assert unequal is not None
    assert unequal.step == 0
    assert truths.same_logits([torch.zeros(3)], [torch.full((3,), 0.01)], 0.05) is None


@pytest.mark.parametrize(("name", "allowed"), [("snapkv", check.CHUNK_ERROR), ("kivi", check.CODE_ERROR)])
def test_reading_in_chunks_may_move_a_number_to_the_next_code(
    name: str, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KIVI attends quantised tokens, SnapKV exact ones."""
    case = Case(methods.get(name), models()[0], 34)
    records, errors = RecordList(), []
    whole = case.run(case.budget, records)
    monkeypatch.setattr(truths, "same_logits", lambda first, second, error: errors.append(error))
    assert check._chunks(case, whole, records) is None
    assert errors == [allowed]
