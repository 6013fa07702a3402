"""KeyDiff: the keys least like the others, without looking at any query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.given import Prefilled
from kvlens.methods.parameters import param

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KeyDiffParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(0, "last prompt tokens, kept without a comparison; the paper protects none")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)


class KeyDiff(PromptEviction):
    """Ranks tokens by how little their key resembles the mean of the normalised keys of the KV head: score = -cos(k,
    mean(k / |k|)), keys after RoPE as cached (paper sec. 3.2, eq. 8). No query is looked at, so that what is kept does
    not depend on the question.

    Departure: ranked once, when prefill has read everything; the paper also evicts block by block while it reads.
    """

    name = "keydiff"
    title = "KeyDiff"
    paper = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference, 2025"
    summary = "drops prompt tokens once, when prefill ends: each KV head keeps the keys least like the average key"
    Parameters = KeyDiffParameters
    presets = {"paper": {}}  # noqa: RUF012
    peeks = False
    params: KeyDiffParameters

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        keys = prompt.keys[layer].float()
        anchor = F.normalize(keys, dim=-1).mean(1, keepdim=True)
        return -torch.cosine_similarity(keys[:, :before], anchor, dim=-1)
