"""Greedy clusters of neighbouring tokens by the cosine of their keys, for all chunks of a layer at once.

Shapes: H_kv KV heads, m tokens in consecutive chunks, C chunks, w tokens of the longest, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def clustered(keys: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """From left to right, a token that belongs nowhere is a seed, and the later ones of its chunk that belong nowhere
    join it where their cosine with it is at least the KV head's threshold [H_kv]: keys [H_kv, m, D], starts and lengths
    [C] -> int64 [H_kv, m], each token's seed."""
    return _joined(_cosines(keys, starts, lengths), starts, lengths, threshold, keys.shape[1])


def fitting(keys: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, most: int, halvings: int) -> torch.Tensor:
    """The highest threshold found by halving with which a KV head has `most` clusters or fewer: float32 [H_kv]. A chunk
    is one cluster at the least, so `most` must not be below C."""
    cosine, m = _cosines(keys, starts, lengths), keys.shape[1]
    low = torch.full((len(keys),), -1.0, device=keys.device)
    high = torch.full_like(low, 1.0)
    numbers = torch.arange(m, device=keys.device)
    for _ in range(halvings):
        middle = (low + high) / 2
        count = (_joined(cosine, starts, lengths, middle, m) == numbers).sum(-1)
        low, high = torch.where(count <= most, middle, low), torch.where(count <= most, high, middle)
    return torch.where(low == -1.0, -2.0, low)  # a cosine may fall below -1 by rounding


def _cosines(keys: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[H_kv, C, w, w], -3 where there is no token."""
    place = torch.arange(int(lengths.max()), device=keys.device)
    present = place < lengths[:, None]
    positions = (starts[:, None] + place).clamp(max=keys.shape[1] - 1)
    unit = F.normalize(keys, dim=-1)[:, positions]
    return (unit @ unit.transpose(-1, -2)).masked_fill(~(present[:, None] & present[..., None]), -3.0)


def _joined(
    cosine: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, threshold: torch.Tensor, m: int
) -> torch.Tensor:
    seed = torch.full(cosine.shape[:3], -1, device=cosine.device)
    for token in range(cosine.shape[-1]):
        alike = (cosine[:, :, token] >= threshold[:, None, None]) & (seed < 0)
        alike[:, :, token] = seed[:, :, token] < 0
        alike[:, :, :token] = False
        seed = torch.where(alike & (seed[:, :, token] < 0)[..., None], token, seed)
    inside = torch.arange(seed.shape[-1], device=seed.device) < lengths[:, None]
    return (seed + starts[:, None])[:, inside]
