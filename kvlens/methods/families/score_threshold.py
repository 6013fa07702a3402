"""A threshold in place of a budget: a part of a prompt eviction that any score can be put into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.head_shares import refuses_head_shares
from kvlens.methods.families.prompt_eviction import PromptEviction, Tokens
from kvlens.methods.families.two_stages import TwoStages
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled

if TYPE_CHECKING:
    import torch

    Base = PromptEviction
else:
    Base = object


@dataclass(frozen=True)
class ScoreThresholdParameters:
    """Beside those of the score."""

    cut: float = param(0.5, "tokens of a lower score go", symbol="tau", ours=True)
    scale: str = param(
        "deviations",
        "the cut counts standard deviations above the mean score of the layer, or is a score itself",
        choices=("deviations", "score"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.cut != self.cut or self.cut in (float("inf"), float("-inf")):
            raise ValueError("cut must be a number.")


class ScoreThreshold(Base):
    """Each KV head keeps the tokens whose score reaches the cut, however many these are, and its window. A budget is a
    bound: where more tokens reach the cut than it holds, the best of the whole model stay."""

    journal_names = {  # noqa: RUF012
        "head_budget_tokens": "prompt tokens kept, window included, by KV head; per layer",
        "reached_tokens": "prompt tokens before the window whose score reaches the cut, by KV head; per layer",
    }
    static_ready = False
    """a static step lays the KV heads of a layer out alike"""
    heads_alike = False
    apart = True
    exact_without_budget = False
    """what does not reach the cut goes whatever the budget is"""
    params: Any

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        equal = super().tokens(prompt, total)
        if prompt is None:
            return equal
        p, shape, n = self.params, self.context.shape, self.context.prompt_tokens
        window = max(min(p.window, n + self.last), self.last)
        end = n - max(window - self.last, 0)
        margins = torch.stack([self._margins(prompt, layer, end) for layer in range(shape.layers)])
        reached = (margins >= 0).sum(-1)
        least = min(p.least - p.window, end)
        counts = reached.clamp(min=least)
        room = (total - window * shape.layers) * shape.kv_heads
        if int(counts.sum()) > room:
            best_tokens = margins.topk(least, -1).indices if least else margins.new_zeros(0, dtype=torch.long)
            forced = margins.scatter(-1, best_tokens, torch.inf) if least else margins
            best = forced.flatten().argsort(descending=True, stable=True)[:room] // end
            counts = best.bincount(minlength=shape.layers * shape.kv_heads).view_as(counts)
        for layer in range(shape.layers):
            self.note("reached_tokens", reached[layer].float(), layer)
            self.note("head_budget_tokens", (counts[layer] + window).float(), layer)
        return [[window + count for count in row] for row in counts.tolist()]

    def _margins(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        """Return by how much each score reaches the cut, in units of the cut: float32 [H_kv, end]; infinite where a
        token stays without a comparison."""
        import torch

        score = self.score(prompt, layer, end).float().expand(self.context.shape.kv_heads, -1)
        if self.params.scale == "score":
            return (score - self.params.cut).nan_to_num(nan=torch.inf)
        finite = score[score.isfinite()]
        if finite.numel() < 2:
            return torch.where(score.isnan(), torch.inf, 0.0 * score)
        spread = finite.std().clamp(min=1e-12)
        return ((score - finite.mean()) / spread - self.params.cut).nan_to_num(nan=torch.inf)


def refuses_threshold(method: type[Any]) -> str:
    """Return why a method's score cannot be cut at a threshold; '': it can."""
    if issubclass(method, ScoreThreshold):
        return "it has a threshold already"
    if issubclass(method, TwoStages):
        return "a share of its tokens is chosen before the others, and a threshold says no number of tokens"
    return refuses_head_shares(method)
