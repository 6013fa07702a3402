"""KVzip against the stock model: the prompt, the instruction and the chunk in one pass, attention weights in
float64."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from support import raises_code, random_llama, run
from transformers import LlamaForCausalLM

from kvlens.checking.models import RecordList, random_prompt
from kvlens.engine.engine import Engine
from kvlens.methods.kvzip import FOLLOWING, OPENING
from kvlens.refusal import Refusal
from kvlens.tiers.slots import FREE

N, CHUNK, LEAD, SINKS = 90, 37, 5, 3


def stock(model: Any) -> Any:
    """The same weights under transformers' own attention, in float64."""
    copied = LlamaForCausalLM(deepcopy(model.model.config)).double().eval()
    copied.load_state_dict(model.model.state_dict())
    copied.set_attn_implementation("eager")
    return copied


def received(model: Any, ids: tuple[int, ...], tokenizer: Any) -> np.ndarray:
    """Scores [L, H_kv, n] of the prompt without its last token, chunk by chunk."""
    plain, n = stock(model), len(ids) - 1
    config = plain.config
    scores = np.zeros((config.num_hidden_layers, config.num_key_value_heads, n))
    for start in range(0, n, CHUNK):
        end = min(start + CHUNK, n)
        told = tokenizer.encode(FOLLOWING if start else OPENING, add_special_tokens=False)
        again = [*told, *ids[max(start - LEAD, 0) : start], *ids[start:end]]
        out = plain(torch.tensor([[*ids[:n], *again]]), output_attentions=True)
        sinks = min(SINKS, start)
        columns = [*range(sinks), *range(start, end), *range(n, n + len(again))]
        for layer, weights in enumerate(out.attentions):
            part = weights[0, :, n:, columns]
            part = part / part.sum(-1, keepdim=True)
            most = part[..., sinks : sinks + end - start].amax(1)
            scores[layer, :, start:end] = most.unflatten(0, (config.num_key_value_heads, -1)).amax(1).detach().numpy()
    return scores


def kept(model: Any, prompt: Any, **settings: Any) -> dict[tuple[int, int], list[int]]:
    """Positions that each KV head keeps."""
    from kvlens import methods
    from kvlens.engine.loop import Generation
    from kvlens.engine.options import Options
    from kvlens.engine.session import Session

    method = methods.get("kvzip")
    params = methods.make_parameters(
        method, None, {"chunk": CHUNK, "lead": LEAD, "sinks": SINKS, "tokens": 31, **settings}
    )
    options = Options(max_new=4)
    with torch.inference_mode():
        session = Session(method, params, Engine(model).context(prompt, None, options))
        Generation(model, prompt, session, options).place(None)
        found = {}
        for layer in range(model.shape.layers):
            for head in range(model.shape.kv_heads):
                pool = session.memory.hot.pool(layer, head)
                slots, row = pool.slots(layer), head - pool.heads.start
                found[layer, head] = sorted(slots.position[row][slots.role[row] != FREE].tolist())
        session.close()
    return found


@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_it_keeps_what_the_repetition_attends_most(share: str) -> None:
    model = random_llama(3)
    prompt = random_prompt(N + 1)
    scores = received(model, prompt.ids, model.tokenizer)
    scores[:, :, :SINKS] = np.inf
    layers, heads, n = scores.shape
    sizes = {"model": (1, layers * heads * n), "layer": (layers, heads * n), "head": (layers * heads, n)}[share]
    groups = scores.reshape(sizes)
    most = 31 * layers * heads // len(groups)
    expected: dict[tuple[int, int], list[int]] = {(x, h): [] for x in range(layers) for h in range(heads)}
    for group, row in enumerate(groups):
        for place in np.argsort(-row, kind="stable")[:most]:
            layer, head, position = np.unravel_index(group * sizes[1] + place, scores.shape)
            expected[int(layer), int(head)].append(int(position))
    assert kept(model, prompt, share=share) == {place: sorted(positions) for place, positions in expected.items()}
    counts = {len(positions) for positions in expected.values()}
    assert (len(counts) > 1) is (share != "head")


@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_the_token_that_step_0_feeds_is_one_of_those_that_stay(share: str) -> None:
    """With peek=on it has a slot of its own, and every KV head pays for it alike."""
    model, prompt = random_llama(3), random_prompt(N + 1)
    with_it, without = (kept(model, prompt, share=share, peek=peek) for peek in ("on", "off"))
    total = sum(map(len, without.values()))
    assert sum(map(len, with_it.values())) == total - len(without), "step 0 fills the slots that are left"
    assert max(abs(len(with_it[place]) + 1 - len(without[place])) for place in without) <= 2


def test_the_second_reading_is_counted_and_changes_no_token_of_full_kv() -> None:
    model, prompt = random_llama(1), random_prompt(N + 1)
    whole = run(model, prompt, "full", max_new=5, keep_logits=True)
    settings = {"chunk": CHUNK, "lead": LEAD, "sinks": SINKS}
    result = run(model, prompt, "kvzip", max_new=5, keep_logits=True, overrides=settings)
    assert result.ids == whole.ids
    asks = [len(model.tokenizer.encode(text)) for text in (OPENING, FOLLOWING)]
    tokens, seconds = result.second_reading
    assert tokens == N + asks[0] + 2 * (asks[1] + LEAD)
    assert seconds > 0
    assert whole.second_reading == (0, 0.0)


def test_the_second_reading_counts_in_the_peak() -> None:
    model, prompt, peaks = random_llama(1), random_prompt(N + 1), {}
    for method, settings in (("kvzip", {"chunk": N}), ("lagkv", {})):
        sink = RecordList()
        run(model, prompt, method, max_new=1, sink=sink, overrides=settings)
        assert sink.prefilled is not None
        peaks[method] = sink.prefilled.prefill_peak_bytes
    most = model.shape.layers * model.shape.q_heads * N * 4
    asks = len(model.tokenizer.encode(OPENING))
    assert peaks["kvzip"] == (2 * N + asks) * model.shape.token_bytes + most
    assert peaks["kvzip"] > peaks["lagkv"]


def test_a_prompt_that_cannot_be_repeated_is_refused() -> None:
    model = random_llama(1, max_position_embeddings=128)
    with raises_code("no_second_reading", Refusal, most=128):
        run(model, random_prompt(N + 1), "kvzip", max_new=3, overrides={"tokens": 40})


def test_runs_that_are_not_recorded_share_a_second_reading() -> None:
    model, prompt = random_llama(1), random_prompt(N + 1)
    read = Engine(model).read(prompt, queries=16)
    settings = {"overrides": {"chunk": CHUNK, "tokens": 40}, "max_new": 4, "keep_logits": True, "read": read}
    results = [run(model, prompt, "kvzip", **settings) for _ in range(2)]
    recorded = run(model, prompt, "kvzip", sink=RecordList(), **settings)
    tokens = [result.second_reading[0] for result in (*results, recorded)]
    assert tokens[0] == tokens[2] > tokens[1] == 0
    assert all(torch.equal(*pair) for pair in zip(results[0].logits, results[1].logits, strict=True))
