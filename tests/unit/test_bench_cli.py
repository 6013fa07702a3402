"""`kvlens bench tasks`, `kvlens bench sweep` and `kvlens prompt`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import kvlens

from kvlens import PACKAGE, tasks
from kvlens.lab.commands import results
from kvlens.studies import storage


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    kvlens("bench", "tasks", "--json")
    said = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in said["tasks"]] == list(tasks.registry())
    assert said["files"] == list(tasks.file_kinds())
    kvlens("bench", "tasks")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) >= len(said["tasks"]) + len(said["files"])
    assert "gsm8k:PATH@shots=8@tokens=256@samples=1\n" in shown


def test_prompt_makes_any_task_in_the_demo_models_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    kvlens("prompt", "--task", "niah_multivalue", "--length", "700", "--depth", "0.2", "--json")
    made = json.loads(capsys.readouterr().out)
    assert len(made["needle"]) == 4
    assert made["answer"].count(", ") == 3
    with pytest.raises(SystemExit):
        kvlens("prompt", "--task", "nonsense")
    assert "unknown task 'nonsense'; known: needle" in capsys.readouterr().err


def test_a_sweep_of_a_file_writes_its_rows_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "vt.jsonl"
    lines = [{"input": f"The code of gate one is {n}{n}{n}{n}. Answer:", "outputs": [str(n) * 4]} for n in (3, 5, 7)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "grid.json"
    argv = [
        "bench",
        "sweep",
        "--no-traces",
        "--methods",
        "full",
        "--tasks",
        f"ruler:{data}",
        "--runs",
        str(tmp_path / "runs"),
    ]
    kvlens(*argv, "--prompts", "2", "--out", str(out))
    assert "4 of 4 trials" in capsys.readouterr().out
    kvlens(*argv, "--prompts", "5", "--out", str(out))
    said = capsys.readouterr()
    assert "6 of 6 trials" in said.out
    assert len(said.err.strip().splitlines()) == 2, "two of the three prompts were there"
    rows = json.loads(out.read_text())
    place = {name: at for at, name in enumerate(rows["columns"])}
    shown = [(row[place["index"]], row[place["length"]], row[place["depth"]]) for row in rows["trials"][::2]]
    assert shown == [(0, None, None), (1, None, None), (2, None, None)]


@pytest.mark.parametrize("table", ["sweep", "quality"])
def test_the_prompts_of_a_table_share_steps(table: str, tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "table.json"
    own = ["--no-traces", "--lengths", "128", "--depths", "0.5"] if table == "sweep" else ["--length", "128"]
    argv = ["--model", "demo", "--methods", "full", "--tasks", "needle", "--budgets", "50%", "--prompts", "2", *own]
    kvlens("bench", table, *argv, "--batch", "2", "--runs", str(runs), "--out", str(out))
    (study,) = storage.ids(runs)
    assert storage.read(runs, study).batch == 2
    sizes = [(trial.figures or {})["batched"] for trial in storage.read_trials(runs, study)]
    assert sizes == [2] * 4, "full KV, and full KV in bfloat16"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [(("--lengths", "12,x"), "not a list of numbers"), (("--ray", "auto"), "ray is not installed")],
)
def test_bad_options_are_one_sentence(
    tmp_path: Path, option: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kvlens(
            "bench",
            "sweep",
            "--no-traces",
            "--runs",
            str(tmp_path / "runs"),
            "--out",
            str(tmp_path / "g.json"),
            *option,
        )
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("quality", "--out"), ("sweep", "--out"), ("explain", "--out"), ("explain", "--kept")]
)
def test_a_place_where_no_file_can_be_is_one_sentence_before_anything_runs(
    tmp_path: Path, command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("not a folder")
    paths = {"--out": tmp_path / "o.json"} | ({"--kept": tmp_path / "k.jsonl"} if command == "explain" else {})
    more = ("--no-traces",) if command == "sweep" else ()
    for place, why in (
        ("folder", "is a folder: name a file in it."),
        ("file/below.json", "'file' is a file, not a folder."),
    ):
        chosen = paths | {option: tmp_path / place}
        with pytest.raises(SystemExit) as ended:
            kvlens("bench", command, *more, *(str(part) for pair in chosen.items() for part in pair))
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 1
        assert said.startswith(f"kvlens: {option} '{chosen[option]}'")
        assert said.endswith(why)
        assert "Errno" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"], "nothing was written"


def test_results_are_written_beside_the_runs_outside_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the top of the checkout that kvlens is imported from, they are written into the checkout."""
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(PACKAGE.parent)
    assert results.results_folder() == Path("kvlens/lab/results")
    (tmp_path / "kvlens/lab/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "runs" / "text-smollm2.json"
    assert results.out_file(None, "text", "smollm2") == target
    assert str(target) in capsys.readouterr().err
    assert results.kept_file(None, "text", "smollm2") == target.with_suffix(".jsonl")
    assert results.out_file(Path("mine.json"), "text", "smollm2") == Path("mine.json")
    assert capsys.readouterr().err == ""
