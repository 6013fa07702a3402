"""How long a run took until its first token, per token and in all, as a user of the model would measure it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlens.store.reader import TraceReader
from kvlens.store.schema import PHASE_COLUMNS


@dataclass(frozen=True)
class Latency:
    """Microseconds; NaN: not recorded. Recording, comparing with full KV and effects are no part of them."""

    first_token: float
    """TTFT: the prompt was read and placed, a question was fed, and the first token of the answer was chosen. NaN where
    an earlier run had read the prompt"""
    per_token: float
    """TPOT: mean duration of the steps after the first token"""
    end_to_end: float
    """until the last token was chosen"""


def latency(reader: TraceReader) -> Latency:
    """Return the latencies of a run, from its recorded times."""
    steps, prefill_s = reader.steps()["dur_us"].to_numpy(np.float64), reader.meta.prefill_s
    first_step = reader.meta.asked_steps + 1
    reading = np.nan if prefill_s is None or reader.meta.prompt_kept else prefill_s * 1e6
    until_first = reading + steps[:first_step].sum() if len(steps) >= first_step else np.nan
    later = steps[first_step:]
    return Latency(until_first, later.mean() if len(later) else np.nan, reading + steps.sum())


def phase_means(reader: TraceReader) -> dict[str, float]:
    """Return the mean microseconds per step of each phase; empty if phases were not timed."""
    frame = reader.phases()
    return {} if frame.empty else {name.removesuffix("_us"): float(frame[name].mean()) for name in PHASE_COLUMNS}
