"""The command line's contract, end to end on the demo model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from kvlens.__main__ import main as start
from kvlens.cli.main import main


def kvlens(*arguments: str) -> None:
    """Runs in this process; raises SystemExit with status 0 or 1."""
    before, sys.argv = sys.argv, ["kvlens", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = before


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_prompt_run_show_export(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvlens("prompt", "--task", "needle", "--length", "300", "--seed", "3", "--json")
    made = json.loads(capsys.readouterr().out)
    assert set(made) >= {"text", "answer", "needle", "task", "seed"}
    start, end = made["needle"][0]
    assert made["answer"].strip(" .") in made["text"][start:end]
    kvlens("prompt", "--task", "needle", "--length", "300", "--seed", "3")
    assert capsys.readouterr().out == made["text"], "the same prompt as plain text, and nothing else"

    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(made))
    kvlens("run", str(file), "--method", "streaming_llm", "--budget", "0.3", "--max-new", "6", "--set", "sinks=2")
    uid = capsys.readouterr().out.strip().splitlines()[-1]
    assert (runs / uid / "trace.duckdb").is_file()

    kvlens("runs", "--json")
    assert json.loads(capsys.readouterr().out)[0]["uid"] == uid
    kvlens("runs")
    assert " 30% " in capsys.readouterr().out
    kvlens("runs", "show", uid)
    shown_text = capsys.readouterr().out
    assert "budget          30%\n" in shown_text
    fields = [line.split(maxsplit=1) for line in shown_text.splitlines() if not line.startswith(" ")]
    assert not [field for field in fields if len(field) < 2 or field[1] in ("None", "()", "[]") or "{" in field[1]]
    assert "sinks 2" in dict(fields)["config"]
    kvlens("runs", "show", uid, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == "completed"
    assert shown["config"]["sinks"] == 2
    assert shown["prompt_tokens"] == 300 or abs(shown["prompt_tokens"] - 300) < 30
    assert shown["steps"] <= 6
    assert [shown[name] for name in ("temperature", "top_p", "forced", "reference", "parent")] == [
        0,
        1,
        False,
        None,
        None,
    ]
    said = shown["output_text"].strip().partition("\n")[0]
    assert shown["outcome"] == ("right answer" if made["answer"].strip() in said else "wrong answer")
    assert shown["left_full_kv_at_step"] is None  # not compared
    assert shown["self_check"]
    assert all(check["passed"] for check in shown["self_check"])

    out = tmp_path / "heads.csv"
    kvlens("export", uid, "--what", "heads", "--format", "csv", "--out", str(out))
    heads = pd.read_csv(out)
    assert len(heads) == 48
    assert {"layer", "q_head", "kv_head", "entropy_nats_mean"} <= set(heads.columns)
    assert any(column.startswith("mass_") for column in heads.columns)
    for what in ("head-steps", "spans", "span-mass", "transfers", "events", "tokens"):
        target = tmp_path / f"{what}.parquet"
        kvlens("export", uid, "--what", what, "--format", "parquet", "--out", str(target))
        pd.read_parquet(target)
    kvlens("runs", "delete", uid)
    assert not (runs / uid).exists()


def test_progress_lines(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_text("The river was wide and the bridge was old. " * 12)
    kvlens("run", str(file), "--method", "full", "--max-new", "3", "--progress-json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["phase"] == "done"
    kvlens("runs")
    assert " no limit " in capsys.readouterr().out
    assert (runs / lines[-1]["uid"]).is_dir()
    lanes = [line for line in lines if line["phase"] in ("race", "lane", "frame", "maps")]
    assert [line["step"] for line in lanes if line["phase"] == "frame"] == [0, 1, 2]
    lines = [line for line in lines if line not in lanes]
    phases = [line["phase"] for line in lines]
    assert [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] != p] == [
        "load",
        "prefill",
        "place",
        "decode",
        "surprisal",
        "store",
        "done",
    ]
    assert all({"done", "total", "tokens_per_s"} <= set(line) for line in lines[:-1])


def test_a_race_of_two_methods(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per lane where nobody watches; JSON; frames for the dashboard; a sentence where it cannot be."""
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"text": "The river was wide and the bridge was old. " * 16, "answer": "bridge"}))
    asked = (
        "race",
        str(file),
        "--model",
        "demo",
        "--methods",
        "streaming_llm,sekv",
        "--budget",
        "15%",
        "--max-new",
        "4",
    )
    kvlens(*asked)
    full, streaming, sekv, race = capsys.readouterr().out.splitlines()
    assert full.startswith("full 2")
    assert ": as full KV" in full
    assert streaming.startswith("streaming_llm 2")
    assert sekv.startswith("sekv: refused: budget_infeasible")
    assert (runs / "races" / f"{race}.json").is_file()
    kvlens("runs", "--json")
    assert {run["method"] for run in json.loads(capsys.readouterr().out)} == {"full", "streaming_llm"}

    kvlens(*asked, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [lane["state"] for lane in found["lanes"]] == ["completed", "completed", "refused"]
    assert found["lanes"][0]["uid"] in full, "full KV was there already"

    kvlens(*asked, "--preset", "sekv:demo", "--progress-json")
    said = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in said]
    assert [line["phase"] for line in lines if line["phase"] in ("race", "done")] == ["race", "done"]
    assert [(f["lane"], f["step"]) for f in lines if f["phase"] == "frame" and f["lane"]] == [(1, n) for n in range(4)]
    assert all(text.startswith('{"phase": "frame"') for text, line in zip(said, lines, strict=True) if "moved" in line)
    assert len({(line["lane"], line["step"]) for line in lines if line["phase"] == "maps"}) == 8
    assert lines[-1] | {"uid": 0, "race": 0} == {"phase": "done", "uid": 0, "status": "completed", "race": 0}

    with pytest.raises(SystemExit):
        kvlens("race", str(file), "--model", "demo", "--methods", "sekv,nothing")
    assert "unknown method 'nothing'" in capsys.readouterr().err


def test_prompt_from_standard_input(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdin:
        buffer = io.BytesIO(("An ordinary sentence about bridges. " * 8).encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    kvlens("run", "-", "--method", "full", "--max-new", "2")
    assert (runs / capsys.readouterr().out.strip().splitlines()[-1]).is_dir()


def test_methods_are_listed_without_torch() -> None:
    import subprocess

    code = (
        "import sys; from kvlens import methods; methods.catalogue(); from kvlens.runs import preflight; assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_an_interrupt_while_the_commands_are_loaded_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "kvlens.cli.main", Interrupted("kvlens.cli.main"))
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1
