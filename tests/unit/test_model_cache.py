"""The cache of converted models: made once, whole or not at all, whatever two processes, a full disk or a kill do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ggufs import stock, write

from kvlens.files import cache_dir
from kvlens.models import cache, find
from kvlens.models.errors import UnsupportedModel

ROOT = Path(__file__).resolve().parents[2]
CONVERT = """
import sys
from kvlens.models.find import resolve
phases = []
print(resolve(sys.argv[1], lambda what, done, total: phases.append(what)), bool(phases))
"""
SLOW = """
import sys, time, kvlens.models.convert as convert
from kvlens.models.find import resolve
true = convert.write_tensors
def slow(*given):
    true(*given)
    print("written", flush=True)
    time.sleep(float(sys.argv[2]))
convert.write_tensors = slow
print(resolve(sys.argv[1]))
"""
NARROW = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from kvlens.models.find import resolve
try:
    resolve(sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def process(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_second_use_converts_nothing_and_a_changed_file_is_another_model(folder: Path) -> None:
    path, told = write(folder / "m.gguf", stock("llama"), "llama"), []
    first = find.resolve(str(path), lambda what, done, total: told.append((what, done, total)))
    assert told[-1][1] == told[-1][2]
    told.clear()
    assert find.resolve(str(path), lambda *said: told.append(said)) == first
    assert told == []
    assert json.loads((Path(first) / "kvlens.json").read_text())["source"] == str(path.resolve())
    write(path, stock("llama", seed=1), "llama")
    os.utime(path, ns=(1, 1))
    assert find.resolve(str(path)) != first


def test_two_processes_at_once_make_it_once(folder: Path) -> None:
    path = str(write(folder / "m.gguf", stock("llama"), "llama"))
    slow = process(SLOW, path, "2")
    assert slow.stdout is not None
    assert slow.stdout.readline() == "written\n"
    waiting = process(CONVERT, path)
    made, told = waiting.communicate(timeout=600)[0].split()
    assert slow.communicate(timeout=600)[0].strip() == made
    assert told == "False", "the second waited and took what the first had made"
    assert [left.name for left in cache.models_dir().glob(".*.part")] == []


def test_what_a_killed_process_left_is_removed_and_made_anew(folder: Path) -> None:
    path = str(write(folder / "m.gguf", stock("llama"), "llama"))
    killed = process(SLOW, path, "600")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "written\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert killed.stderr is not None
    killed.stderr.close()
    assert len(list(cache.models_dir().glob(".*.part"))) == 1
    assert cache.is_made(Path(find.resolve(path))), "a lock that outlived its process would never be given"
    assert list(cache.models_dir().glob(".*.part")) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(folder: Path) -> None:
    path = str(write(folder / "m.gguf", stock("llama"), "llama"))
    said, trouble = process(NARROW, path).communicate(timeout=600)
    assert f"'{cache.models_dir()}'" in said, trouble
    assert "$KVLENS_CACHE" in said
    assert len(said.strip().splitlines()) == 1
    assert [item.name for item in cache.models_dir().iterdir() if not item.name.endswith(".lock")] == []
    assert cache.is_made(Path(find.resolve(path))), "with room it is made"


def test_a_cache_that_cannot_be_written_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("KVLENS_CACHE", str(folder / "file" / "below"))
    with pytest.raises(UnsupportedModel, match="cannot be written"):
        find.resolve(str(write(folder / "m.gguf", stock("llama"), "llama")))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", "/a")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("KVLENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/b/kvlens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("~/.cache/kvlens").expanduser()
