"""SentKVCompress: chunks that end at punctuation, minimum and maximum key on the device, tokens of the best chunks
brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens.methods.families.chunk_retrieval import ChunkRetrieval
from kvlens.methods.segmenter import Segmenter
from kvlens.methods.sentkv.params import PRESETS, SentKVParameters

if TYPE_CHECKING:
    import torch


class SentKVCompress(ChunkRetrieval):
    """Every prompt chunk but the newest lies in the cold tier; the device holds its element-wise extremes per KV head.
    At each step a token counts as much as its chunk's bound on q . k, the best ones up to the token budget are
    attended, beside sinks and the chunk that is still open. Every KV head reuses as many tokens as the one that can
    reuse fewest (sec. 4.2.2). Departures from the paper: docs/evidence/sentkv.md.
    """

    name = "sentkv"
    title = "SentKVCompress"
    paper = (
        "SentKVCompress: Sentence-Level Dynamic KVCache Compression for Efficient Long-Context LLM "
        "Inference (ICLR 2026 submission)"
    )
    summary = (
        "cuts the text at punctuation near a wanted length, keeps the extremes of each chunk's keys on the "
        "device, the chunks in host "
        "memory, and brings back the tokens of the best chunks up to a token budget"
    )
    segmenters = (Segmenter("sentence chunks (SentKVCompress)", ("length", "deviation", "marks", "sinks")),)
    Parameters = SentKVParameters
    presets = PRESETS
    static_ready = scores_stored = True
    params: SentKVParameters

    @classmethod
    def index_numbers(cls, head_dim: int) -> int:
        return 2 * head_dim

    def index(self, keys: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.sentkv.select import extremes

        return extremes(keys)

    def score(self, q: torch.Tensor, index: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.sentkv.select import scores

        scale = q.shape[-1] ** -0.5 if self.params.score_scale == "sqrt" else 1.0
        return scores(q, index, alive, self.params.group, scale)

    @property
    def equal_reuse(self) -> bool:
        return self.params.truncate
