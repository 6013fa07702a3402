"""What a stored run recorded, as pandas frames with documented columns (kvlens/tables/dictionary.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa

from kvlens.store.export import table_pieces
from kvlens.store.reader import TraceReader
from kvlens.tables.column import describe
from kvlens.tables.dictionary import MISSED, RECORDED, SPANS, STEPS


def heads(reader: TraceReader, start: int, stop: int | None) -> pd.DataFrame:
    """Return one row per layer and query head, over steps [start, stop)."""
    return described(reader.head_table(start, stop), "heads")


def steps(reader: TraceReader) -> pd.DataFrame:
    """Return one row per decode step: its token, what it lost against full KV, times and bytes."""
    tokens = reader.tokens()
    columns = tokens[tokens["step"].notna()].astype({"step": "int64"})
    columns = columns[["step", "token_id", "text", "logprob", "next_entropy"]]
    loss = reader.loss()[["step", "ref_text", "top_text", "agrees", "kl", "ref_logprob", "logprob", "ref_rank"]]
    loss = loss.astype({"agrees": "object"}).rename(
        columns={
            "ref_text": "full_text",
            "ref_logprob": "full_logprob_nats",
            "logprob": "full_token_logprob_nats",
            "ref_rank": "full_token_rank",
            "kl": "kl_nats",
        }
    )
    frame = reader.steps().merge(columns, on="step", how="left").merge(loss, on="step", how="left")
    frame = frame.rename(columns={"logprob": "logprob_nats", "next_entropy": "next_entropy_nats"})
    for name in ("full_text", "top_text", "agrees"):
        frame[name] = frame[name].astype("object").where(frame[name].notna(), None)
    return described(frame[list(STEPS)], "steps")


def token_nats(tokens: pd.DataFrame) -> np.ndarray:
    """Return the surprisal of each token [N] in nats: of the prompt as prefill saw it, of a generated token under the
    logits that chose it; NaN: not recorded. tokens: as TraceReader.tokens gives them."""
    generated = -tokens["logprob"].to_numpy(np.float64, na_value=np.nan)
    return np.where(tokens["step"].notna(), generated, tokens["surprisal"].to_numpy(np.float64, na_value=np.nan))


def spans(reader: TraceReader) -> pd.DataFrame:
    """Return one row per span of the prompt and of what was generated."""
    frame = reader.spans().rename(columns={"mean_surprisal": "mean_surprisal_nats"})
    tokens = reader.tokens()
    texts, nats = tokens["text"].tolist(), pd.Series(token_nats(tokens))
    ranges = list(zip(frame["tok_start"], frame["tok_end"], strict=True))
    means = pd.Series([nats.iloc[start:end].mean() for start, end in ranges], frame.index, float)
    frame["mean_surprisal_nats"] = frame["mean_surprisal_nats"].astype(float).fillna(means)
    frame["text"] = ["".join(texts[start:end]) for start, end in ranges]
    mass = reader.mean_span_mass().rename(columns={"mass": "mean_mass"})
    names = {"own": "mean_own_query_mass", "reference": "mean_reference_mass"}
    full = reader.mean_full().rename(columns=names)
    frame = frame.merge(mass, on="span", how="left").merge(full, on="span", how="left")
    return described(frame[list(SPANS)], "spans")


def missed(reader: TraceReader) -> pd.DataFrame:
    """Return one row per (layer, KV head, span) that was missed where the run lost, most important first."""
    from kvlens.lens.attribution import attribute

    frame = attribute(reader).rename(columns={"effect": "effect_logits"})
    return described(frame[list(MISSED)].astype({"layer": int, "kv_head": int, "span": int}), "missed")


def readers(reader: TraceReader, spans: Sequence[int] | None = None) -> pd.DataFrame:
    """Return one row per layer and query head: how much of its attention lies on some spans, on the needle's if none
    are given. Empty if there is no needle, or no full attention by span."""
    from kvlens.lens.spanreaders import needle_spans, span_readers

    chosen_spans = needle_spans(reader) if spans is None else tuple(spans)
    frame = span_readers(reader, chosen_spans).frame()
    return described(frame if chosen_spans and reader.meta.sampled else frame.iloc[:0], "readers")


def decisions(
    reader: TraceReader, kind: str | None, step: int | None, layer: int | None, kv_head: int | None
) -> pd.DataFrame:
    """Return one row per decision."""
    frame = reader.decisions(kind, step, layer, kv_head)
    for name in ("refused_span", "missed_span"):
        frame[name] = [" ".join(str(int(span)) for span in spans) for spans in frame[name]]
    return described(frame, "decisions")


def segments(reader: TraceReader, named: Mapping[str, str | tuple[int, int]] | None = None) -> pd.DataFrame:
    """Return one row per named part of the prompt: what was kept and evicted of it, its attention and its effect.
    named: markers or character ranges in place of the recorded parts."""
    from kvlens.lens.segments import segment_table

    return described(
        segment_table(reader, named).rename(columns={"largest_effect": "largest_effect_logits"}), "segments"
    )


def events(reader: TraceReader, step: int | None, layer: int | None, kv_head: int | None) -> pd.DataFrame:
    """Return the recorded events, in the order in which they happened."""
    return described(reader.events(step, layer, kv_head), "events")


def transfers(reader: TraceReader, step: int | None, layer: int | None, kv_head: int | None) -> pd.DataFrame:
    """Return the copies between device and host."""
    return described(reader.transfers(step, layer, kv_head), "transfers")


def rows(reader: TraceReader, table: str) -> pd.DataFrame:
    """Return a table that is read as it is stored: head-steps, kv-steps, phases or meta."""
    return described(pa.concat_tables(table_pieces(reader, table)).to_pandas(), table)


def described(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the frame with the units and meanings of its columns in its `attrs`."""
    return describe(frame, RECORDED[table])
