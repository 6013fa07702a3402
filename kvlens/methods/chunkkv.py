"""ChunkKV: chunks of neighbouring tokens are kept or dropped whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.needs import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import OBSERVED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChunkKVParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(16, "last prompt tokens: their queries rank the chunks; kept themselves", symbol="w")
    page: int = param(10, "tokens per chunk, the span that is kept or dropped whole", symbol="c")
    reuse: int = param(2, "layers in a row that keep what the first of them chose; 1: each chooses", symbol="N_reuse")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= OBSERVED:
            raise ValueError(f"window must lie between 1 and {OBSERVED}.")
        if self.reuse < 1:
            raise ValueError("reuse must be at least 1.")


class ChunkKV(PromptEviction):
    """Ranks chunks of the prompt by the attention that the window's queries give their tokens, summed over all heads of
    the layer, without pooling; keeps the best whole chunks, the same for all KV heads, and the window (paper Algorithm
    1). `reuse` layers in a row keep one choice (paper sec. 3.3).

    Departures: a chunk's score is the mean over its tokens, which ranks chunks of equal length as the sum does and does
    not count the last, shorter one as weaker than it is. Chunks that would not fit whole are passed over, so that up to
    one chunk of the budget may stay empty.
    """

    name = "chunkkv"
    title = "ChunkKV"
    paper = "Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context Inference, 2025"
    summary = "drops prompt tokens once, when prefill ends, in whole chunks; all KV heads of two layers keep the same"
    Parameters = ChunkKVParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True)
    params: ChunkKVParameters

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        from kvlens.kernels.group_sums import sum_by_group
        from kvlens.methods.families import window_attention as window

        p, shape = self.params, self.context.shape
        peeked = prompt.peeked if p.peek else None
        inside = self.context.prompt_tokens - before
        chooser = layer - layer % p.reuse
        window_queries: Any = window.observed(prompt, chooser, range(shape.q_heads), shape.group, inside, peeked)
        each = window.received(*window_queries).sum(0)
        chunk = self._chunks(each)
        mean = sum_by_group(each[None], chunk[None], int(chunk[-1]) + 1)[0] / chunk.bincount()
        return mean[chunk][None]

    def choose(self, score: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Whole chunks, the best first, as long as they fit."""
        import torch

        chunk = self._chunks(score[0])
        length = chunk.bincount().tolist()
        starts = torch.tensor([number * self.params.page for number in range(len(length))], device=score.device)
        keep, room = torch.zeros(len(length), dtype=torch.bool, device=score.device), counts[0]
        for number in score[0, starts].argsort(descending=True, stable=True).tolist():
            if length[number] <= room:
                keep[number], room = True, room - length[number]
        return keep[chunk][None].expand(score.shape)

    def _chunks(self, each: torch.Tensor) -> torch.Tensor:
        """The chunk that each position [m] belongs to."""
        import torch

        return torch.arange(each.shape[-1], device=each.device) // self.params.page
