"""Names of models: given, shown and taken back; and what is said of a name that stands for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ggufs import stock, write

from kvlens.cli.main import main
from kvlens.models import catalogue, find
from kvlens.models.device import expected, settle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))


def kvlens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit status, what was printed); of a refusal the one sentence."""
    monkeypatch.setattr(sys, "argv", ["kvlens", *arguments])
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            said = capsys.readouterr().err.strip()
            assert len(said.splitlines()) == 1
            return int(ended.code), said
    return 0, capsys.readouterr().out


def test_a_gguf_file_gets_a_name_and_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "mine.gguf", stock("qwen3"), "qwen3", {"general.license": "mit"})
    code, said = kvlens(monkeypatch, capsys, "models", "add", str(path), "--name", "mine", "--json")
    assert code == 0
    entry = json.loads(said)
    assert (entry["name"], entry["family"], entry["licence"], entry["ready"]) == ("mine", "qwen3", "mit", True)
    folder = Path(find.resolve("mine"))
    assert "mine" in [row["name"] for row in json.loads(kvlens(monkeypatch, capsys, "models", "--json")[1])]
    assert "2 layers, 4 query / 2 KV heads of 16" in kvlens(monkeypatch, capsys, "models")[1]
    code, said = kvlens(monkeypatch, capsys, "models", "add", str(tmp_path), "--name", "mine")
    assert code == 1
    assert f"'{path}'" in said, "what has the name"
    assert str(folder) in kvlens(monkeypatch, capsys, "models", "remove", "mine")[1]
    assert not folder.exists()
    assert path.exists(), "the user's own file stays"
    assert kvlens(monkeypatch, capsys, "models", "remove", "mine")[0] == 1


def test_a_file_that_cannot_be_converted_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(tmp_path / "w.gguf", stock("llama"), "llama").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-9])
    code, said = kvlens(monkeypatch, capsys, "models", "add", str(tmp_path / "cut.gguf"))
    assert code == 1
    assert "is cut short: tensor" in said
    assert catalogue.names()[-1] == "demo"
    assert "cut" not in catalogue.names()


def test_a_named_file_that_has_gone_is_listed_with_its_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", stock("llama"), "llama")
    catalogue.add("gone", str(path))
    path.unlink()
    (entry,) = [entry for entry in catalogue.entries() if entry.name == "gone"]
    assert entry.problem is not None
    assert "'gone'" in entry.problem
    assert catalogue.remove("gone") == []


REFUSED = {
    "a mistyped folder": (["run", "{}/ok.txt", "--model", "modles/mine"], "there is no folder 'modles/mine' here"),
    "a mistyped name": (["run", "{}/ok.txt", "--model", "smolm2"], "is not a model folder"),
    "a mistyped file": (["run", "{}/ok.txt", "--model", "{}/m.gguf"], "is not a model folder"),
    "a file that is no model": (["run", "{}/ok.txt", "--model", "{}/ok.txt"], "is not a model folder"),
    "a device of another name": (["run", "{}/ok.txt", "--device", "tpu"], "device 'tpu' is not known"),
    "the form without a template": (["run", "{}/ok.txt", "--chat", "on"], "this one has none: run with --chat off"),
    "a form of another name": (["run", "{}/ok.txt", "--chat", "maybe"], "--chat takes auto, on or off"),
    "a system message without the form": (["run", "{}/ok.txt", "--system", "x"], "--system needs the chat form"),
    "a hub id of another form": (["models", "add", "a b/c", "--hub"], "is not a hub id"),
    "a hub that does not answer": (["models", "add", "no-such/model", "--hub"], "could not be fetched from the hub"),
    "a name that is taken": (["models", "add", "{}", "--name", "demo"], "cannot be a model's name"),
    "the toy removed": (["models", "remove", "demo"], "cannot be removed"),
    "nothing shown": (["models", "show", "nothing"], "is not a model folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_person_gets_wrong_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, wanted = REFUSED[case]
    (tmp_path / "ok.txt").write_text("The code of Ann is 4821. " * 30)
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    code, said = kvlens(monkeypatch, capsys, *(part.replace("{}", str(tmp_path)) for part in arguments))
    assert code == 1
    assert wanted in said
    assert not (tmp_path / "runs").exists()


NO_NETWORK = """
import socket, sys
def refuse(*given, **more):
    print("the network was asked", flush=True)
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse
from kvlens.engine.models import load
from kvlens.models import catalogue, find
for asked in (find.ready, catalogue.entry, load):
    try:
        asked("modles/mine")
    except find.UnsupportedModel as error:
        print("check the spelling" in str(error))
print(load("demo").shape.layers, load(sys.argv[1]).shape.layers)
"""


def test_no_name_and_no_model_asks_the_network(tmp_path: Path) -> None:
    """In a process that is free to ask it: the tests' own is told not to."""
    path = write(tmp_path / "m.gguf", stock("qwen2"), "qwen2")
    free = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, str(path)],
        cwd=Path(__file__).resolve().parents[2],
        env=free,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.splitlines() == ["True", "True", "True", "6 2"], done.stderr[-2000:]


def test_the_device_is_expected_without_torch_as_torch_settles_it() -> None:
    assert expected() == settle("auto")
    assert (expected("cuda:1"), settle("cpu")) == ("cuda:1", "cpu")
