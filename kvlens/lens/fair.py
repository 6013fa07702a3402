"""Eviction that is fair to segments as a what-if: the run again, its budget divided over the segments of the prompt."""

from __future__ import annotations

import pandas as pd

from kvlens import methods
from kvlens.lens.segments import segment_table
from kvlens.meta import RunMeta
from kvlens.store.reader import TraceReader
from kvlens.text.segments import BadSegment

PART = "fair"
COLUMNS = ("segment", "tokens", "kept_before", "kept_after")


def fair_change(meta: RunMeta) -> dict[str, str]:
    """Return what a what-if changes so that every segment keeps the same share of its tokens. Raises BadSegment
    `no_segments` for a run whose prompt names no segment, and NoComposition for a method that has no scores to divide
    or is fair already."""
    name = f"{PART}:{meta.method}"
    methods.get(name)
    if not meta.segments:
        raise BadSegment(
            "no_segments",
            f"run {meta.run_uid} names no segment of its prompt: run it anew with --segment NAME=MARKER or a question.",
            uid=str(meta.run_uid),
        )
    return {"method": name}


def fair_table(reader: TraceReader, repeat: TraceReader) -> pd.DataFrame:
    """Return one row per segment of the prompt: segment, tokens, kept_before of the run and kept_after of its fair
    repeat, the shares of the segment's tokens that are on the device after the last step, means over KV heads."""
    table = segment_table(reader)[["segment", "tokens", "kept_share"]].rename(columns={"kept_share": "kept_before"})
    repeat_shares = segment_table(repeat).set_index("segment")["kept_share"]
    table["kept_after"] = table["segment"].map(repeat_shares)
    return table[list(COLUMNS)]


def fair_lines(table: pd.DataFrame) -> list[str]:
    """Return one line per segment: its name, its tokens, and the share kept before and after."""
    width = max((len(str(name)) for name in table["segment"]), default=0)
    return [
        f"{row.segment:<{width}}  {row.tokens:>6,} tokens  kept {row.kept_before:.3f} -> {row.kept_after:.3f}"
        for row in table.itertuples()
    ]
