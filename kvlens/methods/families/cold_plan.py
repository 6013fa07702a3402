"""Arithmetic of runs that keep pages of tokens in the cold tier: pages, window, slots. No torch.

Pages of p tokens follow one another after the sinks. A page is in the window until it leaves, then in the cold tier,
with an index of it on the device. Device bytes grow with the sequence through that index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.methods.parameters import param
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout, Zones


@dataclass(frozen=True)
class ColdPagesParameters:
    """Lengths are in tokens. A method gives its own defaults."""

    tokens: int = param(
        0,
        "tokens per KV head that attention may read: sinks, window and selected ones; 0: as many selected ones as the "
        "byte budget holds",
    )
    sinks: int = param(4, "first tokens always attended")
    window: int = param(64, "newest tokens always attended")
    page: int = param(16, "tokens per page")
    dense_layers: int = param(0, "first layers that keep every token")
    window_rule: str = param(
        "average",
        "the oldest page leaves so that the window holds W tokens on average (W + p/2 at most), at least W, or at "
        "most W",
        choices=("average", "at_least", "at_most"),
        ours=True,
    )

    def __post_init__(self) -> None:
        for name in ("tokens", "sinks", "window", "dense_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0.")
        if self.page < 1:
            raise ValueError("page must be at least 1 token.")
        if self.ring < self.leaves:
            content = f"pages of {self.page}: the page being written"
            content = content if self.leaves == self.page else f"{self.leaves} tokens that leave together: they"
            raise ValueError(f"window={self.window} is too small for {content} must fit into the window.")
        least = self.sinks + self.window + self.least_selected
        if 0 < self.tokens < least:
            content = "one page" if self.least_selected > 1 else "one token"
            raise ValueError(f"tokens must be 0 or at least {least}: sinks, window and {content}.")

    @property
    def ring(self) -> int:
        """Most tokens in the window, the step's own included."""
        return self.window + {"average": self.leaves // 2, "at_least": self.leaves - 1, "at_most": 0}[self.window_rule]

    @property
    def leaves(self) -> int:
        """Tokens that leave the window together: whole pages."""
        return self.page

    @property
    def least_selected(self) -> int:
        """Fewest tokens that can be selected."""
        return self.page


@dataclass(frozen=True)
class Plan:
    """Sizes of a run that keeps its pages in the cold tier. Everything but `recall` is fixed by prompt and
    parameters."""

    sinks: int
    window_from: int
    """where the window begins at step 0"""
    pages: int
    """pages that will have left the window when the run ends: for so many there is room in the index"""
    pages_now: int
    """of them, those that have left it when decoding begins"""
    recall: int
    """room per (layer, KV head) for selected ones, in units"""
    unit: int
    """tokens of a unit: a page's, or one"""
    ring: int
    prompt_tokens: int
    max_new: int

    @property
    def first_id(self) -> int:
        """Span id of page 0: after the window's and the sinks'."""
        return 1 + (self.sinks > 0)

    def layout(self, params: Any, shape: KVShape, streamed: bool, token_major: bool) -> Layout:
        """streamed, token_major: as kvlens.tiers.layout.Layout has them."""
        paged = Zones(self.sinks, 0, self.recall * self.unit, self.ring)
        whole = Zones(self.window_from, 0, 0, self.prompt_tokens - self.window_from + self.max_new)
        dense = tuple(range(params.dense_layers))
        by_page = self.unit == params.page
        return Layout(
            tuple(whole if layer in dense else paged for layer in range(shape.layers)),
            self.first_id + self.pages,
            params.page * shape.head_token_bytes if streamed else 0,
            self.window_from,
            dense=dense,
            streamed=streamed,
            token_major=token_major,
            cold_pages=self.pages if by_page else 0,
            cold_page_tokens=params.page if by_page else 0,
        )


def window_from(params: Any, sinks: int, tokens: int) -> int:
    """Where the window begins when there are `tokens` tokens, the step's own included."""
    times = -(-max(0, tokens - params.ring - sinks) // params.leaves)
    return sinks + times * params.leaves


def whole_layout(params: Any, prompt_tokens: int, max_new: int) -> Layout:
    """Laid out as FullKV, when nothing has to leave the device."""
    sinks = min(params.sinks, prompt_tokens)
    spans = 1 + (sinks > 0) + -(-(prompt_tokens - sinks) // params.page)
    return Layout(Zones(prompt_tokens, 0, 0, max_new), spans, window_from=prompt_tokens)


def smallest_plan(params: Any, shape: KVShape, prompt_tokens: int, max_new: int, unit: int) -> Plan | None:
    """With room for one selected unit, or for as many as `tokens` names; None: all tokens are to stay on the device."""
    sinks, total = min(params.sinks, prompt_tokens), prompt_tokens + max_new
    start = window_from(params, sinks, prompt_tokens + 1)
    pages = (window_from(params, sinks, total) - sinks) // params.page
    if pages == 0 or params.dense_layers >= shape.layers or (params.tokens and total <= params.tokens):
        return None
    units = (params.tokens - params.sinks - params.window) // unit if params.tokens else 1
    ring = min(params.ring, total - sinks)
    room = min(units, pages * (params.page // unit))
    return Plan(sinks, start, pages, (start - sinks) // params.page, room, unit, ring, prompt_tokens, max_new)
