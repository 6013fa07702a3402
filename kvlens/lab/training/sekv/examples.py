"""Training examples of SeKV's router: what the frozen teacher gives for one document.

Shapes: n = P + T tokens, prefix P, suffix T; L layers, H query heads, H_kv KV heads, D head size, E exact tokens, S
spans of at most m tokens, R ranks, V vocabulary.
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
from kvlens.lab.training.sekv.seam import ATTENTION, Reading
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import surprisal_weights
from kvlens.methods.sekv.spans import COMPRESSED, segment
from kvlens.spans import Surprisal

TOGETHER = 8
"""tokens: spans whose lengths are equal when rounded up to a multiple are decomposed together"""


@dataclass(frozen=True)
class Prefix:
    """The constants of one document: how its prefix lies in memory, for all layers."""

    exact_keys: Tensor
    """[L, H_kv, E, D]"""
    exact_values: Tensor
    mean_keys: Tensor
    """[L, H_kv, S, D], weighted by surprisal (eq. 2)"""
    mean_values: Tensor
    key_factors: tuple[Tensor, Tensor, Tensor]
    """U [L, H_kv, S, m, R], sigma [L, H_kv, S, R], V [L, H_kv, S, R, D]"""
    value_factors: tuple[Tensor, Tensor, Tensor]
    energy: tuple[Tensor, Tensor]
    """squared norm of each span's keys and values, [L, H_kv, S]"""
    in_span: Tensor
    """bool [S, m]: False for padding"""
    length: Tensor
    """float [S], tokens"""


@dataclass(frozen=True)
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
    """of the suffix [T, V]"""
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
def read_all(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    suffix: int,
    params: SeKVParameters,
    anchor_cap: int | None = None,
) -> list[Read | None]:
    """Run the teacher once over documents of one length n and cut their prefixes, all but the last `suffix` tokens.
    None for a document whose prefix has no span to decide about."""
    tokens = torch.tensor([list(ids) for ids in documents], device=model.device)
    trip = Reading(suffix)
    with attending(model, ATTENTION):
        logits = model(input_ids=tokens, use_cache=False, sekv=trip).logits
    layers = [trip.captured[layer] for layer in sorted(trip.captured)]
    query, keys, values = (torch.stack([layer[i] for layer in layers], 1).float() for i in range(3))
    prefix = tokens.shape[1] - suffix
    results: list[Read | None] = []
    for place in range(len(documents)):
        nats = _surprisal(logits[place, : prefix - 1], tokens[place, 1:prefix])
        rows = _rows_of_spans(nats, params, anchor_cap)
        tail = logits[place, prefix:].clone()
        results.append(rows and Read(tail, query[place], keys[place], values[place], nats, *rows, trip.scaling))
    return results


def read(
    model: PreTrainedModel, ids: Sequence[int], suffix: int, params: SeKVParameters, anchor_cap: int | None = None
) -> Read | None:
    """Return the same of one document."""
    return read_all(model, [ids], suffix, params, anchor_cap)[0]


@torch.no_grad()
def prepare_all(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    suffix: int,
    params: SeKVParameters,
    anchor_cap: int | None = None,
    kept_as: torch.dtype = torch.float32,
) -> list[Example | None]:
    """Run the teacher over documents of one length and lay out their prefixes. None for a document whose prefix has no
    span to decide about. kept_as: number format of the examples."""
    examples: list[Example | None] = []
    for ids, results in zip(documents, read_all(model, documents, suffix, params, anchor_cap), strict=True):
        if results is None:
            examples.append(None)
            continue
        prefix = len(ids) - suffix
        positions = torch.arange(prefix, len(ids), device=model.device)[None]
        tokens = torch.tensor([list(ids)], device=model.device)[:, prefix:]
        teacher, mass = results.logits.float().log_softmax(-1).to(kept_as), results.mass().to(kept_as)
        examples.append(Example(tokens, positions, _prefix(results, params, kept_as), teacher, mass))
    return examples


def prepare(
    model: PreTrainedModel, ids: Sequence[int], suffix: int, params: SeKVParameters, anchor_cap: int | None = None
) -> Example | None:
    """Return the same of one document."""
    return prepare_all(model, [ids], suffix, params, anchor_cap)[0]


