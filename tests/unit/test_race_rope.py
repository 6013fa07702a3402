"""A race on a model whose rotary frequencies depend on the length of the text: each lane is the run that it would be
alone, below the border, across it while it decodes, and beyond."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    alone = {length: [angles(model, length, place) for place in (5, 25, 40)] for length in (10, 60)}
    assert not torch.equal(alone[10][0], alone[60][0])
    with whole_length(model, 10):
        with whole_length(model, 60):
            assert torch.equal(turn(model, 5), alone[60][0])
        assert "forward" in vars(model.base_model.rotary_emb)
        again = [turn(model, place) for place in (40, 25, 5)]
    assert all(map(torch.equal, alone[10], reversed(again)))
    assert "forward" not in vars(model.base_model.rotary_emb)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_runs_of_two_lengths_take_turns_in_threads(rope: str) -> None:
    model = build(rope, 20, 50)
    alone = {length: [angles(model, length, place) for place in range(40)] for length in (10, 60)}

    def every_place(length: int) -> list[torch.Tensor]:
        with whole_length(model, length):
            return [turn(model, place) for place in range(40)]

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(alone, pool.map(every_place, alone), strict=True))
    assert all(all(map(torch.equal, found[length], alone[length])) for length in alone)


def test_an_embedding_with_a_forward_pass_of_its_own_has_it_back() -> None:
    model = build("dynamic", 20, 50)
    own = model.base_model.rotary_emb.forward = partial(model.base_model.rotary_emb.forward)
    expected = angles(build("dynamic", 20, 50), 10, 25)
    assert torch.equal(angles(model, 10, 25), expected)
    assert model.base_model.rotary_emb.forward is own


def test_a_run_that_is_compared_works_on_a_changing_rope(tmp_path: Path) -> None:
    """The reading enters `whole_length` inside the run."""
    tokenizer = kvlens.load_model("demo").tokenizer
    model = build("dynamic", 40, len(tokenizer))
    run = kvlens.run(TEXT, method="snapkv", budget="60%", model=model, tokenizer=tokenizer, max_new=4, runs=tmp_path)
    assert run.status == "completed"


def turn(model: Any, place: int) -> torch.Tensor:
    """Cosines [1, 1, D] of a position."""
    cosines: torch.Tensor = model.base_model.rotary_emb(torch.zeros(1, 1, 32), torch.tensor([[place]]))[0]
    return cosines


def angles(model: Any, length: int, place: int) -> torch.Tensor:
    """Cosines of a position in a text of this length, alone."""
    with whole_length(model, length):
        return turn(model, place)
