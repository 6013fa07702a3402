"""FINCH against plain formulas in float64: which tokens of each chunk stay, and who chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import raises_code, random_llama, run

from kvlens import methods
from kvlens.checking.models import random_prompt
from kvlens.engine.engine import Engine
from kvlens.engine.loop import Generation
from kvlens.engine.options import Options
from kvlens.engine.session import Session
from kvlens.methods.finch import within_chunks
from kvlens.refusal import Refusal
from kvlens.text.segments import Segment
from kvlens.tiers.slots import FREE

N, WINDOW, CHUNK, TOKENS = 203, 11, 48, 59


class Unturned:
    """A rotary embedding that turns nothing."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        return keys.float()


def expected(trial: Trial, layer: int, kv_head: int, count: int, normalised: bool) -> list[int]:
    """Positions that stay: the last `count` queries choose."""
    end, rows = N - WINDOW, []
    for head in range(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group):
        weights = trial.weights(layer, head)[N - count :]
        if normalised:
            weights = weights * np.arange(N - count + 1, N + 1)[:, None]
        rows.append(weights.mean(0)[:end])
    score = np.mean(rows, 0)
    share = np.zeros(end)
    for start in range(0, end, CHUNK):
        part = score[start : start + CHUNK]
        share[start + np.argsort(-part, kind="stable")] = np.arange(len(part), 0, -1) / len(part)
    best = np.argsort(-share, kind="stable")[: TOKENS - WINDOW]
    return [*sorted(best.tolist()), *range(end, N)]


@pytest.mark.parametrize("normalised", [True, False])
def test_each_chunk_keeps_what_the_last_tokens_attend(normalised: bool) -> None:
    settings: dict[str, Any] = {"window": WINDOW, "chunk": CHUNK, "tokens": TOKENS, "normalised": normalised}
    trial = Trial("finch", N, 5, rotate=Unturned(), **settings)
    for layer, kv_head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
        assert trial.lies(layer, kv_head) == expected(trial, layer, kv_head, WINDOW, normalised)
    assert trial.session.memory.layout.closed


def test_chunks_keep_the_same_share() -> None:
    share = within_chunks(torch.rand(2, 100, generator=torch.Generator().manual_seed(0)), 25)
    kept = share.argsort(dim=-1, descending=True, stable=True)[:, :40]
    assert all((kept[head] // 25).bincount().tolist() == [10] * 4 for head in range(2))


def test_the_tokens_of_a_known_question_choose() -> None:
    model, prompt = random_llama(1), random_prompt(121)
    asked = replace(prompt, segments=(Segment("text", 0, 90), Segment("question", 90, 121)))
    context = Engine(model).context(asked, None, Options(max_new=3))
    assert context.question_from == 90
    assert Engine(model).context(prompt, None, Options(max_new=3)).question_from is None
    settings = {"window": 4, "chunk": 32, "tokens": 40, "closed": False}
    results = [
        run(model, made, "finch", max_new=3, overrides=settings, keep_logits=True).logits[0] for made in (asked, prompt)
    ]
    assert not torch.equal(*results)
    same = run(model, asked, "finch", max_new=3, overrides={**settings, "window": 30}, keep_logits=True).logits[0]
    other = run(model, prompt, "finch", max_new=3, overrides={**settings, "window": 30}, keep_logits=True).logits[0]
    assert torch.equal(same, other), "the question is the window"


def test_a_known_question_takes_no_chunk_s_share() -> None:
    """A question that attends itself most, longer than the window: chunks of the context keep equal shares."""
    model, prompt = random_llama(1), random_prompt(161)
    asked = replace(prompt, segments=(Segment("text", 0, 96), Segment("question", 96, 161)))
    method = methods.get("finch")
    scores: list[torch.Tensor] = []

    class Looked(method):  # type: ignore[misc, valid-type]
        """Keeps its scores."""

        def score(self, prompt: Any, layer: int, end: int) -> torch.Tensor:
            scores.append(super().score(prompt, layer, end))
            return scores[-1]

    options = Options(max_new=2)
    settings = {"window": 4, "chunk": 32, "tokens": 64 + 30, "closed": False}
    context = Engine(model).context(asked, None, options)
    session = Session(Looked, methods.make_parameters(method, None, settings), context)
    with torch.inference_mode():
        Generation(model, asked, session, options).place(None)
    assert len(scores) == model.shape.layers
    for score in scores:
        assert (score[:, 96:] > score[:, :96].max()).all()
        for row in score[:, :96].unflatten(-1, (3, 32)).flatten(0, 1):
            assert sorted(row.tolist()) == pytest.approx([place / 32 for place in range(1, 33)])
    for layer in range(model.shape.layers):
        for head in range(model.shape.kv_heads):
            row = session.memory.hot.pool(layer, head).slots(layer).position[head]
            kept = row[(row >= 0) & (row < 96)]
            assert (kept // 32).bincount(minlength=3).tolist() == [10, 10, 10]


def test_a_known_question_stays_before_any_context() -> None:
    """Its last `window` tokens and those before them."""
    model, prompt = random_llama(1), random_prompt(121)
    asked, method = (
        replace(prompt, segments=(Segment("text", 0, 90), Segment("question", 90, 121))),
        methods.get("finch"),
    )
    params = methods.make_parameters(method, None, {"window": 4, "chunk": 32, "tokens": 40})
    options = Options(max_new=3)
    with torch.inference_mode():
        session = Session(method, params, Engine(model).context(asked, None, options))
        Generation(model, asked, session, options).place(None)
        for layer, head in np.ndindex(model.shape.layers, model.shape.kv_heads):
            pool = session.memory.hot.pool(layer, head)
            slots, row = pool.slots(layer), head - pool.heads.start
            stayed = set(slots.position[row][slots.role[row] != FREE].tolist())
            assert stayed >= set(range(90, 120))
            assert len(stayed) == 40
        session.close()


def test_without_rotary_positions_nothing_is_closed() -> None:
    with raises_code("no_rotary_positions", Refusal):
        Trial("finch", N, 5, window=WINDOW, tokens=TOKENS)
    assert not Trial("finch", N, 5, window=WINDOW, tokens=TOKENS, closed=False).session.memory.layout.closed
