"""Training examples of SeKV's router: what the frozen teacher gives for one document.

Shapes as in sekv_student: n = P + T tokens, prefix P, suffix T, spans S of at most m tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlens.engine.hf_attention import attending
from kvlens.kernels import lowrank
from kvlens.lab.training.sekv.student import ATTENTION, Pass, Prefix
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import surprisal_weights
from kvlens.methods.sekv.spans import COMPRESSED, segment
from kvlens.spans import Surprisal


@dataclass
class Example:
    """One document as the student sees it."""

    suffix_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]"""
    prefix: Prefix
    teacher: Tensor
    """log-probabilities [T, V]"""
    mass: Tensor
    """the teacher's attention on every span [L, H, T, S]"""
    prefix_keys: Tensor
    """[L, H_kv, P, D]"""


def draw(documents: Sequence[Sequence[int]], length: int, rng: random.Random) -> list[int]:
    """A window of `length` token ids: a random place of a random document, further documents following where it is too
    short."""
    ids: list[int] = []
    while len(ids) < length:
        document = documents[rng.randrange(len(documents))]
        spare = len(document) - length
        start = rng.randrange(spare + 1) if spare > 0 else 0
        ids += document[start : start + length - len(ids)]
    return ids


@dataclass(frozen=True)
class Read:
    """A document as the teacher reads it, and the spans of its prefix."""

    logits: Tensor
    """[n, V]"""
    query: Tensor
    """of the suffix [L, H, T, D]"""
    keys: Tensor
    """[L, H_kv, n, D]"""
    values: Tensor
    nats: Tensor
    """surprisals of the prefix [P]"""
    place: Tensor
    """token of each row of each span [S, m]"""
    in_span: Tensor
    """bool [S, m]: False for padding"""
    scaling: float
    """of attention logits"""

    @property
    def length(self) -> Tensor:
        """float [S], tokens."""
        return self.in_span.sum(-1).float()

    def means(self, params: SeKVParameters) -> tuple[Tensor, Tensor]:
        """Mean keys and values of the spans [L, H_kv, S, D] (eq. 2)."""
        nats = self.nats[self.place] if params.weights == "surprisal" else torch.ones_like(self.nats[self.place])
        weight = surprisal_weights(nats * self.in_span)[..., None] * self.in_span[..., None]
        keys, values = ((x[:, :, self.place] * weight).sum(3) for x in (self.keys, self.values))
        return keys, values

    def mass(self) -> Tensor:
        """Attention of the suffix on each span [L, H, T, S]."""
        both = zip(self.query, self.keys, strict=True)
        return torch.stack([_span_mass(query * self.scaling, key, self.place, self.in_span) for query, key in both])


@torch.no_grad()
def read(
    model: PreTrainedModel, ids: Sequence[int], suffix: int, params: SeKVParameters, anchor_cap: int | None = None
) -> Read | None:
    """Run the teacher over `ids` [n] and cut its prefix, all but the last `suffix` tokens. None when the prefix has no
    span to decide about."""
    tokens = torch.tensor([list(ids)], device=model.device)
    trip = Pass(suffix)
    with attending(model, ATTENTION):
        logits = model(input_ids=tokens, use_cache=False, sekv=trip).logits[0]
    prefix_tokens = len(ids) - suffix
    nats = _surprisal(logits[: prefix_tokens - 1], tokens[0, 1:prefix_tokens])
    compressed_to = prefix_tokens - params.window
    spans = segment(params, nats[: max(0, compressed_to)].tolist(), 0, Surprisal.measure(nats.tolist()), anchor_cap)
    spans = [span for span in spans if span.kind in COMPRESSED]
    if not spans:
        return None
    place = torch.zeros(len(spans), max(len(span) for span in spans), dtype=torch.long, device=model.device)
    in_span = torch.zeros_like(place, dtype=torch.bool)
    for row, span in enumerate(spans):
        place[row, : len(span)] = torch.arange(span.tok_start, span.tok_end)
        in_span[row, : len(span)] = True
    layers = [trip.captured[layer] for layer in sorted(trip.captured)]
    query, keys, values = (torch.stack([layer[i] for layer in layers]).float() for i in range(3))
    return Read(logits, query, keys, values, nats, place, in_span, trip.scaling)


@torch.no_grad()
def prepare(
    model: PreTrainedModel, ids: Sequence[int], suffix: int, params: SeKVParameters, anchor_cap: int | None = None
) -> Example | None:
    """Run the teacher over `ids` [n] and lay out its prefix. None when the prefix has no span to decide about."""
    results = read(model, ids, suffix, params, anchor_cap)
    if results is None:
        return None
    prefix = len(ids) - suffix
    tokens = torch.tensor([list(ids)], device=model.device)
    return Example(
        tokens[:, prefix:],
        torch.arange(prefix, len(ids), device=model.device)[None],
        _prefix(results, params),
        results.logits[prefix:].float().log_softmax(-1),
        results.mass(),
        results.keys[:, :, :prefix],
    )


def _surprisal(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each next token in nats [P], 0 at token 0 (eq. 1), 1024 rows at a time."""
    rows = zip(logits.split(1024), targets.split(1024), strict=True)
    parts = [torch.nn.functional.cross_entropy(row.float(), target, reduction="none") for row, target in rows]
    return torch.cat([logits.new_zeros(1, dtype=torch.float32), *parts])


def _prefix(results: Read, params: SeKVParameters) -> Prefix:
    place, in_span = results.place, results.in_span
    exact = torch.ones(len(results.nats), dtype=torch.bool, device=place.device)
    exact[place[in_span]] = False
    positions = exact.nonzero()[:, 0]
    span_keys, span_values = (x[:, :, place] * in_span[..., None] for x in (results.keys, results.values))
    return Prefix(
        results.keys[:, :, positions],
        results.values[:, :, positions],
        *results.means(params),
        lowrank.truncated_svd(span_keys, params.max_rank),
        lowrank.truncated_svd(span_values, params.max_rank),
        (span_keys.square().sum((-1, -2)), span_values.square().sum((-1, -2))),
        in_span,
        results.length,
    )


def _span_mass(query: Tensor, key: Tensor, place: Tensor, in_span: Tensor) -> Tensor:
    """Attention of the suffix on each span: scaled query [H, T, D] of the last T of n positions, key [H_kv, n, D] ->
    [H, T, S]."""
    heads, suffix, _ = query.shape
    logits = query @ key.repeat_interleave(heads // key.shape[0], dim=0).transpose(-1, -2)
    n = key.shape[1]
    hidden = torch.ones(suffix, n, dtype=torch.bool, device=key.device).triu(n - suffix + 1)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights[:, :, place] * in_span).sum(-1)
