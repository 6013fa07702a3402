"""SentenceKV's parameters, where it cuts, and what a run needs: arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.spans.marks import SETS, Mark
from kvlens.tiers.layout import Layout, Zones

USUAL = 16
"""tokens of a sentence where the text is not known yet"""
OBSERVED = 128
"""prompt queries a run keeps: the largest window that can be asked for"""


@dataclass(frozen=True)
class SentenceKVParameters:
    """Lengths are in tokens."""

    tokens: int = param(
        0,
        "tokens attended per KV head: first, newest and retrieved ones (1,024 in the paper's LongBench runs); 0: as "
        "many retrieved ones as the byte budget holds",
        symbol="τ",
        ours=True,
    )
    factor: float = param(
        3.0, "prompt tokens a KV head keeps in host memory, as a multiple of `tokens`; the others are gone", symbol="r"
    )
    sinks: int = param(32, "first tokens always attended")
    window: int = param(32, "newest tokens always attended, whose queries choose what of the prompt is kept")
    kernel: int = param(7, "neighbouring positions that choice is pooled over (largest)")
    marks: str = param(
        "mid",
        "tokens that end a sentence: one {.}, mid {. ? ! line break}, full (also ; : , dash and their wide forms); "
        "any: all punctuation",
        choices=(*SETS, "any"),
        ours=True,
    )
    shortest: int = param(4, "a mark ends a sentence of at least so many tokens", ours=True)
    longest: int = param(64, "so many tokens are a sentence without a mark", ours=True)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.tokens < 0 or not 1 <= self.window <= OBSERVED:
            raise ValueError(f"sinks and tokens must be at least 0, window lie between 1 and {OBSERVED}.")
        if 0 < self.tokens <= self.sinks + self.window:
            raise ValueError(f"tokens must be 0 or more than {self.sinks + self.window}: sinks and window.")
        if not 1 <= self.shortest <= self.longest or self.factor < 1:
            raise ValueError("shortest must lie between 1 and longest, factor be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError("kernel must be odd, so that a score stays at its token.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """First and newest tokens are each a 32nd of the budget, as 32 of 1,024 in the paper, 4 and 16 at least (ours:
        fewer queries choose poorly). Ours, since it bounds no bytes: a mark ends a sentence of at least a 16th of the
        budget's tokens, 4 to 12, and four times as many are a sentence without a mark."""
        room = tokens_within(shape, budget_bytes, prompt_tokens + max_new)
        shortest = clamp(room / 16, 4, 12)
        return {
            "tokens": 0,
            "sinks": clamp(room / 32, 4, 32),
            "window": clamp(room / 32, 16, 32),
            "shortest": shortest,
            "longest": 4 * shortest,
        }


def closes(params: SentenceKVParameters, tokens: int, mark: Mark | None) -> str | None:
    """Why a sentence of so many tokens, the last of which has the mark, ends; None: it goes on."""
    if mark is not None and tokens >= params.shortest:
        shown = mark.text.replace("\n", "\\n")
        return f"Ends with '{shown}', {tokens} token{'s' * (tokens > 1)} long."
    return f"No mark in {tokens} tokens: cut there." if tokens >= params.longest else None


def cut(params: SentenceKVParameters, marks: Sequence[Mark | None], start: int) -> list[Span]:
    """Sentences of the tokens from `start` on that have ended, by the marks of these tokens."""
    spans, start_token = [], start
    for place, mark in enumerate(marks, start + 1):
        why = closes(params, place - start_token, mark)
        if why is not None:
            spans.append(Span(start_token, place, "sentence", why))
            start_token = place
    return spans


@dataclass(frozen=True)
class Plan:
    """Sizes of one run."""

    params: SentenceKVParameters
    shape: KVShape
    sentences: int
    """of the prompt, in the cold tier when decoding begins"""
    window_from: int
    prompt_tokens: int
    max_new: int

    @property
    def sinks(self) -> int:
        return min(self.params.sinks, self.prompt_tokens)

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.max_new

    @property
    def rows(self) -> int:
        """Sentences at most, of prompt and decoding."""
        return self.sentences + (self.total - 1 - self.window_from) // self.params.shortest

    @property
    def first_id(self) -> int:
        return 1 + (self.sinks > 0)

    @property
    def most(self) -> int:
        """Tokens that may ever be retrieved."""
        return max(1, self.total - self.params.window - self.sinks)

    @property
    def least(self) -> int:
        """Fewest retrieved tokens: what `tokens` names, or one."""
        p = self.params
        return min(self.most, p.tokens - p.sinks - p.window) if p.tokens else 1

    def within(self, budget: int | None) -> int | None:
        """Retrieved tokens that a budget holds; None: not even the fewest."""
        if budget is None or self.params.tokens:
            return self.least if budget is None or self.bytes(self.least) <= budget else None
        spare, each = budget - self.bytes(1), self.shape.layers * Zones(1, 0, 0, 0).layer_bytes(self.shape)
        return None if spare < 0 else min(self.most, 1 + spare // each)

    def layout(self, recall: int) -> Layout:
        ring = min(self.params.window + self.params.longest, self.total - self.window_from)
        zones = Zones(self.sinks, 0, recall, ring)
        return Layout(zones, self.first_id + self.rows, window_from=self.window_from)

    def bytes(self, recall: int) -> int:
        """Device bytes: slots and tables; means, owners, which tokens are kept, sums of queries; a sentence that leaves
        the window."""
        shape, heads = self.shape, self.shape.layers * self.shape.kv_heads
        means = heads * self.rows * shape.head_dim * shape.itemsize
        tokens = self.total * (4 + heads)
        queries = shape.layers * shape.q_heads * shape.head_dim * 4
        leaving = min(self.params.longest, self.total - 1 - self.window_from) * shape.token_bytes
        return self.layout(recall).bytes(shape) + means + tokens + queries + max(0, leaving)


def planned(params: Any, shape: KVShape, prompt_tokens: int, max_new: int, length: int) -> Plan:
    """For a text that is not known yet, whose sentences have `length` tokens."""
    sinks = min(params.sinks, prompt_tokens)
    sentences = max(0, prompt_tokens - params.window - sinks) // length
    return Plan(params, shape, sentences, sinks + sentences * length, prompt_tokens, max_new)


def whole(plan: Plan) -> Layout:
    """Laid out as FullKV, the prompt's sentences named."""
    zones = Zones(plan.window_from, 0, 0, plan.total - plan.window_from)
    layers = tuple(range(plan.shape.layers))
    return Layout(zones, plan.first_id + plan.sentences, window_from=plan.window_from, dense=layers)
