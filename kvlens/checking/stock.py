"""The stock transformers model on a prompt, which full KV must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvlens.engine.hf_attention import attending
from kvlens.engine.models import stock_attention


def stock_logits(model: Any, ids: Sequence[int], fed: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits [V] after each token of `fed`, float32, with the model's own attention and cache. The prompt
    without its last token, `ids[:-1]`, is read at once; fed[0] is the prompt's last token."""
    with torch.inference_mode(), attending(model, stock_attention(model.config)):
        cache, out = DynamicCache(config=model.config), []
        model(input_ids=torch.tensor([ids[:-1]]), past_key_values=cache)
        for token in fed:
            out.append(model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1].float())
    return out


def generated(model: Any, ids: Sequence[int], new: int) -> list[int]:
    """Return the tokens of the stock model's own greedy generate(), up to an end of text."""
    settings = {"max_new_tokens": new, "do_sample": False}
    with torch.inference_mode(), attending(model, stock_attention(model.config)):
        prompt = torch.tensor([list(ids)])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens
