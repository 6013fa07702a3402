"""What a model's weights take, told and refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlens.app.ui.common.pagewords import page_words
from kvlens.demo import demo_path
from kvlens.engine import models
from kvlens.models import find
from kvlens.models import sizes as weights
from kvlens.models.sizes import ModelBeyondMemory, Weights, check_memory, dtype_sentence, weights_in
from kvlens.runs.preflight import foresee, refuse
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import PromptText


def write_weights(folder: Path, dtype: str, numbers: int) -> None:
    """Write the header of a weights file, without its numbers."""
    header = {"a": {"dtype": dtype, "shape": [numbers], "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_headers_tell_what_weights_take(tmp_path: Path) -> None:
    write_weights(tmp_path, "BF16", 8_000_000_000)
    found = weights_in(tmp_path)
    assert found == Weights(8_000_000_000, "bfloat16")
    assert found.bytes_in("float32") == 2 * found.bytes_in("bfloat16") == 32_000_000_000
    sentence = dtype_sentence(tmp_path, "float32")
    assert "32 GB" in sentence
    assert "16 GB" in sentence
    assert dtype_sentence(tmp_path, "bfloat16") == ""
    write_weights(tmp_path, "BF16", 1_000)
    assert dtype_sentence(tmp_path, "float32") == "", "a small model needs no sentence"
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    assert weights_in(tmp_path) is None


def test_weights_beyond_memory_are_refused_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, "BF16", 8_000_000_000)
    monkeypatch.setattr(weights, "host_bytes", lambda: 20_000_000_000)
    with pytest.raises(ModelBeyondMemory, match="--dtype bfloat16") as refused:
        check_memory(tmp_path, "m", "float32")
    assert (refused.value.needed, refused.value.free) == (32_000_000_000, 20_000_000_000)
    check_memory(tmp_path, "m", "bfloat16")
    monkeypatch.setattr(weights, "host_bytes", lambda: 10_000_000_000)
    with pytest.raises(ModelBeyondMemory, match="smaller model"):
        check_memory(tmp_path, "m", "float32")


def test_a_run_is_refused_before_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "host_bytes", lambda: 1_000)
    for call in (foresee, refuse):
        with pytest.raises(ModelBeyondMemory):
            call(RunRequest(model="demo"), PromptText("the red key"))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(ModelBeyondMemory):
        models.load(str(demo_path()), "cpu", "bfloat16")


def test_a_model_that_is_in_memory_already_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "host_bytes", lambda: 1_000)
    monkeypatch.setattr(find, "_kept", {"demo": (find.files_of("demo"), object())})
    prompt = PromptText("the red key opens the old door " * 20)
    request = RunRequest(model="demo", method="streaming_llm", budget="50%", max_new=4, device="cpu")
    refuse(request, prompt)
    with pytest.raises(ModelBeyondMemory):
        refuse(request.model_copy(update={"dtype": "bfloat16"}), prompt)


def test_pages_offer_no_number_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, "BF16", 8_000_000_000)
    said = []
    for free in (20_000_000_000, 10_000_000_000):
        monkeypatch.setattr(weights, "host_bytes", lambda free=free: free)
        with pytest.raises(ModelBeyondMemory) as refused:
            check_memory(tmp_path, "m", "float32")
        said.append(page_words(str(refused.value)).rpartition(": ")[2])
    assert said[0] == said[1]
