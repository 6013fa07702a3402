"""StreamingLLM with positions inside the cache: against the stock model on what is left, token by token, and past the
context the model was made for."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import ListSink, raises_code, random_llama, random_prompt, run, task_prompt
from test_infllm import rotate, softmax, turned

from kvlens import methods
from kvlens.engine.engine import Engine
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.gpu.static.decoder import StaticDecoder
from kvlens.lens.methods.streaming_llm import told
from kvlens.runs.preflight import estimate
from kvlens.runs.preparing import Prepared, plan
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import BadPrompt

PLACES, SINKS = 29, 3
SET = {"positions": "cache", "tokens": PLACES, "sinks": SINKS}


def left(position: int) -> list[int]:
    """Positions in the cache when the token at `position` attends."""
    return [p for p in range(position + 1) if p < SINKS or p > position - (PLACES - SINKS)]


def test_a_step_sees_keys_where_the_cache_has_them() -> None:
    """Float64, G = 3, D = 24: keys turned from where they lie to their place among those that are left."""
    n, new = 93, 40
    trial = Trial("streaming_llm", n, new, rotate=rotate, **SET)
    keys, values = trial.keys, trial.values
    for step in range(new):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        there = np.array(left(n + step))
        assert len(there) == PLACES
        plain_q = turned(q[:, :, None], [-(n + step)])
        for layer, kv_head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
            assert trial.lies(layer, kv_head) == there.tolist()
            heads = slice(kv_head * SHAPE.group, (kv_head + 1) * SHAPE.group)
            inside = turned(turned(keys[layer, kv_head, there], -there), np.arange(PLACES))
            asked = turned(plain_q[layer, heads], [PLACES - 1])[:, 0]
            weights = softmax(asked @ inside.T / SHAPE.head_dim**0.5)
            out = trial.outs[layer][0, heads, 0]
            np.testing.assert_allclose(out, weights @ values[layer, kv_head, there], atol=1e-4)


def stock(model: Any) -> Any:
    """The model with transformers' own attention, weights included in what it returns."""
    own = copy.deepcopy(model.model)
    own.set_attn_implementation("eager")
    return own


def test_one_layer_is_the_stock_model_on_what_is_left() -> None:
    """With one layer, keys know nothing of other tokens: attention is that of the bare model to which the cache's
    tokens are all there is, in a context of no more than the cache. Logits, and the masses that are recorded."""
    model = random_llama(num_hidden_layers=1, max_position_embeddings=32)
    prompt, sink = random_prompt(150, seed=5), ListSink()
    result = run(model, prompt, "streaming_llm", overrides=SET, max_new=20, sink=sink, keep_logits=True, coverage=True)
    assert all(check.passed for check in result.checks), result.checks
    ids, bare = [*prompt.ids, *result.ids], stock(model)
    for step, logits in enumerate(result.logits):
        fed = torch.tensor([[ids[p] for p in left(len(prompt.ids) - 1 + step)]])
        with torch.no_grad():
            out = bare(fed, output_attentions=True)
        torch.testing.assert_close(logits, out.logits[0, -1], atol=2e-4, rtol=1e-4)
        paid = out.attentions[0][0, :, -1]
        head = sink.steps[step].head
        np.testing.assert_allclose(head["mass_sink"][0], paid[:, :SINKS].sum(-1), atol=1e-4)
        np.testing.assert_allclose(head["mass_window"][0], paid[:, SINKS:].sum(-1), atol=1e-4)


@pytest.mark.parametrize("chunk", [0, 37])
def test_reading_a_prompt_is_decoding_it(chunk: int) -> None:
    """Three layers: what a token became depends on all it attended. The prompt in one go or in chunks, or nearly all of
    it fed token by token."""
    model, whole = random_llama(), random_prompt(160, seed=2)
    few = replace(whole, ids=whole.ids[:20], pieces=whole.pieces[:20], offsets=whole.offsets[:20])
    fed = (*whole.ids[20:], 7, 8, 9)
    by_token = run(model, few, "streaming_llm", overrides=SET, forced=fed, keep_logits=True)
    read = run(model, whole, "streaming_llm", overrides=SET, forced=(7, 8, 9), keep_logits=True, prefill_chunk=chunk)
    for a, b in zip(read.logits, by_token.logits[-3:], strict=True):
        torch.testing.assert_close(a, b, atol=3e-4, rtol=1e-3)
    plain = run(model, whole, "streaming_llm", overrides={"tokens": PLACES}, forced=(7, 8, 9), keep_logits=True)
    assert (plain.logits[0] - read.logits[0]).abs().max() > 0.1, "this would show nothing"


