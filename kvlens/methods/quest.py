"""Quest: every query head attends the pages whose keys could reach the largest inner product with its query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.page_retrieval import PageRetrieval, PageRetrievalParameters
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuestParameters(PageRetrievalParameters):
    """Lengths are in tokens."""

    tokens: int = param(1024, "tokens attended per query head, the open page included, in whole pages", symbol="B")
    least_pages: int = param(3, "fewest pages attended")
    dense_layers: int = param(2, "first layers that attend everything (sec. 3.4)")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """An eighth of the prompt is attended, as 4,096 of 32K tokens are in the paper (sec. 4.2), in whole pages of
        16, the paper's fewest pages at least and its default of 1,024 tokens at most; dense are 2 of 32 layers
        (sec. 3.4), one at least (ours)."""
        page, least = 16, 3
        tokens = clamp((prompt_tokens + 1) / 8 // page * page, least * page, 1024)
        return {"page": page, "tokens": tokens, "dense_layers": max(1, round(shape.layers * 2 / 32))}


class Quest(PageRetrieval):
    """Keeps every token on the device and, per page of 16, the smallest and largest value of each key dimension. At
    every step each query head attends the pages with the largest bound sum_d max(q_d min_d, q_d max_d) (sec. 3.4,
    Algorithm 1), the newest page always; the first two layers attend everything. It saves reading, not memory.

    Departures: the page being filled is attended and not ranked, as in the authors' kernels; their accuracy script
    ranks it with the others.
    """

    name = "quest"
    title = "Quest"
    paper = "Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024"
    summary = "keeps every token on the device and attends, per query head and step, the pages that could matter most"
    Parameters = QuestParameters
    presets = {"paper": {}, "demo": {"keep": 0.25}}  # noqa: RUF012
    params: QuestParameters

    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        return 2 * head_dim

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat((keys.amin(-2), keys.amax(-2)), -1)

    def rank(self, q: torch.Tensor, summary: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        from kvlens.kernels.page_scores import bound

        return bound(q, *summary.chunk(2, -1))
