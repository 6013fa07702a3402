"""What a lane of a race shows of a step: a frame of a few numbers, and two maps of a byte per (layer, KV head).

A frame is made of what the recorder has frozen of a step, the maps of the record that it hands to the trace some steps
later, so that nothing is read of a trace while it is written; of a run that has ended the same is made of its trace.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.records import StepRecord
from kvlens.store.cells import integer, number

if TYPE_CHECKING:
    from kvlens.recording.facts import Seen
    from kvlens.store.reader import TraceReader  # it loads pandas, for which a run need not wait

NOT_RECORDED = 255
"""in a map; shares go from 0 to FULL"""
FULL = 254
Frame = dict[str, Any]
"""lane, step, text (the token), kl (nats; None: the contexts differ), agrees (likewise), moved, resident (bytes)"""
Maps = dict[str, Any]
"""lane, step, and two maps [L * H_kv] in base64: `read`, the share of the context's tokens that the KV head attends,
through a summary apart, and `missed`, the most of full attention's mass that one of its query heads does not attend
exactly; None: not recorded"""


def frame_of(lane: int, visited: Seen) -> Frame:
    """The frame of a step that has just ended."""
    moved = visited.kv["h2d_bytes"].sum() + visited.kv["d2h_bytes"].sum()
    loss = visited.facts.loss
    agrees, kl = (None, None) if loss is None else (loss.agrees, loss.kl)
    return _frame(lane, visited.facts.step, visited.facts.text, kl, agrees, int(moved), visited.resident_bytes)


def sketch_of(lane: int, step: int, attended: np.ndarray, coverage: np.ndarray | None, context: int) -> Maps:
    """The maps of a step that is not measured yet; those that follow may differ by a rounding."""
    return _maps(lane, step, attended, coverage, attended.shape[1], context)


def maps_of(lane: int, record: StepRecord, context: int) -> Maps:
    """The maps of a step, once it is measured. context: tokens that full KV attends at it."""
    attended = record.kv.get("attended_tokens")
    kv_heads = record.kv["resident_bytes"].shape[1]
    return _maps(lane, record.step, attended, record.head.get("coverage"), kv_heads, context)


def of_run(lane: int, reader: TraceReader) -> Iterator[tuple[Frame, Maps]]:
    """Frame and maps of each step of a stored run, the same that it gave while it went on."""
    tokens = reader.tokens()
    texts = tokens[tokens["step"].notna()].sort_values("step")["text"].tolist()
    losses = {integer(row.step): (number(row.kl), bool(row.agrees)) for row in reader.loss().itertuples()}
    attended, coverage = reader.kv_cube("attended_tokens"), reader.head_cube("coverage")
    prompt = len(tokens) - len(texts)
    for row in reader.steps().itertuples():
        step = integer(row.step)
        kl, agrees = losses.get(step, (None, None))
        moved = integer(row.h2d_bytes) + integer(row.d2h_bytes)
        yield (
            _frame(lane, step, texts[step], kl, agrees, moved, integer(row.resident_bytes)),
            _maps(lane, step, attended[step], coverage[step], reader.kv_heads, prompt + step),
        )


def _frame(lane: int, step: int, text: str, kl: float | None, agrees: bool | None, moved: int, resident: int) -> Frame:
    kl = None if kl is None or not math.isfinite(kl) else round(kl, 5)
    return {"lane": lane, "step": step, "text": text, "kl": kl, "agrees": agrees, "moved": moved, "resident": resident}


def _maps(
    lane: int, step: int, attended: np.ndarray | None, coverage: np.ndarray | None, kv_heads: int, context: int
) -> Maps:
    return {"lane": lane, "step": step, "read": _read(attended, context), "missed": _missed(coverage, kv_heads)}


def _read(attended: np.ndarray | None, context: int) -> str | None:
    """attended [L, H_kv], tokens."""
    return None if attended is None else _coded(attended.astype(np.float32) / np.float32(context))


def _missed(coverage: np.ndarray | None, kv_heads: int) -> str | None:
    """coverage [L, Hq]: of each group of query heads the one that finds least."""
    if coverage is None:
        return None
    groups = coverage.astype(np.float32).reshape(len(coverage), kv_heads, -1)
    return _coded(np.float32(1) - groups.min(2))


def _coded(shares: np.ndarray) -> str | None:
    """Shares [L, H_kv] as bytes in base64; None where not one is recorded."""
    recorded = ~np.isnan(shares)
    if not recorded.any():
        return None
    codes = np.where(recorded, np.rint(np.clip(np.nan_to_num(shares), 0, 1) * FULL), NOT_RECORDED)
    return base64.b64encode(codes.astype(np.uint8).tobytes()).decode("ascii")
