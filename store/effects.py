"""Effects of spans on the choices of lost steps, on their way to disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kvlens.instruments import Effects
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN


def effect_table(effects: Sequence[Effects], heads: tuple[int, int], steps: int) -> pa.Table:
    """Rows of effect, as they come: one per (layer, KV head, span) of each step.

    `heads`: (layers, KV heads); `steps`: how many steps the trace holds. Raises TraceError for arrays of unequal
    lengths, a step, layer or KV head that the run does not have, a span id that cannot be stored, an effect below 0 (0
    is one too small for float32), an effect or lead that is no number, and a triple named twice.
    """
    for each in effects:
        for name in ("layer", "kv_head", "span"):
            check_shape(each.step, f"effects.{name}", getattr(each, name), (each.effect.size,))
        check_shape(each.step, "effects.effect", each.effect, (each.effect.size,))
    counts = [each.effect.size for each in effects]
    parts = [np.stack(np.broadcast_arrays(each.step, each.layer, each.kv_head, each.span)) for each in effects]
    ids = np.concatenate([np.empty((4, 0), np.int64), *parts], axis=1)
    lead = np.repeat(np.array([each.lead for each in effects], np.float32), counts)
    effect = np.concatenate([np.empty(0, np.float32), *(each.effect for each in effects)]).astype(np.float32)
    most = np.array([steps, *heads, MAX_SPAN + 1])[:, None]
    known_values = ((ids >= 0) & (ids < most)).all() and np.unique(ids, axis=1).shape == ids.shape
    if not known_values or not (np.isfinite(effect) & (effect >= 0) & np.isfinite(lead)).all():
        raise TraceError(
            "Effects are logged of a step, head or span that cannot be stored, twice, below 0 or that are no numbers; "
            "this is a bug in what logs them."
        )
    step, layer, kv_head, span = ids
    return pa.table(
        {
            "step": step.astype(np.uint32),
            "lead": lead,
            "layer": layer.astype(np.uint8),
            "kv_head": kv_head.astype(np.uint8),
            "span": span.astype(np.uint16),
            "effect": effect,
        }
    )
