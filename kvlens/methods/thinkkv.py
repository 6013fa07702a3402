"""ThinK: every token stays, keys in the channels that queries use most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.fitting import clamp
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.quantised.form import PRUNED, Quantised
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement
    from kvlens.tiers.layout import Layout

OBSERVED = 128
"""prompt queries that a run keeps: the largest window that can be asked for"""


@dataclass(frozen=True)
class ThinKParameters:
    """Lengths are in tokens."""

    pruned: float = param(0.4, "share of a key's channels that go", symbol="lambda")
    window: int = param(32, "last prompt queries by which channels are scored", symbol="S_obs")
    group: int = param(32, "tokens of a span, which errors are logged for", ours=True)
    residual: int = param(
        32, "keys are pruned in blocks of so many; up to one fewer of the newest stay whole; a multiple of the group"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.pruned < 1:
            raise ValueError("pruned must be at least 0 and below 1.")
        if not 1 <= self.window <= OBSERVED:
            raise ValueError(f"window must lie between 1 and {OBSERVED}.")
        if self.group < 1 or self.residual < 1 or self.residual % self.group:
            raise ValueError(f"group must be at least 1, and residual a multiple of it, {self.group}.")

    def channels(self, head_dim: int) -> int:
        """Return how many channels of a key stay."""
        return max(1, head_dim - int(head_dim * self.pruned))

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The paper's 40 % of the channels go, or as many as a budget below 80 % of full KV asks for, 90 % at most:
        keys are half of full KV. The newest tokens that stay whole are a 32nd of the prompt in groups of 8, 32 at most
        (ours)."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        pruned = 0.4 if share >= 0.8 else round(min(0.9, 2 * (1 - share)), 2)
        return {"pruned": pruned, "group": 8, "residual": 8 * clamp(prompt_tokens / 256, 1, 4)}


class ThinK(PackedTokens):
    """Some channels of queries and keys add little to any product. When prefill ends, each KV head scores the channels
    of its keys by the squared length of the last queries along the channel times that of the keys, and drops those of
    the lowest score (paper: the Frobenius norm of the channel's part of the products). Keys that leave
    the window lose the same channels; a product with them leaves these out. Values stay whole.

    Departures: the query heads of a KV head are averaged, as in kvpress; the paper's are not grouped. Channels are
    chosen once, at the end of the prompt. Pruned keys are filled up with zeros before the attention. The paper prunes
    what an eviction keeps (SnapKV); here every token stays.
    """

    name = "thinkkv"
    title = "ThinK"
    paper = "Xu et al., ThinK: Thinner Key Cache by Query-Driven Pruning, ICLR 2025"
    summary = "keeps every token, its key in the channels that the last prompt queries use most; the newest keys whole"
    Parameters = ThinKParameters
    presets = {"paper": {}, "demo": {"group": 8, "residual": 16}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED)
    params: ThinKParameters

    @classmethod
    def form(cls, params: ThinKParameters, shape: KVShape, positions: int) -> Quantised:
        channels = params.channels(shape.head_dim)
        return Quantised(0, params.group, params.residual, positions, form=PRUNED, channels=channels)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        layout, placement = super().prefill_end(prompt)
        assert layout.quantised is not None
        numbers = self._channels(prompt).sort(-1).values.tolist()
        channels = tuple(tuple(tuple(head) for head in layer) for layer in numbers)
        return replace(layout, quantised=replace(layout.quantised, kept_channels=channels)), placement

    def _channels(self, prompt: Prefilled) -> torch.Tensor:
        """Return the channels that stay: int64 [L, H_kv, c]."""
        import torch

        queries = prompt.last_queries[:, :, -self.params.window :].float()
        used = queries.square().mean(2).unflatten(1, (self.context.shape.kv_heads, -1)).mean(2)
        score = used * torch.stack([keys.float().square().mean(1) for keys in prompt.keys])
        count = self.params.channels(self.context.shape.head_dim)
        return score.argsort(dim=-1, descending=True, stable=True)[..., :count]
