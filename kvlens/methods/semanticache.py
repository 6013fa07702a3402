"""SemantiCache, after the abstract: tokens of a sentence whose keys are alike become one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.merged_entries import MergedEntries
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.spans.marks import SETS, mark_of

if TYPE_CHECKING:
    import torch

HALVINGS = 12
"""of the range in which a KV head's threshold is looked for"""


@dataclass(frozen=True)
class SemantiCacheParameters:
    """Lengths are in tokens. The abstract gives no numbers: all of these are ours."""

    entries: int = param(0, "merged entries per KV head; 0: as many as the byte budget holds", ours=True)
    sinks: int = param(4, "first tokens, kept as they are", ours=True)
    window: int = param(32, "last prompt tokens, kept as they are", ours=True)
    marks: str = param("full", "which marks end a chunk, as sentence chunks have them", choices=tuple(SETS), ours=True)
    longest: int = param(64, "tokens of a chunk at most", ours=True)
    whole_marks: bool = param(
        False, "a mark is an entry of its own, as summaries of the paper say, where all chunks and marks fit", ours=True
    )

    def __post_init__(self) -> None:
        if min(self.entries, self.sinks, self.window) < 0 or self.longest < 1:
            raise ValueError("entries, sinks and window must be at least 0 and longest at least 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The window is a tenth of the tokens that the budget holds, 32 at most, and the sinks an eighth of the window,
        4 at most (ours: there are no published numbers)."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        window = max(1, min(32, int(share * prompt_tokens / 10)))
        return {"entries": 0, "window": window, "sinks": min(4, window // 8)}


class SemantiCache(MergedEntries):
    """When prefill ends (after the abstract and summaries by others; no full text and no code could be had): the prompt
    is cut at natural delimiters; inside a chunk the first token that belongs nowhere yet is a seed, and later ones
    whose key has at least a threshold's cosine with its key join it; each cluster is one entry of mean key and mean
    value, to whose score the log of its tokens is added, so that it weighs as much as they did if they were alike.

    Seeds from left to right, the cosine, plain means and the log are those of the summaries. They also say that marks
    stay as they are; here a mark may be merged with its chunk, unless `whole_marks`. Ours: the set of marks, keys after
    RoPE, clusters per KV head; the threshold of each KV head is the highest, found by halving, with which its clusters
    fit into the entries it has. Where there are more chunks than entries, neighbouring chunks become one. First and
    last prompt tokens stay, nothing is merged while decoding. A cluster of one token is logged as a summary too, though
    nothing is lost of it.
    """

    name = "semanticache"
    title = "SemantiCache"
    paper = "after the abstract of SemantiCache, arXiv 2603.14303"
    summary = "merges, when prefill ends, tokens of a sentence whose keys are alike into one entry that weighs as many"
    Parameters = SemantiCacheParameters
    presets = {"paper": {}, "demo": {"window": 16}}  # noqa: RUF012
    journal_names = {  # noqa: RUF012
        "threshold": "cosine from which keys are merged, by KV head; per layer",
        "shortened": "mean length of merged keys over that of their members, single tokens left out, by KV head",
    }
    params: SemantiCacheParameters

    @classmethod
    def cut(cls, params: SemantiCacheParameters, prompt: PromptFacts, start: int, end: int, entries: int) -> list[Span]:
        ends = cls._ends(params, prompt, start, end, params.whole_marks)
        if params.whole_marks and entries and len(ends) > entries:
            ends = cls._ends(params, prompt, start, end, False)
        joined = ends if not entries else ends[::-1][:: -(-len(ends) // entries)][::-1] if ends else []
        begins = [start, *(place for place, _ in joined)]
        return [Span(a, b, "chunk", why) for a, (b, why) in zip(begins, joined, strict=False)]

    @classmethod
    def _ends(
        cls, params: SemantiCacheParameters, prompt: PromptFacts, start: int, end: int, whole_marks: bool
    ) -> list[tuple[int, str]]:
        """Return where each chunk of positions [start, end) ends, and why it does."""
        ends, begin = [], start
        for position in range(start, end):
            mark = mark_of(prompt.tokens[position], params.marks) if position < len(prompt.tokens) else None
            shown = "" if mark is None else mark.text.replace("\n", "\\n")
            if shown and whole_marks and position > begin:
                ends.append((position, f"Ends before '{shown}'."))
                begin = position
            if mark is not None or position + 1 - begin == params.longest or position + 1 == end:
                why = "Ends with the prompt." if position + 1 == end else "As long as may be."
                ends.append((position + 1, f"Ends after '{shown}'." if shown else why))
                begin = position + 1
        return ends

    def merge(
        self, prompt: Prefilled, layer: int, chunks: list[Span], entries: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        from kvlens.kernels.group_sums import sum_by_group
        from kvlens.methods.families.clusters import clustered, fitting

        start, end = chunks[0].tok_start, chunks[-1].tok_end
        keys, values = (tensor[layer, :, start:end].float() for tensor in (prompt.keys, prompt.values))
        starts = torch.tensor([chunk.tok_start - start for chunk in chunks], device=keys.device)
        lengths = torch.tensor([len(chunk) for chunk in chunks], device=keys.device)
        threshold = fitting(keys, starts, lengths, entries, HALVINGS)
        seed = clustered(keys, starts, lengths, threshold)
        is_seed = seed == torch.arange(seed.shape[1], device=keys.device)
        entry = (is_seed.cumsum(-1) - 1).gather(-1, seed)
        counts = sum_by_group(torch.ones_like(keys[..., 0]), entry, entries)
        mean_keys, mean_values = (
            sum_by_group(tensor, entry, entries) / counts.clamp(min=1)[..., None] for tensor in (keys, values)
        )
        chunk = torch.repeat_interleave(torch.arange(len(chunks), device=keys.device), lengths).expand_as(entry)
        of_entry = torch.zeros_like(counts, dtype=torch.long).scatter_(1, entry, chunk)
        members = sum_by_group(keys.norm(dim=-1), entry, entries) / counts.clamp(min=1)
        is_merged = counts > 1
        ratio = torch.where(is_merged, mean_keys.norm(dim=-1) / members.clamp(min=1e-20), 0).sum(-1) / is_merged.sum(-1)
        self.note("threshold", threshold, layer)
        self.note("shortened", ratio, layer)
        dtype = prompt.keys.dtype
        return mean_keys.to(dtype), mean_values.to(dtype), counts.long(), of_entry
