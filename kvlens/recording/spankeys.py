"""Mean keys of the prompt's spans, for looking at how spans lie to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvlens import instruments
from kvlens.instruments import SpanKeys, span_key_bytes
from kvlens.rows import SpanRow


def span_keys(
    keys: torch.Tensor, rows: Sequence[SpanRow], rotate: Callable[..., torch.Tensor] | None
) -> SpanKeys | None:
    """keys [L, H_kv, n, D] of the prompt as the cache holds them; rows: its spans; rotate: the model's rotary
    embedding, taken back before averaging, or None.

    None when there are no spans, or their keys need more than `MOST_KEY_BYTES`. Works on one KV head at a time: as
    much memory as float32 keys of it.
    """
    layers, kv_heads, n, head_dim = keys.shape
    known_values = [row for row in rows if row.tok_start < min(row.tok_end, n)]
    if not known_values or span_key_bytes(layers, kv_heads, len(known_values), head_dim) > instruments.MOST_KEY_BYTES:
        return None
    owner = torch.full((n,), len(known_values), dtype=torch.long)
    for index, row in enumerate(known_values):
        owner[row.tok_start : row.tok_end] = index
    counts = (
        torch.bincount(owner, minlength=len(known_values) + 1)[: len(known_values), None].clamp(min=1).to(keys.device)
    )
    owner, positions = owner.to(keys.device), torch.arange(n, device=keys.device)
    means = np.empty((layers, kv_heads, len(known_values), head_dim), np.float32)
    for layer, head in np.ndindex(layers, kv_heads):
        part = keys[layer, head, None]
        plain = part.float() if rotate is None else rotate(part, positions, layer, back=True).float()
        sums = plain.new_zeros(1, len(known_values) + 1, head_dim).index_add_(1, owner, plain)[0, :-1]
        means[layer, head] = (sums / counts).numpy(force=True)
    return SpanKeys(
        "post-rope" if rotate is None else "pre-rope", np.array([row.span for row in known_values], np.int32), means
    )
