"""Chunks of neighbouring tokens stay or go whole: a part of a prompt eviction that any score can be put into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, lacks_score
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled

if TYPE_CHECKING:
    import torch

    Base = PromptEviction
else:
    Base = object


@dataclass(frozen=True)
class WholeChunksParameters:
    """Beside those of the score."""

    page: int = param(10, "tokens per chunk, the span that is kept or dropped whole", symbol="c")
    reuse: int = param(2, "layers in a row that keep what the first of them chose; 1: each chooses", symbol="N_reuse")

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.reuse < 1:
            raise ValueError("reuse must be at least 1.")


class WholeChunks(Base):
    """A chunk's score is the mean over its tokens of a token's score, summed over the KV heads of the layer. The best
    whole chunks that fit stay, the same for all KV heads; `reuse` layers in a row keep one choice."""

    one_set = True
    params: Any

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        from kvlens.kernels.group_sums import sum_by_group

        scores = super().score(prompt, layer - layer % self.params.reuse, end)  # type: ignore[safe-super]
        each = scores.sum(0)  # NaN where a token stays without a comparison: so does its chunk
        chunk = self._chunks(each)
        sums = sum_by_group(each[None], chunk[None], int(chunk[-1]) + 1)[0]
        return torch.where(sums.isnan(), torch.nan, sums / chunk.bincount())[chunk][None]

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


def refuses_chunks(method: type[Any]) -> str:
    """Return why a method's score cannot choose chunks; '': it can."""
    if lacking := lacks_score(method):
        return lacking
    if issubclass(method, WholeChunks):
        return "it keeps whole chunks already"
    if method.keeps_ends:
        return "its layers keep first and newest tokens, not the best ones"
    if not method.heads_alike:
        return "its KV heads keep unequally many tokens, and a chunk stays for all of them"
    return ""
