"""From a selection to who reads what of a layer's slots. One place for all who attend, whatever drives them."""

from __future__ import annotations

import torch

from kvlens.kernels.slot_tables import Codes, SlotReads
from kvlens.memory.hot_tier import FREE, ROLE, Slots
from kvlens.memory.placement import Selection
from kvlens.memory.span_table import SpanTable

CODES = Codes(ROLE["coarse"], ROLE["resident"], ROLE["reconstructed"], FREE)


def slot_reads(
    slots: Slots,
    spans: SpanTable,
    selectable: torch.Tensor,
    is_hot: torch.Tensor,
    group: int,
    selection: Selection | None,
) -> SlotReads:
    """What kvlens.kernels.slot_tables makes a bias and its pages from. selectable bool [S]: spans that are attended
    where the selection says so; is_hot bool [H_kv, S]; group: query heads of a KV head."""
    fine, tokens, positions = (
        (None, None, None) if selection is None else (selection.fine, selection.tokens, selection.positions)
    )
    return SlotReads(
        slots.role,
        slots.span,
        slots.position,
        spans.log_lengths,
        spans.starts,
        selectable,
        is_hot,
        group,
        CODES,
        fine,
        tokens,
        positions,
    )
