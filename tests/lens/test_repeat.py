"""Repeating stored runs: beside full KV, with something held, and what cannot be repeated says why."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lookup_model import save
from lookup_model import text as lookup_text
from support import raises_code, task_prompt
from typer.testing import CliRunner

from kvlens import methods
from kvlens.cli.lens import sentences
from kvlens.cli.main import app
from kvlens.holds import Hold, held_bytes, tokens_of
from kvlens.lens.trial_request import TrialRequest, numbers
from kvlens.lens.whatif import whatif
from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.runs.carrying import carry_out
from kvlens.runs.repeat import CannotRepeat, _original_request, _request, read_run
from kvlens.runs.repeatpair import pair
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader, list_runs
from kvlens.text.prompts import PromptText


def quiet(phase: str, done: int, total: int) -> None:
    """Nobody looks."""


def never() -> bool:
    return False


class Folder:
    """A folder with a run of SeKV that is not paired with anything, and the span of the needle in it."""

    def __init__(self, path: Path, demo: Any) -> None:
        self.path = path
        prompt, _ = task_prompt(demo, "needle", 600, seed=3, max_new=8)
        self.source = PromptText(prompt.source.text, prompt.source.answer, prompt.source.needle, "needle")
        request = RunRequest(
            method="streaming_llm", budget="0.3", max_new=8, stop=("\n",), overrides={"sinks": "6"}, top_k=5
        )
        self.uid = carry_out(request, self.source, path, quiet, never)[0]
        with TraceReader.open(path, self.uid) as reader:
            tokens, spans = reader.tokens(), reader.spans()
        start, end = self.source.needle[0]
        there = tokens[(tokens.char_start < end) & (tokens.char_end > start)]
        self.spans = spans[(spans.tok_start <= there.pos.max()) & (spans.tok_end > there.pos.min())]["span"].tolist()

    def meta(self, uid: str) -> RunMeta:
        with TraceReader.open(self.path, uid) as reader:
            return reader.meta

    def ids(self, uid: str) -> list[int]:
        with TraceReader.open(self.path, uid) as reader:
            tokens = reader.tokens()
        return tokens[tokens["step"].notna()].sort_values("step")["token_id"].tolist()


@pytest.fixture(scope="module")
def folder(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("runs"), demo)


def test_a_free_pair_is_the_same_run_with_its_loss(folder: Folder) -> None:
    stored, reference = pair(folder.path, folder.uid, False, quiet, never)
    assert folder.ids(stored.uid) == folder.ids(folder.uid)
    meta, before = folder.meta(stored.uid), folder.meta(folder.uid)
    assert (meta.parent, meta.reference, meta.forced) == (folder.uid, reference, False)
    assert (before.parent, before.reference) == (None, None)
    for key in (
        "config",
        "budget_bytes",
        "preset",
        "prompt_sha256",
        "needle",
        "answer",
        "task",
        "reference_key",
        "oracle",
    ):
        assert getattr(meta, key) == getattr(before, key), key
    assert {**meta.request, **dict.fromkeys(("against", "overrides"))} == {
        **before.request,
        **dict.fromkeys(("against", "overrides")),
    }
    with TraceReader.open(folder.path, stored.uid) as reader:
        assert len(reader.loss()) >= 1


def test_a_forced_pair_compares_every_step_within_the_same_budget(folder: Folder) -> None:
    stored, reference = pair(folder.path, folder.uid, True, quiet, never)
    assert folder.ids(stored.uid) == folder.ids(reference)
    meta, before = folder.meta(stored.uid), folder.meta(folder.uid)
    assert meta.forced is True
    assert (meta.max_new, meta.budget_bytes) == (before.max_new, before.budget_bytes)
    with TraceReader.open(folder.path, stored.uid) as reader:
        assert len(reader.loss()) == reader.n_steps
    assert len(list_runs(folder.path)[lambda runs: runs["method"] == "full"]) == 1, "one reference serves both"
    listed = CliRunner().invoke(app, ["runs", "--runs", str(folder.path)]).stdout.splitlines()
    assert [line.split()[0] for line in listed if "(fed)" in line] == [stored.uid], (
        "what it was fed is not shown as its own output"
    )


def test_whatif_holds_several_spans_and_starts_from_a_forced_run_as_well(folder: Folder) -> None:
    free, summary = whatif(folder.path, folder.uid, TrialRequest(tuple(folder.spans)), quiet)
    assert summary.restored is True
    assert summary.answer_after.strip() == folder.source.answer.strip()
    assert folder.meta(free.uid).forced is False
    paired, _ = pair(folder.path, folder.uid, True, quiet, never)
    forced, again = whatif(folder.path, paired.uid, TrialRequest(tuple(folder.spans)), quiet)
    assert folder.meta(forced.uid).forced is True
    assert again.kl_before == pytest.approx(summary.kl_before, rel=1e-6), "a trace keeps float32"
    the_same = again.model_copy(update={"kl_before": summary.kl_before})
    assert the_same == summary, "a free and a forced run lose the same, and get the same back"
    runs = list_runs(folder.path).set_index("uid")
    assert runs.loc[forced.uid, "parent"] == paired.uid
    assert bool(runs.loc[forced.uid, "hold"])
    assert runs.loc[free.uid, "reference"] == runs.loc[paired.uid, "reference"]
    listed = CliRunner().invoke(app, ["runs", "--runs", str(folder.path)]).stdout.splitlines()
    marked = {line.split()[0] for line in listed if "(what-if)" in line}
    assert {free.uid, forced.uid} <= marked
    assert not marked & {paired.uid, folder.uid}


def test_a_held_run_can_be_repeated_with_its_hold(folder: Folder) -> None:
    first, _ = whatif(folder.path, folder.uid, TrialRequest(tuple(folder.spans[:1]), "0-2", "1", 1), quiet)
    (held,) = folder.meta(first.uid).hold
    assert held.heads == ((0, 1), (1, 1), (2, 1))
    second, _ = pair(folder.path, first.uid, False, quiet, never)
    assert folder.meta(second.uid).hold == (held,)
    assert folder.ids(second.uid) == folder.ids(first.uid)
    third, _ = whatif(folder.path, first.uid, TrialRequest((1,), "5", "0"), quiet)
    assert [h.span for h in folder.meta(third.uid).hold] == [held.span, 1]


def test_the_span_is_resident_in_the_stored_states_from_that_step_on(folder: Folder) -> None:
    stored, _ = whatif(folder.path, folder.uid, TrialRequest(tuple(folder.spans[:1]), "2", "1", 2), quiet)
    with TraceReader.open(folder.path, stored.uid) as reader:
        at = [(2, 0), (2, 1), (1, 1)]
        states = [
            reader.span_states(step, 2, kv_head).set_index("span").loc[folder.spans[0], "state"] for step, kv_head in at
        ]
    assert states == ["evicted", "resident", "evicted"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (TrialRequest((9999,)), "no span 9999"),
        (TrialRequest((0,)), "span 0 is the window"),
        (TrialRequest((1,), "0,6"), "--layers 0,6: the model has 6"),
        (TrialRequest((1,), "all", "2"), "--heads 2: the model has 2"),
        (TrialRequest((1,), "x"), "--layers x: give all, or numbers"),
        (TrialRequest((1,), "3-1"), "--layers 3-1"),
        (TrialRequest((1,), from_step=50), "--from-step 50: run"),
    ],
)
def test_a_wrong_question_is_a_sentence_and_stores_nothing(folder: Folder, asked: TrialRequest, said: str) -> None:
    before = len(list_runs(folder.path))
    with pytest.raises(ValueError, match=said):
        whatif(folder.path, folder.uid, asked, quiet)
    assert len(list_runs(folder.path)) == before


def test_numbers() -> None:
    assert numbers("all", 3, "layers") == (0, 1, 2)
    assert numbers("0,2-4, 2", 6, "layers") == (0, 2, 3, 4)
    with raises_code("range_reversed"):
        numbers("3-1", 6, "layers")


def test_a_step_of_loss_beside_a_right_answer_is_not_called_no_loss() -> None:
    summary = Counterfactual(
        step=2,
        kl_before=0.5,
        kl_after=0.1,
        agrees_after=True,
        answer_before=" 4229.",
        answer_after=" 4229.",
        expected=" 4229.",
        expected_from="task",
        restored=None,
        held_tokens=16,
        held_bytes=4096,
        search=None,
    )
    lossless = sentences(summary.model_copy(update={"step": None}))
    assert not any("nothing was lost" in line for line in sentences(summary))
    assert len([line for line in lossless if "nothing was lost" in line]) == 1
    assert len([line for line in sentences(summary) if line not in lossless and "answer was right" in line]) == 1


def test_a_search_where_nothing_was_lost_is_a_sentence(folder: Folder) -> None:
    kept, _ = whatif(folder.path, folder.uid, TrialRequest(tuple(folder.spans)), quiet)
    before = len(list_runs(folder.path))
    with pytest.raises(ValueError, match="lost nothing"):
        whatif(folder.path, kept.uid, TrialRequest((1,), search=True), quiet)
    assert len(list_runs(folder.path)) == before
    assert whatif(folder.path, kept.uid, TrialRequest((1,)), quiet)[1].restored is None


def test_bytes_of_overlapping_holds_count_once() -> None:
    shape = KVShape(4, 4, 2, 8, 2)
    holds = (Hold(1, 0, 10, ((0, 0), (1, 1))), Hold(2, 5, 20, ((0, 0),)), Hold(3, 50, 60, ()))
    assert tokens_of(holds) == 20
    assert held_bytes(holds, shape) == (20 + 10) * 2 * 8 * 2


# ---- cannot be repeated
@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Path:
    """The unpaired run alone in a folder of its own."""
    shutil.copytree(folder.path / folder.uid, tmp_path / "runs" / folder.uid)
    return tmp_path / "runs"


def refused(runs: Path, uid: str) -> tuple[str, str]:
    """Return the code and the sentence of the refusal."""
    before = len(list_runs(runs))
    with pytest.raises((ValueError, TraceError)) as error:
        whatif(runs, uid, TrialRequest((1,)), quiet)
    assert len(list_runs(runs)) == before, "nothing is stored"
    return getattr(error.value, "code", ""), str(error.value)


def test_a_run_without_its_prompt(folder: Folder, copy: Path) -> None:
    (copy / folder.uid / "prompt.txt").unlink()
    assert refused(copy, folder.uid)[0] == "no_prompt_text"


def test_a_run_that_is_not_there(copy: Path) -> None:
    assert "20200101-000000-abcdef" in refused(copy, "20200101-000000-abcdef")[1]


def test_a_run_of_a_method_that_is_not_installed_any_more(
    folder: Folder, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: method for name, method in methods.registry().items() if name != "streaming_llm"}
    monkeypatch.setattr(methods, "registry", lambda: known)
    monkeypatch.delitem(methods.BUILT_IN, "streaming_llm")
    assert "unknown method" in refused(copy, folder.uid)[1]


def test_a_run_that_was_fed_foreign_tokens(folder: Folder, tmp_path: Path) -> None:
    request = RunRequest(method="streaming_llm", max_new=4, forced=(5, 6, 7))
    uid = carry_out(request, folder.source, tmp_path, quiet, never)[0]
    assert "fed tokens" in refused(tmp_path, uid)[1]


def test_a_model_that_has_changed_or_gone(tmp_path: Path) -> None:
    model = save(tmp_path / "model", ((1, 1),), 0.4, 1.0)
    request = RunRequest(model=str(model), method="streaming_llm", budget="0.3", max_new=4)
    runs = tmp_path / "runs"
    uid = carry_out(request, PromptText(lookup_text(200, 50)), runs, quiet, never)[0]
    save(model, ((1, 1),), 0.5, 1.0)
    assert "have changed since" in refused(runs, uid)[1]
    shutil.rmtree(model)
    assert refused(runs, uid)[0] == "no_model"


def test_a_trace_that_does_not_say_how_it_was_made() -> None:
    with raises_code("no_config", CannotRepeat, uid="u"):
        _request("u", RunMeta(layers=1, q_heads=1, kv_heads=1, model="demo"))


@pytest.mark.parametrize("preset", ["paper", "fit"])
def test_a_parameter_that_came_later_keeps_its_default(preset: str) -> None:
    """Whatever a preset sets today; what the run says of itself stays."""
    config = dataclasses.asdict(SeKVParameters(window=40, zones="layer"))
    asked = {"method": "sekv", "preset": None, "overrides": {"window": 40}}
    meta = RunMeta(layers=1, q_heads=1, kv_heads=1, method="sekv", preset=preset, request=asked, config=config)
    assert _request("u", meta).overrides["zones"] == "layer"
    assert _original_request(_request("u", meta), meta).overrides == {"window": 40}
    old = meta.model_copy(update={"config": {name: value for name, value in config.items() if name != "zones"}})
    for request in (_request("u", old), _original_request(_request("u", old), old)):
        assert (request.overrides["zones"], request.overrides["window"]) == ("head", 40)


def test_an_old_trace_is_repeated_from_what_it_says(folder: Folder) -> None:
    said = folder.meta(folder.uid).to_row()
    meta = {key: value for key, value in said.items() if key not in ("request", "hold", "reference_key")}
    request = _request(folder.uid, RunMeta.model_validate(meta))
    for budget, limit, again in (("200%", None, "100%"), ("1.0", None, "1.0"), ("20", 5, "20"), ("0.2", None, "0.2")):
        old = RunMeta.model_validate(meta | {"budget": budget, "budget_bytes": limit})
        assert _request(folder.uid, old).budget == again
    whole = read_run(folder.path, folder.uid).request
    assert request.model_copy(update={"stop": whole.stop, "top_k": whole.top_k, "chat": whole.chat}) == whole
    assert request.chat == "off", "it was fed its text as it is"


# ---- command line
def test_the_commands_end_with_the_uid(folder: Folder) -> None:
    runner = CliRunner()
    paired = runner.invoke(app, ["pair", folder.uid, "--runs", str(folder.path)])
    assert paired.exit_code == 0, paired.output
    uid = paired.stdout.splitlines()[-1]
    assert f"reference {folder.meta(uid).reference}" in paired.stdout
    spans = [part for span in folder.spans for part in ("--span", str(span))]
    asked = ["whatif", folder.uid, *spans, "--search", "--runs", str(folder.path)]
    human = runner.invoke(app, asked)
    assert human.exit_code == 0, human.output
    meta = folder.meta(human.stdout.splitlines()[-1])
    (layer, head), *_ = meta.whatif.search.heads
    assert f"Smallest set found: L{layer} KV{head} " in human.stdout
    assert "restored" in human.stdout
    assert [h.heads for h in meta.hold] == [meta.whatif.search.heads] * 2, "held for what was found"
    lines = [json.loads(line) for line in runner.invoke(app, [*asked, "--progress-json"]).stdout.splitlines()]
    assert {"load", "search", "prefill", "decode", "store", "done"} <= {line["phase"] for line in lines}
    assert lines[-1]["phase"] == "done"
    assert folder.meta(lines[-1]["uid"]).whatif == meta.whatif


def test_cancelling_a_search_stores_nothing(folder: Folder) -> None:
    before, calls = len(list_runs(folder.path)), iter(range(10**6))
    with pytest.raises(ValueError, match="cancelled while searching"):
        whatif(folder.path, folder.uid, TrialRequest(tuple(folder.spans), search=True), quiet, lambda: next(calls) > 2)
    assert len(list_runs(folder.path)) == before
