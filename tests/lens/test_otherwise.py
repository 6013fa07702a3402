"""A stored run asked for once more with another budget or other parameters, its pieces of what is held, and the list of
all tries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises_code
from test_counterfactual import FACT, Lost, quiet
from typer.testing import CliRunner
from uiruns import redate

from kvlens.app.report.whatif import whatif as report
from kvlens.budget import BudgetInfeasible
from kvlens.cli.lens import sentences
from kvlens.cli.main import app
from kvlens.holds import Drop, Hold
from kvlens.lens.hold_changes import check_steps
from kvlens.lens.knob import Knob, knob_in, knob_of
from kvlens.lens.pieces import Piece
from kvlens.lens.reasons import explain
from kvlens.lens.search_words import describe_search
from kvlens.lens.severity import outcome_table
from kvlens.lens.trial_request import TrialRequest, holds_for
from kvlens.lens.trylist import tries_in
from kvlens.lens.whatif import whatif
from kvlens.meta import RunMeta
from kvlens.runs.repeat import read_run
from kvlens.store.reader import TraceReader, list_runs


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    return Lost(tmp_path_factory.mktemp("lost"), ((1, 0),), 0.4, 1.0)


def meta(lost: Lost, uid: str) -> RunMeta:
    with TraceReader.open(lost.runs, uid) as reader:
        return reader.meta


def listed(lost: Lost, *more: str) -> Any:
    return CliRunner().invoke(app, ["whatif", lost.uid, "--list", *more, "--runs", str(lost.runs)])


def test_nothing_tried_yet(tmp_path: Path) -> None:
    fresh = Lost(tmp_path, ((1, 0),), 0.4, 1.0)
    assert fresh.uid in listed(fresh).stdout
    assert listed(fresh, "--json").stdout == "[]\n"


def test_another_budget_is_the_same_request_with_it_compared_with_the_same_reference(lost: Lost) -> None:
    held, _ = whatif(lost.runs, lost.uid, TrialRequest((lost.span,)), quiet)
    stored, summary = whatif(lost.runs, lost.uid, TrialRequest(changed={"budget": "90%"}), quiet)
    before, after = meta(lost, lost.uid), meta(lost, stored.uid)
    assert summary is not None
    assert (summary.restored, summary.answer_after) == (True, "a5")
    assert (summary.held_bytes, summary.held_tokens) == (0, 0)
    assert summary.kl_after is not None
    assert summary.kl_before is not None
    assert summary.kl_after < summary.kl_before
    assert (after.parent, after.hold, after.changed, after.budget) == (lost.uid, (), {"budget": "90%"}, "90%")
    assert after.whatif == summary
    assert after.reference == meta(lost, held.uid).reference
    assert {**(after.request or {}), "budget": 0, "against": 0} == {**(before.request or {}), "budget": 0, "against": 0}
    assert before.changed == {}
    runs = list_runs(lost.runs).set_index("uid")
    assert bool(runs.loc[stored.uid, "changed"])
    assert not runs.loc[[lost.uid, held.uid], "changed"].any()
    assert "changed" not in json.loads((lost.runs / lost.uid / "run.json").read_text(encoding="utf-8"))


def test_a_lower_budget_that_cannot_be_kept_is_refused_before_anything_is_made(lost: Lost) -> None:
    stored = len(list_runs(lost.runs))
    with pytest.raises(BudgetInfeasible, match="raise --budget"):
        whatif(lost.runs, lost.uid, TrialRequest(changed={"budget": "1%"}), quiet)
    assert len(list_runs(lost.runs)) == stored


def test_a_parameter_and_a_hold_go_together_and_a_try_can_be_tried_on(lost: Lost) -> None:
    asked = TrialRequest(pieces=(Piece(lost.span, None, 1, 0),), changed={"budget": "40%", "sinks": "8"})
    stored, summary = whatif(lost.runs, lost.uid, asked, quiet)
    assert summary is not None
    assert summary.restored is True
    made = meta(lost, stored.uid)
    assert (made.config["sinks"], made.budget) == (8, "40%")
    assert {hold.heads for hold in made.hold} == {((1, 0),)}
    assert [hold.whole for hold in made.hold] == [False, False], "four more sinks move every page"
    past = read_run(lost.runs, stored.uid)
    again = past.otherwise({"budget": "50%"})
    assert (again.budget, again.overrides, again.hold) == ("50%", {"sinks": "8"}, past.request.hold)
    assert past.otherwise({}) is past.request
    assert past.request.overrides == made.config


def test_a_hold_in_a_run_that_is_cut_otherwise_is_told_of_by_that_runs_own_spans(lost: Lost) -> None:
    """Pages twice as long: half of one is held where a page was, all of it where both its pages were."""
    (here,) = [span for span in read_run(lost.runs, lost.uid).spans if span.span == lost.span]
    size = here.tok_end - here.tok_start
    changed = {"budget": "60%", "page": str(2 * size)}
    told, had = {}, {}
    for pieces in ((lost.span,), (lost.span - 1, lost.span, lost.span + 1)):
        stored, summary = whatif(lost.runs, lost.uid, TrialRequest(pieces, changed=changed), quiet)
        assert summary is not None
        assert summary.held_tokens == len(pieces) * size
        with TraceReader.open(lost.runs, stored.uid) as reader:
            spans, events, holds = reader.spans().set_index("span"), reader.events(), reader.meta.hold
        for hold in holds:
            row = spans.loc[hold.span]
            assert row["tok_start"] <= hold.tok_start < hold.tok_end <= row["tok_end"]
            assert hold.whole is ((hold.tok_start, hold.tok_end) == (row["tok_start"], row["tok_end"]))
        told[len(pieces)] = events.loc[events["kind"] == "hold", "span"].tolist()
        had[len(pieces)] = [(hold.span, hold.whole) for hold in holds]
        assert set(told[len(pieces)]) == {hold.span for hold in holds}
    ((only, whole),) = had[1]
    assert not whole
    assert sorted(whole for _, whole in had[3]) == [False, True]
    assert only in {span for span, _ in had[3]}
    one = next(one for one in tries_in(lost.runs, lost.uid) if one.uid == stored.uid)
    past = read_run(lost.runs, lost.uid)
    again = holds_for(past, TrialRequest(pieces=one.pieces), ((0, 0),))
    assert {hold.span for hold in again if hold.whole} == {lost.span - 1, lost.span, lost.span + 1}, (
        "what a try held is asked for again in the words of the run it was tried on"
    )
    assert "span" not in one.words()
    assert f"page {2 * size}" in one.words()
    back, _ = whatif(lost.runs, stored.uid, TrialRequest(changed={"page": str(size)}), quiet)
    assert sorted(hold.span for hold in meta(lost, back.uid).hold) == [lost.span - 1, lost.span, lost.span + 1]
    assert all(hold.whole for hold in meta(lost, back.uid).hold)


@pytest.mark.parametrize("how", ["heads", "bytes"])
def test_a_search_at_a_budget_that_suffices_says_that_nothing_has_to_be_held(lost: Lost, how: str) -> None:
    asked = TrialRequest((lost.span,), search=True) if how == "heads" else TrialRequest(fewest=9)
    stored, summary = whatif(lost.runs, lost.uid, replace(asked, changed={"budget": "90%"}), quiet)
    assert summary is not None
    assert summary.restored is True
    search = summary.search
    assert search is not None
    assert (search.needless, search.tried, search.heads, search.triples) == (True, 1, (), ())
    assert (meta(lost, stored.uid).hold, summary.held_bytes) == ((), 0)
    assert describe_search(search).startswith("Nothing ")
    _, summary = whatif(lost.runs, lost.uid, replace(asked, changed={"budget": "40%"}), quiet)
    assert summary is not None
    assert summary.search is not None
    assert summary.search.needless is None
    assert summary.search.heads == ((1, 0),) or summary.search.triples == ((1, 0, lost.span),)


def test_only_the_piece_of_the_head_that_carries_the_needle_brings_it_back(lost: Lost) -> None:
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        _, summary = whatif(
            lost.runs,
            lost.uid,
            TrialRequest(pieces=(Piece(tokens=(FACT, FACT + 1), layer=layer, kv_head=head),)),
            quiet,
        )
        assert summary is not None
        assert summary.restored is ((layer, head) == (1, 0))
    pieces = (Piece(lost.span, None, 0, 1), Piece(lost.span, None, 1))
    _, summary = whatif(lost.runs, lost.uid, TrialRequest(pieces=pieces, search=True), quiet)
    assert summary is not None
    assert summary.search is not None
    assert summary.search.heads == ((1, 0),), "of the heads that the pieces name"


def test_an_answer_hangs_on_what_its_head_reads_and_on_nothing_else(lost: Lost) -> None:
    """Dropped of full KV's own run, which is right; and of the run that lost, which has nothing to lose by it."""
    asked = TrialRequest(drops=(Piece(lost.span),), changed={"budget": "90%"})
    stored, summary = whatif(lost.runs, lost.uid, asked, quiet)
    assert summary is not None
    assert (summary.restored, summary.stands) == (False, None)
    (one,) = [one for one in tries_in(lost.runs, lost.uid) if one.drops]
    assert one.outcome().startswith("it is wrong")
    assert "tokens" in one.brief(), "at another budget spans may be others"
    full = str(meta(lost, stored.uid).reference)
    told = {}
    for piece in (f"t{FACT}.L1.KV0", f"t{FACT}.L0", f"t{FACT}.L1.KV1"):
        done = CliRunner().invoke(app, ["whatif", full, "--drop", piece, "--runs", str(lost.runs)])
        assert done.exit_code == 0, done.output
        told[piece] = meta(lost, done.stdout.splitlines()[-1]), done.stdout
    hangs, said = told[f"t{FACT}.L1.KV0"]
    assert hangs.whatif is not None
    assert (hangs.whatif.stands, hangs.whatif.restored, hangs.whatif.dropped_tokens) == (False, None, 1)
    assert hangs.whatif.kl_before == 0
    assert hangs.whatif.kl_after is not None
    assert hangs.whatif.kl_after > 0.1
    assert "hangs on it" in said
    assert "no byte" in said
    assert [meta.whatif.stands for meta, _ in told.values() if meta.whatif] == [False, True, True]
    (drop,) = hangs.drop
    assert (drop.tok_start, drop.tok_end, drop.heads, hangs.hold, hangs.interfered) == (
        FACT,
        FACT + 1,
        ((1, 0),),
        (),
        True,
    )
    listed = list_runs(lost.runs).set_index("uid").loc[str(hangs.run_uid)]
    assert (listed["hold"], listed["drop"], listed["changed"]) == (True, True, False), "no run of the method alone"
    assert {one.outcome().split()[1] for one in tries_in(lost.runs, full)} == {"hangs", "stands"}
    again = read_run(lost.runs, str(hangs.run_uid)).request
    assert again.drop == (Drop(drop.span, FACT, FACT + 1, ((1, 0),), 0, drop.whole),)
    with TraceReader.open(lost.runs, str(hangs.run_uid)) as reader:
        why = explain(reader, 0, 1, 0, drop.span)
        assert (why.kind, why.says) == ("dropped", f"the what-if dropped token {FACT} of it"), "no word on the method"
        assert explain(reader, 0, 0, 0, drop.span).kind != "dropped"
        title, section = report(reader)
        assert outcome_table(reader)["what_if"].to_pylist() == ["drop"]
    _, back = whatif(
        lost.runs, str(hangs.run_uid), TrialRequest(pieces=(Piece(tokens=(FACT, FACT + 1), layer=1),)), quiet
    )
    assert back is not None
    assert back.restored, "what a run dropped and is now to hold is dropped no longer"
    assert (back.lifted_tokens, back.held_tokens) == (1, 1), "full KV has it anyway, and the other head is asked for"
    assert back.held_bytes == 2 * 16 * 4, "one token of that head"
    assert "drop lifted    1 token, 0 bytes" in "\n".join(sentences(back))
    _, found = whatif(lost.runs, str(hangs.run_uid), TrialRequest(fewest=9), quiet)
    assert found is not None
    assert found.search is not None
    assert (found.restored, found.lifted_tokens, found.held_bytes) == (True, 1, 0)
    assert min(one.held_bytes for one in found.search.tests if one.restored) == found.held_bytes
    for late in (TrialRequest(tokens=((FACT, FACT + 1),), from_step=1), TrialRequest(fewest=9, from_step=1)):
        with raises_code("range_begins_earlier", step=0):
            whatif(lost.runs, str(hangs.run_uid), late, quiet)
    hold = Hold(0, FACT, FACT + 1, ((1, 0),), 2)
    with raises_code("range_begins_earlier", step=2):
        check_steps((replace(again.drop[0], from_step=3),), (hold,))
    check_steps((again.drop[0], Drop(0, 0, FACT, ((1, 0),), 3)), (hold,))
    assert title.endswith("drop")
    assert "hangs on it" in section


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "or what to change: --budget or --set."),
        (["--search", "--budget", "30%"], "say what to hold"),
        (["--hold", "5.L9"], "the model has 2 layers"),
        (["--hold", "x"], "give SPAN or tFIRST-LAST"),
        (["--drop", "x"], "--drop x: give SPAN or tFIRST-LAST"),
        (["--drop", "5", "--search"], "leave out --drop, or the search"),
        (["--drop", "t3", "--hold", "t3"], "token 3 would be both held and dropped for layer 0, KV head 0"),
        (["--set", "budget=3"], "give the budget with --budget"),
        (["--set", "nothing=3"], "has no parameter 'nothing'"),
        (["--json", "--budget", "90%"], "--json goes with --list"),
        (["--span", "5", "--budget", ""], "--budget has no value"),
        (["--span", "5", "--set", "sinks="], "--set sinks= has no value"),
        (["--span", "5", "--most", "40"], "--most goes with --fewest-bytes"),
        (["--list", "--span", "5", "--budget", "30%"], "leave out --budget, --span, or --list"),
        (["--list", "--progress-json"], "leave out --progress-json"),
        (["--span", "5", "--layers", "²"], "--layers ²: give all, or numbers"),
        (["--span", "5", "--layers", "0-99999999999"], "--layers 0-99999999999: the model has 2"),
        (["--span", "5", "--heads", "9" * 5000], "the model has 2, counted from 0."),
    ],
)
def test_bad_requests_are_one_sentence(lost: Lost, argv: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["whatif", lost.uid, *argv, "--runs", str(lost.runs)])
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)


