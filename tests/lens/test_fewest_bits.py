"""The search for the fewest extra bits: a model made by hand in which the values of one KV head, and nothing else, do
not survive two bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lookup_model import FILLER, FILLERS, KEY, SIZE, VALUES, save, text
from lookup_model import VALUE as SAYS
from support import raises_code
from test_counterfactual import quiet

import kvlens
from kvlens.app.ui.replay.leastsearches import packs_numbers
from kvlens.cli.lens import sentences
from kvlens.lens import whatif as whatifs
from kvlens.lens.search_words import describe_search
from kvlens.lens.trial_request import TrialRequest
from kvlens.lens.trials import Trials
from kvlens.lens.whatif import whatif
from kvlens.metaparts import Search
from kvlens.refusal import Refusal
from kvlens.runs import memory
from kvlens.runs.carrying import carry_out
from kvlens.runs.preflight import refuse
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

CARRIER = (0, 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "kivi": {"overrides": {"bits": 2, "residual": 32}},
    "snapkv+kivi": {"overrides": {"code_bits": 2, "window": 8}, "budget": "0.7"},
}


def loud(folder: Path) -> Path:
    """A model whose carrier has one loud number in every value, which its output does not read."""
    from transformers import AutoModelForCausalLM

    save(folder, (CARRIER,), 0.4, 1.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layer, head = CARRIER
    with torch.no_grad():
        row = model.model.layers[layer].self_attn.v_proj.weight[(head + 1) * SIZE - 1]
        row[FILLER : FILLER + FILLERS] = 6.0
        row[KEY : SAYS + VALUES] = 6.0
    model.save_pretrained(folder)
    return folder


class Lost:
    def __init__(self, folder: Path, method: str) -> None:
        self.runs = folder / "runs"
        source = PromptText(text(300, 120), "a5")
        request = RunRequest(model=str(loud(folder / "model")), method=method, max_new=6, **SETTINGS[method])
        self.uid, _, self.output = carry_out(request, source, self.runs, quiet, lambda: False)


@pytest.fixture(scope="module", params=list(SETTINGS))
def lost(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    return Lost(tmp_path_factory.mktemp("lost"), request.param)


def test_it_finds_the_values_of_the_carrier_and_their_fewest_bits(lost: Lost) -> None:
    said: list[str] = []
    stored, summary = whatif(lost.runs, lost.uid, TrialRequest(bits=20), quiet, say=said.append)
    assert lost.output.split()[0] == "f0", "two bits lose the value"
    assert summary is not None
    assert (summary.restored, summary.answer_after) == (True, "a5")
    search = summary.search
    assert search is not None
    assert search.finer is not None
    side, _, bits = search.finer.partition(":")
    assert side == "L0.KV1.V"
    layer, head, kind, effect = search.side_effects[0]
    assert (layer, head, kind) == (*CARRIER, "V")
    assert effect > 0
    exact = [test for test in search.tests if test.bits == 0 and test.restored and test.size == 1]
    assert exact, "the side alone, exact, is the proof"
    narrow = [test for test in search.tests if test.restored and test.bits == int(bits or 0)]
    assert search.extra_bytes == min(test.held_bytes for test in narrow if test.held_bytes)
    assert search.extra_bytes == min(test.held_bytes for test in search.tests if test.restored and test.held_bytes)
    assert len(said) == search.tried == len(search.tests) <= 20
    with TraceReader.open(lost.runs, stored.uid) as reader:
        assert reader.meta.config["finer"] == search.finer
        assert reader.meta.whatif == summary
        assert all(reader.self_checks()["passed"])
    assert f"search         {describe_search(search)}" in sentences(summary)


def test_the_kept_tokens_stay_and_the_budget_grows_by_what_is_held(lost: Lost) -> None:
    with TraceReader.open(lost.runs, lost.uid) as before:
        had, spans = before.meta, before.span_rows()
        peak = before.steps()["peak_bytes"].max()
    stored, _ = whatif(lost.runs, lost.uid, TrialRequest(bits=2), quiet)
    with TraceReader.open(lost.runs, stored.uid) as after:
        assert after.span_rows() == spans
        assert after.steps()["peak_bytes"].max() > peak
        if had.budget_bytes is not None and had.budget_bytes < (had.full_kv_bytes or 0):
            assert (after.meta.budget_bytes or 0) - had.budget_bytes == after.steps()["peak_bytes"].max() - peak


def test_holding_another_side_brings_nothing_back(lost: Lost) -> None:
    for finer, back in (("L0.KV1.K,L0.KV0.V,L1.K,L1.V", False), ("L0.KV1.V", True)):
        _, summary = whatif(lost.runs, lost.uid, TrialRequest(changed={"finer": finer}), quiet)
        assert summary is not None
        assert summary.restored is back, finer


def test_a_repeat_changes_finer_alone_whatever_fit_would_choose(tmp_path: Path) -> None:
    source = PromptText("The farmer carried the copper kettle to the old harbor. " * 24)
    shared: dict[str, Any] = {"model": "demo", "preset": "fit", "max_new": 4, "against": True}
    request = RunRequest(method="turboquant", budget="27%", **shared)
    uid, _, _ = carry_out(request, source, tmp_path, quiet, lambda: False)
    stored, _ = whatif(tmp_path, uid, TrialRequest(changed={"finer": "L0.KV0.K"}), quiet)
    with TraceReader.open(tmp_path, uid) as before, TraceReader.open(tmp_path, stored.uid) as after:
        assert after.meta.config == {**before.meta.config, "finer": "L0.KV0.K"}
        assert (after.meta.budget_bytes or 0) > (before.meta.budget_bytes or 0)


def test_finer_that_cannot_be_read_is_refused_before_loading(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    monkeypatch.setattr(whatifs, "reload", lambda *_: loads.append(1))
    with raises_code("finer_unreadable", Refusal, unit="L0.Q"):
        whatif(lost.runs, lost.uid, TrialRequest(changed={"finer": "L0.Q"}), quiet)
    assert loads == []


def test_without_effects_the_order_is_said(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvlens.engine.bit_effects.bit_effects", lambda *_: {})
    whatif(lost.runs, lost.uid, TrialRequest(bits=2), quiet, say=said.append)
    assert len(said) == 3, "one before the two sets"


def test_a_repeat_is_refused_by_the_memory_of_a_compared_run(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_kept", lambda request: True)
    request = RunRequest(model=str(lost.runs.parent / "model"), method="streaming_llm", budget="0.3", max_new=6)
    source = PromptText(text(300, 120), "a5")
    uid, _, _ = carry_out(request, source, lost.runs, quiet, lambda: False)
    alone = refuse(request.model_copy(update={"budget": "0.4"}), source)
    assert alone is not None
    monkeypatch.setattr(memory, "host_bytes", lambda: alone.total)
    with raises_code("run_beyond_memory"):
        whatif(lost.runs, uid, TrialRequest(changed={"budget": "0.4"}), quiet)


def test_a_run_without_codes_is_refused(lost: Lost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "reading", lambda trials: pytest.fail("the prompt is read"))
    request = RunRequest(model=str(lost.runs.parent / "model"), method="streaming_llm", budget="0.3", max_new=6)
    uid, _, _ = carry_out(request, PromptText(text(300, 120), "a5"), tmp_path, quiet, lambda: False)
    with raises_code("nothing_packed", Refusal, uid=uid):
        whatif(tmp_path, uid, TrialRequest(bits=3), quiet)


def test_the_search_is_offered_for_a_run_with_codes_alone(lost: Lost, tmp_path: Path) -> None:
    with TraceReader.open(lost.runs, lost.uid) as reader:
        assert packs_numbers(reader)
        del reader.meta.config["finer"]
        assert packs_numbers(reader), "a run from before the parameter"
    request = RunRequest(model=str(lost.runs.parent / "model"), method="snapkv", budget="0.7", max_new=2)
    uid, _, _ = carry_out(request, PromptText(text(300, 120), "a5"), tmp_path, quiet, lambda: False)
    with TraceReader.open(tmp_path, uid) as reader:
        assert not packs_numbers(reader)


def test_it_goes_with_no_hold_and_no_other_search(lost: Lost) -> None:
    for request in (
        TrialRequest(bits=3, fewest=3),
        TrialRequest((1,), bits=3),
        TrialRequest(bits=3, changed={"finer": "L0.K"}),
        TrialRequest(bits=3, search=True),
    ):
        with raises_code("bits_search_alone", Refusal):
            whatif(lost.runs, lost.uid, request, quiet)
    with raises_code("most_below_one", Refusal):
        whatif(lost.runs, lost.uid, TrialRequest(bits=0), quiet)


def test_a_run_of_the_api(lost: Lost) -> None:
    run = kvlens.open(lost.uid, runs=lost.runs)
    restored = run.fewest_bits(12, progress=False)
    assert restored.restored is True
    assert restored.whatif is not None
    assert restored.whatif.search is not None
    assert restored.meta.config["finer"] == restored.whatif.search.finer != ""
    assert run.at(finer="L0.KV1.V", progress=False).restored is True
    assert run.at(finer="L0.KV0.V", progress=False).restored is False


def test_a_search_that_found_nothing_says_that_bits_are_not_the_cause() -> None:
    said = describe_search(Search(tried=1, most=40, ended=True, finer=""))
    assert "(1 set tried)" in said
