"""What a counterfactual drops: token ranges that chosen (layer, KV head)s never attend, whatever the method does with
them. It is a mask over the slots that a step attends anyway: nothing moves and nothing is freed, so the method has
its budget as without it, and goes on deciding as if the tokens were attended. The mask's own tables are on the device:
the account has them under `dropped`, beside the budget.

A summary entry is masked where all tokens of its span are dropped; one of a span that is dropped in part stays, since
what it says of the others cannot be taken apart, and so does one that stands for no span's tokens. A step's own token
is attended in its step, and where a query head has nothing else left it attends that alone.

Shapes: H_kv KV heads, h of a part of a layer, G query heads of each, P positions of the run, C slots, S spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kvlens.memory.holds import Drop
from kvlens.memory.hot_tier import FREE, ROLE, Slots
from kvlens.memory.placement import Selection
from kvlens.memory.span_table import SpanTable

NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class _Layer:
    """One layer's dropped positions."""

    since: torch.Tensor
    """int32 [H_kv, P + 1]: first step at which the position is dropped, NEVER: at none; the last one is no position"""
    hidden: torch.Tensor
    """bool [H_kv, P + 1]: positions that are dropped at this step"""
    begins: int
    """first step at which any is"""


class Dropped:
    """Owns which positions each KV head leaves out, and from when on. Empty for a run without drops."""

    def __init__(self, drops: Sequence[Drop], kv_heads: int, positions: int, device: torch.device) -> None:
        """positions: of the whole run."""
        self.step = self.position = -1
        since: dict[int, torch.Tensor] = {}
        for drop in drops:
            for layer, head in drop.heads:
                if layer not in since:
                    since[layer] = torch.full((kv_heads, positions + 1), NEVER, dtype=torch.int32)
                since[layer][head, drop.tok_start : min(drop.tok_end, positions)].clamp_(max=drop.from_step)
        self._layers = {
            layer: _Layer(table.to(device), torch.zeros_like(table, dtype=torch.bool, device=device), int(table.min()))
            for layer, table in sorted(since.items())
        }
        self._begin = [
            (drop.from_step, layer, head, drop.span, None if drop.whole else float(drop.tok_end - drop.tok_start))
            for drop in drops
            for layer, head in drop.heads
        ]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the mask needs on the device."""
        return tuple(table for layer in self._layers.values() for table in (layer.since, layer.hidden))

    def start_step(self, step: int, position: int) -> list[tuple[int, int, int, float | None]]:
        """The step whose token will lie at `position` begins. Returns the (layer, KV head, span, how many of its
        tokens, None for all) that are dropped from this step on."""
        self.step, self.position = step, position
        for tables in self._layers.values():
            tables.hidden.copy_(tables.since <= step)
            tables.hidden[:, position] = False
        return [told[1:] for told in self._begin if told[0] == step]

    def live(self, layer: int) -> bool:
        """Whether the layer leaves anything out at this step."""
        return layer in self._layers and self.step >= self._layers[layer].begins

    def counted(self, layer: int, selection: Selection) -> Selection:
        """The selection with its blend's share of the output made smaller by what it attends and what is dropped: the
        mean value stands in for that as for whatever else is not attended."""
        if selection.blend is None or selection.positions is None or not self.live(layer):
            return selection
        blend, hidden = selection.blend, self._layers[layer].hidden[:, None, :-1]
        less = (blend.weights * (hidden & selection.positions)).sum(-1)
        return replace(selection, blend=replace(blend, share=(blend.share - less).clamp(min=0)))

    def hide(self, layer: int, heads: slice, slots: Slots, spans: SpanTable, bias: torch.Tensor) -> torch.Tensor:
        """The bias [h, G, C] over some KV heads' slots without what is dropped, in place."""
        hidden = self._layers[layer].hidden[heads]
        where = slots.position.long()
        gone = hidden.gather(1, torch.where(where < 0, hidden.shape[1] - 1, where))
        summary = slots.role == ROLE["coarse"]
        gone = torch.where(summary, _whole(hidden, spans).gather(1, slots.span.long()), gone)
        bias.masked_fill_(gone[:, None], float("-inf"))
        own = (slots.position == self.position) & ~summary & (slots.role != FREE)
        nothing = (bias == float("-inf")).all(-1, keepdim=True)
        return bias.masked_fill_(nothing & own[:, None], 0.0)


def _whole(hidden: torch.Tensor, spans: SpanTable) -> torch.Tensor:
    """bool [h, S]: spans that have tokens, all of which are in hidden [h, P + 1]."""
    before = F.pad(hidden[:, :-1].long().cumsum(1), (1, 0))
    start, end = spans.ranges().clamp(max=before.shape[1] - 1).to(hidden.device).unbind(1)
    whole = (before[:, end] - before[:, start] == end - start) & (end > start)
    return F.pad(whole, (0, spans.capacity - whole.shape[1]))
