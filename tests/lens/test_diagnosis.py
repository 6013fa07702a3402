"""Many losses at once: made-up runs grouped by cause, and changes tried on runs of the toy that lost."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import duckdb
import pytest
from lensruns import STEP, write_lens_runs
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.lens.answers import full_right
from kvlens.lens.diagnosis import NOT_RECORDED, Cause, Lost, Wanted, diagnose
from kvlens.lens.knob import held_to, limit_of
from kvlens.lens.reasonkinds import KINDS
from kvlens.lens.remedies import Change, attempt
from kvlens.lens.severity import outcome
from kvlens.lens.verdict import verdict
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader, list_runs
from kvlens.text.prompts import PromptText
from tests.synthetic import write_synthetic

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_runs_that_lost_are_grouped_by_cause(tmp_path: Path) -> None:
    made = write_lens_runs(tmp_path)
    told: list[tuple[int, int]] = []
    found = diagnose(tmp_path, Wanted(), lambda done, total: told.append((done, total)))
    assert {one.uid for one in found.lost} == {made.lost, made.repeated}, "what-ifs, fed runs and references are none"
    assert found.compared == 3
    assert (found.mild, found.unread) == (0, ())
    assert told[-1][0] == told[-1][1] == 5
    with TraceReader.open(tmp_path, made.lost) as reader:
        seen = verdict(reader)
    assert seen is not None
    assert seen.missed is not None
    (one,) = (one for one in found.lost if one.uid == made.lost)
    assert (one.step, one.layer, one.kv_head) == (STEP, seen.missed.layer, seen.missed.kv_head)
    assert (one.kind, one.says) == (seen.missed.reason.kind, seen.missed.reason.says)
    assert one.tokens == (seen.missed.tok_start, seen.missed.tok_end)
    assert one.kind in KINDS
    assert diagnose(tmp_path, Wanted(method="nobody's")).lost == ()
    assert one.limit.endswith("%")
    as_share = str(float(one.limit.rstrip("%")) / 100)
    for budget in (one.limit, as_share):
        assert diagnose(tmp_path, Wanted(method=one.method, budget=budget)).lost == found.lost


def test_what_a_run_was_held_to(tmp_path: Path) -> None:
    """Its budget; of a method that keeps every token on the device what its parameters let it attend."""
    made = write_lens_runs(tmp_path)
    with TraceReader.open(tmp_path, made.lost) as reader:
        meta = reader.meta

    def limit(method: str, config: dict[str, object], budget: str = "100%", limit_bytes: int | None = None) -> str:
        of = {"method": method, "config": config, "budget": budget, "budget_bytes": limit_bytes}
        return limit_of(meta.model_copy(update=of))

    assert limit("quest", {"keep": 0.2, "tokens": 1024}) == "20% of attended tokens"
    assert limit("quest", {"keep": 0.0, "tokens": 1024}) == "1,024 attended tokens"
    assert limit("chess", {"keep": 0.0}) == "no limit", "of bytes; what it attends follows from ratios"
    assert limit("full", {}, "1.0") == "no limit"
    assert limit("snapkv", {"tokens": 0}, "0.2", 99) == "20%"
    known = meta.model_copy(update={"method": "quest", "config": {"keep": 0.2, "tokens": 0}})
    assert (held_to(meta), held_to(known)) == ("budget 35%", "20% of attended tokens")


def test_a_budget_that_no_run_has_is_refused(tmp_path: Path) -> None:
    made = write_lens_runs(tmp_path)
    assert {one.uid for one in diagnose(tmp_path, Wanted(budget="35%")).lost} == {made.lost, made.repeated}
    assert diagnose(tmp_path, Wanted(budget="no limit")).lost == diagnose(tmp_path, Wanted(budget="100%")).lost == ()
    with pytest.raises(ValueError, match="is 20 times full KV"):
        Wanted(budget="20")


@pytest.mark.parametrize("command", [["diagnose"], ["runs", "list"]])
def test_a_method_that_is_none_is_said(tmp_path: Path, command: list[str]) -> None:
    """One that has no run here is not."""
    write_lens_runs(tmp_path)
    asked = [*command, "--runs", str(tmp_path), "--method"]
    assert CliRunner().invoke(app, [*asked, "h2o"]).exit_code == 0
    wrong = CliRunner().invoke(app, [*asked, "nosuch"]).exception
    assert isinstance(wrong, ValueError)
    assert "unknown method 'nosuch'" in str(wrong)


def test_a_run_whose_answer_full_kv_did_not_give_is_none_that_lost(tmp_path: Path) -> None:
    known = {"prompt_tokens": 200, "answer": "58214", "output_text": "9999"}
    wrong, right = (
        write_synthetic(tmp_path, 2, 4, 2, 12, 14, seed=3, reference_output=full, **known)  # type: ignore[arg-type]
        for full in ("1951", "58214")
    )
    found = diagnose(tmp_path, Wanted())
    assert [one.uid for one in found.lost] == [right]
    assert (found.compared, found.mild) == (2, 1), wrong


def test_a_run_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    made = write_lens_runs(tmp_path)
    trace = tmp_path / made.lost / "trace.duckdb"
    trace.chmod(0o644)
    trace.write_bytes(b"no database")
    found = diagnose(tmp_path, Wanted())
    assert [one.uid for one in found.lost] == [made.repeated]
    (sentence,) = found.unread
    assert made.lost in sentence


def test_heads_are_counted_over_the_runs_of_a_cause() -> None:
    def lost(uid: str, layer: int | None, head: int | None, needle: bool | None) -> Lost:
        return Lost(uid, "toy", "m", None, "20%", 3, "wrong answer", NOT_RECORDED, "", layer, head, None, needle)

    cause = Cause(
        "toy", "m", "20%", NOT_RECORDED, (lost("a", 2, 1, True), lost("b", 2, 1, False), lost("c", 0, 1, None))
    )
    assert cause.heads == [((2, 1), 2), ((0, 1), 1)]
    assert cause.of_the_answer == (1, 2), "of one it is not known"
    unknown = Cause("toy", "m", "20%", NOT_RECORDED, (lost("d", None, None, None),))
    assert (unknown.heads, unknown.of_the_answer) == ([], (0, 0))


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, loaded_once: None) -> Path:
    """Two runs of the toy whose answers StreamingLLM loses."""
    folder = tmp_path_factory.mktemp("losses")
    for seed in (9_100_001, 9_100_002):
        made = make_prompt("multikey", 600, 0.3, seed, demo_encode())
        source = PromptText(made.text, made.answer, made.needle, "multikey", 1)
        request = RunRequest(model="demo", method="streaming_llm", budget="10%", max_new=8, against=True, oracle="off")
        carry_out(request, source, folder, lambda *_: None, lambda: False)
    return folder


def test_a_change_is_tried_on_all_that_lost(losses: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    copytree(losses, runs)
    lost = diagnose(runs, Wanted(method="streaming_llm")).lost
    assert len(lost) == 2, "the toy loses both"
    before = set(list_runs(runs)["uid"])
    remedy = attempt(runs, lost, Change.parse("budget=90%"), lambda *_: None, lambda: False)
    assert (remedy.restored, remedy.most) == (2, True)
    for one in remedy.tried:
        assert one.uid not in before
        with TraceReader.open(runs, str(one.uid)) as reader:
            assert reader.meta.budget == "90%"
            assert reader.meta.config["sinks"] == 4, "all else is as it was"
            assert str(reader.meta.output_text).strip() == str(reader.meta.answer).strip()
    same = attempt(runs, lost[:1], Change.parse("sinks=6"), lambda *_: None, lambda: False)
    with TraceReader.open(runs, str(same.tried[0].uid)) as reader:
        assert (reader.meta.config["sinks"], reader.meta.budget) == (6, "10%")
    with pytest.raises(ValueError, match="cancelled"):
        attempt(runs, lost, Change.parse("sinks=5"), lambda *_: None, lambda: True)
    small = attempt(runs, lost[:1], Change.parse("budget=0.1%"), lambda *_: None, lambda: False)
    assert (small.restored, small.tried[0].uid) == (0, None)
    assert "smallest" in str(small.tried[0].refused) or "needs" in str(small.tried[0].refused)


def test_an_answer_that_full_kv_does_not_give_is_never_restored(losses: Path, tmp_path: Path) -> None:
    """A trace from before full KV's answer was recorded counts as lost; the repeat, which has it, does not."""
    runs = tmp_path / "runs"
    copytree(losses, runs)
    for uid in list_runs(runs).query("method == 'streaming_llm'")["uid"]:
        trace = runs / uid / "trace.duckdb"
        trace.chmod(0o644)
        with duckdb.connect(str(trace)) as con:
            con.execute("DELETE FROM meta WHERE key IN ('answer', 'reference_output')")
            con.execute("INSERT INTO meta VALUES ('answer', '\"no such answer\"')")
    lost = diagnose(runs, Wanted(method="streaming_llm")).lost
    assert [one.outcome for one in lost] == ["wrong answer"] * 2
    for change in ("budget=90%", "sinks=6"):
        remedy = attempt(runs, lost[:1], Change.parse(change), lambda *_: None, lambda: False)
        assert remedy.restored == 0
        with TraceReader.open(runs, str(remedy.tried[0].uid)) as reader:
            assert full_right(reader) is False
            assert "lost" not in outcome(reader).kinds


