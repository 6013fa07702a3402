"""FullKV against the stock model, family by family; our loop against model.generate(); surprisal against full
logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import BASE, loaded, random_prompt, run
from transformers import AutoConfig, AutoModelForCausalLM

from kvlens import methods
from kvlens.checking.stock import generated, stock_logits
from kvlens.engine.ahead import LookAhead
from kvlens.engine.border import scored
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import SUPPORTED, stock_attention
from kvlens.engine.session import Session
from kvlens.methods.families import window_attention
from kvlens.methods.run_inputs import StepEnd

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {family: {} for family in sorted(SUPPORTED)} | {
    "llama-yarn": {"rope_parameters": YARN},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 32},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {"head_dim": 16},
    "gpt2": {"num_key_value_heads": 8},
    "gpt_neox": {"num_key_value_heads": 8},
    "ministral3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_key_value_heads": 8},
    "phi3": {"sliding_window": None},
    "gemma": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
"""every family that kvlens loads, and what its config needs besides BASE"""
NEW, N = 16, 150


def build(family: str) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.partition("-")[0], **{**BASE, **FAMILIES[family]})
    return loaded(AutoModelForCausalLM.from_config(config), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_equals_stock_bit_for_bit(family: str) -> None:
    """But for rounding where scores are capped or a sink logit takes a share: PyTorch's own attention has neither."""
    model, prompt = build(family), random_prompt(N)
    ours = run(model, prompt, "full", max_new=NEW, prefill_chunk=0, keep_logits=True)
    fed = [prompt.ids[-1], *ours.ids[:-1]]
    stock = stock_logits(model.model, prompt.ids, fed)
    gap = max(float((a - b).abs().max()) for a, b in zip(ours.logits, stock, strict=True))
    assert gap <= (1e-4 if stock_attention(model.model.config) == "eager" else 0)
    assert [int(logits.argmax()) for logits in stock] == ours.ids