def _rows_of_spans(nats: Tensor, params: SeKVParameters, anchor_cap: int | None) -> tuple[Tensor, Tensor] | None:
    """Return the tokens of the spans of a prefix by its surprisals [P]: place [S, m] and in_span [S, m]."""
    values = nats.tolist()
    compressed_to = max(0, len(values) - params.window)
    spans = segment(params, values[:compressed_to], 0, Surprisal.measure(values), anchor_cap)
    spans = [span for span in spans if span.kind in COMPRESSED]
    if not spans:
        return None
    starts, lengths = (torch.tensor(x)[:, None] for x in ([s.tok_start for s in spans], [len(s) for s in spans]))
    columns = torch.arange(int(lengths.max()))
    in_span = columns < lengths
    return torch.where(in_span, starts + columns, 0).to(nats.device), in_span.to(nats.device)


def _surprisal(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p of each next token in nats [P], 0 at token 0 (eq. 1), 1024 rows at a time."""
    rows = zip(logits.split(1024), targets.split(1024), strict=True)
    parts = [torch.nn.functional.cross_entropy(row.float(), target, reduction="none") for row, target in rows]
    return torch.cat([logits.new_zeros(1, dtype=torch.float32), *parts])


def _prefix(results: Read, params: SeKVParameters, kept_as: torch.dtype) -> Prefix:
    place, in_span = results.place, results.in_span
    exact = torch.ones(len(results.nats), dtype=torch.bool, device=place.device)
    exact[place[in_span]] = False
    positions = exact.nonzero()[:, 0]
    mean_keys, mean_values = results.means(params)
    u, sigma, v = _factors(torch.stack((results.keys, results.values)), place, in_span, params.max_rank)
    energies = [(x[:, :, place] * in_span[..., None]).square().sum((-1, -2)) for x in (results.keys, results.values)]
    return Prefix(
        results.keys[:, :, positions].to(kept_as),
        results.values[:, :, positions].to(kept_as),
        mean_keys.to(kept_as),
        mean_values.to(kept_as),
        (u[0].to(kept_as), sigma[0], v[0].to(kept_as)),
        (u[1].to(kept_as), sigma[1], v[1].to(kept_as)),
        (energies[0], energies[1]),
        in_span,
        results.length,
    )


def _factors(x: Tensor, place: Tensor, in_span: Tensor, max_rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose the spans of keys and values x [2, L, H_kv, n, D]: U [2, L, H_kv, S, m, R], sigma [2, L, H_kv, S, R], V
    [2, L, H_kv, S, R, D]. Spans of about one length are decomposed together, so that little is padding."""
    dim, (spans, longest) = x.shape[-1], place.shape
    rank, size = min(longest, dim, max_rank), (*x.shape[:3], spans)
    out = x.new_zeros(*size, longest, rank), x.new_zeros(*size, rank), x.new_zeros(*size, rank, dim)
    lengths = in_span.sum(-1).tolist()
    of_size: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        of_size.setdefault(min(longest, -(-length // TOGETHER) * TOGETHER), []).append(row)
    for tokens, spans_of_size in of_size.items():
        rows = torch.tensor(spans_of_size, device=x.device)
        matrices = x[:, :, :, place[rows, :tokens]] * in_span[rows, :tokens, None]
        u, sigma, v = lowrank.truncated_svd(matrices, max_rank)
        ranks = sigma.shape[-1]
        out[0][:, :, :, rows, :tokens, :ranks] = u
        out[1][:, :, :, rows, :ranks], out[2][:, :, :, rows, :ranks] = sigma, v
    return out


def _span_mass(query: Tensor, key: Tensor, place: Tensor, in_span: Tensor) -> Tensor:
    """Attention of the suffix on each span: scaled query [H, T, D] of the last T of n positions, key [H_kv, n, D] ->
    [H, T, S]."""
    heads, suffix, _ = query.shape
    logits = query @ key.repeat_interleave(heads // key.shape[0], dim=0).transpose(-1, -2)
    n = key.shape[1]
    hidden = torch.ones(suffix, n, dtype=torch.bool, device=key.device).triu(n - suffix + 1)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights[:, :, place] * in_span).sum(-1)
