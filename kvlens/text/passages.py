"""The text that a range of stored tokens stands for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd


def passage(tokens: pd.DataFrame, start: int, end: int) -> str:
    """Text of the rows [start, end) of a reader's tokens. A character that several tokens share, one per byte of it,
    stands there once: each of these tokens has all of it as its own text."""
    return passages(tokens.iloc[start:end], [(0, end)])[0]


def passages(tokens: pd.DataFrame, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return `passage` of each range of rows [start, end), 0 <= start; the tokens are looked through once."""
    texts = tokens["text"].tolist()
    later = texts.copy()
    for place in continued(tokens):
        later[place] = ""
    return ["".join([*texts[start : min(start + 1, end)], *later[start + 1 : end]]) for start, end in ranges]


def continued(tokens: pd.DataFrame) -> list[int]:
    """Rows of tokens that are further bytes of a character which the token before them has begun: that one shows it,
    whatever it has before."""
    starts, ends = (tokens[name].to_numpy(np.float64, na_value=np.nan) for name in ("char_start", "char_end"))
    return (np.flatnonzero((starts[1:] < ends[:-1]) & (ends[1:] == ends[:-1])) + 1).tolist()
