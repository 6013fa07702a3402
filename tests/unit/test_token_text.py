"""The text of tokens where a character takes several: each byte once, and the texts join to the text."""

from __future__ import annotations

from typing import Any

import pytest

from kvlens.text.plaintext import TokenStream, token_text
from kvlens.text.prompts import PromptText, tokenize

TEXTS = ["plain words", "价格是四八二一三。", "Dvořák 漢字 😀 end", "عربي", "ไทย", "a😀b", "👩‍👩‍👧"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_prompt_join_to_the_text(smollm2: Any, text: str) -> None:
    prompt = tokenize(PromptText(text), smollm2.tokenizer, 4096, 1, "off")
    assert "".join(prompt.pieces) == text
    assert len(prompt.pieces) == len(prompt.ids)


@pytest.mark.parametrize("text", TEXTS)
def test_generated_tokens_join_to_the_text(smollm2: Any, text: str) -> None:
    ids = smollm2.tokenizer.encode(text, add_special_tokens=False)
    stream = TokenStream(smollm2.tokenizer.decode)
    pieces = [stream.text(token) for token in ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_tokens_alone_are_their_bytes_where_they_are_no_character(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode("四", add_special_tokens=False)
    assert len(ids) > 1
    escaped = "".join(f"\\x{byte:02x}" for byte in "四".encode())
    assert "".join(token_text(tokenizer, token) for token in ids) == escaped
    assert token_text(tokenizer, tokenizer.encode("word", add_special_tokens=False)[0]) == "word"


def test_bytes_that_never_become_a_character_are_shown_and_do_not_hold_the_rest_back() -> None:
    stream = TokenStream(lambda ids: "".join("\ufffd" if token == 0 else "x" for token in ids))
    assert [stream.text(token) for token in (0, 0, 0, 0, 1, 1)] == ["", "", "", "\ufffd" * 4, "x", "x"]
