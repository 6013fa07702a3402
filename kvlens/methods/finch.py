"""FINCH: the question chooses, chunk by chunk, and what stays is moved together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement
    from kvlens.tiers.layout import Layout

OBSERVED = 128
"""last prompt queries that a run keeps: the longest question whose queries choose"""


@dataclass(frozen=True)
class FinchParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(
        16, "last prompt tokens, kept without a comparison; their queries choose where no question is known", ours=True
    )
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    chunk: int = param(512, "tokens of a chunk; each keeps the same share of its tokens, as in kvpress", symbol="m")
    normalised: bool = param(True, "multiply a query's attention by the number of tokens that it sees")
    closed: bool = param(True, "see what stays as if it were side by side; off: at its own positions")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= OBSERVED or self.chunk < 1:
            raise ValueError(f"window must lie between 1 and {OBSERVED}, and chunk be at least 1.")


class Finch(PromptEviction):
    """The tokens of the question choose what stays of the context: a token's score is the attention that it receives
    from them, times the number of tokens that each of them sees, so that late queries count as much as early ones; the
    mean over these queries and over the query heads of a KV head. The context is cut into chunks, and each keeps its
    best tokens, the same share of each. Keys are then seen as if they were side by side (paper: prompt-guided
    compression, chunk by chunk, with new positions). A known question stays before any of the context does.

    Departures: the prompt is read once, as a whole, and each chunk keeps the same share, as in kvpress. The authors'
    code reads a chunk at a time behind what it kept of the chunks before, the question behind it, and lets both
    compete; it keeps one set of tokens for all KV heads of a layer, here each KV head has its own; it drops the
    question's keys and reads the question again over what stayed. Of a question longer than 128 tokens the last 128
    choose. Where no question is known, the last tokens of the prompt choose.
    """

    name = "finch"
    title = "FINCH"
    paper = "Corallo and Papotti, FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models, TACL 2024"
    summary = (
        "drops prompt tokens once, when prefill ends: of each chunk stays what the question attends to, side by side"
    )
    Parameters = FinchParameters
    presets = {"paper": {}, "demo": {"window": 8, "chunk": 128}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED)
    ranks_parts = True
    static_ready = False
    """a static step sees keys where they are"""
    params: FinchParameters

    def __init__(self, params: FinchParameters, context: RunContext) -> None:
        super().__init__(params, context)
        if params.closed:
            context.rotary("finch with closed=on", ": set closed=off")

    @classmethod
    def turns_keys(cls, params: FinchParameters) -> bool:
        return params.closed

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        layout, placement = super().prefill_end(prompt)
        return replace(layout, closed=self.params.closed), placement

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        from kvlens.methods.families import window_attention as window

        p, shape, n = self.params, self.context.shape, self.context.prompt_tokens
        question = self.context.question_from
        count = p.window if question is None or question >= n else n - question
        count = min(max(count, 1), n, prompt.last_queries.shape[2])
        queries, keys = window.observed(prompt, layer, range(shape.q_heads), shape.group, count, None)
        paid = window.paid(queries, keys)[..., :end]
        if p.normalised:
            paid = paid * torch.arange(n - count + 1, n + 1, device=paid.device)[:, None]
        score = window.grouped(paid.mean(1), shape.group, "mean")
        cut = end if question is None else min(question, end)
        # A known question is no part of any chunk, and comes before all of the context.
        return torch.cat([within_chunks(score[:, :cut], p.chunk), torch.full_like(score[:, cut:], 2.0)], -1)


def within_chunks(score: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return each token's place in its chunk as a share, the best first: score [h, m] -> float32 [h, m] in (0, 1]. The
    earlier one first among equals."""
    import torch

    ranks = []
    for part in score.split(chunk, -1):
        order = part.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(part.shape[-1], 0, -1, device=part.device).float().expand(part.shape)
        ranks.append(torch.empty_like(part).scatter_(-1, order, places / part.shape[-1]))
    return torch.cat(ranks, -1)
