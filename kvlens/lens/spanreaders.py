"""Which query heads read a span: full KV's mass and the run's own on it, in one run and over many.

Over the needles of many prompts this finds a model's retrieval heads from a user's own prompts, by mass in place of
copied tokens (Wu et al., Retrieval Head Mechanistically Explains Long-Context Factuality).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlens.store.reader import TraceReader

TOP_SHARE = 0.1
"""the query heads with most mass that count as a run's top ones, as a share of all"""


@dataclass(frozen=True)
class SpanReaders:
    """Masses on some spans together, shares 0..1, float32 [steps, layers, query heads]; NaN: not sampled. Lower bounds:
    a query head lists its top spans alone."""

    spans: tuple[int, ...]
    full: np.ndarray
    """full KV's own mass; where that was not recorded, full attention by the run's own query"""
    mass: np.ndarray
    """this run's"""
    reference: bool
    """`full` is full KV's own"""

    def frame(self, start: int = 0, stop: int | None = None) -> pd.DataFrame:
        """Return one row per layer and query head over steps [start, stop): layer, q_head, full_mass, mass (means),
        n_steps (steps that were sampled)."""
        part = slice(start, stop)
        counts = np.isfinite(self.full[part]).sum(0)
        layer, q_head = np.indices(counts.shape)
        means = {name: step_mean(values[part]) for name, values in (("full_mass", self.full), ("mass", self.mass))}
        columns = {"layer": layer, "q_head": q_head, **means, "n_steps": counts}
        return pd.DataFrame({name: values.ravel() for name, values in columns.items()})


@dataclass(frozen=True)
class Stability:
    """What many prompts say together of a model's query heads."""

    frame: pd.DataFrame
    """layer, q_head, mean, spread (standard deviation over prompts), least, most, n (prompts), rank (mean rank, 1 =
    most mass), top_share (share of the prompts in which it is among the top TOP_SHARE), most first"""
    correlation: float
    """mean Spearman correlation of two prompts' maps; NaN: one prompt"""
    runs: tuple[str, ...]
    """uids, one per prompt"""

    def grid(self, column: str, layers: int, q_heads: int) -> np.ndarray:
        """Return a column as a map [layers, q_heads]."""
        values = np.full((layers, q_heads), np.nan)
        values[self.frame["layer"], self.frame["q_head"]] = self.frame[column]
        return values


def needle_spans(reader: TraceReader) -> tuple[int, ...]:
    """Return the prompt's spans that hold tokens of the needle; () if no needle is marked."""
    tokens = reader.tokens()
    starts, ends = (tokens[name].to_numpy(np.float64) for name in ("char_start", "char_end"))
    inside = np.zeros(len(tokens), bool)
    for start, end in reader.meta.needle:
        inside |= (starts < end) & (ends > start) & (ends > starts)
    places = np.flatnonzero(inside)
    spans = reader.spans()
    spans = spans[(spans["born_step"] < 0) & (spans["kind"] != "window")]
    rows = spans[["span", "tok_start", "tok_end"]].itertuples(index=False, name=None)
    return tuple(int(span) for span, start, end in rows if ((places >= start) & (places < end)).any())


def span_readers(reader: TraceReader, spans: Sequence[int]) -> SpanReaders:
    """Return the masses on some spans together."""
    full, mass = reader.mass_on_spans(spans)
    return SpanReaders(tuple(spans), full, mass, reader.has_reference_masses())


def step_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the steps that were sampled, NaN where none was."""
    counts = np.isfinite(values).sum(0)
    return np.where(counts > 0, np.nansum(values, 0, dtype=np.float64) / np.maximum(counts, 1), np.nan)


def retrieval_heads(readers: Iterable[TraceReader]) -> Stability:
    """Return the mean map of full KV's mass on the needle over prompts, its spread, and how stable ranks are. Runs of
    one prompt count once, the first of them. Each reader is read before the next is taken, and not afterwards. Raises
    ValueError for runs of different models, and if no run has a needle and full attention by span."""
    maps: dict[str, np.ndarray] = {}
    uids, models = [], set()
    for reader in readers:
        spans = needle_spans(reader)
        prompt = reader.meta.prompt_sha256 or reader.uid
        if not spans or not reader.meta.sampled or prompt in maps:
            continue
        models.add((reader.meta.model, reader.n_layers, reader.q_heads))
        maps[prompt] = step_mean(reader.mass_on_spans(spans)[0])
        uids.append(reader.uid)
    if not maps:
        raise ValueError("no run has a marked needle and full attention by span.")
    if len(models) > 1:
        raise ValueError("the runs are of different models.")
    stack = np.stack(list(maps.values()))
    ranks = np.stack([_ranks(values) for values in stack])
    top = ranks <= max(1, round(TOP_SHARE * stack[0].size))
    layer, q_head = np.indices(stack.shape[1:])
    columns = {
        "layer": layer,
        "q_head": q_head,
        "mean": stack.mean(0),
        "spread": stack.std(0),
        "least": stack.min(0),
        "most": stack.max(0),
        "n": np.full(stack.shape[1:], len(stack)),
        "rank": ranks.mean(0),
        "top_share": top.mean(0),
    }
    frame = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    frame = frame.sort_values("mean", ascending=False, kind="stable", ignore_index=True)
    return Stability(frame, _correlation(ranks.reshape(len(ranks), -1)), tuple(uids))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of a map, 1 = most; equal values share their mean rank."""
    return pd.Series(-values.ravel()).rank().to_numpy().reshape(values.shape)


def _correlation(ranks: np.ndarray) -> float:
    """Mean Spearman correlation over the pairs of rows; a row without differences correlates with none."""
    if len(ranks) < 2:
        return float("nan")
    centred = ranks - ranks.mean(1, keepdims=True)
    norms = np.sqrt((centred**2).sum(1))
    unit = centred / np.where(norms > 0, norms, 1)[:, None]
    return float((unit @ unit.T)[np.triu_indices(len(ranks), 1)].mean())
