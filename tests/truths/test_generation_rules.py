"""The rules of a model's generation_config: the tokens of greedy `generate`; logits that are no numbers end a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import BASE, loaded, random_prompt, run
from transformers import AutoConfig, AutoModelForCausalLM

from kvlens.engine.models import LoadedModel
from kvlens.engine.options import RULES, NonFiniteLogits, rules_of

NEW, LENGTH, END = 20, 60, 7
PLAIN: dict[str, Any] = {}


def build(rules: dict[str, Any], end: int | None = END) -> LoadedModel:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE))
    model.generation_config.eos_token_id = end
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    made = loaded(model)
    made.eos = frozenset(() if end is None else (end,))
    return made


def generated(model: LoadedModel, ids: tuple[int, ...], implementation: str = "sdpa") -> list[int]:
    model.model.set_attn_implementation(implementation)
    fed = torch.tensor([ids])
    with torch.inference_mode():
        out = model.model.generate(fed, attention_mask=torch.ones_like(fed), do_sample=False, max_new_tokens=NEW)
    model.model.set_attn_implementation("kvlens")
    return [int(token) for token in out[0, len(ids) :]]


def plain_tokens() -> list[int]:
    return run(build(PLAIN), random_prompt(LENGTH), "full", max_new=NEW).ids


CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(100, 300)]},
    "min_length": {"min_length": LENGTH + 15},
    "min_new_tokens": {"min_new_tokens": 15},
    "sequence_bias": {"sequence_bias": [[[9], 50.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 11},
    "suppress_tokens": {"suppress_tokens": list(range(0, 512, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 512, 2))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5)},
    "remove_invalid_values": {"remove_invalid_values": True},
}


@pytest.mark.parametrize("name", CASES)
def test_full_equals_generate_under_every_rule(name: str) -> None:
    model, prompt = build(CASES[name]), random_prompt(LENGTH)
    if name.startswith(("min", "exponential")):  # the end would come at once
        end = plain_tokens()[2]
        model = build(CASES[name], end)
    ours = run(model, prompt, "full", max_new=NEW).ids
    assert ours == generated(model, prompt.ids)
    assert rules_of(model.model) == CASES[name]
    if name not in ("remove_invalid_values",):
        assert ours != plain_tokens(), "the rule changes nothing here"


def test_every_rule_is_tried() -> None:
    assert set(CASES) == set(RULES) - {"forced_bos_token_id"}, "forced_bos needs a prompt of one token"


def test_a_model_without_rules_has_none() -> None:
    model = build(PLAIN)
    assert rules_of(model.model) == {}
    assert plain_tokens() == generated(model, random_prompt(LENGTH).ids)


def test_a_forced_repeat_meets_the_same_scores() -> None:
    model, prompt = build(CASES["repetition_penalty"]), random_prompt(LENGTH)
    free = run(model, prompt, "full", max_new=NEW, keep_logits=True)
    again = run(model, prompt, "full", max_new=NEW, keep_logits=True, forced=tuple(free.ids))
    assert all(torch.equal(one, other) for one, other in zip(free.logits, again.logits, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_the_run(value: float) -> None:
    model = build(PLAIN)
    model.model.lm_head.weight[3, 0] = value
    with pytest.raises(NonFiniteLogits) as ended:
        run(model, random_prompt(LENGTH), "full", max_new=4)
    assert (ended.value.code, ended.value.step) == ("non_finite_logits", 0)
