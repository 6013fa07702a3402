"""FreeKV's parameters and presets: what the paper publishes, and where it is silent, what we decided
(docs/evidence/freekv.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_plan import ColdPagesParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape

if TYPE_CHECKING:
    from kvlens.kernels.page_scores import Pooling

POOLINGS = ("MeanS", "MaxS", "MeanQK", "MaxQK", "MeanQ", "MaxQ")


@dataclass(frozen=True)
class FreeKVParameters(ColdPagesParameters):
    """Lengths are in tokens. Defaults are the paper's for long inputs (appendix A) where it gives one."""

    tokens: int = param(
        0,
        "tokens per KV head that attention may read: sinks, window and selected pages (2048 in the paper), on average "
        "where the window's rule is, then p/2 more at most; 0: as many selected pages as the byte budget holds",
        symbol="B",
    )
    sinks: int = param(128, "first tokens always attended (app. A: 128, or 512 for long generation)", symbol="S")
    window: int = param(128, "newest tokens always attended (app. A: 128, or 512 for long generation)", symbol="W")
    page: int = param(32, "tokens per page (app. A)", symbol="p")
    tau: float = param(
        0.8,
        "a KV head whose pooled query similarity is below this is corrected (sec. 3.3; 0.8 for long inputs, "
        "0.9 for long "
        "generation); 0: never; 1: at every step, so that nothing is speculated",
        symbol="τ",
    )
    pooling: Pooling = param(
        "MeanS",
        "how a group agrees on its pages (app. B.2): mean or max over query vectors (Q), page scores (QK) or "
        "their softmax "
        "(S)",
        choices=POOLINGS,
    )
    correction_pooling: str = param(
        "mean",
        "similarity of a KV head's queries, after RoPE as in the authors' code, over its group: mean (sec. 3.3), max "
        "(app. B.3, as printed), or min: corrected as soon as one query head is below tau (ours)",
        choices=("mean", "max", "min"),
    )
    dense_layers: int = param(1, "first layers that keep every token (app. A)")

    score_scale: str = param(
        "none",
        "what page scores are divided by before the softmax: nothing (the authors' code), or sqrt of the head size",
        choices=("none", "sqrt_d"),
        ours=True,
    )
    window_rule: str = param(
        "average",
        "the oldest page leaves so that the window holds W tokens on average (W + p/2 at most; the authors' "
        "accuracy code), "
        "at least W, or at most W",
        choices=("average", "at_least", "at_most"),
        ours=True,
    )
    recall: str = param(
        "misses",
        "misses: only pages that are not on the device are moved (the authors' code); all: every selected "
        "page, every step "
        "(no reuse, the worst case)",
        choices=("misses", "all"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tau <= 1:
            raise ValueError("tau must lie between 0 (no correction) and 1 (no speculation).")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Sinks and window are each a 16th of the budget, as 128 of 2,048 tokens (app. A), 4 sinks and half a page of
        window at least. Ours: the first layer is dense where that costs at most a quarter of the budget; pages are the
        largest of 32 (app. A), 16 and 8 tokens with room for 4 selected ones beside the summaries, which take a token's
        room per page, else those with room for most."""
        whole = prompt_tokens + max_new
        room = tokens_within(shape, budget_bytes, whole)
        dense = int(whole / shape.layers <= room / 4)
        share = clamp(room / 16, 4, 128)
        beside = room - dense * whole / shape.layers - share

        def selected(page: int) -> int:
            """Pages that find room, 4 at most; negative where not even the rest does."""
            return min(4, int((beside - max(share, page // 2) - page / 2 - whole / page - page) // page))

        page = max((32, 16, 8), key=selected)
        window = max(share, page // 2)
        return {"tokens": 0, "sinks": share, "window": window, "page": page, "dense_layers": dense}


#: 'demo' is scaled to 2048 tokens: of 10 % of them (206 tokens per layer and KV head) 128 go to page summaries, 28 to
#: sinks and window, 16 to a page on its way out, 8 to tables, staging and queries, and one page is left to select.
#: Larger pages need fewer summaries, but answered less (docs/evidence/freekv.md).
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"tokens": 2048},
    "paper-long-generation": {"tokens": 2048, "sinks": 512, "window": 512, "tau": 0.9},
    "demo": {"sinks": 4, "window": 16, "page": 16, "dense_layers": 0},
}
