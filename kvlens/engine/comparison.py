"""What a step's next-token distribution lost against full KV, in the very same context."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlens.instruments import Loss
from kvlens.refusal import Refusal


@dataclass(frozen=True)
class Reference:
    """The full-KV run of a prompt: what it chose and on which logits."""

    uid: str
    """of the stored run; '' when it was made in memory"""
    ids: tuple[int, ...]
    logits: torch.Tensor
    """float32 [T, V], row t produced ids[t]"""


class Comparison:
    """Follows one generation beside its reference, as long as both have chosen the same tokens."""

    def __init__(self, reference: Reference, vocabulary: int, text_of: Callable[[int], str]) -> None:
        """Raises ValueError when the reference is of a model with another vocabulary."""
        if reference.logits.shape != (len(reference.ids), vocabulary):
            raise Refusal(
                f"the reference has logits of {reference.logits.shape[-1]:,} tokens, the model a vocabulary of "
                f"{vocabulary:,}: "
                "it is a run of another model or tokenizer.",
                code="other_vocabulary",
                reference=reference.logits.shape[-1],
                model=vocabulary,
            )
        self.reference, self._text_of = reference, text_of
        self._together = True

    def step(self, step: int, logits: torch.Tensor, token: int) -> Loss | None:
        """logits float32 [V] of a step that then chose `token`. None where the contexts differ or the reference had
        ended."""
        if not self._together or step >= len(self.reference.ids):
            return None
        reference_token = self.reference.ids[step]
        self._together = token == reference_token
        return compare(self.reference.logits[step].to(logits.device), logits, reference_token, self._text_of)


def compare(full: torch.Tensor, logits: torch.Tensor, ref_token: int, text_of: Callable[[int], str]) -> Loss:
    """Logits float32 [V] under full KV and under the method. Divergence and logarithms are computed in float64.

    The most probable token is taken from float32 log-probabilities, the first of equals, as greedy decoding takes it.
    """
    top, full_top = _likeliest(logits), _likeliest(full)
    p, q = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = float((p.exp() * (p - q)).masked_fill(p.isneginf(), 0.0).sum())
    earlier = torch.arange(len(logits), device=logits.device) < ref_token
    rank = (logits > logits[ref_token]) | (earlier & (logits == logits[ref_token]))
    return Loss(
        ref_token,
        text_of(ref_token),
        top,
        text_of(top),
        top == full_top,
        kl if math.isnan(kl) else max(0.0, kl),  # rounding below 0 is 0, what is no number stays none
        float(p[ref_token]),
        float(q[ref_token]),
        float(logits[ref_token] - full[ref_token]),
        int(rank.sum()),
    )


def _likeliest(logits: torch.Tensor) -> int:
    return int(logits.log_softmax(-1).argmax())
