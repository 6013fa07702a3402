"""From a selection to the additive bias of a step's attention. One function for all who attend, whatever drives them."""

from __future__ import annotations

import torch

from kvlens.memory.hot import FREE, ROLE, Slots
from kvlens.memory.placement import Selection
from kvlens.memory.spantable import SpanTable


def slot_bias(slots: Slots, spans: SpanTable, governed: torch.Tensor, is_hot: torch.Tensor, group: int,
              selection: Selection | None) -> torch.Tensor:  # fmt: skip
    """Bias [H_kv, G, C] over one layer's slots: log|S| on coarse entries, -inf on what a query head does not attend.

    governed bool [S]: spans that are attended where the selection says so; is_hot bool [H_kv, S].
    """
    role, span = slots.role, slots.span.long()
    out = torch.where(role == ROLE["coarse"], spans.log_lengths[span], torch.zeros((), device=role.device))
    out = out.masked_fill(role == FREE, float("-inf"))[:, None].repeat(1, group, 1)
    if selection is None:
        return out
    wide = span[:, None].expand(-1, group, -1)
    reads = (selection.fine & is_hot[:, None]).gather(2, wide)
    through_summary = (role == ROLE["coarse"])[:, None] & reads
    if selection.tokens is not None:
        offset = slots.position - spans.starts[span]
        reads = reads & (offset[:, None] < selection.tokens.gather(2, wide))
    token = (role == ROLE["resident"]) | (role == ROLE["reconstructed"])
    unread = (token & governed[span])[:, None] & ~reads
    return out.masked_fill(through_summary | unread, float("-inf"))
