"""ChunkKV: chunks of neighbouring tokens are kept or dropped whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.families.whole_chunks import WholeChunks, WholeChunksParameters, refuses_chunks
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import OBSERVED
from kvlens.methods.wrappers import Lending, Lent

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WindowParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(16, "last prompt tokens: their queries rank the chunks; kept themselves", symbol="w")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= OBSERVED:
            raise ValueError(f"window must lie between 1 and {OBSERVED}.")


@dataclass(frozen=True)
class ChunkKVParameters(WholeChunksParameters, WindowParameters):
    """Lengths are in tokens."""


class Attended(PromptEviction):
    """The attention that the window's queries give each token, summed over all heads of the layer, without pooling."""

    one_set = True
    params: Any

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        from kvlens.methods.families import window_attention as window

        shape, peeked = self.context.shape, prompt.peeked if self.params.peek else None
        inside = self.context.prompt_tokens - before
        observed = window.observed(prompt, layer, range(shape.q_heads), shape.group, inside, peeked)
        return window.received(*observed).sum(0, keepdim=True)


class ChunkKV(WholeChunks, Attended):
    """Ranks chunks of the prompt by the attention that the window's queries give their tokens, summed over all heads of
    the layer, without pooling; keeps the best whole chunks, the same for all KV heads, and the window (paper Algorithm
    1). `reuse` layers in a row keep one choice (paper sec. 3.3).

    `chunk:METHOD` ranks chunks by another score. Departures: a chunk's score is the mean over its tokens, which ranks
    chunks of equal length as the sum does and does not count the last, shorter one as weaker than it is. Chunks that
    would not fit whole are passed over, so that up to one chunk of the budget may stay empty.
    """

    name = "chunkkv"
    title = "ChunkKV"
    paper = "Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context Inference, 2025"
    summary = "drops prompt tokens once, when prefill ends, in whole chunks; all KV heads of two layers keep the same"
    Parameters = ChunkKVParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True)
    lends = Lending(
        front=Lent("chunk", WholeChunks, WholeChunksParameters, "in whole chunks of neighbours", refuses_chunks)
    )
    params: ChunkKVParameters
