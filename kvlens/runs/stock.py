"""FullKV here against the stock model, on a short prompt of the demo model."""

from __future__ import annotations

from typing import Any

LENGTH, NEW = 256, 8
"""tokens of the prompt, and generated"""


def stock_gap(device: str) -> tuple[float, int]:
    """Largest difference of the demo model's fp32 logits after a prompt, FullKV here against the stock model, and the
    prompt's tokens."""
    import torch
    from transformers import DynamicCache

    from kvlens import methods
    from kvlens.engine.engine import Engine, Options
    from kvlens.engine.hf_attention import attending

    loaded, prompt = check_prompt(device)
    full = methods.get("full")
    ours = (
        Engine(loaded)
        .run(prompt, full, full.Parameters(), None, Options(max_new=1, prefill_chunk=0), keep_logits=True)
        .logits[0]
    )
    with torch.inference_mode(), attending(loaded.model, "sdpa"):
        cache, ids = DynamicCache(config=loaded.model.config), torch.tensor([prompt.ids], device=device)
        loaded.model(input_ids=ids[:, :-1], past_key_values=cache)
        stock = loaded.model(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1]
    return float((ours.cpu() - stock.cpu()).abs().max()), len(prompt.ids)


def check_task() -> Any:
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt

    return make_prompt("needle", LENGTH, 0.5, 0, demo_encode())


def check_prompt(device: str) -> tuple[Any, Any]:
    from kvlens.engine.models import load
    from kvlens.text.prompts import PromptText, tokenize

    loaded = load("demo", device)
    return loaded, tokenize(PromptText(check_task().text), loaded.tokenizer, loaded.max_positions, NEW)