def test_the_command_says_both(losses: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    copytree(losses, runs)
    asked = ["diagnose", "--runs", str(runs), "--method", "streaming_llm"]
    tried = ["--try", "budget=90%", "--try", "budget=95%"]
    said = CliRunner().invoke(app, [*asked, *tried])
    assert said.exit_code == 0, said.output
    assert "compared with full KV, 2 lost." in said.stdout
    assert "budget=90%: 2 of 2 restored." in said.stdout
    assert "budget=95%:" not in said.stdout, "what comes after the change that sufficed is not tried"
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert {one["kind"] for one in told["lost"]} == {NOT_RECORDED}
    assert told["remedies"] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("budget", "--try takes budget=SHARE"),
        ("speed=3", "streaming_llm has no parameter 'speed'"),
        ("budget=x", "budget"),
    ],
)
def test_a_change_that_no_run_can_have_is_one_sentence(losses: Path, change: str, sentence: str) -> None:
    done = CliRunner().invoke(app, ["diagnose", "--runs", str(losses), "--method", "streaming_llm", "--try", change])
    assert done.exit_code == 1
    assert sentence in str(done.exception)
    assert len(list_runs(losses)) == 4, "nothing was run"


@pytest.mark.parametrize("option", ["model", "task"])
def test_a_name_that_no_stored_run_has_is_said(losses: Path, option: str) -> None:
    done = CliRunner().invoke(app, ["diagnose", "--runs", str(losses), f"--{option}", "nothing-of-the-kind"])
    assert done.exit_code == 1
    there = sorted({str(one) for one in list_runs(losses)[option].dropna()})
    assert "'nothing-of-the-kind'" in str(done.exception)
    assert f" {', '.join(there)}." in str(done.exception)
