"""Replay as the lens: the verdict, where a run opens, what can be tried and what came of it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import pandas as pd
import pytest
from lensruns import SPAN, STEP, SUMMARY, LensRuns, without_facts, write_lens_runs
from streamlit.testing.v1 import AppTest
from test_pages import player_header, words
from uiruns import Visit

from kvlens.app.ui.common import lensdata, lensjobs, sentences
from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.request import TryChoice, pair_command, whatif_command
from kvlens.app.ui.home import reading
from kvlens.app.ui.replay.lensview import more
from kvlens.lens.pieces import Piece
from kvlens.lens.verdict import Verdict, verdict
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import Lease
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    return write_lens_runs(tmp_path_factory.mktemp("lens-runs"))


@pytest.fixture(scope="module")
def found(lens: LensRuns) -> Verdict:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        told = verdict(reader)
    assert told is not None
    return told


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def finished(uid: str, *lines: str) -> list[str]:
    """A process that reports the run `uid` as its result."""
    reports = [*lines, json.dumps({"phase": "done", "uid": uid})]
    return [sys.executable, "-c", f"print({chr(10).join(reports)!r})"]


def test_the_verdict_says_what_was_recorded(visit: Visit, lens: LensRuns, found: Verdict) -> None:
    text = words(visit(lens.folder, "replay", run=lens.lost))
    missed = found.missed
    assert missed is not None
    assert found.step == STEP
    assert f"**Lost at step {STEP}**: full KV says “{found.expected.strip()}”, this run “{found.got.strip()}”" in text
    assert f"KL {found.kl:.3g} nats" in text
    assert f"by L{missed.layer} KV{missed.kv_head}" in text
    assert f"span {missed.span}, tokens {missed.tok_start}–{missed.tok_end - 1}" in text
    assert missed.mass_words() in text.replace("\\", "")
    assert f"**: {missed.reason.says}." in text.replace("\\", "")
    assert f"of which span {missed.span}, over all heads: " in text
    plain_text = text.replace("\\", "")
    assert missed.effect_words() in plain_text
    assert f": L{missed.layer} KV{missed.kv_head} span {missed.span} {missed.effect:.2f}" in plain_text
    assert f"{missed.lead:.2f} logits." in plain_text


def test_where_full_kv_is_wrong_as_well_it_diverged(visit: Visit, tmp_path: Path) -> None:
    known = {"prompt_tokens": 200, "answer": "58214", "output_text": "9999", "loss_step": STEP}
    for full, begins in (("1951<b>*", "Diverged"), ("58214", "Lost")):
        uid = write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, reference_output=full, **known)  # type: ignore[arg-type]
        app = visit(tmp_path, "replay", run=uid)
        assert not app.exception
        text = words(app)
        assert f"**{begins} at step {STEP}**" in text
        said = "the answer is wrong, and so is full KV's ('1951<b>*')" in text
        escaped = any(r"1951\<b\>\*" in line.value for line in app.markdown)
        assert said == escaped == (begins == "Diverged")


def test_why_effects_were_not_recorded_is_said(lens: LensRuns, found: Verdict) -> None:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        bare = replace(found, step=found.step + 1)
        assert reader.effects(bare.step).empty
        assert not any("Effects" in line for line in more(reader, bare)), "nothing is said of what has no reason"
        reader.meta = reader.meta.model_copy(update={"no_effects": "the context is too long"})
        assert any("Effects" in line and str(reader.meta.no_effects) in line for line in more(reader, bare))


def test_a_lost_run_opens_where_it_was_lost(visit: Visit, lens: LensRuns, found: Verdict) -> None:
    app = visit(lens.folder, "replay", run=lens.lost)
    assert found.missed is not None
    header = player_header(app)
    assert [header[name] for name in ("step", "layer", "head", "span", "metric")] == [
        STEP,
        found.missed.layer,
        found.missed.q_head,
        found.missed.span,
        "regret",
    ]
    assert app.query_params["step"] == str(STEP)
    assert app.query_params["span"] == str(found.missed.span)


def test_a_link_to_another_place_wins(visit: Visit, lens: LensRuns) -> None:
    header = player_header(visit(lens.folder, "replay", run=lens.lost, step=2, layer=0, head=3))
    assert [header[name] for name in ("step", "layer", "head", "span")] == [2, 0, 3, None]


def test_a_free_run_says_where_contexts_part_and_offers_the_comparison_of_all_steps(
    visit: Visit, lens: LensRuns
) -> None:
    app = visit(lens.folder, "replay", run=lens.lost)
    assert f"Steps from {STEP + 1} on" in words(app)
    assert sentences.COMPARE_ALL_STEPS in [button.label for button in app.button]
    again = visit(lens.folder, "replay", run=lens.repeated)
    assert sentences.COMPARE_ALL_STEPS not in [button.label for button in again.button], "there is one already"
    (link,) = (link for link in again.get("page_link") if link.proto.label == "Add all steps to the comparison")
    assert parse_qs(link.proto.query_string)["runs"] == [f"{lens.repeated},{lens.full},{lens.forced}"]
    assert "fed full KV's tokens" in words(visit(lens.folder, "replay", run=lens.forced))


def test_a_run_that_was_not_compared_says_so_and_offers_it(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, "replay", run=lens.plain)
    assert sentences.LOSS_NOT_RECORDED in words(app)
    assert "Full attention's masses" in words(app)
    assert "Compare with full KV" in [button.label for button in app.button]
    assert "Hold it resident" not in [button.label for button in app.button]


def test_runs_that_lost_nothing_say_so(visit: Visit, lens: LensRuns) -> None:
    assert "**Nothing was lost**: at all 12 compared steps" in words(visit(lens.folder, "replay", run=lens.kept))
    text = words(visit(lens.folder, "replay", run=lens.full))
    assert "the reference of 5 other runs." in text


def test_a_comparison_is_made_on_demand_and_the_page_of_it_opens(
    visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lensjobs, "pair_command", lambda uid, runs: asked.append(uid) or finished(lens.forced))
    app = press(visit(lens.folder, "replay", run=lens.plain), "Compare with full KV")
    assert asked == [lens.plain]
    if "runs" not in app.query_params:  # a job that ends at once has led to the page already
        wait_for_jobs()
        app.run()
    assert app.multiselect(key="compare_runs").value == [lens.full, lens.plain, lens.forced]
    assert app.query_params["run"] == lens.forced
    assert "job" not in app.query_params


def test_holding_a_span_ends_with_its_outcome_on_the_page(
    visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TryChoice] = []
    monkeypatch.setattr(lensjobs, "whatif_command", lambda uid, hold, runs: asked.append(hold) or finished(lens.held))
    app = visit(lens.folder, "replay", run=lens.repeated, step=STEP, layer=1, head=2, span=SPAN)
    next(box for box in app.selectbox if box.label == "for").set_value("L1 KV1").run()
    app = press(app, f"Hold span {SPAN}")
    assert asked == [TryChoice((Piece(SPAN, None, 1, 1),), STEP)]
    wait_for_jobs()
    app.run()
    assert app.query_params["whatif"] == lens.held
    assert "job" not in app.query_params
    told_outcome(app)


def told_outcome(app: AppTest) -> None:
    assert f"span {SPAN} (tokens 40–47) held exactly resident for L0 KV1, L1 KV0 from step {STEP} on" in words(app)
    texts = [text.value for text in app.text]
    assert "Answer before: 41<b>7</b>\nAnswer with it held: 4172\nExpected: 4172" in texts
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics == {"Answer restored": "yes", f"KL at step {STEP}, nats": "2.25 → < 0.001", "Bytes held": "12.3 kB"}
    notes = [caption.value for caption in app.caption if "8 tokens in 2 KV heads" in caption.value]
    assert len(notes) == 1
    assert notes[0].replace("\\", "").startswith("Bytes held: "), "it stands below all three figures"


def test_the_outcome_is_in_the_link_and_on_the_repeat_itself(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, "replay", run=lens.repeated, step=STEP, whatif=lens.held)
    told_outcome(app)
    (link,) = (link for link in app.get("page_link") if link.proto.label == "Compare both runs")
    place = {name: value for name, (value,) in parse_qs(link.proto.query_string).items()}
    assert place["step"] == str(STEP)
    assert [place[name] for name in ("runs", "run", "against")] == [
        f"{lens.repeated},{lens.held}",
        lens.held,
        lens.repeated,
    ]
    app = visit(lens.folder, "replay", run=lens.held)
    told_outcome(app)
    assert re.search(r"\*\*Repeat .*hold:\*\*", words(app))
    header = player_header(app)
    assert (header["step"], header["span"]) == (STEP, SPAN)


def test_a_search_says_which_heads_suffice_or_that_none_do(visit: Visit, tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)
    hold = [{"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 1]], "from_step": STEP}]
    for number, (heads, words_of) in enumerate(
        (
            ([[0, 1]], "Smallest set found: L0 KV1 (5 sets of heads tried, KL 0.1 nats over the answer)."),
            ([], "Not even holding it"),
        )
    ):
        found = SUMMARY | {"search": {"heads": heads, "tried": 5, "kl": 0.1}, "restored": bool(heads)}
        uid = write_synthetic(
            tmp_path, 2, 4, 2, 12, 14, uid=f"20260302-00000{number}-search", parent=runs.lost, hold=hold, whatif=found
        )
        app = visit(tmp_path, "replay", run=runs.lost, step=3, whatif=uid)
        assert words_of in words(app)
        assert app.metric[0].value == ("yes" if heads else "no")
    assert len(next(frame.value for frame in app.dataframe if "restored, or stands" in frame.value)) == 2


def test_a_link_to_another_runs_try_is_dropped(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder, "replay", run=lens.lost, step=3, whatif=lens.held, job="nonsense")
    assert not {"whatif", "job"} & set(app.query_params)
    assert not app.metric


def test_a_repeat_that_failed_says_why(visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import sys; print(\'{"phase": "error", "message": "model changed."}\'); sys.exit(1)'
    monkeypatch.setattr(lensjobs, "whatif_command", lambda uid, hold, runs: [sys.executable, "-c", code])
    app = press(visit(lens.folder, "replay", run=lens.lost), "Hold it resident")
    wait_for_jobs()
    app.run()
    assert [box.value for box in app.error] == ["model changed\\."]


def test_the_runs_page_says_what_belongs_together(visit: Visit, lens: LensRuns) -> None:
    app = visit(lens.folder)
    folded = app.dataframe[0].value.set_index("run")["what it is"]
    assert set(folded.index) == {lens.lost, lens.repeated, lens.kept, lens.plain}
    more = {uid: role.rpartition("; ")[2] for uid, role in folded.items() if "more" in role}
    assert more == {lens.repeated: "2 more", lens.kept: "1 more"}
    toggle = app.toggle(key="runs_whole")
    assert toggle.label.endswith(" (3)")
    table = toggle.set_value(True).run().dataframe[0].value.set_index("run")["what it is"]
    assert table[lens.held] == f"what-if of …{lens.repeated[-6:]}"
    assert table[lens.forced] == "against full KV, forced"
    assert table[lens.lost] == "against full KV"
    assert table[lens.full] == "reference of 5"
    assert table[lens.plain] == ""


def test_the_runs_page_says_what_came_of_each(visit: Visit, lens: LensRuns, found: Verdict) -> None:
    table = visit(lens.folder).dataframe[0].value.set_index("run")
    lost, kept, plain = (table.loc[uid] for uid in (lens.lost, lens.kept, lens.plain))
    assert (lost["outcome"], lost["expected"], lost["left full KV at step"]) == ("Lost, other token", "4172", STEP)
    assert lost["KL there (nats)"] == pytest.approx(found.kl)
    assert pd.isna(kept["left full KV at step"])
    assert (kept["outcome"], plain["outcome"]) == ("nothing lost", "")


def test_a_run_that_is_being_written_is_read_when_it_has_ended(visit: Visit, tmp_path: Path) -> None:
    uid = write_lens_runs(tmp_path).lost
    without_facts(tmp_path, uid)

    def said(app: AppTest) -> object:
        return app.dataframe[0].value.set_index("run").loc[uid, "outcome"]

    with Lease(tmp_path / uid):
        app = visit(tmp_path)
        assert said(app) == ""
    assert said(app.run()) == "Lost, other token"


def test_runs_that_point_at_each_other_stand_by_themselves() -> None:
    rows = [
        {"uid": "a", "parent": "b", "hold": True, "forced": False, "reference": None},
        {"uid": "b", "parent": "a", "hold": True, "forced": False, "reference": "b"},
        {"uid": "c", "parent": "gone", "hold": True, "forced": False, "reference": "d"},
        {"uid": "d", "parent": None, "hold": False, "forced": False, "reference": None},
        {"uid": "e", "parent": "c", "hold": True, "forced": False, "reference": "d"},
    ]
    assert lensdata.owners(pd.DataFrame(rows)) == [None, None, None, "c", "c"]


def test_a_slow_disk_fills_the_table_look_by_look(
    visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_facts(lens.folder, *(path.parent.name for path in lens.folder.glob("*/run.json")))
    monkeypatch.setattr(reading, "LOOK_S", 0.0)
    assert set(visit(lens.folder).dataframe[0].value["outcome"]) == {reading.UNREAD}
    monkeypatch.setattr(reading, "LOOK_S", 60.0)
    assert reading.UNREAD not in set(visit(lens.folder).dataframe[0].value["outcome"])


def test_the_commands_carry_every_choice(tmp_path: Path) -> None:
    pieces = (Piece(3), Piece(tokens=(5, 9), layer=1, kv_head=0))
    argv = whatif_command(
        "u", TryChoice(pieces, 2, (("budget", "30%"), ("keep", "0.3")), "heads", (Piece(9),)), tmp_path
    )
    assert argv[argv.index("whatif") :] == [
        "whatif",
        "u",
        *("--hold", "3", "--hold", "t5-8.L1.KV0", "--drop", "9"),
        *("--from-step", "2"),
        *("--budget", "30%", "--set", "keep=0.3"),
        "--search",
        "--runs",
        str(tmp_path),
        "--progress-json",
    ]
    for search, option in (("bytes", "--fewest-bytes"), ("bits", "--fewest-bits")):
        assert option in whatif_command("u", TryChoice((), 0, (), search), tmp_path)
    assert pair_command("u", tmp_path)[3:] == ["pair", "u", "--forced", "--runs", str(tmp_path), "--progress-json"]


def wait_for_jobs() -> None:
    import time

    for _ in range(4_800):
        if not any(job.active for job in manager().jobs()):
            return
        time.sleep(0.05)
    raise AssertionError("the job did not end")
