"""FreeKV's arithmetic: pages, window, slots and bytes of a run. No torch.

Pages of p tokens follow one another after the sinks. A page is in the window until it leaves, then in the cold tier,
with a summary on the device. Device bytes grow with the sequence through the summaries: 1/p of its KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlens.memory.layout import Layout, Zones
from kvlens.methods.freekv.params import FreeKVParameters
from kvlens.shape import KVShape

INDEX_BYTES = 8
"""one entry of the table of selected pages, int64; the number of pages likewise"""


@dataclass(frozen=True)
class Plan:
    """Sizes of a run that keeps its pages in the cold tier. Everything but `recall` is fixed by prompt and
    parameters."""

    sinks: int
    window_from: int
    """where the window begins at step 0"""
    pages: int
    """pages that will have left the window when the run ends: rows of the summary table"""
    pages_now: int
    """of them, those that have left it when decoding begins"""
    recall: int
    """pages of room per (layer, KV head) for selected ones"""
    ring: int
    prompt_tokens: int
    max_new: int

    @property
    def first_id(self) -> int:
        """Span id of page 0: after the window's and the sinks'."""
        return 1 + (self.sinks > 0)

    def layout(self, params: FreeKVParameters, shape: KVShape) -> Layout:
        paged = Zones(self.sinks, 0, self.recall * params.page, self.ring)
        whole = Zones(self.window_from, 0, 0, self.prompt_tokens - self.window_from + self.max_new)
        dense = tuple(range(params.dense_layers))
        zones = tuple(whole if layer in dense else paged for layer in range(shape.layers))
        return Layout(
            zones,
            self.first_id + self.pages,
            params.page * shape.head_token_bytes,
            self.window_from,
            dense=dense,
            streamed=True,
            token_major=True,
            cold_pages=self.pages,
            cold_page_tokens=params.page,
        )

    def bytes(self, params: FreeKVParameters, shape: KVShape) -> int:
        """Device bytes at their peak: slots, tables, staging, summaries, the last step's queries and selections, and a
        page on its way out of the window."""
        layers = shape.layers - params.dense_layers
        summaries = self.pages * shape.kv_heads * shape.head_token_bytes
        queries = shape.q_heads * shape.head_dim * shape.itemsize
        selected = shape.kv_heads * self.recall * INDEX_BYTES
        leaving = params.page * shape.token_bytes if self.pages > self.pages_now else 0
        return (
            self.layout(params, shape).bytes(shape) + layers * (summaries + queries + selected) + INDEX_BYTES + leaving
        )


def window_from(params: FreeKVParameters, sinks: int, tokens: int) -> int:
    """Where the window begins when there are `tokens` tokens, the step's own included."""
    pages = -(-max(0, tokens - params.ring - sinks) // params.page)
    return sinks + pages * params.page


def whole_layout(params: FreeKVParameters, prompt_tokens: int, max_new: int) -> Layout:
    """Laid out as FullKV, when nothing has to leave the device."""
    sinks = min(params.sinks, prompt_tokens)
    spans = 1 + (sinks > 0) + -(-(prompt_tokens - sinks) // params.page)
    return Layout(Zones(prompt_tokens, 0, 0, max_new), spans, window_from=prompt_tokens)


def smallest_plan(params: FreeKVParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> Plan | None:
    """With room for one selected page, or for as many as `tokens` names; None: all tokens are to stay on the device."""
    sinks, total = min(params.sinks, prompt_tokens), prompt_tokens + max_new
    start = window_from(params, sinks, prompt_tokens + 1)
    pages = (window_from(params, sinks, total) - sinks) // params.page
    if pages == 0 or params.dense_layers >= shape.layers or (params.tokens and total <= params.tokens):
        return None
    asked = (params.tokens - params.sinks - params.window) // params.page if params.tokens else 1
    ring = min(params.ring, total - sinks)
    return Plan(sinks, start, pages, (start - sinks) // params.page, min(asked, pages), ring, prompt_tokens, max_new)


def floor_bytes(params: FreeKVParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
    """The least device bytes of a run."""
    plan = smallest_plan(params, shape, prompt_tokens, max_new)
    whole = whole_layout(params, prompt_tokens, max_new).bytes(shape)
    if plan is None:
        return whole
    paged = plan.bytes(params, shape)
    return paged if params.tokens else min(paged, whole)


def plan_within(
    params: FreeKVParameters, shape: KVShape, prompt_tokens: int, max_new: int, budget: int | None
) -> Plan | None:
    """The plan for a budget that is at least the floor; None: all tokens stay on the device."""
    plan = smallest_plan(params, shape, prompt_tokens, max_new)
    if plan is None or params.tokens:
        return plan
    if budget is None or whole_layout(params, prompt_tokens, max_new).bytes(shape) <= budget:
        return None
    layers = shape.layers - params.dense_layers
    per_page = layers * (Zones(0, 0, params.page, 0).layer_bytes(shape) + shape.kv_heads * INDEX_BYTES)
    more = (budget - plan.bytes(params, shape)) // per_page
    return replace(plan, recall=min(plan.pages, plan.recall + more))
