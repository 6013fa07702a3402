"""CHESS's parameters, presets and arithmetic: pages, chunks, grids and the bytes of their vectors. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvlens.methods.parameters import param
from kvlens.refusal import Refusal
from kvlens.shape import KVShape
from kvlens.text.units import counted
from kvlens.tiers.layout import Layout, Zones

AGGRESSIVE = {"grid_ratio": 0.5, "chunk_ratio": 0.2, "page_ratio": 0.1}
LEAST_PAGES = 128
"""that a hierarchy should have to choose from; ours"""


@dataclass(frozen=True)
class ChessParameters:
    """Defaults are the paper's headline setting, 'aggressive' (Table 1), where it gives one."""

    page: int = param(32, "tokens per page (sec. 5.1)", symbol="B")
    grid_ratio: float = param(0.5, "share of the grids that is kept (sec. 3.2)", symbol="ρ_g")
    chunk_ratio: float = param(0.2, "share of the chunks under kept grids that is kept", symbol="ρ_c")
    page_ratio: float = param(0.1, "share of the pages under kept chunks that is kept", symbol="ρ_p")
    trigger: str = param(
        "dynamic",
        "when the context is reconstructed (sec. 3.3, app. C): dynamic: when a page of generated tokens was "
        "uncertain; fixed: "
        "every `interval` pages; every: at every page; never: only at the end of prefill",
        choices=("dynamic", "fixed", "every", "never"),
    )
    interval: int = param(6, "pages between reconstructions with trigger=fixed (app. C)")

    chunk_pages: int = param(8, "pages per chunk; the paper gives no number", symbol="N_c", ours=True)
    grid_chunks: int = param(8, "chunks per grid; the paper gives no number", symbol="N_g", ours=True)
    window_pages: int = param(
        4, "newest complete pages, always attended; the page being written comes on top", symbol="|W|", ours=True
    )
    sink_pages: int = param(1, "first pages, always attended", ours=True)
    candidates: str = param(
        "all",
        "pages in the hierarchy; all: every complete page, sinks' and window's too (sec. 3.2: all grids, then a "
        "union), so that one may be selected before it leaves; older: those after the sinks that have left the window, "
        "so that no selection is spent on pages attended anyway",
        choices=("all", "older"),
        ours=True,
    )
    centroids: str = param(
        "members",
        "vector of a chunk or grid that is not full; members: the mean over the members it has; printed: their sum "
        "divided by N_c or N_g (eq. 2 as printed), so that it scores lower the emptier it is",
        choices=("members", "printed"),
        ours=True,
    )
    quantile: str = param(
        "active",
        "active: a ratio is of the units whose parent was kept, at least one, ties to the older unit; paper_literal: "
        "Algorithm 1 as printed, a quantile over all units with the scores of inactive ones set to zero",
        choices=("active", "paper_literal"),
        ours=True,
    )
    keep: float = param(
        0.0,
        "0: the ratios; else the share of tokens attended, sinks and window counted: grids and chunks are kept "
        "by the cube root of "
        "the pages' share, pages by their number, at least one (so sinks, window and one page are attended "
        "whatever it says); for "
        "comparisons at equal attended tokens",
        ours=True,
    )
    scale: str = param(
        "plain",
        (
            "plain: keys as they are, so layers with long keys weigh more; layer: each layer's part of a page "
            "vector has length 1"
        ),
        choices=("plain", "layer"),
        ours=True,
    )
    keys: str = param(
        "rotated",
        "keys in the page vectors: rotated: as the cache holds them; unrotated: with RoPE taken back, so that "
        "distance plays no "
        "part",
        choices=("rotated", "unrotated"),
        ours=True,
    )
    anchor_tail: bool = param(False, "the unfinished page counts in the query anchor of the first selection", ours=True)
    condition: str = param(
        "and",
        "dynamic: entropy and varentropy above their thresholds, or one of them",
        choices=("and", "or"),
        ours=True,
    )
    varentropy: str = param(
        "page",
        "page: variance of the entropies of a page's tokens (the paper's Var(H)_p); token: mean over them of "
        "the variance of -log p (what "
        "the word means elsewhere)",
        choices=("page", "token"),
        ours=True,
    )
    max_interval: int = param(0, "dynamic: reconstruct after so many pages at the latest; 0: no such limit", ours=True)
    threshold_entropy: float = param(
        -1.0, "nats, instead of the calibrated threshold; negative: the calibrated one", ours=True
    )
    threshold_varentropy: float = param(-1.0, "nats squared, likewise", ours=True)
    calibration: str = param(
        "", "file made by `kvlens calibrate chess`; empty: the one shipped for the model", ours=True
    )

    def __post_init__(self) -> None:
        for name in ("page", "interval", "chunk_pages", "grid_chunks", "window_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        for name in ("sink_pages", "max_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0.")
        for name in ("grid_ratio", "chunk_ratio", "page_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie above 0 and be at most 1.")
        if not 0 <= self.keep <= 1:
            raise ValueError("keep must lie between 0 (use the ratios) and 1.")
        if self.keep and self.quantile == "paper_literal":
            raise Refusal(
                "keep counts pages, which quantile=paper_literal does not: set the ratios instead, or quantile=active.",
                code="parameters_disagree",
            )
        for name in ("threshold_entropy", "threshold_varentropy"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{name} must be a number.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The largest pages of 32 (sec. 5.1), 16 or 8 tokens that make 128 pages, since ratios of .5, .2 and .1
        (Table 1) need something to choose from; chunks of 8 pages and grids of 8 chunks where that makes 8 grids, of 4
        else (ours: the paper gives neither). The ratios are the paper's."""
        tokens = prompt_tokens + max_new
        page = next((size for size in (32, 16) if tokens >= LEAST_PAGES * size), 8)
        branch = 8 if tokens >= 8 * 64 * page else 4
        return {"page": page, "chunk_pages": branch, "grid_chunks": branch, **AGGRESSIVE}

    def misfit(self, prompt_tokens: int) -> str | None:
        """There is nothing to choose among."""
        if prompt_tokens > self.page * self.chunk_pages * self.grid_chunks:
            return None
        return f"it is {counted(-(-prompt_tokens // self.page), 'page')}, one grid"

    @property
    def thresholds_given(self) -> bool:
        return self.threshold_entropy >= 0 and self.threshold_varentropy >= 0


#: Table 1's three settings; 'paper' is the headline one. 'demo' has the same ratios over a hierarchy scaled down for
#: 2048 tokens: 256 pages of 8 tokens, 64 chunks, 16 grids, where pages of 32 would leave 64 pages in 8 chunks in one
#: grid.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "aggressive": dict(AGGRESSIVE),
    "moderate": {"grid_ratio": 0.8, "chunk_ratio": 0.7, "page_ratio": 0.7},
    "conservative": {"grid_ratio": 0.9, "chunk_ratio": 0.9, "page_ratio": 0.9},
    "demo": {"page": 8, "chunk_pages": 4, "grid_chunks": 4, "candidates": "older"},
}


@dataclass(frozen=True)
class Sizes:
    """What one run needs room for. Page j has tokens [j * page, (j + 1) * page); span ids are page + 1, since 0 is the
    window."""

    pages: int
    """complete pages at the last reconstruction that can come"""
    chunks: int
    grids: int
    leaving: int
    """pages that lie before the window when decoding begins"""
    spans: int

    @classmethod
    def count(cls, p: ChessParameters, prompt_tokens: int, max_new: int) -> Sizes:
        pages = (prompt_tokens + max_new - 1) // p.page
        chunks = -(-pages // p.chunk_pages)
        leaving = max(0, prompt_tokens // p.page - p.window_pages)
        return cls(pages, chunks, -(-chunks // p.grid_chunks), leaving, 1 + max(0, pages - p.window_pages))

    def layout(self, p: ChessParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> Layout:
        """Every layer keeps every token; pages that leave the window are renamed where they lie."""
        window_start = self.leaving * p.page
        zones = Zones(window_start, 0, 0, prompt_tokens - window_start + max_new)
        return Layout(zones, self.spans, window_from=window_start, dense=tuple(range(shape.layers)))

    def bytes(self, p: ChessParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Device bytes: full KV with its tables, the vectors of all units (layers * KV heads * head size numbers each),
        the selection."""
        vectors = (
            (self.grids + self.chunks + self.pages) * shape.layers * shape.kv_heads * shape.head_dim * shape.itemsize
        )
        return self.layout(p, shape, prompt_tokens, max_new).bytes(shape) + vectors + self.spans


def pages_within(p: ChessParameters, tokens: int) -> int:
    """Pages that `keep` leaves to the selection of a context of `tokens` tokens, after sinks, window and a full
    unfinished page; all of them at 1."""
    if p.keep == 1:
        return tokens // p.page
    safe = (p.sink_pages + p.window_pages + 1) * p.page
    return max(1, (math.floor(p.keep * tokens + 1e-9) - safe) // p.page)
