from dataclasses import dataclass

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param


@dataclass(frozen=True)
class LastGlanceParameters(PromptEvictionParameters):
    window: int = param(16, "last prompt tokens, kept without a comparison")
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)


class LastGlance(PromptEviction):
    """Each KV head keeps the prompt tokens that the last prompt queries attend most."""

    name = "last_glance"
    title = "Last glance"
    paper = "an example of kvlens"
    summary = "drops the prompt tokens that the last queries attend least once, when prefill ends"
    Parameters = LastGlanceParameters
    needs = Needs(queries=16)

    def score(self, prompt, layer, before):
        """Return float32 [H_kv, before]: the highest stay."""
        keys = prompt.keys[layer, :, :before].float()  # [H_kv, before, D]
        queries = prompt.last_queries[layer].float()  # [Hq, w, D]
        grouped = queries.unflatten(0, (keys.shape[0], -1)).flatten(1, 2)  # [H_kv, G w, D]
        weights = (grouped @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5).softmax(-1)
        return weights.mean(1)
