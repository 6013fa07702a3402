"""Expected Attention: what queries yet to come are expected to attend to, from the statistics of those seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext

if TYPE_CHECKING:
    import torch

OBSERVED = 4096
"""last prompt queries a run keeps for the statistics"""


@dataclass(frozen=True)
class ExpectedAttentionParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(0, "last prompt tokens, kept without a comparison; the paper protects none")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    sinks: int = param(4, "first tokens: always kept, and left out of the statistics of queries")
    future: int = param(512, "positions to come, over which the rotation of queries is averaged", symbol="T")
    covariance: bool = param(True, "count how queries scatter as well, not their mean alone", symbol="Sigma")
    epsilon: float = param(0.02, "added to the expected attention before it is weighed by the value", symbol="epsilon")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.future < 1 or self.epsilon < 0:
            raise ValueError("sinks and epsilon must be at least 0 and future at least 1.")

    @property
    def least(self) -> int:
        return max(self.window + 1, self.sinks + 1)


class ExpectedAttention(PromptEviction):
    """Takes the queries still to come for normally distributed with the mean mu and the covariance Sigma of the
    prompt's queries before their rotary embedding, turned by the mean rotation of the next `future` positions. A key's
    expected weight is exp(k.mu / sqrt(D) + k' Sigma k / 2D), normalised over the tokens, averaged over the query heads
    of a KV head; the score is (weight + epsilon) * |v| (paper sec. 3). Which question comes does not
    matter.

    Departures: a layer's KV heads keep equally many, where the paper's experiments divide them as AdaKV does. Only the
    prompt is compressed, once, when prefill has ended; the paper's decoding form compresses every
    512 steps as well. Of prompts longer than 4,096 tokens the last 4,096 queries make the statistics. Queries are read
    where the model gives them, after their rotation, and turned back; they lie beside the prompt's KV until it is
    placed, and are no KV.
    """

    name = "expected_attention"
    title = "Expected Attention"
    paper = "Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: each KV head keeps what queries distributed like the prompt's "
        "would attend to, weighed by the size of the value"
    )
    Parameters = ExpectedAttentionParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED)
    partial_ranking = True
    params: ExpectedAttentionParameters

    def __init__(self, params: ExpectedAttentionParameters, context: RunContext) -> None:
        super().__init__(params, context)
        context.rotary(self.name)

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        import torch

        p, shape = self.params, self.context.shape
        mean, scatter = self._expected(prompt, layer)
        keys = prompt.keys[layer, :, :before].float().repeat_interleave(shape.group, 0)
        logits = (keys @ mean[..., None])[..., 0] * shape.head_dim**-0.5
        if p.covariance:
            logits += ((keys @ scatter) * keys).sum(-1) / (2 * shape.head_dim)
        logits[:, : p.sinks] = -torch.inf
        weight = logits.softmax(-1).unflatten(0, (-1, shape.group)).mean(1)
        score = (weight + p.epsilon) * prompt.values[layer, :, :before].float().norm(dim=-1)
        score[:, : p.sinks] = torch.nan  # ranked before every number: kept for a reason of their own
        return score

    def _expected(self, prompt: Prefilled, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [Hq, D] and covariance [Hq, D, D] of the queries to come."""
        import torch

        p, rotate, n = self.params, self.context.rotate, self.context.prompt_tokens
        assert rotate is not None
        queries = prompt.last_queries[layer].float()
        positions = torch.arange(n - queries.shape[1], n, device=queries.device)
        plain = rotate(queries, positions, layer, back=True)[:, max(p.sinks - int(positions[0]), 0) :]
        mean = plain.mean(1)
        spread = plain - mean[:, None]
        ahead = torch.arange(n, n + p.future, device=queries.device)
        axes = torch.eye(queries.shape[-1], device=queries.device)[:, None].expand(-1, p.future, -1)
        turn = rotate(axes, ahead, layer).mean(1)  # row i: where axis i comes to lie, on average
        return mean @ turn, turn.T @ (spread.transpose(1, 2) @ spread / spread.shape[1]) @ turn
