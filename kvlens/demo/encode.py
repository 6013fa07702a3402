"""Text to token ids with the demo model's tokenizer, without torch or transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


@cache
def demo_encode() -> Callable[[str], list[int]]:
    """A function text -> ids without special tokens."""
    from tokenizers import Tokenizer

    from kvlens.demo import DEMO_FOLDER

    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
