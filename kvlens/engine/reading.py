"""A prompt's chunk under attention of a method's own."""

from __future__ import annotations

import torch

from kvlens.kernels.attend import PLAIN, LayerForm, causal, partial_attention, prefill_attention
from kvlens.methods.hooks import Placing
from kvlens.methods.run_inputs import Rotate


def reading_attention(
    method: Placing,
    turn: Rotate | None,
    layer: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    form: LayerForm = PLAIN,
) -> torch.Tensor:
    """Return the attention of the last m of the N prompt tokens read so far. turn: the model's rotary embedding. q
    [1, Hq, m, D], keys, values [H_kv, N, D] -> [1, Hq, m, D]."""
    m, n = q.shape[2], keys.shape[1]
    reading = method.reading(layer, keys, m)
    if reading is None:
        return prefill_attention(q, keys[None], values[None], scaling, form)
    near, visible = None, reading.seen
    if form.window:
        visible = visible & causal(m, n, form.window, visible.device)
    if reading.nearer is not None:
        assert turn is not None, "the method renumbers positions that cannot be taken back"
        near = _moved(q, torch.arange(n - m, n, device=q.device), reading.nearer, turn, layer)
    return partial_attention(q, keys, values, visible, scaling, near, reading.first, form=form)


def _moved(q: torch.Tensor, position: torch.Tensor, nearer: torch.Tensor, turn: Rotate, layer: int) -> torch.Tensor:
    """Queries [1, Hq, m, D] of positions [m] as if they lay `nearer` [m] positions before."""
    moved = turn(turn(q[0], position, layer, back=True), position - nearer, layer)
    return torch.where((nearer == 0)[:, None], q[0], moved.to(q.dtype))[None]
