"""A race on a model whose rotary frequencies depend on the length of the text: each lane is the run that it would be
alone, below the border, across it while it decodes, and beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvlens
from kvlens.engine.rotary import whole_length

TEXT = "The farmer carried the copper kettle to the old harbor. " * 8
METHODS = ("snapkv", "quest", "keydiff")
NEW = 10
DECIDED = ["token", "nats", "text", "agrees"]
"""what a step did, by the part of a column's name"""


def build(rope: str, border: int, vocab: int) -> Any:
    torch.manual_seed(3)
    original = {"original_max_position_embeddings": border} if rope == "longrope" else {}
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 30.0]} if rope == "longrope" else {}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=border if rope == "dynamic" else 4096,
        rope_parameters={"rope_type": rope, "rope_theta": 10_000.0, "factor": 4.0, **original, **factors},
    )
    return AutoModelForCausalLM.from_config(config).eval()


def decided(run: kvlens.Run) -> pd.DataFrame:
    steps = run.steps()
    return steps[[name for name in steps if any(part in name for part in DECIDED)]]


@pytest.mark.parametrize("beyond", [-NEW - 1, -NEW // 2, 40], ids=["below", "across", "beyond"])
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_lanes_on_a_changing_rope_are_the_runs_that_they_would_be_alone(
    rope: str, beyond: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = kvlens.load_model("demo").tokenizer
    border = len(tokenizer(TEXT)["input_ids"]) - beyond
    model = build(rope, border, len(tokenizer))
    settings: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "max_new": NEW, "ignore_eos": True}
    race = kvlens.race(TEXT, METHODS, "60%", runs=tmp_path / "race", progress=False, **settings)
    assert [lane.state for lane in race.info.lanes] == ["completed"] * (len(METHODS) + 1)
    for method, lane in zip(METHODS, race[1:], strict=True):
        alone = kvlens.run(TEXT, method=method, budget="60%", runs=tmp_path / method, progress=False, **settings)
        assert lane.output == alone.output
        assert decided(lane).shape[1] >= 2
        pd.testing.assert_frame_equal(decided(lane), decided(alone))
    assert "forward" not in vars(model.base_model.rotary_emb)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_of_a_step_do_not_depend_on_other_runs(rope: str) -> None:
    model = build(rope, 20, 50)
    embedding, hidden = model.base_model.rotary_emb, torch.zeros(1, 1, 32)
    with whole_length(model, 10):
        alone = [embedding(hidden, torch.tensor([[position]]))[0] for position in (5, 25, 40)]
        with whole_length(model, 10):
            embedding(hidden, torch.tensor([[60]]))  # a lane that is ahead
        assert "forward" in vars(embedding)
        again = [embedding(hidden, torch.tensor([[position]]))[0] for position in (40, 25, 5)]
    assert all(map(torch.equal, alone, reversed(again)))
    assert "forward" not in vars(embedding)
