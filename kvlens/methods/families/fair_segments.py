"""Every segment of the prompt keeps the same share of its tokens: a part of a prompt eviction that any score can be put
into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import PromptEviction, lacks_score
from kvlens.methods.families.token_shares import round_shares
from kvlens.methods.families.whole_chunks import WholeChunks
from kvlens.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from kvlens.methods.run_inputs import RunContext

    Base = PromptEviction
else:
    Base = object

SHARE = "fair_share"


@dataclass(frozen=True)
class FairSegmentsParameters:
    """None beside those of the score."""


class FairSegments(Base):
    """A KV head's tokens are divided over the segments of the prompt, the same share of each, and each segment keeps
    its best ones by the score. Tokens that stay without a comparison count for their segment: the window, and those
    that the method names. A segment with more of these than its share keeps them, and the others share what is left.
    Tokens that no segment names are a segment of their own."""

    journal_names = {  # noqa: RUF012
        SHARE: "share of its tokens that each segment keeps, mean over KV heads, in the order of the prompt; per layer"
    }
    params: Any

    def __init__(self, params: Any, context: RunContext) -> None:
        """Raises Refusal `no_segments` if the prompt names no segment, `evicts_while_reading` if tokens are dropped
        before all of the prompt was read."""
        super().__init__(params, context)
        if self.needs_with(params).reading:
            raise Refusal(
                f"{self.name} drops tokens while it reads the prompt, before it has read every segment: run it without "
                "that setting.",
                code="evicts_while_reading",
                method=self.name,
            )
        if not context.segments:
            raise Refusal(
                f"{self.name} divides the budget over the prompt's segments, and this prompt names none: name them "
                "with --segment NAME=MARKER, or give a question or the chat form.",
                code="no_segments",
                method=self.name,
            )

    def choose(self, score: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Each segment's best tokens: score [h, m], NaN first; counts[head] of them -> bool [h, m]."""
        import torch

        count, last = score.shape[-1], self.context.prompt_tokens + self.last
        owner = torch.tensor(segment_owners(self.context.segments, last), device=score.device)
        sizes = owner.bincount().tolist()
        behind = owner[count:].bincount(minlength=len(sizes)).tolist()
        owner = owner[:count]
        keep = torch.zeros_like(score, dtype=torch.bool)
        for head, budget in enumerate(counts):
            free = owner[score[head].isnan()].bincount(minlength=len(sizes)).tolist()
            least = [window + unranked for window, unranked in zip(behind, free, strict=True)]
            total = budget + last - count
            shares = fair_counts(sizes, least if sum(least) <= total else behind, total)
            for segment, tokens in enumerate(shares):
                places = (owner == segment).nonzero()[:, 0]
                keep[head, places] = super().choose(score[head : head + 1, places], [tokens - behind[segment]])[0]
        return keep

    def placed(self, layer: int, score: torch.Tensor, mask: torch.Tensor) -> None:
        import torch

        super().placed(layer, score, mask)  # type: ignore[safe-super]
        owner = torch.tensor(segment_owners(self.context.segments, mask.shape[-1]), device=mask.device)
        shares = torch.stack([mask[:, owner == segment].float().mean() for segment in range(int(owner.max()) + 1)])
        self.note(SHARE, shares, layer)


def segment_owners(segments: Sequence[tuple[str, int, int]], tokens: int) -> list[int]:
    """Return the number of the segment that owns each of the first `tokens` positions, numbered as they first occur:
    segments of one name are one, and positions without a name are one more."""
    names: list[str | None] = [None] * tokens
    for name, start, end in segments:
        names[start:end] = [name] * len(names[start:end])
    numbers: dict[str | None, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def fair_counts(sizes: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Return the tokens that each segment keeps, `total` together: the same share of each, but never fewer than
    `least`, which together are at most `total`."""
    counts, remaining = [0] * len(sizes), total
    open_segments = [segment for segment, size in enumerate(sizes) if size]
    while open_segments:
        size = sum(sizes[segment] for segment in open_segments)
        full = [segment for segment in open_segments if least[segment] * size > remaining * sizes[segment]]
        if not full:
            shares = round_shares([remaining * sizes[segment] / size for segment in open_segments], remaining)
            for segment, share in zip(open_segments, shares, strict=True):
                counts[segment] = share
            break
        for segment in full:
            counts[segment] = least[segment]
            remaining -= counts[segment]
            open_segments.remove(segment)
    return counts


def refuses_fair_segments(method: type[Any]) -> str:
    """Return why a method's score cannot be divided over segments; '': it can."""
    if lacking := lacks_score(method):
        return lacking
    if issubclass(method, FairSegments):
        return "it divides its budget over segments already"
    if method.keeps_ends:
        return "its layers keep first and newest tokens, not the best ones"
    return "it keeps whole chunks, which cross the borders of segments" if issubclass(method, WholeChunks) else ""