def test_a_prompt_that_was_read_under_full_attention_does_not_serve_it() -> None:
    model, prompt = random_llama(), random_prompt(90)
    read: ReadPrompt = Engine(model).read(prompt)
    shared = run(model, prompt, "streaming_llm", overrides=SET, max_new=4, keep_logits=True, read=read)
    alone = run(model, prompt, "streaming_llm", overrides=SET, max_new=4, keep_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(shared.logits, alone.logits, strict=True))


def test_a_cache_that_holds_everything_is_full_attention() -> None:
    model, prompt = random_llama(), random_prompt(90)
    full = run(model, prompt, "full", max_new=6, keep_logits=True)
    same = run(model, prompt, "streaming_llm", overrides={"positions": "cache"}, max_new=6, keep_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(full.logits, same.logits, strict=True))


def test_it_runs_past_the_context_that_others_are_refused_beyond(demo: Any) -> None:
    """The toy model as if it took 400 tokens, and a prompt of 700."""
    short = replace(demo, max_positions=400)
    prompt, made = task_prompt(demo, "needle", 700, depth=0.98, max_new=8)
    prepared = Prepared(Engine(short), prompt, "")
    request = RunRequest(method="streaming_llm", max_new=8, budget="30%", overrides={"positions": "cache"})
    planned = plan(request, prepared)
    context = prepared.engine.context(prompt, planned.budget, planned.options)
    assert planned.method.reach(planned.params, context) < 400 < context.prompt_tokens
    result = prepared.engine.run(prompt, planned.method, planned.params, planned.budget, planned.options)
    assert made.answer in result.text
    beyond = {"positions=true": {"overrides": {}}, "full": {"method": "full", "overrides": {}, "budget": None}}
    beyond["a cache too large"] = {"budget": "90%"}
    for changes in beyond.values():
        with raises_code("too_long", BadPrompt, most=400):
            plan(request.model_copy(update=changes), prepared)


def test_the_form_and_the_command_know_before_the_model_is_loaded(demo: Any) -> None:
    _, made = task_prompt(demo, "needle", 8100, max_new=8)
    plain = {"model": "demo", "method": "streaming_llm", "budget": "20%", "max_new": 200}
    for positions, fits in (("true", False), ("cache", True)):
        told = estimate(made.text, params={"positions": positions}, **plain)
        assert told["feasible"] is fits
        assert any("the model takes" in line for line in told["warnings"]) is not fits


@pytest.mark.parametrize(
    ("kind", "readings", "changed", "says"),
    [
        ("sink", {0: "all", 1: "all"}, {}, "directly before the window"),
        ("page", {0: "all", 1: "all"}, {}, "directly before the window, and took from it"),
        ("page", {0: "all", 1: "part"}, {}, None),
        ("sink", {0: "all", 1: "all"}, {"short": False}, None),
        ("sink", {0: "all", 1: "all"}, {"positions": "true"}, None),
    ],
)
def test_what_was_attended_whole_and_got_less_is_explained_by_where_sinks_are_seen(
    kind: str, readings: dict[int, str], changed: dict[str, Any], says: str | None
) -> None:
    config = {"positions": changed.pop("positions", "cache")}
    reader = SimpleNamespace(meta=SimpleNamespace(config=config))
    facts = SimpleNamespace(reader=reader, kind=kind, readings=readings, **{"read": True, "short": True, **changed})
    reason = told(facts)
    assert (reason is None) if says is None else (reason is not None and reason[0] == "elsewhere")
    assert says is None or reason[1].endswith(says)


def test_what_it_cannot_do_is_said_in_one_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"^streaming_llm with positions=cache needs rotary [^\n]*'random' has none\.$"
    ):
        Trial("streaming_llm", 60, 4, **SET)
    method, model = methods.get("streaming_llm"), random_llama()
    params = methods.make_parameters(method, None, SET)
    with pytest.raises(ValueError, match=r"^StreamingLLM [^\n]*\(static_step_refused\)[^\n]*\.$"):
        StaticDecoder(model, random_prompt(90), method, params)
