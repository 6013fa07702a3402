"""Compactor: keys that no others can stand for, and tokens that their whole neighbourhood attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext, torch_seed

if TYPE_CHECKING:
    import torch

OBSERVED = 4096
"""last prompt queries a run keeps for the non-causal attention"""

TIES = 2**14
"""steps of a z-score that a score is rounded to: of two tokens that are equal but for the last bits the earlier stays,
however the prompt was read"""


@dataclass(frozen=True)
class CompactorParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(4, "last prompt tokens, kept without a comparison (kvpress)", ours=True)
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    sinks: int = param(8, "first tokens: always kept (kvpress)", ours=True)
    chunk: int = param(128, "tokens of a chunk, all of which attend each other", symbol="C")
    sketch: int = param(
        48, "random directions that keys are projected on before their leverage is taken; 0: none", symbol="k"
    )
    blend: float = param(0.5, "weight of the leverage beside the attention", symbol="lambda")
    scaled: bool = param(False, "divide the attention's logits by sqrt(D); the authors' code does not")
    smooth: int = param(3, "neighbouring positions that the attention is averaged over, as in kvpress", ours=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.sketch < 0 or self.chunk < 1 or self.blend < 0:
            raise ValueError("sinks, sketch and blend must be at least 0 and chunk at least 1.")
        if self.smooth < 1 or self.smooth % 2 == 0:
            raise ValueError("smooth must be odd, so that a score stays at its token.")

    @property
    def least(self) -> int:
        return self.window + self.sinks + 1


class Compactor(PromptEviction):
    """Adds two scores of a token, each as a z-score over the layer. Leverage: the diagonal of X (X'X)^-1 X', X the
    centred keys before their rotary embedding, projected on `sketch` Gaussian directions. Attention: the weights that
    the token receives from all queries of its chunk, later ones and earlier ones, times the length of its value,
    averaged over neighbours and over the query heads of a KV head (paper sec. 3). No question is looked at.

    Departures: the paper infers the share to keep from the text; here the budget says it. X'X gets 1e-2 on its
    diagonal, as in the authors' code, and the run's seed draws the directions. Of prompts longer than 4,096 tokens only
    the last 4,096 have an attention score; the others rank by leverage alone. The leverage is over the whole prompt;
    the authors' code takes it chunk by chunk. Scores are rounded to 2^-14 of a standard deviation, so that equal tokens
    tie and the earlier one stays.
    """

    name = "compactor"
    title = "Compactor"
    paper = "Chari and Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: each KV head keeps keys of high leverage and tokens that earlier "
        "and later queries of their chunk attend"
    )
    Parameters = CompactorParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED)
    partial_ranking = True
    params: CompactorParameters

    def __init__(self, params: CompactorParameters, context: RunContext) -> None:
        super().__init__(params, context)
        context.rotary(self.name)

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        p, shape = self.params, self.context.shape
        start = min(p.sinks, end)
        scores = torch.full((shape.kv_heads, end), torch.nan, device=prompt.keys.device)
        if end - start < 2:
            scores[:, start:] = 0.0
            return scores
        keys, values = (x[layer, :, start:end].float() for x in (prompt.keys, prompt.values))
        queries = prompt.last_queries[layer].float()
        skipped = self.context.prompt_tokens - queries.shape[1]
        queries = queries[:, max(start - skipped, 0) : end - skipped]
        watched = queries.shape[1]
        received = (
            non_causal(queries, keys[:, -watched:], p.chunk, p.scaled) if watched else keys.new_zeros(shape.q_heads, 0)
        )
        weighed = received.unflatten(0, (-1, shape.group)).mean(1) * values[:, end - start - watched :].norm(dim=-1)
        smooth = F.avg_pool1d(weighed[None], p.smooth, stride=1, padding=p.smooth // 2)[0] if watched else weighed
        scores[:, start:] = p.blend * standard(self._leverage(keys, layer, start))
        scores[:, end - watched :] += standard(smooth)
        return (scores * TIES).round() / TIES

    def _leverage(self, keys: torch.Tensor, layer: int, start: int) -> torch.Tensor:
        """Return the leverage of keys float32 [H_kv, m, D] at positions from `start` on: [H_kv, m]."""
        import torch

        rotate: Any = self.context.rotate
        positions = torch.arange(start, start + keys.shape[1], device=keys.device)
        plain = rotate(keys, positions, layer, back=True)
        if self.params.sketch:
            drawn = torch.Generator().manual_seed(torch_seed(self.context.seed * self.context.shape.layers + layer))
            size = (keys.shape[0], keys.shape[-1], self.params.sketch)
            plain = plain @ (torch.randn(size, generator=drawn) / self.params.sketch**0.5).to(keys.device)
        return leverage(plain)


def leverage(rows: torch.Tensor) -> torch.Tensor:
    """Return the diagonal of X (X'X + 0.01)^-1 X', X the centred rows: float32 [H_kv, m, k] -> [H_kv, m]."""
    import torch

    centred = rows - rows.mean(1, keepdim=True)
    square = centred.mT @ centred + 0.01 * torch.eye(rows.shape[-1], device=rows.device)
    return (centred * torch.linalg.solve(square, centred.mT).mT).sum(-1).clamp(min=0.0)


def non_causal(queries: torch.Tensor, keys: torch.Tensor, chunk: int, scaled: bool) -> torch.Tensor:
    """Return the weight that each token receives from all queries of its chunk: queries [Hq, m, D], keys [H_kv, m, D]
    -> float32 [Hq, m]. Chunks of `chunk` tokens from the first on, the last one shorter."""
    import torch

    wide, scale = (
        keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0),
        queries.shape[-1] ** -0.5 if scaled else 1.0,
    )
    parts = zip(queries.split(chunk, 1), wide.split(chunk, 1), strict=True)
    sums = [(q @ k.mT * scale).softmax(-1).sum(1) for q, k in parts]
    return torch.cat(sums, 1)


def standard(scores: torch.Tensor) -> torch.Tensor:
    """Return z-scores over all KV heads of a layer: [H_kv, m]. Scores that differ by less than a hundredth of their
    mean size count as nearly equal; one score is 0."""
    if scores.numel() < 2:
        return scores * 0.0
    return (scores - scores.mean()) / scores.std().clamp(min=float(scores.abs().mean()) / 100 + 1e-12)
