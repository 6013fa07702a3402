"""A method whose decisions that depend on meaning are replayed: random weights cannot make them. Everything it computes
to decide is computed, and its answer is then replaced.

Each KV head wants a window that slides over a random order of its spans, so that every step misses the stated share
exactly. What lies in host memory is random as well: prefill's offload, one copy per unit, is left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvlens.lab.gpu.floors import StepShape
from kvlens.memory.placement import Placement, Selection
from kvlens.methods.base import Method
from kvlens.methods.run_inputs import Prefilled, RunContext
from kvlens.tiers.layout import Layout

TURNS = 256
"""steps after which drawn corrections come again"""


class Replay:
    """Wishes of all layers, and which KV heads wait for theirs, on the device. `moves` off: nobody wishes, so that two
    timings give what recall costs."""

    def __init__(self, shape: StepShape, alike: bool) -> None:
        self.shape, self.alike = shape, alike
        self.moves = True
        self.cold: list[int] = []

    def begin(self, context: RunContext, layout: Layout, placement: Placement) -> None:
        """What went to host memory when prefill ended, and how much of it the recall zone holds."""
        kv, device = context.shape, context.device
        self.cold = [i + 1 for i in placement.offload]
        lengths = {i: len(placement.spans[i - 1]) for i in self.cold}
        longest = max(lengths.values(), default=1)
        full = [i for i in self.cold if lengths[i] == longest]
        recall = layout.zones_of(kv.layers - 1).recall
        target = min(self.shape.wanted, recall // longest)
        self.missed = max(1, round(self.shape.missed / max(1, self.shape.wanted) * target))
        while target + self.missed > len(full) and target > 1:
            target, self.missed = target - 1, min(self.missed, target - 1)
        self.wanted, self.tokens = target, longest
        orders = [torch.randperm(len(full)) for _ in range(1 if self.alike else kv.kv_heads)]
        self.order = torch.tensor(full)[torch.stack(orders).expand(kv.kv_heads, -1)].to(device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.requested = self._window(target)
        self.before = self.requested.clone()
        self.waits = (torch.rand(TURNS, kv.layers, kv.kv_heads) < self.shape.waited).to(device)
        self.now = torch.zeros(kv.layers, kv.kv_heads, dtype=torch.bool, device=device)
        self.fine = torch.zeros(kv.layers, kv.kv_heads, 0, dtype=torch.bool, device=device)
        """[L, H_kv, S]: spans that are read at this step; its width is known when the method first selects"""
        self.parts = self.fine.long()
        """the same with the tokens read of each"""

    def _window(self, wanted_count: int) -> torch.Tensor:
        place = (self.step * self.missed + torch.arange(wanted_count, device=self.step.device)) % self.order.shape[1]
        return self.order[:, place]

    def next(self, spans: int) -> None:
        """Another step: its wishes, those of the one before, and what every layer answers. Made once for all layers, so
        that what stands in for a decision is no part of a layer's time. spans: span ids that the method selects from.
        """
        if self.fine.shape[2] != spans:
            self.fine = self.fine.new_zeros(*self.fine.shape[:2], spans)
            self.parts = self.fine.long()
        self.before.copy_(self.requested)
        self.step.add_(1)
        self.requested.copy_(self._window(self.wanted))
        self.now.copy_(self.waits.index_select(0, self.step % TURNS)[0])
        read = torch.where(self.now[..., None], self.requested, self.before)
        self.fine.zero_()
        self.fine.scatter_(2, read, True)
        self.parts.copy_(self.fine).mul_(self.tokens)

    def answer(self, layer: int, selection: Selection) -> Selection:
        """`selection` with the replayed wishes in place of its own. Where all KV heads wait there is one plan, not one
        before the attention and an empty one after it."""
        now = self.now[layer] if selection.now is not None and self.shape.waited < 1 else None
        fine = self.fine[layer, :, None].expand_as(selection.fine)
        tokens = None if selection.tokens is None else self.parts[layer, :, None].expand_as(selection.tokens)
        requested = self.requested if self.moves else self.requested[:, :0]
        return replace(selection, fine=fine, requested=requested, tokens=tokens, now=now)


def replayed(method: type[Method], replay: Replay) -> type[Method]:
    """`method` with its placement's offload left out and its wishes replayed."""

    class Replayed(method):  # type: ignore[misc, valid-type]
        _first_layer = -1

        def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
            layout, placement = super().prefill_end(prompt)
            if placement.offload:
                replay.begin(self.context, layout, placement)
            return layout, replace(placement, offload=[], selectable=[*placement.selectable, *placement.offload])

        def select(self, layer: int, q: torch.Tensor) -> Selection | None:
            selection: Selection | None = super().select(layer, q)
            if selection is None or not replay.cold:
                return selection
            if self._first_layer in (-1, layer):
                self._first_layer = layer
                replay.next(selection.fine.shape[2])
            return replay.answer(layer, selection)

    return Replayed
