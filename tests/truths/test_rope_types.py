"""Full KV against the stock model's own `generate` for every rope type of transformers, below, at and beyond the border
at which frequencies change, whole and in chunks (truths 1 and 4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import BASE, loaded, random_prompt, run
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import LoadedModel, UnsupportedModel

ORIGINAL, NEW = 60, 12
"""tokens of the border; tokens generated"""
THETA = {"rope_theta": 10000.0}
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 30.0], "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONG | {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
LENGTHS = (ORIGINAL - NEW, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL)


def build(rope: str, family: str = "llama") -> LoadedModel:
    """A random model whose border is at ORIGINAL tokens; dynamic NTK takes its own limit for the border."""
    torch.manual_seed(3)
    limit = ORIGINAL if rope == "dynamic" else 4096
    more = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None} if family == "phi3" else {}
    config = AutoConfig.for_model(
        family,
        **{**BASE, **more, "max_position_embeddings": limit},
        rope_parameters={"rope_type": rope, **THETA, **ROPES[rope]},
    )
    return loaded(AutoModelForCausalLM.from_config(config), f"{family}-{rope}")


def generated(model: LoadedModel, ids: tuple[int, ...], rope: str, family: str = "llama") -> list[int]:
    """The tokens of greedy `generate` on a fresh stock model."""
    fresh = build(rope, family).model
    fresh.set_attn_implementation("sdpa")
    fresh.load_state_dict(model.model.state_dict())
    fed = torch.tensor([ids])
    with torch.inference_mode():
        out = fresh.generate(
            fed, attention_mask=torch.ones_like(fed), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )
    return [int(token) for token in out[0, len(ids) :]]


def test_every_rope_type_of_transformers_is_tried() -> None:
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rope", ROPES)
def test_full_equals_generate_past_the_border_in_chunks_and_whole(rope: str, length: int) -> None:
    model, prompt = build(rope), random_prompt(length)
    expected = generated(model, prompt.ids, rope)
    for chunk in (0, 7, length // 2):
        assert run(model, prompt, "full", max_new=NEW, prefill_chunk=chunk).ids == expected, chunk


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_long_text_before_leaves_no_trace_in_the_next_run(rope: str) -> None:
    model, short = build(rope), random_prompt(ORIGINAL + 1)
    first = run(model, short, "full", max_new=NEW).ids
    run(model, random_prompt(5 * ORIGINAL, seed=9), "full", max_new=2)
    assert run(model, short, "full", max_new=NEW).ids == first


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_prompt_read_before_gives_the_same_tokens(rope: str) -> None:
    model, prompt = build(rope), random_prompt(ORIGINAL + 20)
    read = Engine(model).read(prompt, 7)
    assert run(model, prompt, "full", max_new=NEW, read=read).ids == run(model, prompt, "full", max_new=NEW).ids


@pytest.mark.parametrize("length", [ORIGINAL - NEW + 1, ORIGINAL + 1, 3 * ORIGINAL])
def test_phi3_equals_generate_on_either_side_of_its_border(length: int) -> None:
    model, prompt = build("longrope", "phi3"), random_prompt(length)
    assert run(model, prompt, "full", max_new=NEW, prefill_chunk=7).ids == generated(
        model, prompt.ids, "longrope", "phi3"
    )


def test_phi3_refuses_to_decode_across_its_border() -> None:
    model, prompt = build("longrope", "phi3"), random_prompt(ORIGINAL - 2)
    with pytest.raises(UnsupportedModel) as refused:
        run(model, prompt, "full", max_new=NEW)
    assert "--max-new to 3" in str(refused.value)
    assert len(run(model, prompt, "full", max_new=3).ids) == 3


@pytest.mark.parametrize("family", ["phi3", "mistral", "starcoder2"])
def test_a_window_that_never_binds_changes_nothing(family: str) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **BASE, sliding_window=80)
    model = loaded(AutoModelForCausalLM.from_config(config), family)
    prompt = random_prompt(70)
    ours = run(model, prompt, "full", max_new=11, prefill_chunk=13).ids
    model.model.set_attn_implementation("sdpa")
    fed = torch.tensor([prompt.ids])
    with torch.inference_mode():
        out = model.model.generate(
            fed, attention_mask=torch.ones_like(fed), do_sample=False, max_new_tokens=11, min_new_tokens=11
        )
    model.model.set_attn_implementation("kvlens")
    assert ours == out[0, 70:].tolist()
    for steps, binds in ((11, False), (12, True)):
        context = Engine(model).context(prompt, None, Options(max_new=steps))
        assert any(context.shape.windows) == any(form.window for form in context.forms) == binds