def test_the_list_tells_every_try_newest_first(tmp_path: Path) -> None:
    mine = Lost(tmp_path, ((1, 0),), 0.4, 1.0)
    argv = ["--hold", f"{mine.span}.L1.KV0", "--hold", f"t{FACT}.L0", "--runs", str(mine.runs), "--progress-json"]
    first = CliRunner().invoke(app, ["whatif", mine.uid, *argv])
    assert first.exit_code == 0, first.output
    budget, _ = whatif(mine.runs, mine.uid, TrialRequest(changed={"budget": "90%"}), quiet)
    found, _ = whatif(mine.runs, mine.uid, TrialRequest(fewest=9), quiet)
    held = json.loads(first.stdout.splitlines()[-1])["uid"]
    for second, uid in enumerate((held, budget.uid, found.uid)):
        redate(mine.runs / uid / "run.json", f"2026-01-01T00:00:0{second}+00:00")
    rows = json.loads(listed(mine, "--json").stdout)
    assert [row["uid"] for row in rows] == [found.uid, budget.uid, held]
    assert [row["restored"] for row in rows] == [True, True, True]
    assert rows[0]["holds"] == [f"{mine.span}.L1.KV0"]
    assert rows[0]["search"]["triples"] == [[1, 0, mine.span]]
    assert rows[1]["changed"] == {"budget": "90%"}
    full = meta(mine, mine.uid).full_kv_bytes or 0
    assert rows[1]["more_bytes"] == pytest.approx(0.6 * full, rel=0.01)
    assert rows[2]["holds"] == [f"{mine.span}.L1.KV0", f"t{FACT}.L0"]
    assert rows[2]["more_bytes"] == rows[2]["held_bytes"]
    told = listed(mine).stdout.splitlines()
    assert [line.split()[0] for line in told[1:]] == [row["uid"] for row in rows]
    assert "budget 90%" in told[2]
    assert f"span {mine.span} for L1 KV0, token {FACT} for L0 KV0, L0 KV1 held from step 0" in told[3]
    assert [one.uid for one in tries_in(mine.runs, found.uid)] == []


