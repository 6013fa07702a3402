"""What CompressKV's calibration measures while a model answers under full attention. L layers, Hq query heads."""

from __future__ import annotations

import torch

from kvlens.kernels.attend import attention_weights, decode_attention
from kvlens.lab.calibrate.projection import projected

KINDS = ("srh", "srh_code", "trh", "trh_topk")


class HeadScores:
    """Scores of one answer: a watcher of `kvlens.lab.calibrate.fullrun.watch`.

    `scores`: kind -> float64 [L, Hq].
    srh: eq. 1, the head's attention on the answer span, summed over the steps whose token occurs in the span.
    srh_code: the same, a step counted as often as its token occurs in the span (the authors' code).
    trh: share of the span's length that the head copied: steps whose token stands where the head attends most (Wu et
    al.). trh_topk: the same, for the `top` most attended positions instead of the one (HeadKV's relaxation as
    CompressKV sec. 3.1 puts it). `chance`: the srh score of a head that attends all tokens alike.
    """

    def __init__(self, layers: int, q_heads: int, prompt: tuple[int, ...], span: list[int], top: int) -> None:
        """span: prompt positions of the answer; prompt: all prompt token ids."""
        self.scores = {kind: torch.zeros(layers, q_heads, dtype=torch.float64) for kind in KINDS}
        self.chance = 0.0
        self._context = 1
        self._span, self._tokens = span, [prompt[position] for position in span]
        self._top = min(top, len(prompt))
        self._mass = torch.zeros(layers, q_heads, dtype=torch.float64)
        self._strongest = torch.zeros(layers, q_heads, self._top, dtype=torch.long)

    def layer(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        """Attention of one layer before its step's token is known."""
        weights = attention_weights(q, keys, None, scaling).flatten(0, 1).cpu()
        self._context = keys.shape[1]
        self._mass[layer] = weights[:, self._span].double().sum(-1)
        self._strongest[layer] = weights.topk(self._top, -1).indices

    def token(self, token: int) -> None:
        """The step's token: credit what the layers attended."""
        positions = [
            position for position, counterpart in zip(self._span, self._tokens, strict=True) if counterpart == token
        ]
        if not positions:
            return
        hits = torch.isin(self._strongest, torch.tensor(positions))
        self.chance += len(self._span) / self._context
        self.scores["srh"] += self._mass
        self.scores["srh_code"] += len(positions) * self._mass
        self.scores["trh"] += hits[..., 0].double() / len(self._span)
        self.scores["trh_topk"] += hits.any(-1).double() / len(self._span)


class LayerErrors:
    """Compression errors of one answer (eq. 2-4): a watcher. Full and compressed cache see the same query, so all
    layers are measured in one pass, each as if it alone were compressed.

    `errors`: float64 [L], summed over the steps.
    """

    def __init__(
        self, projections: list[torch.nn.Module], kept_values: list[torch.Tensor], prompt_tokens: int, epsilon: float
    ) -> None:
        """kept_values: prompt positions left in the compressed cache, per layer; decoded tokens are in both caches."""
        self.errors = torch.zeros(len(kept_values), dtype=torch.float64)
        self._projections, self._kept, self._n, self._epsilon = projections, kept_values, prompt_tokens, epsilon

    def layer(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        """One layer's output with both caches."""
        remaining = torch.cat([self._kept[layer], torch.arange(self._n, keys.shape[1], device=keys.device)])
        query = q[None, :, None]
        outputs = [
            projected(self._projections[layer], decode_attention(query, k, v, None, scaling).flatten())
            for k, v in ((keys, values), (keys[:, remaining], values[:, remaining]))
        ]
        full, compressed = (output.double() for output in outputs)
        self.errors[layer] += float((compressed - full).norm() / (full.norm() + self._epsilon))

    def token(self, token: int) -> None:
        """Errors do not depend on it."""
