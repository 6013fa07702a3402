"""The KV heads of a layer share its budget by where their best tokens are: a part of a prompt eviction that any score
can be put into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, Tokens, lacks_score
from kvlens.methods.families.token_shares import round_shares
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled

if TYPE_CHECKING:
    Base = PromptEviction
else:
    Base = object


@dataclass(frozen=True)
class HeadSharesParameters:
    """Beside those of the score."""

    floor: float = param(0.2, "share of the budget that every KV head has whatever its scores are", symbol="alpha")

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if not 0 <= self.floor <= 1:
            raise ValueError("floor must lie between 0 and 1.")


class HeadShares(Base):
    """Ranks the scores of all KV heads of a layer together and takes as many as the budget holds. A head's count is how
    many of these are its own, mixed with an equal share: count * (1 - floor) + C * floor. It keeps that many of its
    best tokens."""

    journal_names = {"head_budget_tokens": "prompt tokens kept, window included, by KV head; per layer"}  # noqa: RUF012
    static_ready = False
    """a static step lays the KV heads of a layer out alike"""
    heads_alike = False
    params: Any

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        equal = super().tokens(prompt, total)
        n, heads = self.context.prompt_tokens + self.last, self.context.shape.kv_heads
        if prompt is None or total >= n * len(equal):
            return equal
        window = max(min(self.params.window, n), self.last)
        counts = []
        for layer, (count,) in enumerate(equal):
            counts.append([window + c for c in self._shared(prompt, layer, heads * (count - window))])
            self.note("head_budget_tokens", torch.tensor(counts[-1], dtype=torch.float32), layer)
        return counts

    def _shared(self, prompt: Prefilled, layer: int, total: int) -> list[int]:
        """Tokens before the window that each KV head of a layer keeps, `total` together."""
        n, p = self.context.prompt_tokens, self.params
        score = self.comparable(prompt, layer, n - max(min(p.window, n + self.last) - self.last, 0))
        best = score.flatten().argsort(descending=True, stable=True)[:total] // score.shape[1]
        counts = best.bincount(minlength=len(score)).tolist()
        return round_shares([c * (1 - p.floor) + p.floor * total / len(counts) for c in counts], total)


def refuses_head_shares(method: type[Any]) -> str:
    """Return why a method's score cannot be shared by head; '': it can."""
    if lacking := lacks_score(method):
        return lacking
    if method.one_set:
        return "all KV heads of its layers keep the same tokens"
    if method.ranks_parts:
        return "its scores are places within parts of the prompt, the same numbers for every KV head"
    return "" if method.heads_alike else "it divides a layer's budget over its KV heads itself"
