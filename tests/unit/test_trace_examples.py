"""The examples write traces in a process that has no kvlens, and the traces show what the engines lost and shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlens.demo import demo_path
from kvlens.lens.severity import outcome
from kvlens.lens.verdict import verdict
from kvlens.store.reader import TraceReader
from kvlens.tasks import ask, get
from kvlens.tasks.encoding import encoding
from kvlens.trace.importing import import_checked

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import runpy, sys
sys.path[0] = {examples!r}
sys.modules["kvlens"] = None
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(name: str, *words: str) -> str:
    """Run an example without kvlens and return what it prints."""
    examples = ROOT / "examples"
    code = ALONE.format(examples=str(examples), script=str(examples / name))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A prompt's file, its answer and the words that hold it."""
    source = ask(get("multikey"), 400, 0.4, 1, encoding("demo", "auto"))
    file = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    file.write_text(source.text)
    ((start, end),) = source.needle
    return file, str(source.answer).strip(), source.text[start:end]


def test_the_paged_decoder_shows_its_lost_answer_its_holes_and_its_bytes(
    prompt: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, answer, needle = prompt
    options = ("--answer", answer, "--needle", needle, "--pages", "2", "--new", "6")
    said = run_example("paged_decoder.py", str(demo_path()), str(file), str(tmp_path / "trace"), *options)
    assert answer not in said
    with TraceReader.open(tmp_path / "runs", import_checked(tmp_path / "trace", tmp_path / "runs")) as reader:
        assert {"lost", "wrong"} <= set(outcome(reader).kinds)
        assert answer in str(reader.meta.reference_output)
        loss = verdict(reader)
        assert loss is not None
        assert loss.missed is not None
        assert loss.missed.state == "cold"
        first, last = loss.missed.tok_start, loss.missed.tok_end
        tokens = reader.tokens()
        assert answer[:4] in "".join(tokens["text"].iloc[first:last])
        assert len(reader.holes(0.05)) > 0
        steps, page_bytes = reader.steps(), 16 * int(reader.meta.token_bytes or 0)
        assert (steps["resident_bytes"] == 4 * page_bytes).all()
        written = int(reader.meta.prompt_tokens or 0) - 1 + steps["step"]
        assert (steps["cold_bytes"] == page_bytes * (written // 16)).all()
        recalls = reader.events()
        recalls = recalls[recalls["kind"] == "recall"]
        assert steps["h2d_bytes"].sum() == recalls["value"].sum() > 0
        states = reader.state_changes(loss.missed.layer, loss.missed.kv_head)
        assert {"cold", "resident"} <= set(states["state"])


def test_paged_serving_writes_a_trace_per_request_with_its_shared_pages(
    prompt: tuple[Path, str, str], tmp_path: Path
) -> None:
    file, answer, _ = prompt
    text = file.read_text()
    context = text[: text.rindex("Question:")]
    other, alone = tmp_path / "other.txt", tmp_path / "alone.txt"
    other.write_text(f"{context}Question: What is the access code of Lucy Dunn? Answer:")
    alone.write_text(text[1000:])
    files = (str(file), str(other), str(alone))
    said = run_example("paged_serving.py", str(demo_path()), str(tmp_path / "traces"), *files, "--new", "6")
    assert answer in said.splitlines()[0]
    shared, bytes_shared = [], []
    for number in range(3):
        folder = tmp_path / "traces" / f"request-{number}"
        with TraceReader.open(tmp_path / "runs", import_checked(folder, tmp_path / "runs")) as reader:
            spans = reader.spans()
            pages = spans[spans["kind"] == "shared page"]
            shared.append(dict(zip(pages["span"].tolist(), pages["reason"].tolist(), strict=True)))
            bytes_shared.append(reader.journal("shared_bytes")["values"].iloc[0][0])
            assert reader.self_checks()["passed"].all()
            page_bytes = 16 * int(reader.meta.token_bytes or 0)
    assert set(shared[0]) == set(shared[1]) == set(range(len(shared[0])))
    assert set(shared[0].values()) == {"Shared with requests 1."}
    assert set(shared[1].values()) == {"Shared with requests 0."}
    assert len(shared[0]) > 15
    assert shared[2] == {}
    assert bytes_shared == [page_bytes * len(pages) for pages in shared]


def test_the_copy_of_the_writer_is_the_writer() -> None:
    assert (ROOT / "examples" / "trace_writer.py").read_text() == (ROOT / "kvlens" / "trace" / "writer.py").read_text()
    heads = json.loads((ROOT / "kvlens" / "trace" / "trace.schema.json").read_text())["properties"]
    assert {"engine", "layers", "steps"} <= set(heads)
