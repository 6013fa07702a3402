"""What one layer attends in one pass: positions of its entries, and the weights of the rows that are steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvlens.observing.calls import Call
from kvlens.observing.changes import Changes
from kvlens.observing.matching import NOTHING, Match, Matcher
from kvlens.observing.weights import hide, output_error, row_weights, scores_mask


@dataclass
class LayerSeen:
    """One layer in one pass; r rows, C entries. All of the chosen sequence."""

    query: torch.Tensor
    """float32 [Hq, r, D]"""
    weights: torch.Tensor
    """float32 [Hq, r, C]"""
    match: Match
    attended: torch.Tensor
    """bool [H_kv, r, C]: some query head of the KV head may attend the entry"""
    scaling: float
    output_error: float


def hidden_entries(call: Call, row: int) -> torch.Tensor | None:
    """Return the entries that a head-wise press hides, bool [H_kv, C]: kvpress keeps their indices on the module
    (`masked_key_indices`) and puts keys without weight in their place. None: none."""
    indices = getattr(call.module, "masked_key_indices", None)
    if indices is None or call.query.shape[2] == call.key.shape[2]:
        return None
    batch, heads, places = (torch.as_tensor(part, device=call.key.device) for part in indices)
    hidden = torch.zeros(call.key.shape[1:3], dtype=torch.bool, device=call.key.device)
    chosen = batch == row
    if not bool((places[chosen] < hidden.shape[1]).all()):
        return None  # left over from another press: kvpress's own function refuses them
    hidden[heads[chosen], places[chosen]] = True
    return hidden


class LayerWatch:
    """Watches one layer. `prepare` is called before the attention, `finish` after it."""

    def __init__(self, matcher: Matcher, changes: Changes | None) -> None:
        """changes: what a counterfactual holds or drops; None: nothing."""
        self._matcher, self._changes = matcher, changes
        self._rows = torch.empty(0, dtype=torch.long)
        self._added = torch.empty(0)
        self._match: Match | None = None

    def prepare(self, call: Call, row: int, rows: torch.Tensor, step: int, latent: torch.Tensor | None = None) -> Call:
        """Match the entries and return the call to make. rows: the query rows that are steps; step: of the first;
        latent [B, 1, C, D]: what the cache holds per token in place of each KV head's keys and values (MLA)."""
        added = scores_mask(call, row, rows)
        hidden = hidden_entries(call, row)
        group = call.query.shape[1] // call.key.shape[1]
        if hidden is not None:
            added = hide(added, hidden, group)
        live = _seen(added, call.key.shape[1]).any(1)
        if latent is None:
            match = self._matcher.match(call.key[row], call.value[row], live)
        else:
            match = self._matcher.match(latent[row], latent[row], live.any(0, keepdim=True)).spread(len(live))
        if self._changes is not None and step > 0:
            changed = self._changes.apply(call, row, rows, added, match)
            if changed is not None:
                call, added, match = changed
        self._rows, self._added, self._match = rows, added, match
        return call

    def finish(self, call: Call, row: int, output: torch.Tensor) -> LayerSeen:
        """Return what the layer attended. output: of the model's own call."""
        assert self._match is not None
        call = replace(call, key=call.key.detach(), value=call.value.detach())
        weights, _ = row_weights(call, row, self._rows, self._added)
        scaling = call.options.get("scaling")
        match, self._match = self._match, None
        return LayerSeen(
            call.query[row][:, self._rows].detach().float(),
            weights,
            match,
            _seen(self._added, call.key.shape[1]) & (match.kind != NOTHING)[:, None],
            call.query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            output_error(call, row, self._rows, weights, output),
        )


def _seen(added: torch.Tensor, heads: int) -> torch.Tensor:
    """Return bool [H_kv, r, C]: an entry that a query head of the KV head may attend. added [1|Hq, r, C]."""
    open_entries = added > -torch.inf
    if len(open_entries) == 1:
        return open_entries.expand(heads, -1, -1)
    return open_entries.unflatten(0, (heads, -1)).any(1)
