"""Every page opens a run that kvlens did not steer, and shows what was not recorded as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_pages import words
from transformers import DynamicCache
from uiruns import Visit

import kvlens
from kvlens.app.ui.common.sentences import OBSERVED_HOLD
from kvlens.app.ui.replay.conditions import observed_conditions
from kvlens.lens.knob import NOT_RECORDED
from kvlens.lens.verdict import verdict
from kvlens.metaparts import Observed
from kvlens.store.reader import TraceReader


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> kvlens.Run:
    folder = tmp_path_factory.mktemp("observed")
    loaded = kvlens.load_model("demo")
    model: Any = loaded.model
    prompt = kvlens.sample("demo")
    ids = loaded.tokenizer(prompt.text, return_tensors="pt")["input_ids"]
    model.set_attn_implementation("sdpa")
    try:
        with kvlens.observe(model, loaded.tokenizer, answer=prompt.answer, runs=folder, progress=False) as seen:
            cache, fed = DynamicCache(), ids
            with torch.no_grad():
                for step in range(6):
                    position = torch.tensor([[ids.shape[1] + step - 1]]) if step else None
                    logits = model(fed, past_key_values=cache, position_ids=position).logits
                    fed = logits[:, -1:].argmax(-1)
                    for layer in cache.layers if not step else ():
                        layer.keys, layer.values = layer.keys[:, :, -90:], layer.values[:, :, -90:]
    finally:
        model.set_attn_implementation("kvlens")
    return seen.run


def test_the_run_lost_and_says_which_head_missed_what(observed: kvlens.Run) -> None:
    verdict = observed.verdict
    assert verdict.outcome == "lost"
    assert verdict.reason == "evicted"
    assert "(" not in str(verdict.why), "how kvlens cut the span is no reason of the caller's cache"
    assert len(observed.missed()) > 0
    assert observed.events()["kind"].isin(["evict"]).any()


@pytest.mark.parametrize("page", ["replay", "heads", "spans", "memory", "compare", "method", "home"])
def test_a_page_opens_it(visit: Visit, observed: kvlens.Run, page: str) -> None:
    at = visit(observed.folder, page, run=observed.uid)
    assert not at.exception
    assert not at.error


def test_replay_shows_full_kvs_own_mass_and_that_the_budget_was_not_recorded(
    visit: Visit, observed: kvlens.Run
) -> None:
    with TraceReader.open(observed.folder, observed.uid) as reader:
        told = verdict(reader)
    assert told is not None
    assert told.missed is not None
    assert told.missed.reference is not None
    text = words(visit(observed.folder, "replay", run=observed.uid))
    assert told.missed.mass_words() in text
    assert NOT_RECORDED in text


def test_memory_shows_what_the_run_does_not_record(visit: Visit, observed: kvlens.Run) -> None:
    shown = {metric.label: metric.value for metric in visit(observed.folder, "memory", run=observed.uid).metric}
    unknown = ("Budget", "Moved to the device", "Moved to host memory", "Moved, not used")
    lacking = [shown[label] for label in unknown]
    assert lacking == ["not recorded"] * len(unknown)


def test_replay_offers_no_repeat_of_it(visit: Visit, observed: kvlens.Run) -> None:
    at = visit(observed.folder, "replay", run=observed.uid)
    assert OBSERVED_HOLD in [caption.value for caption in at.caption]
    assert not [button.label for button in at.button if button.key == "find_tip" or button.label == "Hold it resident"]
    with pytest.raises(kvlens.RunError) as refusal:
        observed.tips()
    assert refusal.value.code == "observed_run"


def test_replay_says_what_was_seen_of_it(visit: Visit, observed: kvlens.Run) -> None:
    at = visit(observed.folder, "replay", run=observed.uid)
    assert observed.meta.observed is not None
    said = "\n".join(observed_conditions(observed.meta.observed))
    assert said in [text.value for text in at.text]


def test_conditions_of_an_observed_run_name_every_limit() -> None:
    seen = Observed(stopped="cut back", unmatched_mass=0.25, sampled=True, no_reference="off", entries={"ambiguous": 3})
    said = observed_conditions(seen)
    assert [any(value in line for line in said) for value in ("cut back", "0.2500", "yes", "off", "3")] == [True] * 5
