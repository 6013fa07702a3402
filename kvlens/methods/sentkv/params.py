"""SentKVCompress's parameters and presets: what the paper publishes, and where it is silent, what we decided
(docs/evidence/sentkv.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvlens.methods.families.chunk_plan import ChunkRetrievalParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape
from kvlens.spans.marks import SETS
from kvlens.spans.sentences import Splitter


@dataclass(frozen=True)
class SentKVParameters(ChunkRetrievalParameters):
    """Lengths are in tokens. What the paper calls a sentence is a chunk here: at a target length of 14 tokens it is a
    phrase."""

    length: int = param(14, "wanted tokens of a chunk (sec. 4.1.1, 5.1.2)", symbol="L")
    deviation: int = param(8, "how far from the wanted end a chunk may end (sec. 4.1.1, 5.1.2)", symbol="Δ")
    usage: float = param(
        0.0,
        "tokens attended per step, as a share of all, sinks and open chunk included (the paper's 0.1 is in the "
        "preset 'paper'); "
        "0: as many as the memory budget holds",
        symbol="KV usage rate (sec. 5.1.2)",
        ours=True,
    )
    truncate: bool = param(
        True,
        (
            "every KV head reuses as many tokens as the one that can reuse fewest (sec. 4.2.2); off: all it can "
            "(comparison)"
        ),
    )
    marks: str = param(
        "auto",
        "tokens that may end a chunk: one {.}, mid {. ? ! line break}, full (also ; : , dash and their wide "
        "forms); any: all "
        "punctuation with equal weights, none: no mark (ablations); auto: the paper's choice for its models, else mid",
        choices=("auto", *SETS, "any"),
        ours=True,
    )
    literal: bool = param(
        False, "a mark opens the next chunk, as the pseudo-code says, instead of ending its own", ours=True
    )
    length_control: bool = param(
        True, "off: every mark ends a chunk, and L + Δ tokens without one do (ablation)", ours=True
    )
    group: str = param(
        "max",
        "how the query heads of a KV head select: together by the largest of their scores, by the mean of "
        "their softmaxes over "
        "chunks, or native: each for itself, their union is fetched",
        choices=("max", "mean", "native"),
        ours=True,
    )
    score_scale: str = param(
        "sqrt",
        "scores inside the softmax of group=mean: divided by sqrt(D), or not",
        choices=("sqrt", "one"),
        ours=True,
    )
    sinks: int = param(
        4,
        "first tokens always attended, behind which chunks begin; the paper names none; 0: chunks begin at 0 (alg. 2)",
        ours=True,
    )
    dense_layers: int = param(0, "first layers that keep and attend everything; the paper names none", ours=True)

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Chunks are as long as keeps what selects them in the paper's proportion to what is selected, 7 % of KV beside
        a usage of 10 % (sec. 5.1.2, 5.3): a token's room per chunk, 7 of 17 parts of the budget. The paper's 14 tokens
        at least, and at most the square root of a third of all tokens (ours: an open chunk takes room too). The
        deviation is the paper's. Without a budget the paper's usage, else what the budget holds."""
        if budget_bytes is None:
            return {"usage": 0.1}
        whole = prompt_tokens + max_new
        room = max(1, tokens_within(shape, budget_bytes, whole))
        length = clamp(min(17 * whole / (7 * room), math.sqrt(whole / 3)), 14, whole)
        return {"usage": 0.0, "length": length, "deviation": 8}

    def splitter(self) -> Splitter:
        """The rule that cuts. Raises ValueError for lengths below 1."""
        return Splitter(self.length, self.deviation, self.literal, not self.length_control)


#: 'demo': minima and maxima take one token's KV per chunk, 7 % of KV at L = 14, so small budgets need longer chunks.
PRESETS: dict[str, dict[str, Any]] = {"paper": {"usage": 0.1}, "demo": {"length": 20}}