@pytest.mark.parametrize("family", ["llama", "granite", "opt"])
def test_methods_score_by_the_models_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever factor a family has on its logits: of the queries that prefill keeps for methods, of the peek, and of
    those that a step hands them."""
    model, prompt = build(family), random_prompt(N, seed=6)
    read = Engine(model).read(prompt, 37)
    handed: dict[int, torch.Tensor] = {}

    def select(_: Any, layer: int, q: torch.Tensor) -> None:
        handed.setdefault(layer, q.clone())

    monkeypatch.setattr(methods.get("full"), "select", select)
    run(model, prompt, "full", max_new=1)
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.tensor([prompt.ids])
        weights = model.model(ids, output_attentions=True).attentions
    before, group = N - 1, model.shape.group
    for layer in range(model.shape.layers):
        keys = read.keys[layer].repeat_interleave(group, 0)
        paid = window_attention.paid(read.last_queries[layer], keys)
        own = weights[layer][0, :, before - paid.shape[1] : before, :before]
        torch.testing.assert_close(paid, own, atol=1e-5, rtol=1e-4)
        keys = torch.cat([keys, read.peeked.keys[layer].repeat_interleave(group, 0)], 1)
        paid = window_attention.paid(read.peeked.queries[layer], keys)
        torch.testing.assert_close(paid[:, 0], weights[layer][0, :, -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(handed[layer], read.peeked.queries[layer, :, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_look_ahead_makes_a_layers_own_query_of_its_own_input(family: str) -> None:
    """What estimates queries is the model's own attention, whatever its family: norms, biases, rotary embedding."""
    model, prompt, full = build(family), random_prompt(60), methods.get("full")
    session = Session(full, full.Parameters(), Engine(model).context(prompt, None, Options(max_new=2)))
    cache, own, seen = SessionCache(session, model.shape.layers), {}, {}

    class Own:
        def layer(
            self, layer: int, q: torch.Tensor, biases: object, scaling: float, selection: object, slots: Any
        ) -> None:
            own[layer] = scored(q, scaling)

    with torch.inference_mode():
        model.model(input_ids=torch.tensor([prompt.ids[:-1]]), past_key_values=cache)
        session.finish_prefill(torch.zeros(len(prompt.ids) - 1))
        session.begin_step(0, None)
        session.observer, ahead = Own(), LookAhead(model.model, session, cache)
        for layer, module in enumerate(ahead.layers):

            def look(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                seen[layer] = ahead.query(layer, args, kwargs)

            module.register_forward_pre_hook(look, with_kwargs=True)
        model.model(input_ids=torch.tensor([[prompt.ids[-1]]]), past_key_values=cache)
    assert set(own) == set(seen) == set(range(model.shape.layers))
    assert all(torch.equal(own[layer], seen[layer]) for layer in own)
    session.close()


class GenerateSession(Session):
    """Lets transformers' generate() drive a session: a single token after the prompt means that prefill is over."""

    steps = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0 and keys.shape[1] == 1:
            if not self.decoding:
                self.finish_prefill(torch.zeros(self.context.prompt_tokens))
            self.begin_step(self.steps, None if not self.steps else StepEnd(self.steps - 1, self._position, 0.0, 0.0))
            self.steps += 1
        super().write(layer, keys, values)

    def tokens_seen(self, layer: int) -> int:
        return self._position + 1 if self.decoding else super().tokens_seen(layer)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_our_loop_equals_generate(family: str) -> None:
    model, prompt = build(family), random_prompt(N, seed=2)
    ours = run(model, prompt, "full", max_new=NEW)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    reference = generated(model.model, prompt.ids, NEW)
    assert ours.ids == reference
    full = methods.get("full")
    context = Engine(model).context(prompt, None, Options(max_new=NEW))
    session = GenerateSession(full, full.Parameters(), type(context)(**{**context.__dict__, "prompt_tokens": N}))
    cache = SessionCache(session, model.shape.layers)
    driven = model.model.generate(torch.tensor([prompt.ids]), past_key_values=cache, **settings)[0, N:].tolist()
    session.close()
    assert driven == reference


@pytest.mark.parametrize("family", ["llama", "cohere", "granite"])
def test_surprisal_equals_full_logits(family: str) -> None:
    model, prompt = build(family), random_prompt(N, seed=4)
    ours = Engine(model).read(prompt, prefill_chunk=37).surprisal.whole()
    alone = run(model, prompt, "full", max_new=1, prefill_chunk=37).surprisal.whole()
    model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        ids = torch.tensor([prompt.ids])
        logits = model.model(ids).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert torch.isnan(ours[0])
    torch.testing.assert_close(ours[1:].double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.isnan(alone[:-1]).all(), "nobody wants it"
    torch.testing.assert_close(alone[-1], ours[-1], atol=1e-4, rtol=1e-4)


def test_two_sessions_on_one_model_do_not_meet(tiny: Any) -> None:
    first, second = random_prompt(60, seed=5), random_prompt(80, seed=6)
    alone = [run(tiny, p, "full", max_new=8).ids for p in (first, second)]
    full = methods.get("full")
    sessions, caches, fed, out = [], [], [], [[], []]
    with torch.inference_mode():
        for p in (first, second):
            context = Engine(tiny).context(p, None, Options(max_new=8))
            session = Session(full, full.Parameters(), context)
            cache = SessionCache(session, tiny.shape.layers)
            tiny.model(input_ids=torch.tensor([p.ids[:-1]]), past_key_values=cache)
            session.finish_prefill(torch.zeros(len(p.ids) - 1))
            sessions.append(session)
            caches.append(cache)
            fed.append(p.ids[-1])
        for step in range(8):
            for i in (0, 1):
                sessions[i].begin_step(step, None)
                logits = tiny.model(input_ids=torch.tensor([[fed[i]]]), past_key_values=caches[i]).logits[0, -1]
                fed[i] = int(logits.argmax())
                out[i].append(fed[i])
    for session in sessions:
        session.close()
    assert out == alone