def test_the_shares_are_those_that_the_method_can_keep_to(lost: Lost) -> None:
    said = meta(lost, lost.uid)
    knob = knob_of(said)
    assert knob is not None
    assert (knob.name, knob.own, knob.shares[-1]) == ("budget", 30.0, 100.0)
    many = said.model_copy(update={"request": {**(said.request or {}), "overrides": {"sinks": "60"}}})
    fewer = knob_of(many)
    assert fewer is not None
    assert set(fewer.shares) < set(knob.shares)
    assert list(fewer.shares) == sorted(fewer.shares)
    below = max(share for share in knob.shares if share < fewer.shares[0])
    for share, refused in ((fewer.shares[0], False), (below, True)):
        asked = TrialRequest(changed={"budget": knob.value(share), "sinks": "60"})
        if refused:
            with pytest.raises(BudgetInfeasible):
                whatif(lost.runs, lost.uid, asked, quiet)
        else:
            assert whatif(lost.runs, lost.uid, asked, quiet)[1] is not None


def test_a_method_that_keeps_all_is_asked_for_what_it_attends(lost: Lost) -> None:
    said = meta(lost, lost.uid)
    quest = said.model_copy(update={"method": "quest", "config": {"keep": 0.2}, "budget_bytes": None})
    knob = knob_of(quest)
    assert knob is not None
    assert (knob.name, knob.own, knob.value(30)) == ("keep", 20.0, "0.3")
    assert (knob.share("0.3"), knob.share("7"), knob.share("512tok"), knob.share("x")) == (30.0, None, None, None)
    assert (knob.choice(20.0), knob.choice(30.0)) == ("keep 20% (as it was)", "keep 30%")
    assert knob_of(said.model_copy(update={"method": "full"})) is None
    assert knob_of(said.model_copy(update={"method": "not there"})) is None
    assert knob_of(said.model_copy(update={"token_bytes": None})) is None
    assert Knob("budget", 30.0, (30.0, 100.0)).value(30.0) == "30%"


