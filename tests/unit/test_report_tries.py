"""kvlens report: what was tried on a run, and the text at the step of loss."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from lensruns import SPAN, STEP, SUMMARY, LensRuns, write_lens_runs
from uiruns import redate

from kvlens.app.figures.states import STATE_COLORS
from kvlens.app.report import report_bytes
from kvlens.app.report import strip as strips
from kvlens.app.report.strip import strip, token_states
from kvlens.app.report.trial_section import describe_trials
from kvlens.app.report.whatif import _describe_outcome as verdict_on
from kvlens.app.report.whatif import whatif
from kvlens.cli.lens import sentences
from kvlens.lens.tries import outcome
from kvlens.lens.trylist import tries_in
from kvlens.lens.verdict import Verdict, verdict
from kvlens.metaparts import Counterfactual
from kvlens.store.reader import TraceReader
from kvlens.text.units import si_bytes
from tests.synthetic import write_synthetic


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    return write_lens_runs(tmp_path_factory.mktemp("report-tries"))


def lost(reader: TraceReader) -> Verdict:
    found = verdict(reader)
    assert found is not None
    assert found.missed is not None
    return found


def test_a_lifted_drop_that_proved_the_loss_is_not_priced_as_a_hold(tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)
    came = SUMMARY | {"held_tokens": 0, "held_bytes": 0, "lifted_tokens": 8}
    hold = {"span": SPAN, "tok_start": 40, "tok_end": 48, "heads": [[0, 1]], "from_step": 0}
    uid = write_synthetic(tmp_path, 2, 4, 2, 12, 14, parent=runs.kept, hold=[hold], whatif=came)
    with TraceReader.open(tmp_path, runs.kept) as reader:
        assert "the run says '4172' (drop lifted, 0 B)." in html.unescape(describe_trials(reader))
    with TraceReader.open(tmp_path, uid) as reader:
        section = html.unescape(whatif(reader)[1])
    assert "8 tokens, 0 B" in section
    assert "beyond the budget" not in section


def test_a_report_names_the_cheapest_try_that_proved_the_loss_and_lists_all(tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)
    redate(tmp_path / runs.held / "run.json", "2026-03-02T00:00:00+00:00")
    dear = {"held_bytes": 99_000_000, "answer_after": "<b>4172</b>"}
    for number, said in enumerate(
        (
            {"changed": {"budget": "50%"}, "whatif": SUMMARY | {"restored": False, "held_bytes": 0}},
            {"changed": {"keep": "0.5"}, "whatif": SUMMARY | dear},
        )
    ):
        uid = write_synthetic(
            tmp_path, 2, 4, 2, 12, 14, uid=f"20260303-00000{number}-more", parent=runs.repeated, **said
        )
        redate(tmp_path / uid / "run.json", f"2026-03-03T00:00:0{number}+00:00")
    with TraceReader.open(tmp_path, runs.repeated) as reader:
        said = html.unescape(describe_trials(reader))
        whole = html.unescape(report_bytes(reader).decode())
    proof = said[said.index(f"span {SPAN} (tokens 40–47)") : said.index("(12.3 kB")]
    assert all(part in proof for part in ("L0 KV1, L1 KV0", f"step {STEP}", "'4172'"))
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', said)
    assert rows == [
        ("keep 0.5", "'<b>4172</b>'", "yes"),
        ("budget 50%", "'4172'", "no"),
        (f"span {SPAN} held for L0 KV1, L1 KV0 from step {STEP}", "'4172'", "yes"),
    ]
    assert "2.25 → 0.0004" in said
    assert said in whole
    with TraceReader.open(tmp_path, uid) as reader:
        other = html.unescape(report_bytes(reader).decode())
    assert "asked for otherwise: keep</th><td>0.5</td>" in other
    assert "4172" in other
    assert "came back" in other


def test_a_report_on_a_what_if_says_which_of_both_it_is(tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)

    def said(**more: object) -> str:
        uid = write_synthetic(tmp_path, 2, 4, 2, 12, 14, whatif=SUMMARY, **more)  # type: ignore[arg-type]
        with TraceReader.open(tmp_path, uid) as reader:
            return html.unescape(report_bytes(reader).decode())

    with TraceReader.open(tmp_path, runs.held) as reader:
        (own,), before = (hold.to_row() for hold in reader.meta.hold), reader.meta.budget_bytes
    assert before is not None
    budget = f"budget</th><td>{si_bytes(before)}</td><td>9 MB</td>"
    raised = {"changed": {"budget": "50%"}, "budget_bytes": 9_000_000}
    there, otherwise, beyond = ("Repeated with a hold", "Repeated with other settings", "beyond the budget")
    for holds, parent in (((), runs.repeated), ([own], runs.held)):
        text = said(parent=parent, hold=holds, **raised)
        assert otherwise in text
        assert there not in text
        assert beyond not in text
        assert "held exactly</th>" not in text
        assert budget in text
    assert "With 8 tokens held, as" in text
    (one,) = [one for one in tries_in(tmp_path, runs.held) if one.changed]
    assert one.words() == one.brief() != "budget 50%"
    assert one.words().startswith("budget 50% (8 tokens")
    text = said(parent=runs.repeated, hold=[own], **raised)
    assert "8 tokens held" not in text
    assert there in text
    assert beyond in text
    assert budget in text
    text = said(parent=runs.repeated, hold=[own])
    assert there in text
    assert re.search("budget</th><td[^>]*>[^<]*</td><td[^>]*>9 MB", text) is None
    assert "budget</th><td>not recorded</td><td>9 MB" in said(parent="gone", **raised)
    assert "span 5" in said(parent=runs.held, hold=[own]), "repeated as it was"


def test_where_nothing_came_back_the_report_says_so(tmp_path: Path) -> None:
    runs = write_lens_runs(tmp_path)
    said = {"changed": {"budget": "50%"}, "whatif": SUMMARY | {"restored": False}}
    write_synthetic(tmp_path, 2, 4, 2, 12, 14, parent=runs.lost, **said)
    with TraceReader.open(tmp_path, runs.lost) as reader:
        assert "1 try, none of" in describe_trials(reader)


@pytest.mark.parametrize(
    ("more", "said", "told", "line"),
    [
        ({}, "yes", "The answer came back.", "restored"),
        ({"dropped_tokens": 8}, "it is right with the one and without the other", "", ""),
        ({"dropped_tokens": 8, "stands": False}, "it is wrong with the one, without the other", "", ""),
        ({"expected_from": "reference"}, "same token at step 9", "", ""),
        ({"expected_from": "reference", "restored": False}, "leaves full KV at step 9", "", ""),
        ({"expected_from": "reference", "dropped_tokens": 8, "held_tokens": 0, "stands": True}, "same tokens", "", ""),
        ({"expected_from": "reference", "dropped_tokens": 8, "stands": False}, "leaves full KV at step 9", "", ""),
        ({"dropped_tokens": 8, "held_tokens": 0, "stands": False}, "it hangs on it", "The answer hangs on it:", ""),
    ],
)
def test_an_outcome_is_said_of_the_answer_only_where_it_is_known(
    more: dict[str, object], said: str, told: str, line: str
) -> None:
    """And a hold and a drop together are neither 'restored' nor 'hangs on it'."""
    came = Counterfactual.model_validate(SUMMARY | {"stands": None} | more)
    words = said.removeprefix("it is ")
    of = "The answer:" if came.answer_known else "Its tokens, beside full KV's:"
    assert outcome(came) == said
    assert verdict_on(came).startswith(told or f"{of} {words}.")
    lines = sentences(came)
    assert (line or f"{'the answer' if came.answer_known else 'the tokens':<14} {said}") in lines
    if not came.answer_known:
        assert not {"restored", "not restored"} & set(lines)


def test_a_run_that_nothing_was_tried_on_has_no_such_section(lens: LensRuns) -> None:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        assert describe_trials(reader) == ""


def test_every_token_has_the_state_of_its_span(lens: LensRuns) -> None:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        missed = lost(reader).missed
        assert missed is not None
        written = int(reader.tokens()["step"].isna().sum()) + STEP
        states = token_states(reader, STEP, missed.layer, missed.kv_head, written)
        lay = reader.span_states(STEP, missed.layer, missed.kv_head).set_index("span")["state"]
        spans = reader.spans()
    assert len(states) == written
    alive = spans[(spans["kind"] != "window") & (spans["born_step"] <= STEP) & ~(spans["died_step"] <= STEP)]
    covered = set()
    for row in alive.itertuples():
        assert set(states[int(row.tok_start) : int(row.tok_end)]) == {lay[row.span]}
        covered |= set(range(int(row.tok_start), int(row.tok_end)))
    assert covered < set(range(written))
    assert {states[at] for at in set(range(written)) - covered} == {"resident"}
    assert len(set(states)) > 1


def test_the_strip_is_the_text_with_its_marks(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        found = lost(reader)
        tokens, missed = reader.tokens(), found.missed
        written = int(tokens["step"].isna().sum()) + STEP
        shown = strip(reader, found)
        monkeypatch.setattr(strips, "MOST", 20)
        cut = html.unescape(strip(reader, found))
    assert missed is not None
    text = html.unescape(re.sub("<[^>]+>", "", shown.partition("</p>")[0]))
    assert text == "".join(tokens["text"].iloc[:written])
    framed = "".join(html.unescape(one) for one in re.findall(r'class="[^"]*missed[^"]*"[^>]*>([^<]*)<', shown))
    assert framed == "".join(tokens["text"].iloc[missed.tok_start : missed.tok_end])
    assert 'class="needle' in shown or 'needle"' in shown
    assert {color for color in STATE_COLORS.values() if f"background:{color}55" in shown.partition("</p>")[0]}
    assert re.search(r"… \d+ tokens …", cut)


def test_markup_in_a_token_stays_text(lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceReader.open(lens.folder, lens.lost) as reader:
        found, tokens = lost(reader), reader.tokens()
        tokens["text"] = "<script>alert(1)</script>"
        monkeypatch.setattr(reader, "tokens", lambda: tokens)
        shown = strip(reader, found)
    assert "<script" not in shown


def test_a_run_without_a_loss_has_a_sentence_in_place_of_the_strip(lens: LensRuns) -> None:
    with TraceReader.open(lens.folder, lens.kept) as reader:
        assert "<svg" not in strip(reader, verdict(reader))
