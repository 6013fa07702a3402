"""ShadowKV's parameters and what a run needs: arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout, Zones


@dataclass(frozen=True)
class ShadowKVParameters:
    """Lengths are in tokens."""

    tokens: int = param(
        0,
        "tokens of chosen chunks attended per KV head, outliers and newest ones besides (2,048 in the paper); 0: as "
        "many as the byte budget holds",
        ours=True,
    )
    chunk: int = param(8, "tokens per chunk")
    rank: float = param(
        0.15625,
        "rank of the keys, as a share of the width of a layer's keys side by side (the paper's 160 of 1,024)",
        symbol="r",
    )
    outliers: int = param(48, "chunks per KV head that stay whole: those whose mean is least like some key", symbol="o")
    local: int = param(4, "newest whole chunks of the prompt that stay; decoded tokens stay too")
    group: str = param("max", "how the query heads of a KV head agree on chunks", choices=("max", "mean"))

    def __post_init__(self) -> None:
        if self.chunk < 1 or min(self.tokens, self.outliers, self.local) < 0:
            raise ValueError("chunk must be at least 1, tokens, outliers and local at least 0.")
        if 0 < self.tokens < self.chunk:
            raise ValueError(f"tokens must be 0 or at least one chunk of {self.chunk}.")
        if not 0 < self.rank <= 1:
            raise ValueError("rank must lie above 0 and at most at 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Of the room beside decoded tokens and the newest 32 of the prompt (the paper's), a third each at most for the
        means of chunks, which are the shortest of 8 (the paper's), 16, 32 and 64 tokens that keep to it, and for the
        keys' factors, of the paper's rank at most. A sixth of the rest is outliers, as 384 of 2,432 in the paper. The
        thirds are ours: the paper bounds no bytes."""
        room = max(0, tokens_within(shape, budget_bytes, prompt_tokens + max_new) - max_new - 40)
        chunk = next((c for c in (8, 16, 32) if prompt_tokens / (2 * c) <= room / 3), 64)
        rank = min(0.15625, 2 * room / 3 / max(1, prompt_tokens))
        rest = room - prompt_tokens / (2 * chunk) - prompt_tokens * rank / 2
        return {
            "tokens": 0,
            "chunk": chunk,
            "rank": round(max(rank, 1 / (shape.kv_heads * shape.head_dim)), 4),
            "outliers": clamp(rest / 6 / chunk, 0, 48),
            "local": max(1, 32 // chunk),
        }


@dataclass(frozen=True)
class Plan:
    """Sizes of one run."""

    params: Any
    shape: KVShape
    prompt_tokens: int
    max_new: int

    @property
    def chunks(self) -> int:
        """That lie in the cold tier."""
        return max(0, self.prompt_tokens // self.params.chunk - self.params.local)

    @property
    def window_from(self) -> int:
        return self.chunks * self.params.chunk

    @property
    def outliers(self) -> int:
        """Chunks that each KV head keeps; one at least is left to choose."""
        return min(self.params.outliers, max(0, self.chunks - 1))

    @property
    def rank(self) -> int:
        width = self.shape.kv_heads * self.shape.head_dim
        return max(1, min(round(self.params.rank * width), width, self.window_from))

    @property
    def least(self) -> int:
        """Fewest chunks chosen: what `tokens` names, or one."""
        return max(1, min(self.chunks - self.outliers, self.params.tokens // self.params.chunk))

    def within(self, budget: int | None) -> int | None:
        """Chunks chosen by a budget that is at least the floor; None: all tokens stay on the device."""
        if self.chunks <= self.outliers or (not self.params.tokens and self._whole_fits(budget)):
            return None
        if self.params.tokens:
            return self.least if self.params.tokens < self.window_from else None
        assert budget is not None
        least = self.bytes(1)
        return min(self.chunks - self.outliers, 1 + (budget - least) // (self.bytes(2) - least))

    def _whole_fits(self, budget: int | None) -> bool:
        return budget is None or self.whole().bytes(self.shape) <= budget

    def floor(self) -> int:
        """Fewest device bytes."""
        whole = self.whole().bytes(self.shape)
        if self.params.tokens or self.chunks <= self.outliers:
            recall = self.within(None)
            return whole if recall is None else self.bytes(recall)
        return min(whole, self.bytes(1))

    def whole(self) -> Layout:
        """Laid out as FullKV, the chunks named."""
        zones = Zones(self.window_from, 0, 0, self._newest)
        layers = tuple(range(self.shape.layers))
        return Layout(zones, 1 + self.chunks, window_from=self.window_from, dense=layers)

    @property
    def _newest(self) -> int:
        return self.prompt_tokens - self.window_from + self.max_new

    def layout(self, recall: int) -> Layout:
        chunk = self.params.chunk
        return Layout(
            Zones(self.outliers * chunk, 0, recall * chunk, self._newest),
            1 + self.chunks,
            chunk * self.shape.head_token_bytes // 2,
            self.window_from,
            recall_spans=(chunk, chunk),
        )

    def bytes(self, recall: int) -> int:
        """Device bytes: slots, tables, staging; factors of the keys, means of chunks, which of them are outliers."""
        shape, width = self.shape, self.shape.kv_heads * self.shape.head_dim
        factors = (self.window_from + width) * self.rank
        means = self.chunks * width
        held = shape.layers * ((factors + means) * shape.itemsize + self.chunks * shape.kv_heads)
        return self.layout(recall).bytes(shape) + held