def test_a_share_of_nothing_is_what_the_other_parameters_say(lost: Lost) -> None:
    """keep=0: the slider begins at what was attended, so that more of it is more."""
    said = meta(lost, lost.uid)
    assert said.full_kv_bytes
    assert said.token_bytes
    assert said.max_new
    prompt = said.full_kv_bytes // said.token_bytes - said.max_new
    quest = said.model_copy(update={"method": "quest", "config": {"keep": 0.0, "tokens": 96}, "budget_bytes": None})
    knob = knob_of(quest)
    assert knob is not None
    assert knob.own == round(100 * 96 / prompt, 1)
    assert knob.own in knob.shares
    assert knob.choice(knob.own) == f"tokens=96, {knob.own:g}% attended (as it was)"
    assert knob.choice(40.0) == "keep 40%"
    every = knob_of(quest.model_copy(update={"config": {"keep": 0.0, "tokens": 5000}}))
    assert every is not None
    assert (every.own, every.choice(100.0)) == (100.0, "tokens=5000, 100% attended (as it was)")
    by_ratios = said.model_copy(update={"method": "chess", "config": {"keep": 0.0}, "budget_bytes": None})
    assert knob_of(by_ratios) is None, "nothing says what was attended"
    seen = knob_of(by_ratios, lambda: 23.14)
    assert seen is not None
    assert (seen.own, seen.choice(23.1)) == (23.1, "its own parameters, 23.1% attended (as it was)")
    with TraceReader.open(lost.runs, lost.uid) as reader:
        attended = reader.kv_cube("attended_tokens")
        reader.meta = by_ratios
        read = knob_in(reader)
    assert read is not None
    there = (said.prompt_tokens or 0) + np.arange(len(attended))[:, None, None]
    assert read.own == pytest.approx(100 * (attended / there).mean(), abs=0.06)


def test_a_prompt_is_as_long_as_the_run_says_where_layers_have_windows(lost: Lost) -> None:
    """Bytes of full KV count the windows alone, so they do not say how long the prompt was."""
    said = meta(lost, lost.uid)
    assert said.prompt_tokens
    assert said.token_bytes
    windowed = {"windows": (48,) * said.layers, "full_kv_bytes": 48 * said.token_bytes, "method": "quest"}
    config = {"config": {"keep": 0.0, "tokens": 24}, "budget_bytes": None}
    knob = knob_of(said.model_copy(update=windowed | config))
    assert knob is not None
    assert knob.own == round(100 * 24 / said.prompt_tokens, 1)
