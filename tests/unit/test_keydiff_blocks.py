"""KeyDiff's block form against the stock model with a cache that is cut by hand after each block, in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, raises_code, random_llama, random_prompt, run
from transformers import DynamicCache

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.session import Session
from kvlens.methods.keydiff import KeyDiff
from kvlens.tiers.layout import SLOT_TABLE_BYTES

N, TOKENS, BLOCK, FED = 230, 53, 36, (5, 6, 7, 8)


class Stock:
    """transformers' own attention over its own cache in float64; each layer's cache is cut to TOKENS after each block,
    and where its tokens lay in the text is followed beside it."""

    def __init__(self, model: Any, ids: tuple[int, ...]) -> None:
        self.model = copy.deepcopy(model.model).double()
        self.model.set_attn_implementation("eager")
        self.cache = DynamicCache()
        shape = model.shape
        self.lies = np.zeros((shape.layers, shape.kv_heads, 0), int)
        self.cuts: list[np.ndarray] = []
        self.most = 0
        for first in range(0, len(ids), BLOCK):
            self.feed(ids[first : first + BLOCK], first)
            self.cut()

    def feed(self, ids: tuple[int, ...], first: int) -> torch.Tensor:
        here = torch.arange(first, first + len(ids))
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), past_key_values=self.cache, position_ids=here[None])
        new = np.broadcast_to(here.numpy(), (*self.lies.shape[:2], len(ids)))
        self.lies = np.concatenate([self.lies, new], 2)
        self.most = max(self.most, self.lies.shape[2])
        return out.logits[0]

    def cut(self) -> None:
        lowest = np.full(self.lies.shape[:2], np.nan)
        if self.lies.shape[2] > TOKENS:
            kept = np.zeros((*self.lies.shape[:2], TOKENS), int)
            for layer, head in np.ndindex(*self.lies.shape[:2]):
                held = self.cache.layers[layer]
                keys = held.keys[0, head].numpy()
                unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
                anchor = unit.mean(0)
                score = -(unit @ anchor) / np.linalg.norm(anchor)
                kept[layer, head] = np.sort(np.argsort(-score, kind="stable")[:TOKENS])
                lowest[layer, head] = score[kept[layer, head]].min()
            self.lies = np.take_along_axis(self.lies, kept, 2)
            for layer, held in enumerate(self.cache.layers):
                at = torch.tensor(kept[layer])[None, ..., None].expand(-1, -1, -1, held.keys.shape[-1])
                held.keys, held.values = held.keys.gather(2, at), held.values.gather(2, at)
        self.cuts.append(lowest)


def test_blocks_attend_what_was_kept_and_are_cut_with_it() -> None:
    model, prompt = random_llama(), random_prompt(N + 1, seed=4)
    theirs = Stock(model, prompt.ids[:N])
    assert theirs.most <= TOKENS + BLOCK
    params, options = KeyDiff.Parameters(tokens=TOKENS, block=BLOCK), Options(max_new=len(FED), forced=FED)
    session = Session(KeyDiff, params, Engine(model).context(prompt, None, options))
    with torch.inference_mode():
        Generation(model, prompt, session, options).place(None)
    for layer, head in np.ndindex(*theirs.lies.shape[:2]):
        slots, at = session.memory.hot.slots(layer), session.memory.hot.pool(layer, head).start["kept"]
        assert sorted(slots.position[head, at : at + TOKENS].tolist()) == theirs.lies[layer, head].tolist()
    noted = {(note.layer, note.kv_head): note.values for note in session.method.drain_journal()}
    found = np.array(
        [[noted[layer, head] for head in range(model.shape.kv_heads)] for layer in range(model.shape.layers)]
    )
    np.testing.assert_allclose(found, np.moveaxis(theirs.cuts, 0, 2), atol=1e-4)
    session.close()
    result = run(model, prompt, "keydiff", overrides={"tokens": TOKENS, "block": BLOCK}, forced=FED, keep_logits=True)
    whole = run(model, prompt, "keydiff", overrides={"tokens": TOKENS}, forced=FED, keep_logits=True)
    for step, token in enumerate((prompt.ids[-1], *FED[:-1])):
        expected = theirs.feed((token,), N + step)[-1]
        torch.testing.assert_close(result.logits[step].double(), expected, atol=1e-3, rtol=1e-3)
        assert (whole.logits[step] - result.logits[step]).abs().max() > 0.05, "blocks would not have shown"


@pytest.mark.parametrize("changes", [{"window": 8}, {"window": 8, "peek": True}])
def test_a_protected_window_stays_and_the_count_holds(changes: dict[str, Any]) -> None:
    model, prompt, sink = random_llama(), random_prompt(N + 1), ListSink()
    asked = {"tokens": TOKENS, "block": BLOCK, **changes}
    result = run(model, prompt, "keydiff", overrides=asked, max_new=3, sink=sink, coverage=True)
    assert all(check.passed for check in result.checks), result.checks
    last = int(bool(changes.get("peek")))
    counts = sink.steps[0].kv["attended_tokens"]
    assert (counts == TOKENS - last + 1).all(), "the token that step 0 feeds comes on top, or is the last of them"
    assert all(row.kept == TOKENS - 8 for row in sink.prefilled.cuts)


def test_with_room_for_the_whole_prompt_blocks_change_nothing() -> None:
    model, prompt = random_llama(), random_prompt(150)
    full = run(model, prompt, "full", max_new=4, keep_logits=True)
    same = run(model, prompt, "keydiff", overrides={"block": BLOCK}, max_new=4, keep_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(full.logits, same.logits, strict=True))


def test_a_layer_that_can_keep_everything_keeps_it() -> None:
    """A budget of one token less than everything: it is missing in the last layer alone."""
    model, prompt = random_llama(), random_prompt(150)
    shape, asked = model.shape, methods.make_parameters(KeyDiff, None, {"block": BLOCK})
    whole = KeyDiff.floor_bytes(methods.make_parameters(KeyDiff, None, {"tokens": 149}), shape, 149, 4)
    one = shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)
    options = Options(max_new=4)
    context = Engine(model).context(prompt, Budget.parse(f"{whole - one}B"), options)
    session = Session(KeyDiff, asked, context)
    with torch.inference_mode():
        Generation(model, prompt, session, options).place(None)
    counts = [int((session.memory.hot.slots(layer).position[0] >= 0).sum()) for layer in range(shape.layers)]
    session.close()
    assert counts == [149, 149, 148]


def test_a_wrong_block_is_said_in_one_sentence() -> None:
    with raises_code("parameters_disagree", parameter="block"):
        methods.make_parameters(KeyDiff, None, {"block": -1})
