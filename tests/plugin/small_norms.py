from dataclasses import dataclass

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.statements import Statement, arm


@dataclass(frozen=True)
class SmallNormsParameters(PromptEvictionParameters):
    window: int = param(16, "last prompt tokens, kept without a comparison")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    skipped: int = param(1, "first layers in which the newest tokens stay instead: long keys mean nothing there")


class SmallNorms(PromptEviction):
    """Each KV head keeps the prompt tokens whose keys are shortest."""

    name = "small_norms"
    title = "Small norms"
    paper = "after Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, EMNLP 2024"
    summary = "drops the prompt tokens with the longest keys once, when prefill ends"
    statements = (
        Statement(
            "Devoto et al. abstract", "Half can go unharmed.", arm("small_norms", "50%"), (arm("full"),), "as good"
        ),
    )
    Parameters = SmallNormsParameters
    needs = Needs()

    def score(self, prompt, layer, before):
        """Return float32 [H_kv, before]: the highest stay."""
        import torch

        norms = prompt.keys[layer, :, :before].float().norm(dim=-1)
        if layer < self.params.skipped:
            return torch.arange(before, device=norms.device).float().expand_as(norms)
        return -norms
