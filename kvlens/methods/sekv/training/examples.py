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
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import surprisal_weights
from kvlens.methods.sekv.spans import COMPRESSED, segment
from kvlens.methods.sekv.training.student import ATTENTION, Pass, Prefix
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


@torch.no_grad()
def prepare(
    model: PreTrainedModel, ids: Sequence[int], suffix: int, params: SeKVParameters, anchor_cap: int | None = None
) -> Example | None:
    """Run the teacher over `ids` [n] and lay out its prefix. None when the prefix has no span to decide about."""
    tokens = torch.tensor([list(ids)], device=model.device)
    trip = Pass(suffix)
    with attending(model, ATTENTION):
        logits = model(input_ids=tokens, use_cache=False, sekv=trip).logits[0]
    prefix_tokens = len(ids) - suffix
    nats = _surprisal(logits[: prefix_tokens - 1], tokens[0, 1:prefix_tokens])
    compressed_to = prefix_tokens - params.window
    spans = segment(params, nats[: max(0, compressed_to)].tolist(), 0, Surprisal.of(nats.tolist()), anchor_cap)
    spans = [span for span in spans if span.kind in COMPRESSED]
    if not spans:
        return None
    layers = [trip.captured[layer] for layer in sorted(trip.captured)]
    keys, values = (torch.stack([layer[i] for layer in layers]).float() for i in (1, 2))
    place = torch.zeros(len(spans), max(len(span) for span in spans), dtype=torch.long, device=model.device)
    in_span = torch.zeros_like(place, dtype=torch.bool)
    for row, span in enumerate(spans):
        place[row, : len(span)] = torch.arange(span.tok_start, span.tok_end)
        in_span[row, : len(span)] = True
    return Example(
        tokens[:, prefix_tokens:],
        torch.arange(prefix_tokens, len(ids), device=model.device)[None],
        _prefix(keys[:, :, :prefix_tokens], values[:, :, :prefix_tokens], nats, place, in_span, params),
        logits[prefix_tokens:].float().log_softmax(-1),
        torch.stack(
            [_span_mass(query.float() * trip.scaling, key.float(), place, in_span) for query, key, _ in layers]
        ),
        keys[:, :, :prefix_tokens],
    )


def _surprisal(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each next token in nats [P], 0 at token 0 (eq. 1), 1024 rows at a time."""
    rows = zip(logits.split(1024), targets.split(1024), strict=True)
    parts = [torch.nn.functional.cross_entropy(row.float(), target, reduction="none") for row, target in rows]
    return torch.cat([logits.new_zeros(1, dtype=torch.float32), *parts])


def _prefix(
    keys: Tensor, values: Tensor, nats: Tensor, place: Tensor, in_span: Tensor, params: SeKVParameters
) -> Prefix:
    """keys, values [L, H_kv, P, D]; place [S, m] token of each row of each span."""
    exact = torch.ones(keys.shape[2], dtype=torch.bool, device=keys.device)
    exact[place[in_span]] = False
    weight = (nats[place] if params.weights == "surprisal" else torch.ones_like(nats[place])) * in_span
    weight = surprisal_weights(weight)[..., None] * in_span[..., None]
    span_keys, span_values = (x[:, :, place] * in_span[..., None] for x in (keys, values))
    return Prefix(
        keys[:, :, exact],
        values[:, :, exact],
        (span_keys * weight).sum(3),
        (span_values * weight).sum(3),
        lowrank.truncated_svd(span_keys, params.max_rank),
        lowrank.truncated_svd(span_values, params.max_rank),
        (span_keys.square().sum((-1, -2)), span_values.square().sum((-1, -2))),
        in_span,
        in_span.sum(-1).float(),
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
