"""Counting tokens before a run, without transformers: the tokenizer.json of the chosen model when it is on this
machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kvlens.demo.encode import demo_encode


@lru_cache(maxsize=4)
def encoder(model: str) -> tuple[Callable[[str], list[int]], bool]:
    """Text -> token ids without special tokens, and whether that is the model's own tokenizer or, as a stand-in, the
    demo's."""
    path = _tokenizer_file(model)
    if path is None:
        return demo_encode(), model == "demo"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return (lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)), True


@lru_cache(maxsize=4)
def special_tokens(model: str) -> int:
    """How many tokens of its own the model's tokenizer adds to a prompt; the demo's one where it is not on this
    machine."""
    path = _tokenizer_file(model)
    if path is None:
        return 1
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(path)).num_special_tokens_to_add(False))


def _tokenizer_file(model: str) -> Path | None:
    """A file of a local model or of the Hugging Face cache; never fetched."""
    if model == "demo":
        return None
    local = Path(model).expanduser() / "tokenizer.json"
    if local.is_file():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "tokenizer.json")
    except (ImportError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None
