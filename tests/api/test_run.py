"""`kvlens.run` and what a Run gives out, on the toy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from apirun import BUDGET, METHOD, NEW

import kvlens
from kvlens.api.columns import TABLES
from kvlens.api.verdict import Verdict
from kvlens.budget import NO_LIMIT
from kvlens.cli.main import main
from kvlens.store.reader import TraceReader


def test_a_verdict_has_typed_fields_and_one_sentence(lost: kvlens.Run) -> None:
    verdict = lost.verdict
    assert (verdict.outcome, verdict.right, verdict.restored) == ("lost", False, None)
    assert isinstance(verdict.step, int)
    assert None not in (verdict.layer, verdict.kv_head, verdict.span, verdict.effect_logits)
    assert verdict.reason == "evicted"
    assert verdict.reference_mass is not None
    assert verdict.mass is not None
    assert verdict.reference_mass > verdict.mass
    span = lost.spans().set_index("span").loc[verdict.span]
    assert (span["tok_start"], span["tok_end"], span["text"]) == (verdict.tok_start, verdict.tok_end, verdict.text)
    sentence = str(verdict)
    assert sentence == repr(verdict)
    for part in (f"step {verdict.step}", f"L{verdict.layer} KV{verdict.kv_head}", f"span {verdict.span}"):
        assert part in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_verdict_without_a_loss_names_no_span() -> None:
    assert (Verdict("kept").span, Verdict("not_compared").step) == (None, None)
    assert str(Verdict("kept", True)) != str(Verdict("not_compared", True))


def test_holding_the_missed_span_restores_the_answer(lost: kvlens.Run) -> None:
    verdict = lost.verdict
    held = lost.hold(span=verdict.span, layer=verdict.layer, kv_head=verdict.kv_head, progress=False)
    assert held.restored is True
    assert held.verdict.restored is True
    assert held.held == ((verdict.layer, verdict.kv_head, verdict.span),)
    assert held.meta.parent == lost.uid
    assert held.meta.answer is not None
    assert held.meta.answer.strip() in held.output


def test_triples_tokens_and_whole_spans_can_be_held(lost: kvlens.Run) -> None:
    verdict = lost.verdict
    assert None not in (verdict.layer, verdict.kv_head, verdict.span, verdict.tok_start, verdict.tok_end)
    triple = (verdict.layer, verdict.kv_head, verdict.span)
    by_triple = lost.hold(triples=[triple], progress=False)  # type: ignore[list-item]
    assert by_triple.held == (triple,)
    whole = lost.hold(span=verdict.span, progress=False)
    assert len(whole.held) == lost.meta.layers * lost.meta.kv_heads
    assert verdict.tok_start is not None
    assert verdict.tok_end is not None
    tokens = lost.hold(tokens=(verdict.tok_start, verdict.tok_end - 1), progress=False)
    assert (by_triple.restored, whole.restored, tokens.restored) == (True, True, True)
    assert whole.whatif is not None
    assert tokens.whatif is not None
    assert whole.whatif.held_bytes == tokens.whatif.held_bytes


def test_a_drop_says_whether_the_answer_hangs_on_it(lost: kvlens.Run) -> None:
    wide = lost.at(budget=0.9, progress=False)
    assert wide.restored is True
    needle = next(row.span for row in lost.spans().itertuples() if row.span == lost.verdict.span)
    dropped = wide.drop(span=int(needle), progress=False)
    assert dropped.stands is False
    assert dropped.restored is None


def test_another_budget_and_another_parameter(lost: kvlens.Run) -> None:
    more = lost.at(budget_tokens=280, progress=False)
    assert more.meta.budget == "280tok"
    other = lost.at(sinks=8, progress=False)
    assert other.meta.config["sinks"] == 8
    assert other.meta.budget == BUDGET
    assert other.meta.changed == {"sinks": "8"}


def test_the_fewest_bytes_that_restore_the_answer(lost: kvlens.Run) -> None:
    found = lost.fewest_bytes(6, progress=False)
    assert found.whatif is not None
    assert found.whatif.search is not None
    assert found.whatif.search.most == 6
    assert set(found.held) >= set(found.whatif.search.triples)
    assert found.restored is True


FRAMES = ("heads", "steps", "spans", "missed", "decisions", "events", "transfers", "head_steps", "kv_steps", "phases")


@pytest.mark.parametrize("table", FRAMES)
def test_every_column_has_a_unit_and_a_meaning(lost: kvlens.Run, table: str) -> None:
    frame: pd.DataFrame = getattr(lost, table)()
    assert set(frame.attrs["units"]) == set(frame.columns) == set(frame.attrs["columns"])
    columns = TABLES[table.replace("_", "-")]
    assert all(columns[name].meaning for name in frame.columns)
    assert list(frame.columns) == list(columns)


def test_the_tables_agree_with_the_trace(lost: kvlens.Run) -> None:
    steps, reader = lost.steps(), lost.reader
    assert len(steps) == reader.n_steps
    assert "".join(steps["text"]).removesuffix("<|eos|>") == lost.output
    step = lost.verdict.step
    assert steps["agrees"].tolist()[: (step or 0) + 1] == [True] * (step or 0) + [False]
    assert steps["agrees"].tolist()[(step or 0) + 1 :] == [None] * (len(steps) - (step or 0) - 1)
    assert steps["kl_nats"][step] == pytest.approx(lost.verdict.kl_nats)
    assert len(lost.heads()) == reader.n_layers * reader.q_heads
    assert len(lost.events()) == len(reader.events())
    assert set(lost.events(step=-1)["step"]) == {-1}
    assert len(lost.decisions()) == len(reader.decisions()) > 0
    assert len(lost.phases()) == len(steps)
    first = lost.heads(0, 1).set_index(["layer", "q_head"])["entropy_nats_mean"]
    assert first[2, 3] == pytest.approx(float(reader.head_cube("entropy")[0, 2, 3]))


def test_a_run_of_the_api_is_the_run_of_the_command_line(
    lost: kvlens.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    prompt = kvlens.sample("demo")
    file = tmp_path / "prompt.json"
    fields = {"text": prompt.text, "answer": prompt.answer, "needle": prompt.needle, "task": prompt.task}
    file.write_text(json.dumps({**fields, "seed": prompt.seed, "question": prompt.question}))
    options = ("--model", "demo", "--method", METHOD, "--budget", BUDGET, "--max-new", str(NEW), "--against-full")
    monkeypatch.setattr(sys, "argv", ["kvlens", "run", str(file), *options, "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    uid = capsys.readouterr().out.strip().splitlines()[-1]
    differing = {"run_uid", "created", "started", "reference", "machine", "prompt_kept", "trace_stalls"}

    def said(reader: TraceReader) -> dict[str, object]:
        meta = reader.meta.model_dump()
        timed = ("_s", "_us", "_peak_bytes")
        return {name: value for name, value in meta.items() if name not in differing and not name.endswith(timed)}

    with TraceReader.open(tmp_path / "runs", uid) as other:
        assert said(other) == said(lost.reader)
        times = ["t_us", "dur_us", "wait_us", "record_us"]
        pairs = [
            (other.tokens().drop(columns="t_us"), lost.reader.tokens().drop(columns="t_us")),
            (other.steps().drop(columns=times), lost.reader.steps().drop(columns=times)),
            (other.spans(), lost.reader.spans()),
            (other.events(), lost.reader.events()),
            (other.loss(), lost.reader.loss()),
            (other.effects(0), lost.reader.effects(0)),
            (other.head_table().drop(columns="run_uid"), lost.reader.head_table().drop(columns="run_uid")),
        ]
    for theirs, ours in pairs:
        pd.testing.assert_frame_equal(theirs, ours, check_exact=True)
    assert lost.reader.self_checks()["passed"].all()


def test_stored_runs_are_listed_and_opened(lost: kvlens.Run, runs: Path) -> None:
    listed = kvlens.runs(outcome="lost", method=METHOD)
    assert lost.uid in set(listed["uid"])
    assert set(listed.attrs["units"]) == set(listed.columns)
    assert kvlens.runs(outcome="lost", method="full").empty
    for named in (lost.uid, runs / lost.uid, str(runs / lost.uid), runs / lost.uid / "trace.duckdb"):
        opened = kvlens.open(named)
        assert (opened.uid, opened.folder.resolve()) == (lost.uid, runs.resolve())
        assert opened.verdict == lost.verdict


def test_methods_are_a_table_and_still_a_package() -> None:
    table = kvlens.methods()
    assert set(table["name"]) == set(kvlens.methods.registry())  # type: ignore[attr-defined]
    assert set(table.attrs["units"]) == set(table.columns)
    family = table["family"].iloc[-1]
    assert set(kvlens.methods(family)["family"]) == {family}


def test_a_run_is_one_line_without_a_display(lost: kvlens.Run) -> None:
    assert lost.uid in repr(lost)
    assert "\n" not in repr(lost)
    assert BUDGET in repr(lost)
    assert lost.status == "completed"


@pytest.mark.parametrize(("method", "limit"), [("quest", "20% of attended tokens"), ("full", NO_LIMIT)])
def test_the_line_of_a_run_has_what_was_asked_for(runs: Path, method: str, limit: str) -> None:
    budget = "20%" if method == "quest" else None
    line = repr(kvlens.run(kvlens.sample("demo"), method, budget, model="demo", max_new=2, progress=False))
    assert limit in line
    assert "1.0" not in line


def test_importing_kvlens_is_light() -> None:
    code = (
        "import sys, kvlens, kvlens.methods\n"
        "assert callable(kvlens.methods) and callable(kvlens.runs)\n"
        "heavy = ('torch', 'pandas', 'duckdb', 'transformers', 'tqdm', 'streamlit', 'plotly', 'kvlens.api')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_api_needs_neither_streamlit_nor_plotly() -> None:
    code = (
        "import sys\nsys.modules['streamlit'] = sys.modules['plotly'] = None\n"
        "import kvlens\nkvlens.run, kvlens.race, kvlens.open, kvlens.load_model\nprint(len(kvlens.methods()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert int(done.stdout) > 10, done.stderr


def test_tables_of_all_completed_runs_name_the_run_of_a_row(lost: kvlens.Run) -> None:
    frame = kvlens.table("decisions")
    assert lost.uid in set(frame["uid"])
    own = frame[frame["uid"] == lost.uid]
    assert own["asked"].sum() == lost.decisions()["asked"].sum() > 0
    heads = kvlens.retrieval_heads()
    assert len(heads) == lost.reader.n_layers * lost.reader.q_heads
    assert list(heads.columns) == list(TABLES["retrieval_heads"])
    readers = lost.readers()
    assert list(readers.columns) == list(TABLES["readers"])
    assert readers["full_mass"].max() <= 1.001
    with pytest.raises(kvlens.RequestError) as refused:
        kvlens.table("weights")
    assert refused.value.code == "unknown_table"
