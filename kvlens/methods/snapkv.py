"""SnapKV: what the last prompt tokens attend to, kept with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.fair_segments import FairSegments, FairSegmentsParameters, refuses_fair_segments
from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.wrappers import Lending, Lent
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

OBSERVED = 128
"""prompt queries a run keeps for the window: the largest window that can be asked for"""


@dataclass(frozen=True)
class SnapKVParameters(PromptEvictionParameters):
    """Lengths are in tokens. Defaults are those of the paper's LongBench configuration."""

    window: int = param(32, "last prompt tokens: their queries rank the others; kept themselves", symbol="L_obs")
    kernel: int = param(7, "neighbouring positions a score is pooled over", symbol="kernel_size")
    pool: str = param("max", "how it is pooled", choices=("max", "avg"), symbol="pooling")
    group: str = param(
        "mean",
        "how the query heads of a KV head, which store one copy, agree",
        choices=("mean", "max", "sum"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= OBSERVED:
            raise ValueError(f"window must lie between 1 and {OBSERVED}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError("kernel must be odd, so that a score stays at its token.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The window is a 32nd of the kept tokens, as 32 of 1,024 in SnapKV's paper (sec. 5.2); 8 at least (ours: fewer
        queries rank poorly) and SnapKV's 32 at most. As many prompt tokens as the byte budget holds."""
        kept_tokens = tokens_within(shape, budget_bytes, prompt_tokens + max_new) - max_new
        return {"window": clamp(kept_tokens / 32, 8, 32), "tokens": 0}


class SnapKV(PromptEviction):
    """Ranks the prompt's tokens before the window by the attention that the window's queries give them: softmax over
    all keys, summed over the window, pooled over neighbouring positions, then over the query heads of a KV head; keeps
    the best of each KV head and the window (paper sec. 4.2, Listing 1). `fair:METHOD` divides the tokens of any score
    over the prompt's segments, the same share of each (ours).

    Departures: the paper stores a set per query head, G times the bytes; here a KV head's group agrees on one
    (`group`). The window ends with the prompt's very last token (`peek`), as in the authors' code.
    """

    name = "snapkv"
    title = "SnapKV"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024"
    benchmark = "LongBench"
    summary = "drops prompt tokens once, when prefill ends: each KV head keeps what the last prompt tokens attend to"
    Parameters = SnapKVParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True)
    lends = Lending(
        front=Lent(
            "fair",
            FairSegments,
            FairSegmentsParameters,
            "each segment of the prompt keeps the same share of its tokens",
            refuses_fair_segments,
        )
    )
    params: SnapKVParameters

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        from kvlens.methods.families import window_attention as window

        received = window.received(*self.observed(prompt, layer, before))
        return window.grouped(window.pooled(received, *self.pooling), self.context.shape.group, self.params.group)

    def observed(self, prompt: Prefilled, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the window's queries [Hq, w, D] and the keys [Hq, n, D] that each of them sees."""
        from kvlens.methods.families import window_attention as window

        shape, peeked = self.context.shape, prompt.peeked if self.params.peek else None
        inside = self.context.prompt_tokens - end
        return window.observed(prompt, layer, range(shape.q_heads), shape.group, inside, peeked)

    @property
    def pooling(self) -> tuple[int, str]:
        """Positions that a score is pooled over, and how."""
        return self.params.kernel, self.params.pool
