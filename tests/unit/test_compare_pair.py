"""Two runs beside each other: what may be compared, where they part, what differs, and which pair a page opens with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pairruns import PARTED, PairRuns, write_pair

from kvlens import tasks
from kvlens.app.compare.groups import Trial, default_pair, partner, points, trial
from kvlens.app.compare.names import run_name, short_names
from kvlens.app.compare.pair import Pair, divergence_words
from kvlens.app.compare.settings import KINDS, _held, config_difference, setting_words
from kvlens.app.compare.together import Together
from kvlens.app.compare.totals import COMPARED, FIRST_OTHER, TO_DEVICE, TO_HOST, Total, beside, totals, totals_table
from kvlens.app.report.run import answer
from kvlens.metaparts import Held, Machine
from kvlens.store.reader import TraceReader, list_runs
from kvlens.tasks.base import Unscored
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PairRuns:
    return write_pair(tmp_path_factory.mktemp("pair"))


def pair(runs: PairRuns, a: str, b: str) -> Pair:
    return Pair.read(TraceReader.open(runs.folder, a), TraceReader.open(runs.folder, b))


def test_runs_of_one_prompt_part_at_the_first_other_token(runs: PairRuns) -> None:
    found = pair(runs, runs.run, runs.reference)
    assert found.apart is None
    assert found.divergence == PARTED
    assert f" step {PARTED}:" in divergence_words(found)
    assert "'<i>'" in divergence_words(found)


def test_equal_tokens_are_said_as_far_as_both_go(runs: PairRuns) -> None:
    found = pair(runs, runs.run, runs.plain)
    assert found.divergence is None
    assert found.steps == 30
    assert "as both go (A has 30 steps, B 20)" in divergence_words(found)


def test_a_forced_run_says_whose_tokens_it_was_fed(runs: PairRuns) -> None:
    found = pair(runs, runs.run, runs.plain)
    found.a.meta = found.a.meta.model_copy(update={"forced": True, "reference": found.b.uid})
    plain = divergence_words(pair(runs, runs.run, runs.plain))
    assert divergence_words(found).endswith(plain)
    assert "B's tokens" in divergence_words(found).removesuffix(plain)
    assert run_name(found.a).endswith("forced")


@pytest.mark.parametrize(("which", "said"), [("other", "different prompts"), ("recut", "Another tokenizer")])
def test_other_prompts_and_tokenizers_are_totals_only(runs: PairRuns, which: str, said: str) -> None:
    found = pair(runs, runs.run, getattr(runs, which))
    assert said in str(found.apart)
    assert found.divergence is None


def test_settings_that_differ_come_first_and_absent_ones_are_dashes(runs: PairRuns) -> None:
    a, b = (TraceReader.open(runs.folder, uid) for uid in (runs.run, runs.reference))
    b.meta = b.meta.model_copy(update={"config": {"window": 48, "page": 16, "inner": {"rate": 0.5}}})
    frame = config_difference({"A": a, "B": b}).set_index("setting")
    assert frame.loc["method"].tolist() == ["sekv", "full", "differs"]
    assert frame.loc["budget"].tolist() == ["35%", "–", "differs"]
    assert frame.loc["parameter window"].tolist() == ["48", "48", "same"]
    assert frame.loc["parameter inner.rate"].tolist() == ["–", "0.5", "some methods only"]
    b.meta = b.meta.model_copy(update={"machine": Machine(threads=7), "started": "2026-03-02T00:00:00Z"})
    later = config_difference({"A": a, "B": b}).set_index("setting")
    assert later.loc[["machine threads", "started"], "kind"].tolist() == ["circumstances", "circumstances"]
    assert [setting_words(name) for name in ("machine threads", "budget_bytes", "parameter a_b", "new_one")] == [
        "threads",
        "budget (bytes)",
        "parameter a_b",
        "new one",
    ]
    kinds = frame["kind"].tolist()
    assert kinds == sorted(kinds, key=KINDS.index)


def test_a_parameter_that_differs_among_the_methods_that_have_it_differs(runs: PairRuns) -> None:
    found = {name: TraceReader.open(runs.folder, getattr(runs, name)) for name in ("run", "plain", "reference")}
    for name, config in (("run", {"page": 16, "sinks": 4}), ("plain", {"page": 32, "sinks": 4}), ("reference", {})):
        found[name].meta = found[name].meta.model_copy(update={"config": config})
    frame = config_difference(found).set_index("setting")
    assert frame.loc["parameter page"].tolist() == ["16", "32", "–", "differs"]
    assert frame.loc["parameter sinks"].tolist() == ["4", "4", "–", "some methods only"]
    assert frame.loc["model", "kind"] == "same"


def test_runs_are_told_apart_in_as_few_words_as_can_be(runs: PairRuns) -> None:
    run, plain, full = (TraceReader.open(runs.folder, uid) for uid in (runs.run, runs.plain, runs.reference))
    assert short_names([full, run]) == ["FullKV", "SeKV"]
    assert short_names([run, plain]) == ["SeKV …sekv", "SeKV …plain"]
    plain.meta = plain.meta.model_copy(update={"budget": "10%", "forced": True})
    assert short_names([run, plain]) == ["SeKV", "SeKV forced"]
    plain.meta = plain.meta.model_copy(update={"forced": False})
    assert short_names([run, plain, full]) == ["SeKV 35%", "SeKV 10%", "FullKV"]
    other, recut = (TraceReader.open(runs.folder, uid) for uid in (runs.other, runs.recut))
    names = short_names([run, plain, other, recut])
    assert names == ["SeKV 35% …sekv", "SeKV 10%", "SeKV 35% …other", "SeKV 35% …recut"]


def test_runs_are_laid_beside_one_as_far_as_all_go(runs: PairRuns) -> None:
    names = ("run", "reference", "plain", "other", "recut")
    every = {name: TraceReader.open(runs.folder, getattr(runs, name)) for name in names}
    found = Together.beside("run", every)
    assert found.names == ("run", "reference", "plain")
    assert (found.same, found.both) == (PARTED + 1, 20)
    assert [sentence.split()[0] for sentence in found.left_out] == ["other", "recut"]
    assert ["another prompt" in sentence for sentence in found.left_out] == [True, False]
    assert ["other tokens" in sentence for sentence in found.left_out] == [False, True]
    alone = Together.beside("run", {name: every[name] for name in ("run", "plain")})
    assert (alone.same, alone.both, alone.left_out) == (20, 20, ())
    assert Together.beside("other", every).names == ("other",)


def test_a_model_of_another_shape_is_left_out_of_the_maps(runs: PairRuns, tmp_path: Path) -> None:
    made = {"kv_heads": 2, "steps": 4, "spans": 8, "prompt_tokens": 100, "seed": 1}
    uids = [write_synthetic(tmp_path, layers=layers, q_heads=4, **made) for layers in (2, 3)]
    found = Together.beside("a", {name: TraceReader.open(tmp_path, uid) for name, uid in zip("ab", uids, strict=True)})
    assert found.names == ("a",)
    assert [sentence.split()[0] for sentence in found.left_out] == ["b"]


def test_totals_are_the_recorded_sums_and_nothing_is_invented(runs: PairRuns) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        found = {total.name: total for total in totals(reader)}
        moved = {name: reader.steps()[name].sum() for name in ("h2d_bytes", "d2h_bytes")}
        assert moved["h2d_bytes"] > 0
        assert moved["h2d_bytes"] != moved["d2h_bytes"]
        assert (found[TO_DEVICE].value, found[TO_HOST].value) == (moved["h2d_bytes"], moved["d2h_bytes"])
        assert ("to the device" in TO_DEVICE, "host" in TO_HOST) == (True, True)
        assert found[COMPARED].value == PARTED + 1
        assert found[FIRST_OTHER].text() == f"step {PARTED}"
    with TraceReader.open(runs.folder, runs.reference) as reader:
        found = {total.name: total for total in totals(reader)}
        assert np.isnan(found["KL from full KV, largest"].value)
        assert found["KL from full KV, largest"].text() == "not recorded"
        assert found["budget"].text() == "no limit"


@pytest.mark.parametrize(
    ("unit", "a", "b", "said"),
    [
        ("bytes", 1e6, 3e6, "2 MB more, 3 times A"),
        ("bytes", 3e6, 1e6, "2 MB less, 0.333 times A"),
        ("bytes", 5.0, 0.0, "5 B less"),
        ("bytes", 0.0, 5.0, "5 B more"),
        ("tokens", 7.0, 7.0, "the same"),
        ("step", 3.0, 9.0, "6 steps later"),
        ("step", 9.0, 3.0, "6 steps earlier"),
        ("step", 3.0, 4.0, "1 step later"),
        ("copies", 1.0, 2.0, "1 copy more, 2 times A"),
        ("tokens", 32_768.0, 65_536.4, "32,768.4 tokens more, 2 times A"),
        ("nats", -2.0, -0.5, "1.5 nats more"),
        ("share", 0.5, np.nan, "not recorded in B"),
        ("share", np.nan, np.nan, "not recorded in both"),
    ],
)
def test_differences_are_words(unit: str, a: float, b: float, said: str) -> None:
    assert beside(Total("x", unit, a), Total("x", unit, b)) == said


def test_the_delta_table_has_words_and_numbers(runs: PairRuns) -> None:
    found = pair(runs, runs.run, runs.plain)
    frame = totals_table({"A": totals(found.a), "B": totals(found.b)}, ("A", "B")).set_index("quantity")
    assert frame.loc["decode steps", "B beside A"] == "10 steps less, 0.667 times A"
    assert frame.loc["decode steps", ["value A", "value B", "unit"]].tolist() == [30.0, 20.0, "steps"]
    full = totals(TraceReader.open(runs.folder, runs.reference))
    three = totals_table({"x": full, "y": totals(found.a), "z": totals(found.b)}, ("z", "y")).set_index("quantity")
    assert three.loc["decode steps", ["x", "y", "z"]].tolist() == ["30 steps", "30 steps", "20 steps"]
    assert three.loc["decode steps", "B beside A"] == "10 steps more, 1.5 times A"


def test_a_page_opens_with_the_newest_run_that_has_a_reference(runs: PairRuns) -> None:
    table = list_runs(runs.folder)
    assert default_pair(table, lambda uid: None) == (runs.run, runs.reference)
    without = table.assign(reference=None)
    prompts = {runs.plain: "p", runs.run: "p", runs.other: "q"}
    assert default_pair(without, prompts.get) == (runs.plain, runs.run)
    assert default_pair(without, lambda uid: None) == tuple(table["uid"][:2])
    assert default_pair(without.head(1), prompts.get) is None
    assert default_pair(without.assign(status="unreadable"), prompts.get) is None


def test_a_run_finds_its_partner(runs: PairRuns) -> None:
    table = list_runs(runs.folder)
    prompts = {runs.plain: "p", runs.run: "p"}
    assert partner(table, runs.run, prompts.get) == runs.reference
    assert partner(table, runs.reference, prompts.get) == runs.run
    assert partner(table, runs.plain, prompts.get) == runs.run
    assert partner(table, runs.other, prompts.get) == runs.plain
    assert partner(table[table["uid"] == runs.run], runs.run, prompts.get) is None


TRIAL = Trial("r1", "demo", "needle", "sekv", "", "demo", "float32", "20%", "p1", True, 2e6, 1e7, 1e3, 100.0)


def test_points_count_prompts_and_the_newest_run_of_each() -> None:
    others = [
        replace(TRIAL, uid="r2", prompt="p2", exact=False, peak_bytes=4e6),
        replace(TRIAL, uid="r3", prompt="p2", exact=True),
        replace(TRIAL, uid="r4", budget="10%", exact=False, attended_tokens=float("nan")),
    ]
    frame = points([TRIAL, *others]).set_index("budget")
    assert frame.loc["20%", ["n", "exact", "peak_bytes", "full_kv_share"]].tolist() == [2, 1.0, 2e6, 0.2]
    assert frame.loc["20%", "low"] == pytest.approx(0.3424, abs=1e-4)
    assert frame.loc["10%", ["n", "exact"]].tolist() == [1, 0.0]
    assert np.isnan(frame.loc["10%", "attended_tokens"])
    assert points([]).empty


def unscored(*asked: object) -> float:
    raise Unscored("it needs a package that is not installed.")


def test_what_is_no_trial(runs: PairRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceReader.open(runs.folder, runs.run) as reader:
        found = trial(reader)
        assert found is not None
        assert (found.method, found.budget) == ("sekv", "35%")
        for name, value in (("forced", True), ("hold", [{"span": 1}]), ("answer", None)):
            kept = reader.meta
            reader.meta = kept.model_copy(update={name: value})
            assert trial(reader) is None
            reader.meta = kept
        for output, right in ((" 4172\nmore", True), ("41725", False)):
            reader.meta = reader.meta.model_copy(update={"output_text": output})
            assert trial(reader).exact is right  # type: ignore[union-attr]
        monkeypatch.setattr(tasks, "score", unscored)
        reader.meta = reader.meta.model_copy(update={"task": "math500:none"})
        assert trial(reader) is None, "what cannot be scored is not wrong"
        assert "not judged" in answer(reader)
    with TraceReader.open(runs.folder, runs.reference) as reader:
        assert trial(reader) is None


def test_what_was_held_is_said_whole() -> None:
    every = tuple((layer, head) for layer in range(3) for head in (0, 1))
    held = Held(span=5, tok_start=64, tok_end=80, heads=every, from_step=2)
    assert _held(held) == "span 5, tokens 64-79, for L0-2 KV0+1, from step 2 on"
    some = held.model_copy(update={"heads": ((0, 0), (0, 1), (2, 1))})
    assert _held(some) == "span 5, tokens 64-79, for L0 KV0+1, L2 KV1, from step 2 on"
