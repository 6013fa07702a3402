"""Merged entries: when prefill ends, the prompt between its first and its last tokens becomes fewer entries, each a
key, a value and how many tokens it stands for. The log of that number is added to the entry's score.

A method of this kind says how spans are cut (`cut`) and what the entries are (`merge`). Budgets, layout and placement
are here. Shapes: H_kv KV heads, D head size, E entries.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement


class MergedEntries(Method):
    """Base; `params` has `entries` (0: as many as the budget holds), `sinks` and `window`."""

    family = "prompt_eviction"
    params: Any

    @classmethod
    @abstractmethod
    def cut(cls, params: Any, prompt: PromptFacts, start: int, end: int, entries: int) -> list[Span]:
        """Return the spans of positions [start, end), of kind `chunk`: entries belong to them. entries 0: all stay."""

    @abstractmethod
    def merge(
        self, prompt: Prefilled, layer: int, chunks: list[Span], entries: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values [H_kv, E, D] of a layer's entries, how many tokens each stands for [H_kv, E], 0: none,
        and which chunk it belongs to, int64 [H_kv, E]."""

    @classmethod
    def span_room(cls, params: Any, prompt_tokens: int, entries: int) -> int:
        """Return how many chunks there can be."""
        return entries

    # --------------------------------------------------------------------------------------------------------- how many
    @classmethod
    def entries(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int, budget: int | None) -> int:
        """Return the entries of each KV head; 0: every token stays as it is."""
        most = prompt_tokens - min(params.sinks + params.window, prompt_tokens)
        if params.entries:
            return int(params.entries) if params.entries < most else 0
        if budget is None or cls._layout(params, prompt_tokens, max_new, 0).bytes(shape) <= budget:
            return 0
        one_entry, two = (cls._layout(params, prompt_tokens, max_new, many).bytes(shape) for many in (1, 2))
        return int(min(most, max(1, 1 + (budget - one_entry) // (two - one_entry))))

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        count = cls.entries(params, shape, prompt_tokens, max_new, 0 if not params.entries else None)
        whole = cls._layout(params, prompt_tokens, max_new, 0).bytes(shape)
        return min(whole, cls._layout(params, prompt_tokens, max_new, count).bytes(shape))

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        entries = cls.entries(params, prompt.shape, n, prompt.max_new, prompt.budget_bytes)
        sinks, until = min(params.sinks, n), max(n - params.window, min(params.sinks, n))
        sink_spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are kept as they are.")] if sinks else []
        return [*sink_spans, *cls.cut(params, prompt, sinks, until, entries)]

    @classmethod
    def _layout(cls, params: Any, n: int, max_new: int, entries: int) -> Layout:
        """entries 0: every token stays, with a span for each at most."""
        sinks, until = min(params.sinks, n), max(n - params.window, min(params.sinks, n))
        window = n - until + max_new
        if not entries:
            return Layout(Zones(until, 0, 0, window), until - sinks + 2, window_from=until, weighted=True)
        room = cls.span_room(params, n, entries) + 2
        return Layout(Zones(sinks, entries, 0, window), room, window_from=until, weighted=True)

    # ------------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        entries = self.entries(p, shape, n, context.max_new, context.budget_bytes)
        layout = self._layout(p, n, context.max_new, entries)
        spans = self.segments(p, context, ())
        chunks = [number for number, span in enumerate(spans) if span.kind == "chunk"]
        roles = ["sink" if span.kind == "sink" else "resident" for span in spans]
        until = layout.window_from
        if not entries:
            every = Kept.everywhere(torch.arange(until, device=prompt.keys.device))
            return layout, Placement(spans, ["resident"] * len(spans), roles, every)
        states = ["coarse" if span.kind == "chunk" else "resident" for span in spans]
        sink_tokens = Kept.everywhere(torch.arange(min(p.sinks, n), device=prompt.keys.device))
        placement = Placement(spans, states, roles, sink_tokens, coarse=chunks)
        merged_layers = [
            self.merge(prompt, layer, [spans[number] for number in chunks], entries) for layer in range(shape.layers)
        ]
        keys, values, counts, owner = (torch.stack(parts) for parts in zip(*merged_layers, strict=True))
        placement.coarse_keys, placement.coarse_values = keys, values
        placement.coarse_counts, placement.coarse_spans = counts, owner + chunks[0]
        return layout, placement
