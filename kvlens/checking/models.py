"""Small random models and prompts, on which a method is checked in milliseconds. Their output means nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvlens.engine.hf_attention import ATTENTION
from kvlens.engine.models import LoadedModel, shape_of
from kvlens.records import PrefillRecord, StepRecord
from kvlens.text.prompts import Prompt, PromptText
from kvlens.text.segments import Segment

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
"""a Llama of 3 layers, 8 query heads and 2 KV heads"""


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 48},
    "gemma2": {"sliding_window": 48, "head_dim": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 4},
    "gemma3_text": {
        "sliding_window": 48,
        "head_dim": 16,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 3,
    },
    "cohere2": {"sliding_window": 48, "num_hidden_layers": 4},
    "gpt_oss": {
        "sliding_window": 48,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""families with sliding windows, and what their configs need besides BASE. Every layer of the first one has a window"""


class RecordList:
    """A sink that keeps what the recorder passes on."""

    def __init__(self) -> None:
        self.prefilled: PrefillRecord | None = None
        self.steps: list[StepRecord] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Keep the record of the prompt."""
        self.prefilled = record

    def step(self, record: StepRecord) -> None:
        """Keep the record of a step."""
        self.steps.append(record)


class NoTokenizer:
    """Decodes ids as text, and encodes any text as made-up ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return an id per word, whatever it means."""
        return [2 + sum(map(ord, word)) % 200 for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return a word per id."""
        return " ".join(f"t{i}" for i in ids)


def as_loaded(model: PreTrainedModel, name: str = "random") -> LoadedModel:
    """Return a transformers model with the kvlens attention, as `kvlens.engine.models.load` returns one."""
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    shape = shape_of(model.config, torch.finfo(model.dtype).bits // 8)
    plain = all(
        getattr(model.config, scale, None) is None
        for scale in ("logit_scale", "logits_scaling", "final_logit_softcapping")
    )
    return LoadedModel(name, model, NoTokenizer(), shape, BASE["max_position_embeddings"], plain, frozenset())


def random_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Return a random Llama. changes: fields of its config that differ from BASE."""
    torch.manual_seed(seed)
    return as_loaded(LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).to(dtype))


def random_windowed(family: str, seed: int = 1) -> LoadedModel:
    """Return a random model of a family with sliding windows of 48 tokens. Its sink logits, if it has any, take much of
    the attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**BASE, **WINDOWED[family]}))
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data.normal_(2.0)
    return as_loaded(model, family)


def random_prompt(tokens: int, seed: int = 0, vocabulary: int = 512, stop: int = 0) -> Prompt:
    """Return a prompt of random token ids, its first third and the rest named segments. stop: every so many tokens the
    text is a full stop; 0: never."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(3, vocabulary, (tokens,), generator=generator).tolist())
    pieces = tuple("." if stop and position % stop == stop - 1 else f"t{token}" for position, token in enumerate(ids))
    parts = (Segment("instruction", 0, tokens // 3), Segment("documents", tokens // 3, tokens))
    return Prompt(PromptText("x"), ids, pieces, (None,) * tokens, segments=parts)
