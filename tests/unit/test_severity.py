"""How much a first step of loss took, from recorded columns."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from lensruns import STEP, write_lens_runs

from kvlens import tasks
from kvlens.api.verdict import read_verdict
from kvlens.app.compare.groups import trial
from kvlens.cli.main import app
from kvlens.cli.run import refuse_unsound
from kvlens.lens.answers import answer_sentence
from kvlens.lens.severity import NEAR_TIE, SHOWN, Severity, failed_checks, outcome, severity
from kvlens.lens.verdict import verdict
from kvlens.store.reader import TraceReader
from kvlens.studies.figures import figures_of
from kvlens.tasks.base import Unscored


def changed(folder: Path, uid: str, statements: list[str], **meta: object) -> None:
    """Changes the run's trace."""
    trace = folder / uid / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        for statement in statements:
            con.execute(statement)
        for key, value in meta.items():
            con.execute("DELETE FROM meta WHERE key = ?", [key])
            con.execute("INSERT INTO meta VALUES (?, ?)", [key, json.dumps(value)])


def judged(folder: Path, uid: str, statements: list[str], **meta: object) -> Severity:
    """The severity of a run's loss after its trace was changed so."""
    changed(folder, uid, statements, **meta)
    with TraceReader.open(folder, uid) as reader:
        found = verdict(reader)
        assert found is not None
        assert found.step == STEP
        return severity(reader, found)


def followed(margin: float) -> list[str]:
    """The run went on with its own token, whose logit is so much above full KV's."""
    return [
        f"UPDATE token SET token_id = (SELECT top_token FROM loss WHERE step = {STEP}), logprob = -0.25 "
        f"WHERE step = {STEP}",
        f"UPDATE loss SET logprob = {-0.25 - margin} WHERE step = {STEP}",
    ]


