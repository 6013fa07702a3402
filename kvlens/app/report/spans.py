"""Spans as a figure of the report needs them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlens.store.cells import integer, number
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage


def listed(reader: TraceReader, step: int, layer: int, q_head: int) -> pd.DataFrame:
    """The spans that full attention would have read most at a step: span, reference (full KV's own mass, NaN: not
    recorded), own (own-query mass), mass, regret, kind, tokens (in words), text, needle."""
    table, tokens = reader.oracle(step, layer, q_head), reader.tokens()
    needle = reader.meta.needle
    rows = []
    for row in table.itertuples():
        start, end = integer(row.tok_start), integer(row.tok_end)
        window = row.kind == "window"
        part = tokens.iloc[start:end]
        text = "" if window else passage(tokens, start, end)
        rows.append(
            {
                "span": integer(row.span),
                "reference": number(row.reference),
                "own": number(row.own),
                "mass": number(row.mass),
                "regret": number(row.regret),
                "kind": str(row.kind),
                "tokens": "the latest tokens" if window else f"tokens {start}–{end - 1}",
                "text": shortened(text, 160),
                "needle": not window and _holds(part, needle),
            }
        )
    columns = ["span", "reference", "own", "mass", "regret", "kind", "tokens", "text", "needle"]
    return pd.DataFrame(rows, columns=columns)


def shortened(text: str, most: int) -> str:
    """Text of at most about `most` characters, cut in the middle."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _holds(part: pd.DataFrame, needle: Sequence[tuple[int, int]]) -> bool:
    """Some token of the part lies in one of the character ranges [start, end)."""
    return any(bool(((part["char_start"] < end) & (part["char_end"] > start)).any()) for start, end in needle)
