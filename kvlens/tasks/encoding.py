"""Counting tokens for a task's prompt with the tokenizer of a model, without loading the model."""

from __future__ import annotations

from kvlens.tasks.base import Encode


def encoding(model: str) -> tuple[Encode, int]:
    """(text -> ids without special tokens, special tokens the tokenizer adds). The demo model's needs no transformers.

    Raises UnsupportedModel or ValueError with one sentence for a model that is not there."""
    if model == "demo":
        from kvlens.demo.encode import demo_encode

        return demo_encode(), 1
    from transformers import AutoTokenizer

    from kvlens.engine.models import resolve

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(model), trust_remote_code=False)
    except OSError as error:
        raise ValueError(
            f"the tokenizer of '{model}' could not be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False)), tokenizer.num_special_tokens_to_add()
