"""Full KV's own attention beside a run, against the eager attention of the plain model on the run's tokens."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvlens.engine.alongside import Alongside
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine
from kvlens.rows import SpanRow
from tests.support import ListSink, random_llama, random_prompt, run

NEW, PROMPT = 12, 60
OWN_PROMPT = "streaming_llm positions=cache"
"""reads the prompt under attention of its own, so that its keys are not full KV's"""
HEADS = {"llama": {"num_key_value_heads": 8}, "gqa": {}}
"""changes of the random Llama: 8 KV heads for 8 query heads; 2 for 8"""


def reference_of(model: Any, prompt: Any) -> Reference:
    full = run(model, prompt, "full", keep_logits=True, max_new=NEW, ignore_eos=True)
    return Reference("", tuple(full.ids), torch.stack(full.logits))


def record(model: Any, prompt: Any, method: str, against: Reference | None, **options: Any) -> tuple[Any, ListSink]:
    sink, settings = ListSink(), {"coverage": True, "oracle": "all", **asked()}
    return run(model, prompt, method, sink=sink, against=against, **(settings | options)), sink


def asked() -> dict[str, Any]:
    """Settings with which a method runs on the prompt."""
    return {"max_new": NEW, "ignore_eos": True, "budget": "0.4"}


def eager(model: Any, ids: list[int]) -> list[np.ndarray]:
    """Attention [Hq, n, n] of each layer, by transformers alone."""
    plain, own = model.model, model.model.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = plain(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        plain.set_attn_implementation(own)
    return [layer[0].double().numpy() for layer in layers]


def owner_of(rows: list[SpanRow], positions: int) -> np.ndarray:
    owner = np.full(positions, next(row.span for row in rows if row.kind == "window"))
    for row in rows:
        if row.kind != "window":
            owner[row.tok_start : row.tok_end] = row.span
    return owner


def spans_until(sink: ListSink, step: int) -> list[SpanRow]:
    assert sink.prefilled is not None
    return [*sink.prefilled.spans, *(row for past in sink.steps[: step + 1] for row in past.spans)]


@pytest.mark.parametrize("method", ["streaming_llm", "h2o", OWN_PROMPT])
@pytest.mark.parametrize("heads", HEADS)
def test_reference_masses_are_the_plain_models_attention_at_the_run_s_tokens(heads: str, method: str) -> None:
    model, prompt = random_llama(0, **HEADS[heads]), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    read = Engine(model).read(prompt) if method == OWN_PROMPT else None
    result, sink = record(model, prompt, method, against, read=read)
    assert result.ids != list(against.ids), "some steps lie behind the divergence"
    attention = eager(model, [*prompt.ids, *result.ids[:-1]])
    for t, step in enumerate(sink.steps):
        assert step.oracle is not None
        assert step.oracle.reference is not None
        assert step.oracle.tail_reference is not None
        owner = owner_of(spans_until(sink, t), PROMPT + t)
        for layer, whole in enumerate(attention):
            for head, row in enumerate(whole[:, PROMPT - 1 + t, : PROMPT + t]):
                by_span = np.bincount(owner, row, minlength=owner.max() + 1)
                listed = step.oracle.span[layer, head]
                present = listed >= 0
                np.testing.assert_allclose(
                    step.oracle.reference[layer, head][present], by_span[listed[present]], atol=1e-5
                )
                rest = 1 - by_span[listed[present]].sum()
                np.testing.assert_allclose(step.oracle.tail_reference[layer, head], rest, atol=1e-5)
                lost = step.oracle.reference_lost_pos[layer, head]  # type: ignore[index]
                masses = step.oracle.reference_lost_mass[layer, head]  # type: ignore[index]
                np.testing.assert_allclose(masses[lost >= 0], row[lost[lost >= 0]], atol=1e-5)
    assert all(check.passed for check in result.checks)


def test_own_query_masses_leave_the_reference_s_where_the_query_has_drifted() -> None:
    model, prompt = random_llama(0), random_prompt(PROMPT)
    _, sink = record(model, prompt, "streaming_llm", reference_of(model, prompt))
    first = sink.steps[0].oracle
    assert first is not None
    assert first.reference is not None
    np.testing.assert_allclose(first.reference[0], first.full[0], atol=1e-6)  # the first layer's query has not
    assert np.abs(first.reference[-1] - first.full[-1]).max() > 1e-4


def test_regret_and_unread_are_of_each_mass() -> None:
    model, prompt = random_llama(0), random_prompt(PROMPT)
    _, sink = record(model, prompt, "streaming_llm", reference_of(model, prompt), top_k=64)
    for step in sink.steps:
        oracle, head = step.oracle, step.head
        assert oracle is not None
        assert oracle.reference is not None
        np.testing.assert_allclose(head["regret"], np.maximum(oracle.full - oracle.mass, 0).sum(-1), atol=1e-5)
        unread = np.maximum(oracle.reference_unread, oracle.reference * _share(oracle.full, oracle.mass))  # type: ignore[type-var]
        missed = np.minimum(np.maximum(oracle.reference - oracle.mass, 0), unread)
        np.testing.assert_allclose(head["reference_regret"], missed.sum(-1), atol=1e-5)
        np.testing.assert_allclose(oracle.regret, missed, atol=1e-6)
        assert oracle.reference_unread is not None
        np.testing.assert_allclose(head["reference_unread"], oracle.reference_unread.sum(-1), atol=1e-5)


def _share(own: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Of the own-query mass the share that the method lacks."""
    return np.maximum(own.astype(np.float64) - mass, 0) / np.maximum(own, 1e-12)


def test_a_span_that_was_read_whole_is_not_missed_though_the_query_has_drifted() -> None:
    model, prompt = random_llama(0), random_prompt(PROMPT)
    _, sink = record(model, prompt, "streaming_llm", reference_of(model, prompt))
    for step in sink.steps:
        assert step.oracle is not None
        assert step.oracle.reference is not None
        assert step.oracle.reference_unread is not None
        whole = (step.oracle.span >= 0) & (step.oracle.reference_unread == 0) & (step.oracle.mass >= step.oracle.full)
        assert whole.any()
        assert step.oracle.regret[whole].max() == 0
        assert (step.oracle.reference - step.oracle.mass)[whole].max() > 1e-4


@pytest.mark.parametrize("method", ["streaming_llm", OWN_PROMPT])
def test_tokens_are_those_of_the_run_that_records_nothing(method: str) -> None:
    model, prompt = random_llama(0), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    plain = run(model, prompt, method, keep_logits=True, **asked())
    recorded, _ = record(model, prompt, method, against, keep_logits=True)
    assert recorded.ids == plain.ids
    assert torch.equal(torch.stack(recorded.logits), torch.stack(plain.logits))


def test_full_kv_beside_a_run_is_given_back_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Alongside]] = []
    attention = Alongside.attention
    monkeypatch.setattr(
        Alongside, "attention", lambda full, *args: (made.append(weakref.ref(full)), attention(full, *args))[1]
    )
    model, prompt = random_llama(0), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    gc.disable()
    try:
        record(model, prompt, "streaming_llm", against)
        assert made
        assert [full() for full in made] == [None] * len(made)
    finally:
        gc.enable()


def test_a_run_without_a_reference_or_without_sampling_feeds_full_kv_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attention = Alongside.attention
    monkeypatch.setattr(Alongside, "attention", lambda *args: (calls.append(1), attention(*args))[1])
    model, prompt = random_llama(0), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    alone, sink = record(model, prompt, "streaming_llm", None)
    assert sink.steps[0].oracle is not None
    assert sink.steps[0].oracle.reference is None
    unsampled, _ = record(model, prompt, "streaming_llm", against, oracle="off")
    run(model, prompt, "streaming_llm", against=against, **asked())
    assert (calls, alone.full_kv_s, unsampled.full_kv_s) == ([], None, None)
    record(model, prompt, "streaming_llm", against)
    assert len(calls) == -(-NEW // 8)


@pytest.mark.parametrize("method", ["streaming_llm", OWN_PROMPT])
def test_no_prompt_is_read_for_it(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from kvlens.engine import loop

    reads: list[int] = []
    prefill = loop.prefill
    monkeypatch.setattr(loop, "prefill", lambda *args: (reads.append(1), prefill(*args))[1])
    model, prompt = random_llama(0), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    reads.clear()
    result, sink = record(model, prompt, method, against)
    assert len(reads) == 1
    assert sink.steps[0].oracle is not None
    own_prompt = method == OWN_PROMPT
    assert (sink.steps[0].oracle.reference is None) == own_prompt  # its prompt's keys are not full KV's
    assert (result.no_full_kv is not None) == own_prompt


def test_what_goes_wrong_beside_the_run_costs_the_masses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = random_llama(0), random_prompt(PROMPT)
    against = reference_of(model, prompt)
    whole, _ = record(model, prompt, "streaming_llm", against)

    def fail(*args: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Alongside, "attend", fail)
    result, sink = record(model, prompt, "streaming_llm", against)
    assert result.ids == whole.ids
    assert "no room" in str(result.no_full_kv)
    assert all(step.oracle is not None and step.oracle.reference is None for step in sink.steps)
