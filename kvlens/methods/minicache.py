"""MiniCache: neighbouring deep layers share one direction of each key and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.quantised.form import MERGED, Quantised
from kvlens.shape import KVShape


@dataclass(frozen=True)
class MiniCacheParameters:
    """Lengths are in tokens."""

    begin: float = param(0.5, "share of the layers that stay as they are, the first ones", symbol="S")
    part: float = param(0.6, "way from the lower layer's direction to the upper one's", symbol="t")
    exact: float = param(
        0.05,
        "share of the tokens that both layers keep as they are: those whose directions differ most",
        symbol="gamma",
    )
    group: int = param(32, "tokens of a span, which errors are logged for", ours=True)
    residual: int = param(32, "newest tokens that stay as they are, a multiple of the group", ours=True)

    def __post_init__(self) -> None:
        if not (0 <= self.begin <= 1 and 0 <= self.part <= 1 and 0 <= self.exact <= 1):
            raise ValueError("begin, part and exact must lie between 0 and 1.")
        if self.group < 1 or self.residual < 1 or self.residual % self.group:
            raise ValueError(f"group must be at least 1, and residual a multiple of it, {self.group}.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The paper merges the deeper half of the layers, which leaves three quarters of full KV; a budget below 80 %
        of full KV merges more of them, all at about half. The newest tokens that stay are a 32nd of the prompt in
        groups of 8, 32 at most (ours)."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        begin = 0.5 if share >= 0.8 else round(max(0.0, 2 * share - 1.2), 2)
        return {"begin": begin, "group": 8, "residual": 8 * clamp(prompt_tokens / 256, 1, 4)}


class MiniCache(PackedTokens):
    """Keys and values of neighbouring layers have much the same direction in the deeper half of a model. Two layers
    store one direction of each token, on the arc between their own ones, and a length each; a token comes back as the
    shared direction times the layer's length. Tokens whose two directions differ most stay as they are in both layers
    (paper sec. 4: SLERP, magnitudes, retention).

    Departures: a fixed share of the tokens stays, those with the largest angles, so that bytes are known before; the
    paper keeps those within a share of the range of angles. Tokens that leave the window later stay if their angle is
    larger than the smallest one that stayed of the prompt, as long as there is room. The newest tokens are not merged
    yet. Keys are merged after their rotary embedding, per KV head. The paper quantises in a second arm.
    """

    name = "minicache"
    title = "MiniCache"
    paper = "Liu et al., MiniCache: KV Cache Compression in Depth Dimension for Large Language Models, NeurIPS 2024"
    summary = (
        "keeps every token; two neighbouring deep layers share one direction of each key and value, with a length each"
    )
    Parameters = MiniCacheParameters
    presets = {"paper": {}, "demo": {"group": 8, "residual": 16}}  # noqa: RUF012
    params: MiniCacheParameters

    @classmethod
    def form(cls, params: MiniCacheParameters, shape: KVShape, positions: int) -> Quantised:
        begin = round(params.begin * shape.layers)
        return Quantised(
            0,
            params.group,
            params.residual,
            positions,
            form=MERGED,
            merged_from=begin,
            part=params.part,
            exact_share=params.exact,
        )
