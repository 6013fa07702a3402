"""Where spans lie in the text, and what stands there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvlens.text.passages import passages


def span_text(tokens: pd.DataFrame, start: int, end: int, limit: int = 120) -> str:
    """Text of token positions [start, end), shortened in the middle."""
    return span_texts(tokens.iloc[start:end], [(0, end)], limit)[0]


def span_texts(tokens: pd.DataFrame, ranges: Sequence[tuple[int, int]], limit: int = 120) -> list[str]:
    """Return `span_text` of each range; the tokens are looked through once."""
    texts = passages(tokens, ranges)
    return [text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}" for text in texts]


def window_range(spans: pd.DataFrame, step: int, written: int) -> tuple[int, int]:
    """Positions [start, end) of the window at a step: those of the `written` ones that no other living span covers."""
    alive = spans[(spans["kind"] != "window") & (spans["born_step"] <= step) & ~(spans["died_step"] <= step)]
    covered = np.zeros(written, bool)
    for start, end in zip(alive["tok_start"], alive["tok_end"], strict=True):
        covered[int(start) : int(end)] = True
    free = np.flatnonzero(~covered)
    return (int(free[0]), int(free[-1]) + 1) if free.size else (written, written)
