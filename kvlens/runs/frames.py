"""What a lane of a race shows of a step: a few numbers and two maps of a byte per (layer, KV head).

A frame is made of the record that the recorder hands to the trace, so that nothing is read of a trace while it is
written; of a run that has ended the same frames are made of its trace.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from kvlens.rows import StepRecord
from kvlens.store.reader import TraceReader

NOT_RECORDED = 255
"""in a map; shares go from 0 to FULL"""
FULL = 254
Frame = dict[str, Any]
"""lane, step, text (the token), kl (nats; None: the contexts differ), agrees (likewise), moved, resident (bytes), and
two maps [L * H_kv] in base64: `read`, the share of the context's tokens that the KV head attends in full, exact or
rebuilt, and `missed`, the most of full attention's mass that one of its query heads lets lie; None: not recorded"""


def frame_of(lane: int, record: StepRecord, context: int) -> Frame:
    """The frame of a step. context: tokens that full KV would attend at it."""
    loss, kv = record.loss, record.kv
    return {
        "lane": lane,
        "step": record.step,
        "text": record.text,
        "kl": None if loss is None else round(loss.kl, 5),
        "agrees": None if loss is None else loss.agrees,
        "moved": int(kv["h2d_bytes"].sum() + kv["d2h_bytes"].sum()),
        "resident": record.resident_bytes,
        "read": _read(kv.get("attended_tokens"), context),
        "missed": _missed(record.head.get("coverage"), kv["h2d_bytes"].shape[1]),
    }


def frames_of(lane: int, reader: TraceReader) -> list[Frame]:
    """The frames of a stored run, the same that it gave while it went on."""
    tokens = reader.tokens()
    texts = tokens[tokens["step"].notna()].sort_values("step")["text"].tolist()
    losses = {int(row.step): row for row in reader.loss().itertuples()}
    steps, attended, coverage = reader.steps(), reader.kv_cube("attended_tokens"), reader.head_cube("coverage")
    prompt = len(tokens) - len(texts)
    found = []
    for row in steps.itertuples():
        step = int(row.step)
        loss = losses.get(step)
        found.append(
            {
                "lane": lane,
                "step": step,
                "text": texts[step],
                "kl": None if loss is None else round(float(loss.kl), 5),
                "agrees": None if loss is None else bool(loss.agrees),
                "moved": int(row.h2d_bytes + row.d2h_bytes),
                "resident": int(row.resident_bytes),
                "read": _read(attended[step], prompt + step),
                "missed": _missed(coverage[step], reader.kv_heads),
            }
        )
    return found


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
    known = ~np.isnan(shares)
    if not known.any():
        return None
    codes = np.where(known, np.rint(np.clip(np.nan_to_num(shares), 0, 1) * FULL), NOT_RECORDED)
    return base64.b64encode(codes.astype(np.uint8).tobytes()).decode("ascii")
