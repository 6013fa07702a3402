"""Documents of one length as one batch: what differs in number (exact tokens, spans) is padded.

Shapes: L layers, B documents, H query heads, H_kv KV heads, D head size, T positions, E exact tokens, S spans of at
most m tokens, R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.lab.training.sekv.examples import Example


@dataclass(frozen=True)
class Batch:
    """B documents as the student sees them. Padding has length 1 and is in no mask."""

    suffix_ids: Tensor
    """[B, T]"""
    position_ids: Tensor
    """[B, T]"""
    teacher: Tensor
    """log-probabilities [B, T, V]"""
    mass: Tensor
    """the teacher's attention on every span [L, B, H, T, S]"""
    exact_keys: Tensor
    """[L, B, H_kv, E, D]"""
    exact_values: Tensor
    mean_keys: Tensor
    """[L, B, H_kv, S, D]"""
    mean_values: Tensor
    key_factors: tuple[Tensor, Tensor, Tensor]
    """U [L, B, H_kv, S, m, R], sigma [L, B, H_kv, S, R], V [L, B, H_kv, S, R, D]"""
    value_factors: tuple[Tensor, Tensor, Tensor]
    energy: tuple[Tensor, Tensor]
    """[L, B, H_kv, S]"""
    is_exact: Tensor
    """bool [B, E]"""
    in_span: Tensor
    """bool [B, S, m]"""
    is_span: Tensor
    """bool [B, S]"""
    has_rank: Tensor
    """bool [B, R]: the ranks that the document's spans can have"""
    length: Tensor
    """float [B, S], tokens"""
    token: Tensor
    """row of each token of spans among the S m rows of all [B, F], and rows of padding behind"""
    is_token: Tensor
    """bool [B, F]"""


def join(examples: Sequence[Example]) -> Batch:
    """Return the examples as one batch, in float32. All have the same T."""
    prefixes = [example.prefix for example in examples]
    ranks = [torch.ones_like(prefix.key_factors[1][0, 0, 0], dtype=torch.bool) for prefix in prefixes]

    def layers(parts: Sequence[Tensor]) -> Tensor:
        return _padded(parts, 1).float()

    def factors(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        u, sigma, v = (layers(of_all) for of_all in zip(*parts, strict=True))
        return u, sigma, v

    lengths = [prefix.length for prefix in prefixes]
    in_span = _padded([prefix.in_span for prefix in prefixes], 0)
    tokens = in_span.sum((1, 2))
    rows = (~in_span.flatten(1)).byte().argsort(dim=1, stable=True)[:, : int(tokens.max())]
    is_span = _padded([torch.ones_like(length, dtype=torch.bool) for length in lengths], 0)
    return Batch(
        torch.cat([example.suffix_ids for example in examples]),
        torch.cat([example.position_ids for example in examples]),
        torch.stack([example.teacher for example in examples]).float(),
        layers([example.mass for example in examples]),
        layers([prefix.exact_keys for prefix in prefixes]),
        layers([prefix.exact_values for prefix in prefixes]),
        layers([prefix.mean_keys for prefix in prefixes]),
        layers([prefix.mean_values for prefix in prefixes]),
        factors([prefix.key_factors for prefix in prefixes]),
        factors([prefix.value_factors for prefix in prefixes]),
        (layers([prefix.energy[0] for prefix in prefixes]), layers([prefix.energy[1] for prefix in prefixes])),
        _padded([torch.ones_like(prefix.exact_keys[0, 0, :, 0], dtype=torch.bool) for prefix in prefixes], 0),
        in_span,
        is_span,
        _padded(ranks, 0),
        torch.where(is_span, _padded(lengths, 0).float(), 1),
        rows,
        torch.arange(rows.shape[1], device=rows.device) < tokens[:, None],
    )


def _padded(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Stack tensors of different sizes in a new dimension `dim`, with zeros behind the smaller ones."""
    size = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    if all(list(part.shape) == size for part in parts):
        return torch.stack(list(parts), dim)
    out = parts[0].new_zeros(*size[:dim], len(parts), *size[dim:])
    for place, part in enumerate(parts):
        target = out.select(dim, place)
        target[tuple(slice(0, extent) for extent in part.shape)] = part
    return out
