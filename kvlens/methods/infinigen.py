"""InfiniGen: tokens in host memory, foreseen by the layer before with a fifth of the key's dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.token_retrieval import TokenRetrievalParameters
from kvlens.methods.families.turned_keys import TurnedKeys
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InfiniGenParameters(TokenRetrievalParameters):
    """Lengths are in tokens."""

    alpha: float = param(
        4.0,
        "tokens whose estimated score, divided by sqrt of the head size, is above the largest minus this are asked "
        "for (the authors' 4 for OPT, 5 for Llama)",
        symbol="α",
    )
    partial: float = param(0.2, "share of a key's dimensions that the device keeps to estimate scores")
    most_fetched: float = param(0.2, "share of the tokens so far that a KV head fetches at most")
    ahead: bool = param(
        True, "estimate with the input of the layer before; off: with the layer's own query, and wait (comparison)"
    )
    dense_layers: int = param(
        2,
        "first layers that keep every token (the authors' code); 0: the first, which no layer precedes, asks with its "
        "own query and waits",
    )
    sinks: int = param(0, "first tokens always attended; the paper has none", ours=True)
    window: int = param(16, "newest tokens always attended, until their page is full; the paper has none", ours=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0 or not 0 < self.partial <= 1 or not 0 < self.most_fetched <= 1:
            raise ValueError("alpha must be at least 0, partial and most_fetched lie above 0 and at most at 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The share of a key's dimensions is eight tenths of the budget's share of full KV, and the paper's fifth at
        most: the device then spends at most four tenths of the budget on estimates. As many of the authors' two dense
        layers as a quarter of the budget holds. The window is a hundredth of the prompt in whole pages of 16. Ours:
        the paper bounds no bytes."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        return {
            "partial": round(min(0.2, 0.8 * share), 4),
            "dense_layers": min(2, int(0.25 * share * shape.layers)),
            "window": 16 * max(1, (prompt_tokens + 1) // 1600),
        }


class InfiniGen(TurnedKeys):
    """Every token lies in host memory. Queries and keys are turned by an orthogonal matrix A per KV head, which changes
    no product and gathers most of it in few dimensions; of these the device keeps a share of every key.
    While a layer runs, the query of the next one is estimated from this layer's input, tokens whose estimated score is
    near the largest are asked for, as many in every KV head as they ask for on average, and brought meanwhile.

    Departures: A and the dimensions come from the last prompt queries of this very run and not from a sample offline,
    and are turned after the rotary embedding; a group of query heads chooses together, by its largest score; what was
    fetched for the step before is not fetched again; the host's pool is not bounded (docs/evidence/infinigen.md).
    """

    name = "infinigen"
    title = "InfiniGen"
    paper = "Lee et al., InfiniGen: Efficient Generative Inference of LLMs with Dynamic KV Cache Management, OSDI 2024"
    summary = (
        "keeps all but the newest tokens in host memory and few turned key dimensions of each on the device; brings, "
        "while a layer runs, the tokens that the next one is foreseen to need"
    )
    Parameters = InfiniGenParameters
    presets = {"paper": {}, "demo": {"partial": 0.125, "dense_layers": 0}}  # noqa: RUF012
    needs = Needs(queries=128, ahead=True)
    journal_names = {  # noqa: RUF012
        "foreseen": "tokens above the threshold, per KV head, and last how many each KV head may take"
    }
    params: InfiniGenParameters

    @classmethod
    def needs_with(cls, params: InfiniGenParameters) -> Needs:
        return replace(cls.needs, ahead=params.ahead)

    def axes(self, prompt: Prefilled, width: int) -> torch.Tensor:
        queries = prompt.last_queries[self.params.dense_layers :].unflatten(1, (self.context.shape.kv_heads, -1))
        return turned(queries.flatten(2, 3), width)

    def count(self, score: torch.Tensor) -> torch.Tensor:
        import torch

        above = (score > score.amax(-1, keepdim=True) - self.params.alpha).sum(-1)
        count = (above.sum() // len(above)).clamp(1, self.most_now)
        self.note("foreseen", torch.cat((above, count[None])).float())
        return count


def turned(queries: torch.Tensor, width: int) -> torch.Tensor:
    """The dimensions in which queries are largest, of those that gather most of them: queries [..., m, D] -> columns of
    an orthogonal matrix, float32 [..., D, width]. The matrix is the right factor of the queries' SVD; its columns go by
    the sum of |q a|."""
    import torch

    sample = queries.double()
    _, axes = torch.linalg.eigh(sample.transpose(-1, -2) @ sample)
    order = (sample @ axes).abs().sum(-2).argsort(-1, descending=True)[..., :width]
    return axes.gather(-1, order[..., None, :].expand(*axes.shape[:-1], width)).float()
