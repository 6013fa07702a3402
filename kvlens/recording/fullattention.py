"""Full attention of a run's own queries over the exact keys of every position, a layer at a time. Shapes as in
``snapshot.py``; n positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvlens.kernels.attend import form_at
from kvlens.recording.keyparts import layer_keys
from kvlens.recording.snapshot import Snapshot


class FullAttention:
    """Full attention of T steps that are measured together. A layer's keys are read once for all of them, in parts as
    they lie; 16-bit keys are never all there in float32. What is returned lies in room that the next call fills anew:
    new room for each layer costs more than its product."""

    def __init__(self, shots: Sequence[Snapshot]) -> None:
        """shots: consecutive steps, with the keys of all positions."""
        keys = [shot.shadow if shot.keys is None else shot.keys for shot in shots]
        assert keys[-1] is not None, "full attention needs the keys of all positions"
        self._keys, self._forms, self._scaling = keys[-1], shots[0].forms, shots[0].scaling
        layers, kv_heads, self._n, _ = self._keys.shape
        q = torch.stack([shot.q for shot in shots], 1).unflatten(2, (kv_heads, -1)).transpose(1, 2)
        self._shape = (*q.shape[1:4], self._n)
        self._rows = q.reshape(layers, kv_heads, -1, q.shape[-1]).float()
        """[L, H_kv, T * G, D]"""
        self._written = torch.tensor([each.shape[2] for each in keys if each is not None], device=q.device)
        self._fewest = min(each.shape[2] for each in keys if each is not None)
        unwritten = torch.arange(self._fewest, self._n, device=q.device) >= self._written[:, None, None]
        self._unwritten = unwritten
        """bool [T, 1, n - fewest]: positions that a step had not written"""
        self._scores = self._rows.new_empty(self._shape)
        self._weights = self._scores.new_empty(0)

    def layers(self, start: int, count: int) -> torch.Tensor:
        """Return full attention of some layers [count, H_kv, T, G, n], 0 on positions a step had not written."""
        if len(self._weights) < count:
            self._weights = self._scores.new_empty(count, *self._shape)
        for layer in range(start, start + count):
            self._weigh(layer, self._weights[layer - start])
        return self._weights[:count]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return full attention of a plain layer [H_kv, T, G, n], and its entropy in nats [H_kv, T, G].

        With m the largest score s, -ln p = m - s - ln max(p): an entropy takes a product, and no logarithm of each
        weight."""
        weights, scores = self.layers(layer, 1)[0], self._scores
        scores -= scores.amax(-1, keepdim=True)
        scores[..., self._fewest :].masked_fill_(self._unwritten, 0.0)  # where -inf would meet a weight of 0
        below = weights.flatten(0, 2)[:, None] @ scores.flatten(0, 2)[..., None]
        return weights, -weights.amax(-1).log() - below.view(self._shape[:3])

    def _weigh(self, layer: int, weights: torch.Tensor) -> None:
        """Compute the scores of a layer, and write its weights [H_kv, T, G, n]."""
        scores, start = self._scores, 0
        for part in layer_keys(self._keys, layer):
            if part.shape[1]:
                room = scores.flatten(1, 2)[..., start : start + part.shape[1]]
                torch.baddbmm(room, self._rows[layer], part.float().mT, beta=0, alpha=self._scaling, out=room)
                start += part.shape[1]
        form = form_at(self._forms, layer)
        scores = form.cap(scores)
        scores[..., self._fewest :].masked_fill_(self._unwritten, -math.inf)
        if form.window:
            old = torch.arange(self._n, device=scores.device) < (self._written - form.window)[:, None, None]
            scores = scores.masked_fill(old, -math.inf)
        if form.sinks is None:
            torch.softmax(scores, -1, out=weights)
        else:
            weights.copy_(form.weigh(scores.transpose(1, 2)).transpose(1, 2))
