"""The text that a range of stored tokens stands for."""

from __future__ import annotations

import numpy as np
import pandas as pd


def passage(tokens: pd.DataFrame, start: int, end: int) -> str:
    """Text of the rows [start, end) of a reader's tokens. A character that several tokens share, one per byte of it,
    stands there once: each of these tokens has all of it as its own text."""
    texts = tokens["text"].iloc[start:end].tolist()
    first, last = (
        tokens[name].iloc[start:end].to_numpy(np.float64, na_value=np.nan) for name in ("char_start", "char_end")
    )
    again = np.flatnonzero((first[1:] == first[:-1]) & (last[1:] == last[:-1])) + 1
    for place in again:
        texts[place] = ""
    return "".join(texts)