@pytest.fixture
def lost(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path, write_lens_runs(tmp_path).lost


def test_a_wrong_answer_is_lost_however_near_the_tokens_were(lost: tuple[Path, str]) -> None:
    how = judged(*lost, followed(0.1), output_text="not that", answer="4172")
    assert (how.right, how.mild, how.headline(STEP)) == (False, False, f"Lost at step {STEP}")
    assert how.margin == pytest.approx(0.1, abs=1e-6)
    assert how.words() == "wrong answer"
    assert how.near_tie
    assert f"by 0.1 logits, less than {NEAR_TIE}" in how.sentence()


def test_a_right_answer_diverged(lost: tuple[Path, str]) -> None:
    how = judged(*lost, followed(2.0), output_text="It is 4172.", answer="4172")
    assert (how.right, how.mild, how.near_tie) == (True, True, False)
    assert how.headline(STEP) == f"Diverged at step {STEP}"
    assert (how.words(), ";" in how.sentence()) == ("right answer", False)


@pytest.mark.parametrize(("margin", "tie"), [(0.0, True), (NEAR_TIE - 0.01, True), (NEAR_TIE + 0.01, False)])
def test_a_near_tie_is_told_by_the_difference_of_two_logits(lost: tuple[Path, str], margin: float, tie: bool) -> None:
    how = judged(*lost, followed(margin), answer=None)
    assert (how.right, how.near_tie, how.mild) == (None, tie, tie)
    assert how.words().split(", ")[1:] == ["near tie"] * tie


def test_a_stop_token_is_told_by_the_ids_that_end_the_output(lost: tuple[Path, str]) -> None:
    with TraceReader.open(*lost) as reader:
        row = reader.loss().set_index("step").loc[STEP]
    for token in (int(row["ref_token"]), int(row["top_token"])):
        how = judged(*lost, [], answer=None, stop_ids=[token])
        assert how.stop
        assert how.mild
        assert len(how.words().split(", ")) == 2, "with its place"
    assert not judged(*lost, [], stop_ids=[]).stop


def test_what_was_not_followed_or_drawn_by_chance_has_no_margin(lost: tuple[Path, str]) -> None:
    assert judged(*lost, followed(0.1), temperature=0.7).margin is None
    assert judged(*lost, [f"UPDATE token SET token_id = -1 WHERE step = {STEP}"], temperature=0.0).margin is None
    how = judged(*lost, [*followed(0.1), f"UPDATE loss SET logprob = '-infinity'::FLOAT WHERE step = {STEP}"])
    assert not how.near_tie


def test_exports_say_it_in_the_columns_that_the_documentation_defines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = write_lens_runs(tmp_path)
    changed(tmp_path, runs.lost, followed(0.1), answer="4172", output_text="It is 4172.")
    with TraceReader.open(tmp_path, runs.lost) as reader:
        kl = float(reader.loss().set_index("step").loc[STEP, "kl"])
        wanted = {
            "outcome": "right answer, near tie",
            "outcome_kinds": "right diverged",
            "expected": "4172",
            "left_full_kv_at_step": STEP,
            "kl_at_loss_nats": kl,
            "margin_logits": pytest.approx(0.1, abs=1e-6),
            "at_stop_token": False,
        }
    told = {}
    for uid in (runs.lost, runs.kept):
        for fmt in ("json", "csv", "parquet"):
            out = tmp_path / f"{uid}.{fmt}"
            asked = ["export", uid, "--what", "outcome", "--format", fmt, "--out", str(out), "--runs", str(tmp_path)]
            app(asked, standalone_mode=False)
        (told[uid],) = json.loads((tmp_path / f"{uid}.json").read_text())
        (table,) = pq.read_table(tmp_path / f"{uid}.parquet").to_pylist()
        (text,) = csv.DictReader(io.StringIO((tmp_path / f"{uid}.csv").read_text()))
        assert told[uid] == table
        assert text == {
            name: "" if value is None else str(value).replace("False", "false") for name, value in table.items()
        }
    assert told[runs.lost] == {"uid": runs.lost, "what_if": None, **wanted}
    assert told[runs.kept] == {"uid": runs.kept, "what_if": None} | dict.fromkeys(wanted) | {
        "outcome": "nothing lost",
        "outcome_kinds": "kept",
        "expected": "4172",
    }
    capsys.readouterr()
    for said in (["runs", "--json"], ["runs", "show", runs.lost, "--json"]):
        app([*said, "--runs", str(tmp_path)], standalone_mode=False)
        found = json.loads(capsys.readouterr().out)
        row = found if isinstance(found, dict) else next(one for one in found if one["uid"] == runs.lost)
        row = row if "expected" in row else row | {"expected": row["answer"]}
        assert {name: row[name] for name in wanted} == wanted | {"outcome_kinds": ["right", "diverged"]}
    documented = (Path(__file__).parents[2] / "docs" / "trace-schema.md").read_text()
    assert all(f"| {name} | " in documented for name in wanted)


@pytest.mark.parametrize(
    ("output", "stopped", "cut_off"),
    [("It is 41", "length", True), ("It is 41", "eos", False), ("It is 41", "stop", False), ("4172", "length", False)],
)
def test_a_wrong_answer_that_the_limit_ended_is_cut_off(
    lost: tuple[Path, str], output: str, stopped: str, cut_off: bool
) -> None:
    how = judged(*lost, followed(2.0), answer="4172", output_text=output, stopped=stopped)
    assert how.cut_off == cut_off
    with TraceReader.open(*lost) as reader:
        assert ("cut_off" in outcome(reader).kinds) == cut_off
        assert figures_of(reader)["cut_off"] == cut_off
        assert read_verdict(reader).cut_off == cut_off
        assert answer_sentence(reader.meta).endswith(" off.") == cut_off


def test_without_a_known_answer_nothing_is_cut_off(lost: tuple[Path, str]) -> None:
    assert not judged(*lost, [], answer=None, output_text="It is 41", stopped="length").cut_off
    with TraceReader.open(*lost) as reader:
        assert "cut_off" not in figures_of(reader)


def test_a_run_that_was_fed_its_tokens_is_not_judged(lost: tuple[Path, str]) -> None:
    assert judged(*lost, [], answer="4172", output_text="4172", forced=True).right is None


def test_an_answer_that_cannot_be_scored_here_is_not_called_wrong(
    lost: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscored(*_: str) -> float:
        raise Unscored("it needs a package that is not installed.")

    monkeypatch.setattr(tasks, "score", unscored)
    how = judged(*lost, followed(2.0), answer="4172", output_text="4172", task="niah_single")
    assert (how.right, how.words()) == (None, "other token")
    monkeypatch.undo()
    gone = judged(*lost, [], answer="4172", output_text="It is 4172.", task="gone:somewhere")
    assert gone.right is True


def both_wrong(folder: Path, uid: str, statements: list[str], **meta: object) -> Severity:
    return judged(
        folder, uid, statements, answer="58214", output_text="9999", reference_output=" 1951\nand so on", **meta
    )


def test_an_answer_that_full_kv_does_not_give_is_not_lost(lost: tuple[Path, str]) -> None:
    how = both_wrong(*lost, followed(2.0))
    assert (how.right, how.full_right, how.mild) == (False, False, True)
    assert how.headline(STEP) == f"Diverged at step {STEP}"
    assert (how.both_wrong, "('1951')" in how.sentence()) == (True, True)
    with TraceReader.open(*lost) as reader:
        came = outcome(reader)
    assert (came.words, came.kinds, came.right) == (how.words(), ("wrong", "diverged"), False)


def test_near_ties_and_stops_are_said_beside_two_wrong_answers(lost: tuple[Path, str]) -> None:
    how = both_wrong(*lost, followed(0.1))
    assert (how.both_wrong, how.words().split(", ")[-1]) == (True, "near tie")
    assert (how.near_tie, "('1951'); near tie: " in how.sentence()) == (True, True)
    with TraceReader.open(*lost) as reader:
        token = int(reader.loss().set_index("step").loc[STEP, "top_token"])
    how = both_wrong(*lost, [], stop_ids=[token])
    assert (how.both_wrong, how.stop, how.words().split(", ")[-1] == "near tie") == (True, True, False)
    assert how.sentence().count("; ") == 1 + how.near_tie, "the stop token comes first"


@pytest.mark.parametrize("full", ["58214", None])
def test_an_answer_that_full_kv_gives_or_may_have_given_is_lost(lost: tuple[Path, str], full: str | None) -> None:
    how = judged(*lost, followed(0.1), answer="58214", output_text="9999", reference_output=full)
    assert (how.full_right, how.mild, how.words()) == (True if full else None, False, "wrong answer")
    assert (how.right, how.both_wrong, how.near_tie) == (False, False, True)
    with TraceReader.open(*lost) as reader:
        assert outcome(reader).kinds == ("wrong", "lost")


def test_a_right_answer_is_right_whatever_full_kv_says(lost: tuple[Path, str]) -> None:
    how = judged(*lost, followed(2.0), answer="58214", output_text="58214", reference_output="1951")
    assert (how.full_right, how.both_wrong, how.words()) == (False, False, "right answer")


def test_a_run_that_failed_a_self_check_is_in_no_list_right(lost: tuple[Path, str]) -> None:
    judged(*lost, ["UPDATE self_check SET passed = false WHERE rowid = 0"], answer="58214", output_text="58214")
    with TraceReader.open(*lost) as reader:
        assert failed_checks(reader) == [str(reader.self_checks()["name"].iloc[0])]
        came = outcome(reader)
        assert (came.kinds, came.right) == (("unsound",), None)
        assert trial(reader) is None
    with pytest.raises(SystemExit) as ended:
        refuse_unsound(*lost)
    assert ended.value.code == 1


def test_what_full_kv_said_is_short_and_on_one_line(lost: tuple[Path, str]) -> None:
    long = "x" * (SHOWN + 1)
    for said, shown in ((long, f"'{long[:SHOWN]}…'"), ("a\u202eb\x1b", r"'a\u202eb\x1b'"), ("", "''")):
        how = judged(*lost, followed(2.0), answer="58214", output_text="9999", reference_output=said)
        assert how.sentence().endswith(f"({shown})")
