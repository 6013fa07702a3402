"""The spans of an observed run: pages of the prompt, and the window of what follows; and the events that tell where a
page's tokens went."""

from __future__ import annotations

from typing import Any

import torch

from kvlens.rows import EventRow, SpanRow
from kvlens.spans import fixed_chunks
from kvlens.tiers.slots import WINDOW

PAGE = 16
"""tokens of a page, as full KV's runs have them"""
GROWTH, LEAST = 1.05, 1e-4
"""an error that was recorded is recorded again once it has grown by this factor and this much"""


class Pages:
    """Pages of the prompt without its last token; that token and all behind it are the window."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt = prompt_tokens - 1
        """tokens in pages"""
        self.spans = fixed_chunks(0, self.prompt, PAGE, kind="page")
        self.count = len(self.spans) + 1
        """span ids"""

    def rows(self) -> list[SpanRow]:
        """Return the spans as they are when prefill ends."""
        window = SpanRow(WINDOW, "window", self.prompt, self.prompt, -1, "the newest tokens, always attended")
        return [
            window,
            *(
                SpanRow(number, span.kind, span.tok_start, span.tok_end, -1, span.reason)
                for number, span in enumerate(self.spans, 1)
            ),
        ]

    def opened(self) -> list[EventRow]:
        """Return the events of prefill."""
        numbers = range(1, self.count)
        return [EventRow(-1, None, None, None, "span_open", number, None, False) for number in numbers]

    def spans_of(self, position: torch.Tensor) -> torch.Tensor:
        """Return the span of each position; the window's for positions that are none."""
        inside = (position >= 0) & (position < self.prompt)
        return torch.where(inside, position // PAGE + 1, WINDOW)

    def owner(self, positions: int, device: torch.device) -> torch.Tensor:
        """Return the span of positions 0 up to `positions`: int64."""
        return self.spans_of(torch.arange(positions, device=device))

    def lost(self, before: torch.Tensor, after: torch.Tensor, step: int, after_attention: bool) -> list[EventRow]:
        """Return events for pages that lost or regained tokens between two steps. before, after: bool [L, H_kv, n] of
        attended prompt positions."""
        counts = [self._counts(present) for present in (before, after)]
        events = []
        for layer, head, page in (counts[0] != counts[1]).nonzero().tolist():
            had, has = (int(count[layer, head, page]) for count in counts)
            whole = len(self.spans[page])
            kind = "evict" if not has else "kept" if has == whole else "thin"
            value = float(had - has) if has < had else None
            if has > had and kind == "thin":
                continue
            events.append(EventRow(step, layer, head, None, kind, page + 1, value, after_attention))
        return events

    def rewritten(
        self, errors_before: torch.Tensor, errors_after: torch.Tensor, whole: set[Any], step: int, after_attention: bool
    ) -> list[EventRow]:
        """Return events for pages of which tokens were rewritten between two steps, or further so.

        errors_before, errors_after float32 [L, H_kv, n]: of each attended prompt position, -1 where it is the written
        one; whole: (layer, KV head, span) that regained all tokens.
        """
        errors = [self._errors(error) for error in (errors_before, errors_after)]
        grew = (errors[1] >= 0) & ((errors[0] < 0) | (errors[1] > errors[0] * GROWTH + LEAST))
        return [
            EventRow(step, layer, head, None, "rewrite", page + 1, float(errors[1][layer, head, page]), after_attention)
            for layer, head, page in (errors[1] >= 0).nonzero().tolist()
            if bool(grew[layer, head, page]) or (layer, head, page + 1) in whole
        ]

    def _errors(self, error: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each page: float32 [L, H_kv, pages]."""
        padded = torch.nn.functional.pad(error[..., : self.prompt], (0, -self.prompt % PAGE), value=-1.0)
        return padded.unflatten(-1, (-1, PAGE)).amax(-1)

    def _counts(self, present: torch.Tensor) -> torch.Tensor:
        """Return how many tokens of each page are attended: int64 [L, H_kv, pages]."""
        padded = torch.nn.functional.pad(present[..., : self.prompt].long(), (0, -self.prompt % PAGE))
        return padded.unflatten(-1, (-1, PAGE)).sum(-1)
