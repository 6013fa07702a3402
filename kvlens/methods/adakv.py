"""AdaKV: the KV heads of a layer share its budget by where their best tokens lie."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families import kept_tokens
from kvlens.methods.families.kept_tokens import Tokens
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import SnapKV, SnapKVParameters


@dataclass(frozen=True)
class AdaKVParameters(SnapKVParameters):
    """Lengths are in tokens. Defaults are the paper's, on SnapKV's scores."""

    floor: float = param(0.2, "share of the budget that every KV head has whatever its scores are", symbol="alpha")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError("floor must lie between 0 and 1.")


class AdaKV(SnapKV):
    """Scores as SnapKV; of a layer's scores, all KV heads together, the best as many as the budget holds are counted by
    head, and each head keeps as many of its own best tokens as it has among them (paper Algorithm 1), mixed with an
    equal share: count * (1 - floor) + C * floor (paper sec. 4.3). Heads of spread attention gain tokens, those with one
    strong peak give them.

    Departures: as SnapKV's. Rounding keeps the layer's sum exact.
    """

    name = "adakv"
    title = "AdaKV"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, NeurIPS 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: what the last prompt tokens attend to stays, and KV heads whose "
        "attention is spread keep more of it"
    )
    Parameters = AdaKVParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    journal_names = {"head_budget_tokens": "prompt tokens kept, window included, by KV head; per layer"}  # noqa: RUF012
    static_ready = False
    """a static step lays the KV heads of a layer out alike"""
    params: AdaKVParameters

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        equal = super().tokens(prompt, total)
        n, heads = self.context.prompt_tokens + self.last, self.context.shape.kv_heads
        if prompt is None or total >= n * len(equal):
            return equal
        window = min(self.params.window, n)
        counts = []
        for layer, (count,) in enumerate(equal):
            counts.append([window + c for c in self._shared(prompt, layer, heads * (count - window))])
            self.note("head_budget_tokens", torch.tensor(counts[-1], dtype=torch.float32), layer)
        return counts

    def _shared(self, prompt: Prefilled, layer: int, total: int) -> list[int]:
        """Tokens before the window that each KV head of a layer keeps, `total` together."""
        n, p = self.context.prompt_tokens, self.params
        score = self.score(prompt, layer, n - max(min(p.window, n + self.last) - self.last, 0))
        best = score.flatten().argsort(descending=True, stable=True)[:total] // score.shape[1]
        counts = best.bincount(minlength=len(score)).tolist()
        return kept_tokens.rounded([c * (1 - p.floor) + p.floor * total / len(counts) for c in counts], total)
