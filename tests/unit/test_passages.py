"""The text of a range of tokens, where one character is several tokens."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlens.text.passages import passage

#: '<bos>', 'Z', two bytes of 'ü', 'ri', 'ri' again, and two generated tokens, which have no place in the prompt.
TOKENS = pd.DataFrame(
    {
        "text": ["<bos>", "Z", "ü", "ü", "ri", "ri", "a", "a"],
        "char_start": pd.array([None, 0, 1, 1, 2, 4, None, None], "Int32"),
        "char_end": pd.array([None, 1, 2, 2, 4, 6, None, None], "Int32"),
    }
)


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [(0, 8, "<bos>Züririaa"), (1, 3, "Zü"), (3, 5, "üri"), (2, 4, "ü"), (4, 6, "riri"), (6, 8, "aa"), (5, 5, "")],
)
def test_a_character_of_several_tokens_stands_once(start: int, end: int, text: str) -> None:
    assert passage(TOKENS, start, end) == text
    assert passage(TOKENS.astype({"char_start": float, "char_end": float}), start, end) == text


def test_the_first_token_of_a_character_may_have_more_than_it() -> None:
    """A tokenizer may give the space before to it: its range is wider than those of the bytes that follow."""
    wide = pd.DataFrame(
        {"text": ["x", " ✓", "✓", "✓", " y"], "char_start": [0, 1, 2, 2, 3], "char_end": [1, 3, 3, 3, 5]}
    )
    assert passage(wide, 0, 5) == "x ✓ y"
    assert passage(wide, 2, 4) == "✓", "from within it, it stands there once"
