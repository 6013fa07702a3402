"""Full attention of a run's own queries over the exact keys of every position, made a layer at a time. Shapes as in
``snapshot.py``; n positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kvlens.kernels.attend import attention_weights
from kvlens.recording.keyparts import KeyParts
from kvlens.recording.snapshot import Snapshot


def full_attention(shots: Sequence[Snapshot]) -> torch.Tensor:
    """Return full attention [L, H_kv, T, G, n] of consecutive steps, 0 on positions a step had not written."""
    return stack_layers(layers_attention(shots), len(shots[0].q))


def stack_layers(attention: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Return the next `count` layers of `layers_attention` [count, H_kv, T, G, n]."""
    layer = next(attention)
    weights = layer.new_empty(count, *layer.shape)
    weights[0] = layer
    for number in range(1, count):
        weights[number] = next(attention)
    return weights


def layers_attention(shots: Sequence[Snapshot]) -> Iterator[torch.Tensor]:
    """Yield full attention [H_kv, T, G, n] of consecutive steps, layer by layer, 0 on positions a step had not written.
    The steps' queries share one product with the keys: what a layer needs fits a processor's cache, and keys of 16 bits
    are never all there in float32."""
    keys = [shot.shadow if shot.keys is None else shot.keys for shot in shots]
    longest = keys[-1]
    assert longest is not None
    layers, kv_heads, n, head_dim = longest.shape
    q = torch.stack([shot.q for shot in shots], 1).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    steps, group = q.shape[2:4]
    token_counts = torch.tensor([each.shape[2] for each in keys if each is not None], device=q.device)
    unwritten = (torch.arange(n, device=q.device) >= token_counts[:, None]).repeat_interleave(group, 0)
    bias = unwritten.new_zeros(unwritten.shape, dtype=torch.float32).masked_fill(unwritten, -math.inf)
    rows = q.reshape(layers, -1, head_dim)
    if shots[0].forms:
        yield from _formed(shots[0], rows, longest, bias, token_counts, group)
        return
    for part in zip(rows, longest, strict=True):
        weights = attention_weights(*part, bias if steps > 1 else None, shots[0].scaling)
        yield weights.unflatten(1, (steps, group))


def _formed(
    shot: Snapshot,
    rows: torch.Tensor,
    keys: torch.Tensor | KeyParts,
    bias: torch.Tensor,
    counts: torch.Tensor,
    group: int,
) -> Iterator[torch.Tensor]:
    """Yield full attention [H_kv, T, G, n] of each layer by its form. rows [L, H_kv * T * G, D], keys [L, H_kv, n,
    D], bias [T * G, n] -inf on unwritten positions, counts [T]: positions written."""
    kv_heads, n = keys.shape[1:3]
    position = torch.arange(n, device=rows.device)
    for form, q, layer_keys in zip(shot.forms, rows, keys, strict=True):
        scores = form.cap(q.view(kv_heads, -1, q.shape[-1]).float() @ layer_keys.float().mT * shot.scaling) + bias
        scores = scores.unflatten(1, (-1, group))
        if form.window:
            old = position < (counts - form.window)[:, None]
            scores = scores.masked_fill(old[:, None], -math.inf)
        yield form.weigh(scores.transpose(1, 2)).transpose(1, 2)
