"""KeyDiff: the keys least like the others, without looking at any query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, Reading, RunContext
from kvlens.refusal import Refusal

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement
    from kvlens.tiers.layout import Layout


@dataclass(frozen=True)
class KeyDiffParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(0, "last prompt tokens, kept without a comparison; the paper protects none")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    block: int = param(
        0,
        "the prompt is read in blocks of so many tokens, each of which attends what is kept of those before it and is "
        "then ranked with it (128 in the paper); 0: ranked once, when everything has been read",
        symbol="B",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 0:
            raise Refusal("block must be at least 0.", code="parameters_disagree", parameter="block")


class KeyDiff(PromptEviction):
    """Ranks tokens by how little their key resembles the mean of the normalised keys of the KV head: score = -cos(k,
    mean(k / |k|)), keys after RoPE as cached (paper sec. 3). No query is looked at, so that what is kept does
    not depend on the question.

    With a `block` the prompt is read as in the paper's experiments: a block attends what each KV head has kept and
    itself, then kept and new tokens are ranked together, by the mean of these keys alone, and cut to the budget, so
    that no KV head ever attends more than its budget and a block. What later tokens become differs with it, so such a
    prompt is read for each run anew. A token that went with an earlier block has no score in the trace; the journal has
    each block's cut.

    Departures: the prompt's keys and values stay on the device until it has been read, as for every method (the peak of
    prefill is logged apart); nothing is evicted while decoding.
    """

    name = "keydiff"
    title = "KeyDiff"
    paper = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, 2025"
    summary = "drops prompt tokens once, when prefill ends: each KV head keeps the keys least like the average key"
    Parameters = KeyDiffParameters
    presets = {"paper": {}, "blocks": {"block": 128}}  # noqa: RUF012
    needs = Needs()
    journal_names = {  # noqa: RUF012
        "block_cut": "lowest score that stayed when a block of the prompt had been read, by block from the first one; "
        "NaN where nothing had to go. Per layer and KV head"
    }
    params: KeyDiffParameters

    def __init__(self, params: KeyDiffParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self.partial_ranking = params.block > 0
        self._alive: dict[int, torch.Tensor] = {}
        """of each layer, bool [H_kv, m]: kept of the tokens read so far"""
        self._ranked: dict[int, torch.Tensor] = {}
        """of each layer, float32 [H_kv, m]: the last block's ranking, NaN where a token was not ranked in it"""
        self._cuts: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def needs_with(cls, params: KeyDiffParameters) -> Needs:
        return Needs(reading=params.block > 0)

    @property
    def block(self) -> int:
        evicts = self.total(self.params, self.context) < self.context.shape.layers * (
            self.context.prompt_tokens + self.last
        )
        return self.params.block if evicts else 0

    def reading(self, layer: int, keys: torch.Tensor, tokens: int) -> Reading | None:
        import torch

        if not self.block:
            return None
        n, most = keys.shape[1], self.tokens(None, self.total(self.params, self.context))[layer][0] - self.last
        new = torch.ones(len(keys), tokens, dtype=torch.bool, device=keys.device)
        alive = self._alive.get(layer, new[:, :0])
        causal = new[:1, :1].expand(tokens, tokens).tril().expand(len(keys), -1, -1)
        reading = Reading(torch.cat((alive[:, None].expand(-1, tokens, -1), causal), 2))
        positions = torch.cat((alive, new), 1)
        self._alive[layer], cut = self._cut(layer, keys, positions, most) if n > most else (positions, None)
        self._cuts.setdefault(layer, []).append(keys.new_full((len(keys),), torch.nan) if cut is None else cut)
        return reading

    def _cut(self, layer: int, keys: torch.Tensor, there: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens stay of those `there` bool [H_kv, m], `most` of each KV head, and the lowest score of these."""
        import torch

        newest = there.shape[1] - max(self.params.window - self.last, 0)
        rank = unlike(keys, there)[:, :newest].masked_fill(~there[:, :newest], torch.nan)
        kept_positions = there.clone()
        kept_positions[:, :newest] = self.choose(rank, [most - (there.shape[1] - newest)] * len(keys))
        self._ranked[layer] = rank
        return kept_positions, rank.masked_fill(~kept_positions[:, :newest], torch.inf).amin(1)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        placed = super().prefill_end(prompt)
        for tables in (self._alive, self._ranked, self._cuts):
            tables.clear()  # they served the reading of the prompt
        return placed

    def choose(self, score: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return super().choose(score.nan_to_num(nan=float("-inf")), counts)

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        import torch

        if layer in self._ranked:
            for head, cuts in enumerate(torch.stack(self._cuts[layer], 1)):
                self.note("block_cut", cuts, layer, head)
            return self._ranked[layer][:, :before]
        return unlike(prompt.keys[layer])[:, :before]


def unlike(keys: torch.Tensor, there: torch.Tensor | None = None) -> torch.Tensor:
    """How little each key [H_kv, m, D] resembles the mean of the normalised keys, or of those that are `there` bool
    [H_kv, m]: float32 [H_kv, m]."""
    import torch.nn.functional as F
    from torch import cosine_similarity

    keys = keys.float()
    unit = F.normalize(keys, dim=-1)
    if there is not None:
        unit = unit * there[..., None]  # the mean's length, that of all tokens, is nothing to a cosine
    return -cosine_similarity(keys, unit.mean(1, keepdim=True), dim=-1)
