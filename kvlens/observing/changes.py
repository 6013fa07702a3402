"""Holds and drops in a generation that kvlens does not steer: held keys and values are put back beside the cache's own
entries, dropped entries are masked. The cache itself is never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlens.holds import Drop, Hold
from kvlens.observing.calls import Call
from kvlens.observing.matching import EXACT, Match
from kvlens.observing.refusals import refuse_hold
from kvlens.observing.written import Written


class Changes:
    """What is held and dropped in one layer: bool [H_kv, n] of positions."""

    def __init__(self, held: torch.Tensor, dropped: torch.Tensor, written: Written) -> None:
        self._held, self._dropped, self._written = held, dropped, written

    def apply(
        self, call: Call, row: int, rows: torch.Tensor, added: torch.Tensor, match: Match
    ) -> tuple[Call, torch.Tensor, Match] | None:
        """Return (the call to make, its added scores [Hq, m, C'], the positions of its entries); None: the layer's call
        stays as it is. A held position is put back for the KV heads that do not attend it exactly."""
        heads, group = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
        attended = (added > -torch.inf).expand(heads * group, -1, -1).unflatten(0, (heads, -1)).any(2).any(1)
        exact = torch.zeros_like(self._held)
        present = attended & (match.kind == EXACT) & (match.position >= 0) & (match.position < exact.shape[1])
        head, entry = present.nonzero(as_tuple=True)
        exact[head, match.position[head, entry]] = True
        missing = self._held & ~exact
        dropped = self._of_entries(self._dropped, match)
        # what stands for a held position in another form would count it twice
        replaced = self._of_entries(missing, match)
        places = missing.any(0).nonzero()[:, 0]
        if not len(places) and not bool(dropped.any()):
            return None
        if call.key.shape[0] > 1:
            raise refuse_hold("batch_hold", "holds and drops need a batch of one sequence.", rows=call.key.shape[0])
        keys, values = self._written.keys, self._written.values
        if keys is None or values is None:
            raise refuse_hold("no_shadow", "a hold puts back the shadow copy: pass shadow=True.")
        hidden = (dropped | replaced).repeat_interleave(group, 0)[:, None]
        own = added.expand(heads * group, -1, -1).masked_fill(hidden, -torch.inf)
        beside = torch.zeros(heads, len(places), device=own.device).masked_fill_(~missing[:, places], -torch.inf)
        beside = beside.repeat_interleave(group, 0)[:, None].expand(-1, own.shape[1], -1)
        whole = torch.cat([own, beside], -1)
        mask = whole.clamp(min=torch.finfo(call.query.dtype).min).to(call.query.dtype)[None]
        changed = replace(
            call,
            key=torch.cat([call.key, keys[None][:, :, places].to(call.key.dtype)], 2),
            value=torch.cat([call.value, values[None][:, :, places].to(call.value.dtype)], 2),
            mask=mask,
        )
        new = Match(
            torch.cat([match.position, places.expand(heads, -1)], 1),
            torch.cat([match.kind, missing[:, places].to(torch.uint8) * EXACT], 1),
            torch.cat([match.error, match.error.new_zeros(heads, len(places))], 1),
            torch.cat([match.ambiguous, match.ambiguous.new_zeros(heads, len(places))], 1),
        )
        return changed, whole, new

    @staticmethod
    def _of_entries(positions: torch.Tensor, match: Match) -> torch.Tensor:
        """Return the entries, bool [H_kv, C], whose positions are among bool [H_kv, n]."""
        known = (match.position >= 0) & (match.position < positions.shape[1])
        at = match.position.clamp(0, positions.shape[1] - 1)
        return positions.gather(1, at) & known


def layer_changes(
    layer: int, holds: Sequence[Hold], drops: Sequence[Drop], kv_heads: int, positions: int, written: Written
) -> Changes | None:
    """Return what is held and dropped in a layer; None: nothing. positions: of the prompt."""
    masks = []
    for ranges in (holds, drops):
        mask = torch.zeros(kv_heads, positions, dtype=torch.bool)
        for change in ranges:
            for of_layer, head in change.heads:
                if of_layer == layer:
                    mask[head, change.tok_start : change.tok_end] = True
        masks.append(mask)
    return Changes(masks[0], masks[1], written) if any(bool(mask.any()) for mask in masks) else None
