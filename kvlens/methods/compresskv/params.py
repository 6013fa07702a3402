"""CompressKV's parameters and presets: what the paper publishes, and what we decided where it is silent
(docs/evidence/compresskv.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape

OBSERVED = 64
"""prompt queries a run keeps for the window: the largest window that can be asked for"""
HEADS = ("srh", "srh_code", "trh", "trh_topk", "all")


@dataclass(frozen=True)
class CompressKVParameters:
    """Lengths are in tokens. Defaults are the paper's (sec. 4, implementation details) unless marked ours."""

    window: int = param(
        8, "last prompt tokens: their queries score the others, and they are kept themselves", symbol="window_size"
    )
    peek: bool = param(
        True,
        (
            "the very last prompt token, which step 0 feeds, is the last of the window; off: the window ends with "
            "the token before it"
        ),
    )
    kernel: int = param(5, "positions over which a head's scores are averaged", symbol="kernel_size")
    top_heads: int = param(4, "semantic retrieval heads per layer that choose the tokens", symbol="k (sec. 3.3)")
    floor: int = param(32, "fewest prompt tokens a layer keeps, window included", symbol="m")
    ceiling: float = param(
        3.0, "most prompt tokens a layer keeps, as a multiple of the layers' average", symbol="M / B"
    )
    tokens: int = param(
        0,
        "prompt tokens kept per layer on average, window included; 0: as many as the byte budget holds",
        symbol="B",
        ours=True,
    )
    heads: str = param(
        "srh",
        "whose attention chooses the tokens: srh (eq. 1), srh_code (eq. 1 as the authors' code counts it), trh "
        "and trh_topk (traditional "
        "retrieval heads, top-1 and top-k rule), all (every head of the layer: SnapKV with one token set; "
        "needs no calibration)",
        choices=HEADS,
        ours=True,
    )
    layers: str = param(
        "error",
        "tokens per layer: by the calibrated layer errors (sec. 3.4), or equal (ablation; needs no calibration)",
        choices=("error", "equal"),
        ours=True,
    )
    unscored: str = param(
        "all",
        "who chooses in a layer none of whose heads has a score: all its heads, or the first ones by index",
        choices=("all", "first"),
        ours=True,
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate compresskv`; empty: the one shipped for the model", ours=True
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        for name in ("window", "kernel", "top_heads", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if self.window > OBSERVED:
            raise ValueError(f"window must be at most {OBSERVED}.")
        if self.kernel % 2 == 0:
            raise ValueError("kernel must be odd, so that a score stays at its token.")
        if self.floor < self.window:
            raise ValueError(f"floor must be at least the window, {self.window}: the window is always kept.")
        if self.ceiling < 1:
            raise ValueError("ceiling must be at least 1: no layer could keep the average.")
        if self.tokens and self.tokens < self.floor:
            raise ValueError(f"tokens must be 0 or at least the floor, {self.floor}.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Of the prompt tokens that are kept a 16th are the window and a quarter are a layer's floor, as 8 and 32 of
        128, the paper's smallest budget (sec. 4); the paper's 8 and 32 at most. As many prompt tokens as the byte
        budget holds."""
        retained = tokens_within(shape, budget_bytes, prompt_tokens + max_new) - max_new
        window = clamp(retained / 16, 1, 8)
        return {"window": window, "floor": clamp(retained / 4, window, 32), "tokens": 0}

    @property
    def least(self) -> int:
        """Fewest prompt tokens a KV head keeps, window included."""
        return self.floor

    @property
    def calibrated(self) -> bool:
        """Something of a calibration file is used."""
        return self.heads != "all" or self.layers != "equal"


#: 'demo': a 5 % budget of 2048 tokens is about 100 tokens per layer, decoded ones included; a floor of 32 would leave
#: the layer errors almost nothing to divide. Its tokenizer makes every digit a token: the average reaches three tokens
#: to each side, so that of a four-digit code that is attended at its first digit the last one is not lost (real
#: tokenizers make one or two tokens of it).
PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "demo": {"floor": 16, "kernel": 7}}
