"""A model's rotary embedding taken back and applied again, against what the model itself does to its keys."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import BASE, loaded, random_prompt

from kvlens import methods
from kvlens.engine.engine import Engine, Options
from kvlens.engine.rotary import rotary_of

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi": ("Phi", {}),
    "phi3-partial": ("Phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "cohere-pairs": ("Cohere", {}),
    "granite": ("Granite", {}),
    "olmo2": ("Olmo2", {}),
    "glm4-pairs-partial": ("Glm4", {"head_dim": 16}),
    "stablelm-partial": ("StableLm", {}),
    "nemotron-partial": ("Nemotron", {}),
    "gpt_neox-partial": ("GPTNeoX", {}),
    "smollm3-some-layers": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "starcoder2": ("Starcoder2", {}),
    "cohere2-some-layers": ("Cohere2", {"sliding_window": 20, "num_hidden_layers": 4}),
    "gemma3-frequencies-by-kind": ("Gemma3", {"head_dim": 16, "sliding_window": 20, "sliding_window_pattern": 2}),
    "gpt_oss-halves": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
N = 70


def build(family: str) -> Any:
    name, changes = FAMILIES[family]
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**{**BASE, **changes})).eval()


class Watched:
    """The keys that go into and come out of the model's own rotary embedding, layer by layer."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        module = sys.modules[type(model.base_model).__module__]
        own = module.apply_rotary_pos_emb

        def watch(q: torch.Tensor, k: torch.Tensor, *rest: Any, **named: Any) -> Any:
            turned = own(q, k, *rest, **named)
            self.before.append(k[0])
            self.after.append(turned[1][0])
            return turned

        monkeypatch.setattr(module, "apply_rotary_pos_emb", watch)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_it_does_and_undoes_what_the_model_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    rotate = rotary_of(model)
    assert rotate is not None
    watched = Watched(model, monkeypatch)
    model(input_ids=torch.tensor([random_prompt(N).ids]))
    positions = torch.arange(N)
    with_positions = [layer for layer, used in enumerate(rotate.used) if used]
    assert len(watched.before) == len(with_positions)
    for layer, before, after in zip(with_positions, watched.before, watched.after, strict=True):
        assert not torch.allclose(before[:, 1:], after[:, 1:], atol=1e-2)
        torch.testing.assert_close(rotate(before, positions, layer), after, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rotate(after, positions, layer, back=True), before, atol=1e-5, rtol=1e-5)
        part = slice(20, 41)  # any stretch of positions, as a span is
        torch.testing.assert_close(
            rotate(before[:, part], positions[part], layer), after[:, part], atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_back_and_forth_is_the_identity_for_all_layers_at_once(family: str) -> None:
    model = loaded(build(family))
    rotate = rotary_of(model.model)
    shape = model.shape
    keys = torch.randn(shape.layers, shape.kv_heads, N, shape.head_dim)
    positions = torch.arange(3000, 3000 + N)
    there = rotate(keys, positions)
    torch.testing.assert_close(rotate(there, positions, back=True), keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(rotate(keys, positions, back=True), positions), keys, atol=1e-5, rtol=1e-5)
    for layer in range(shape.layers):
        assert torch.equal(there[layer], rotate(keys[layer], positions, layer))


@torch.inference_mode()
def test_layers_without_positions_are_left_alone() -> None:
    rotate = rotary_of(build("smollm3-some-layers"))
    assert rotate.used == (True, False, True)
    keys = torch.randn(2, 5, 8)
    assert torch.equal(rotate(keys, torch.arange(5), 1), keys)
    assert not torch.equal(rotate(keys, torch.arange(5), 0), keys)


def test_a_turn_is_the_textbook_formula() -> None:
    """Llama's halves in float64: (x_i, x_{i + D/2}) by the angle position / theta^(2 i / D)."""
    rotate = rotary_of(build("llama"))
    x = np.random.default_rng(0).standard_normal((6, 8))
    positions = np.array([0, 1, 5, 100, 700, 3999])
    angle = positions[:, None] * 10000.0 ** (-2 * np.arange(4) / 8)
    c, s = np.cos(angle), np.sin(angle)
    expected = np.concatenate([x[:, :4] * c - x[:, 4:] * s, x[:, 4:] * c + x[:, :4] * s], 1)
    out = rotate(torch.tensor(x, dtype=torch.float32), torch.tensor(positions), 0)
    np.testing.assert_allclose(
        out.numpy(), expected, atol=5e-4
    )  # float32 angles at position 3999 are good to 4000 * 2^-24


def test_half_precision_keys_come_back_in_float32() -> None:
    rotate = rotary_of(build("llama"))
    keys = torch.randn(2, 5, 8).bfloat16()
    out = rotate(keys, torch.arange(5), 0, back=True)
    assert out.dtype == torch.float32
    assert torch.equal(rotate(out, torch.arange(5), 0).bfloat16(), keys)


@pytest.mark.parametrize("kind", ["GPT2", "dynamic"])
def test_there_is_none_where_a_turn_cannot_be_taken_back(kind: str) -> None:
    if kind == "GPT2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64))
    else:
        dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**BASE, "rope_parameters": dynamic}))
    assert rotary_of(model) is None


def test_a_run_knows_its_models_rotary(tiny: Any) -> None:
    context = Engine(tiny).context(random_prompt(20), None, Options(max_new=2))
    assert context.rotate is not None
    assert context.rotate.used == (True,) * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_holds_the_numbers_that_the_embedding_gives(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, at single positions and at many, also where the table has to grow."""
    rotary = rotary_of(build(family))
    assert rotary is not None
    keys = torch.zeros(1, 1, 1, 16, dtype=dtype)
    for positions in (torch.tensor([3]), torch.tensor([2_000, 0, 7]), torch.arange(333), torch.tensor([70_000, 5])):
        for kind in set(rotary._kinds) or {""}:
            angles, computed = rotary._angles(keys, positions, kind), rotary._computed(keys, positions, kind)
            assert all(torch.equal(own, direct) for own, direct in zip(angles, computed, strict=True))


def test_angles_are_computed_once_for_all_layers_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count: a step of a method that turns keys and queries in every layer computes no angles beside the model's."""
    engine = Engine(loaded(build("llama")))
    counted = [0]
    embedding = type(engine.loaded.model.base_model.rotary_emb)
    forward = embedding.forward

    def counting(self: Any, *more: Any, **named: Any) -> Any:
        counted[0] += 1
        return forward(self, *more, **named)

    monkeypatch.setattr(embedding, "forward", counting)
    prompt, counts = random_prompt(200), []
    for steps in (2, 10):
        counted[0] = 0
        params = methods.make_parameters(methods.get("infllm"), "demo", {})
        engine.run(prompt, methods.get("infllm"), params, None, Options(max_new=steps, ignore_eos=True))
        counts.append(counted[0])
    assert counts[1] - counts[0] == 8, "the model's own, once a step"
