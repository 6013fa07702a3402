"""Full KV beside a run: the full-KV cache of the run's prompt, fed the run's own tokens a few steps behind the run.

Up to the divergence the tokens are the reference's, so this is the reference's own run. Behind it full KV is forced
along the run's tokens. Several steps go through the model at once; only their attention is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.rotary import frequencies_vary
from kvlens.engine.sharedpasses import FullKVPass, Passes, SharedPasses
from kvlens.kernels.attend import LayerForm, causal, form_at
from kvlens.shortage import shortage
from kvlens.text.prompts import Prompt
from kvlens.tiers.slots import PromptStore


class Alongside:
    """A session of full KV (kvlens.engine.hf_attention.LayerSession) and a recorder's source of full KV's own attention
    (kvlens.recording.recorder.FullKVAttention). It copies no key or value of the prompt. What goes wrong ends it,
    never the run."""

    def __init__(
        self,
        loaded: LoadedModel,
        keys: torch.Tensor,
        values: torch.Tensor,
        token: int,
        steps: int,
        shared: SharedPasses | None = None,
    ) -> None:
        """keys, values: the prompt's under full KV [L, H_kv, n, D]; token: fed in step 0; steps: at most; shared: of
        the lanes on this reading of the prompt; None: there is one run."""
        layers, kv_heads, n, head_dim = keys.shape
        self._model, self._token = loaded.model.base_model, token
        self._keys, self._values, self._prompt = keys, values, n
        self._new = keys.new_empty(2, layers, kv_heads, steps, head_dim)
        """keys and values of the decoded tokens"""
        self._seen = [0] * layers
        """decoded tokens that each layer has seen"""
        self._forms = forms_of(loaded.model, loaded.shape.bound(n + steps))
        self._sampled: Sequence[Sequence[int]] = ()
        self._rows: list[torch.Tensor | None] = []
        """of each step [l, H_kv, G, n], filled layer by layer; None: no layer is sampled"""
        self._shared = shared
        self._path: Passes = ()
        self.why: str | None = None
        """why there is no attention from some step on; None: there is"""

    def attention(self, tokens: Sequence[int], layers: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
        """See kvlens.recording.recorder.FullKVAttention."""
        self._sampled, self._rows = layers, [None] * len(tokens)
        if self.why is None:
            fed, self._token = (self._token, *tokens[:-1]), tokens[-1]
            self._path, sampled_layers = (*self._path, fed), tuple(map(tuple, layers))
            entry = None if self._shared is None else self._shared.find(self._path, sampled_layers)
            if entry is not None:
                return self._take(entry)
            try:
                with torch.inference_mode():
                    ids = torch.tensor([fed], device=self._keys.device)
                    cache = SessionCache(self, len(self._seen))  # kept, it and this would keep each other's keys
                    self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            except Exception as failure:
                short = shortage(failure)
                self.why = str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
        results, self._rows = self._rows, []  # kept here, a step's would last until the next steps
        if self.why is not None:
            return [None] * len(tokens)
        if self._shared is not None:
            end = self._seen[0]
            self._shared.keep(self._path, sampled_layers, results, self._new[:, :, :, end - len(tokens) : end])
        return results

    def _take(self, entry: FullKVPass) -> list[torch.Tensor | None]:
        """Take another lane's pass as if this lane had made it."""
        for layer, start in enumerate(self._seen):
            end = start + entry.new.shape[3]
            self._new[:, layer, :, start:end] = entry.new[:, layer]
            self._seen[layer] = end
        return list(entry.rows)

    # ---- called by the seam
    def tokens_seen(self, layer: int) -> int:
        return self._prompt + self._seen[layer]

    def form(self, layer: int) -> LayerForm:
        return form_at(self._forms, layer)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        start, m = self._seen[layer], keys.shape[1]
        self._new[0, layer, :, start : start + m], self._new[1, layer, :, start : start + m] = keys, values
        self._seen[layer] = start + m

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, Hq, m, D] -> attention output of the same shape; softmax and products in float32."""
        count, m = self._seen[layer], q.shape[2]
        new_keys, new_values = (part.float() for part in self._new[:, layer, :, :count])
        packed = q[0].float().reshape(len(new_keys), -1, q.shape[3])  # query heads of a KV head, then steps
        keys, values = self._keys[layer].float(), self._values[layer].float()
        form = self.form(layer)
        scores = form.cap(torch.cat([packed @ keys.mT, packed @ new_keys.mT], -1) * scaling)
        scores = scores.unflatten(1, (-1, m))
        unseen = ~causal(m, self._prompt + count, form.window, q.device)
        weights = form.weigh(scores.masked_fill_(unseen, -torch.inf))
        for step, sampled in enumerate(self._sampled):
            if layer in sampled:
                row = weights[:, :, step, : self._prompt + count - m + step + 1]
                rows = self._rows[step]
                self._rows[step] = rows = row.new_empty(len(sampled), *row.shape) if rows is None else rows
                rows[sampled.index(layer)] = row
        flat = weights.flatten(1, 2)
        output = flat[..., : self._prompt] @ values + flat[..., self._prompt :] @ new_values
        return output.reshape(1, -1, m, q.shape[3]).to(q.dtype)


def full_kv_beside(
    loaded: LoadedModel, prompt: Prompt, read: ReadPrompt | PromptStore | None, steps: int
) -> tuple[Alongside | None, str | None]:
    """Return full KV beside a run, or None and why there is none. read: the prompt as full KV reads it; None: it is not
    at hand. No prompt is read for it. steps: of the run, at most."""
    whole = len(prompt.ids) + len(prompt.asked)
    if frequencies_vary(loaded.model.config, whole, len(prompt.ids) + steps):
        return None, "the model's rotary frequencies change from step to step at this length"
    if read is None:
        return None, "full KV's reading of the prompt was not at hand"
    shared = read.passes if isinstance(read, ReadPrompt) else None
    return Alongside(loaded, read.keys, read.values, prompt.ids[-1], steps, shared), None
