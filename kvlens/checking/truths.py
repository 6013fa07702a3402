"""Truths of every run (docs/concepts.md), as comparisons of records. A comparison returns its first
mismatch, or None.

Shapes: L layers, Hq query heads, H_kv KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from kvlens.checking.models import RecordList
from kvlens.decisions import DECISION_KINDS
from kvlens.records import StepRecord
from kvlens.rows import MASS_COLUMNS
from kvlens.shape import KVShape

MASS_ERROR = 1e-3
"""largest difference of a sum of masses from 1"""


@dataclass(frozen=True)
class Mismatch:
    """Where a truth fails. None: the place has no such number."""

    expected: str
    actual: str
    step: int | None = None
    layer: int | None = None
    head: int | None = None
    """query head or KV head, as `expected` says"""


def same_logits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], error: float = 0.0) -> Mismatch | None:
    """Compare the logits [V] of every step. error: largest difference allowed; 0: equal bit for bit."""
    if len(first) != len(second):
        return Mismatch(f"{len(first)} steps", f"{len(second)} steps")
    for step, (logits_a, logits_b) in enumerate(zip(first, second, strict=True)):
        gap = float((logits_a.float() - logits_b.float()).abs().max())
        if not (torch.equal(logits_a, logits_b) or gap <= error):
            allowed = f"logits that differ by at most {error:g}" if error else "equal logits"
            return Mismatch(allowed, f"a difference of {gap:.3g}", step)
    return None


def finite_logits(logits: Sequence[torch.Tensor]) -> Mismatch | None:
    """Refuse NaN and infinity in the logits [V] of a step."""
    bad = next((step for step, row in enumerate(logits) if not bool(row.isfinite().all())), None)
    return None if bad is None else Mismatch("finite logits", "NaN or infinity", bad)


def masses_add_up(steps: Sequence[StepRecord], shape: KVShape) -> Mismatch | None:
    """Add up the masses over span states, and over the top spans and the rest, of every step, layer and query head."""
    for number, record in enumerate(steps):
        total = sum(record.head[column] for column in MASS_COLUMNS)
        if record.step != number or np.shape(total) != (shape.layers, shape.q_heads):
            expected = f"step {number} with masses of {shape.layers} layers and {shape.q_heads} query heads"
            return Mismatch(expected, f"step {record.step} with {np.shape(total)}", number)
        for sums in (total, record.top_mass.sum(-1) + record.tail_mass):
            wrong = ~(np.abs(np.asarray(sums) - 1) <= MASS_ERROR)
            if wrong.any():
                layer, head = (int(place) for place in np.argwhere(wrong)[0])
                actual = f"{np.asarray(sums)[layer, head]:.4g}"
                return Mismatch("masses of a query head that add up to 1", actual, number, layer, head)
        wrong = ~np.isfinite(record.head["entropy"])
        if wrong.any():
            layer, head = (int(place) for place in np.argwhere(wrong)[0])
            return Mismatch("an entropy of every query head", "none", number, layer, head)
    return None


def spans_partition(records: RecordList) -> Mismatch | None:
    """Compare the spans with the positions: every position is in exactly one span or in the window."""
    assert records.prefilled is not None
    spans = records.prefilled.spans + [span for record in records.steps for span in record.spans]
    if [span.span for span in spans] != list(range(len(spans))):
        return Mismatch("span ids in the order of birth", str([span.span for span in spans][:8]))
    ranges = sorted((span.tok_start, span.tok_end) for span in spans if span.kind != "window")
    broken = next(((previous, right) for previous, right in pairwise(ranges) if previous[1] != right[0]), None)
    if broken is not None:
        return Mismatch(f"a span that begins at token {broken[0][1]}", f"token {broken[1][0]}")
    if ranges and ranges[0][0] != 0:
        return Mismatch("a span that begins at token 0", f"token {ranges[0][0]}")
    if spans[0].kind != "window":
        return Mismatch("the window as span 0", spans[0].kind)
    placed = max((span.tok_end for span in spans if span.kind != "window" and span.born_step == -1), default=0)
    if placed != spans[0].tok_start:
        return Mismatch(f"spans of the prompt up to the window at token {spans[0].tok_start}", f"up to {placed}")
    return None


def ledger_bytes(records: RecordList) -> Mismatch | None:
    """Compare the bytes of the transfers with the bytes of the KV heads, in both directions."""
    assert records.prefilled is not None
    rows = records.prefilled.transfers + [row for record in records.steps for row in record.transfers]
    for direction in ("h2d", "d2h"):
        by_row = sum(row.bytes for row in rows if row.direction == direction and row.step >= 0)
        by_head = sum(record.kv[f"{direction}_bytes"].sum() for record in records.steps)
        if by_row != by_head:
            return Mismatch(f"{by_row} {direction} bytes of transfers", f"{by_head:g} bytes of KV heads")
    late = next((row for row in rows if row.end_us < row.start_us), None)
    return None if late is None else Mismatch("a transfer that ends after it begins", str(late), late.step)


def bytes_add_up(steps: Sequence[StepRecord], shape: KVShape) -> Mismatch | None:
    """Compare what KV heads hold with what is resident, and what they read with what they attend."""
    for record in steps:
        resident, read = record.kv["resident_bytes"], record.kv["read_bytes"]
        rest = record.resident_bytes - resident.sum()
        if not 0 <= rest < resident.size:  # shared bytes are divided and rounded down
            actual = f"{resident.sum():g} bytes"
            return Mismatch(f"{record.resident_bytes} resident bytes in all KV heads", actual, record.step)
        entries = (record.kv["attended_tokens"] + record.kv["attended_coarse"]) * shape.head_token_bytes
        few = read < entries
        if few.any() and not record.head["mass_quantised"].any():
            layer, head = (int(place) for place in np.argwhere(few)[0])
            expected = f"at least {entries[layer, head]:g} bytes read by a KV head"
            return Mismatch(expected, f"{read[layer, head]:g}", record.step, layer, head)
    return None


def decisions_agree(steps: Sequence[StepRecord], shape: KVShape) -> str | None:
    """Decisions add up: asked = granted + refused + missed. The rows agree with `corrected` and `n_zoomed`, which are
    measured apart from them, and with `zoom_asked` and `zoom_refused`, which are made from them."""
    for record in steps:
        decided, size = record.decisions, (shape.layers, shape.q_heads)
        if decided is not None and (decided.requested != decided.granted + decided.refused + decided.missed).any():
            return f"step {record.step}: decisions do not add up"
        corrected = np.nansum(record.head.get("corrected", np.zeros(size))[:, :: shape.group])
        rows = 0 if decided is None else int((decided.kind == DECISION_KINDS.index("correction")).sum())
        if rows != corrected:
            return f"step {record.step}: {rows} rows of corrections, {corrected:.0f} corrected KV heads"
        zooms = None if decided is None else decided.kind == DECISION_KINDS.index("zoom")
        for column, count in (("zoom_asked", "requested"), ("n_zoomed", "granted"), ("zoom_refused", "refused")):
            total = 0 if decided is None or zooms is None else int(getattr(decided, count)[zooms].sum())
            if total != np.nansum(record.head.get(column, np.zeros(size))):
                return f"step {record.step}: {total} in rows is not the sum of {column}"
    return None


def within_budget(steps: Sequence[StepRecord], limit: int) -> Mismatch | None:
    """Compare resident and peak bytes of every step with the limit in bytes."""
    for record in steps:
        if not record.resident_bytes <= record.peak_bytes <= limit:
            actual = f"{record.resident_bytes:,} resident, {record.peak_bytes:,} peak"
            return Mismatch(f"at most {limit:,} bytes", actual, record.step)
    return None


def same_trace(first: RecordList, second: RecordList) -> Mismatch | None:
    """Compare two traces without their times."""
    assert first.prefilled is not None
    assert second.prefilled is not None
    if first.prefilled.spans != second.prefilled.spans:
        return Mismatch("equal spans of the prompt", "others")
    if len(first.steps) != len(second.steps):
        return Mismatch(f"{len(first.steps)} steps", f"{len(second.steps)} steps")
    for step_a, step_b in zip(first.steps, second.steps, strict=True):
        for name in ("token_id", "events"):
            if getattr(step_a, name) != getattr(step_b, name):
                return Mismatch(f"equal {name}", "others", step_a.step)
        for columns, columns_b in ((step_a.head, step_b.head), (step_a.kv, step_b.kv)):
            unequal = [name for name in columns if not np.array_equal(columns[name], columns_b[name], equal_nan=True)]
            if unequal:
                wrong = np.argwhere(~np.isclose(columns[unequal[0]], columns_b[unequal[0]], 0, 0, equal_nan=True))[0]
                layer, head = (int(place) for place in wrong)
                return Mismatch(f"equal {unequal[0]}", "others", step_a.step, layer, head)
        moved = [
            [(row.layer, row.kv_head, row.span, row.direction, row.cause, row.bytes) for row in record.transfers]
            for record in (step_a, step_b)
        ]
        if moved[0] != moved[1]:
            return Mismatch("equal transfers", "others", step_a.step)
    return None
