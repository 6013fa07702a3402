"""The attention of several steps, some layers at a time. What measuring makes of it is never there for all layers at
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kvlens.kernels.attend import LayerForm, attention_shares
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.tiers.slots import FREE

PART_NUMBERS = 1_000_000
"""attention weights of the layers and steps that are measured at a time, or those of one layer"""


def layers_at_a_time(numbers: int) -> int:
    """Return how many layers are in work at a time. numbers: attention weights of a layer."""
    return max(1, PART_NUMBERS // max(1, numbers))


def layer_parts(shots: Sequence[Snapshot]) -> Iterator[Attended]:
    """Yield the attention of T steps that are alike, as T * l layers, in the order of the layers."""
    shadow = shots[-1].shadow
    for groups in zip(*(shot.groups for shot in shots), strict=True):
        layers, kv_heads, group, slots = groups[-1].weights.shape
        positions = slots if shadow is None else max(slots, shadow.shape[2])
        count = layers_at_a_time(len(shots) * kv_heads * group * positions)
        for start in range(0, layers, count):
            yield _together([take_layers(member, start, start + count) for member in groups])


def take_layers(attended: Attended, start: int, end: int) -> Attended:
    """Return the attention of the layers [start, end), without a copy."""
    tables: dict[str, Any] = {name: None if t is None else t[start:end] for name, t in vars(attended).items()}
    return Attended(**tables)


def _together(members: list[Attended]) -> Attended:
    """The same layers of T steps as T * l layers; where fewer slots were live, free slots without weight are added."""
    if len(members) == 1:
        return members[0]
    slots = max(member.weights.shape[-1] for member in members)

    def join(tensors: list[torch.Tensor], filling: float) -> torch.Tensor:
        return torch.cat([F.pad(tensor, (0, slots - tensor.shape[-1]), value=filling) for tensor in tensors])

    visible = (
        None
        if members[0].visible is None
        else join([member.visible for member in members if member.visible is not None], False)
    )
    return Attended(
        join([member.weights for member in members], 0.0),
        visible,
        join([member.role for member in members], FREE),
        join([member.span for member in members], 0),
        join([member.position for member in members], -1),
        None if members[0].share is None else torch.cat([m.share for m in members if m.share is not None]),
        None if members[0].sink is None else torch.cat([m.sink for m in members if m.sink is not None]),
        None
        if members[0].summarised is None
        else torch.cat([m.summarised for m in members if m.summarised is not None]),
    )


def share_layers(
    queries: Sequence[torch.Tensor],
    keys: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    scaling: float,
    form: LayerForm,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the weights [l, h, G, C] of l layers, which slots they could attend, None: all, and what sink logits take,
    None: there are none. Scores exist of a few layers at a time. queries [Hq, D] of each layer, keys [l, h, C, D],
    biases [h, G, C] of all layers or of none."""
    count, weights, visible, sinks = layers_at_a_time(len(queries[0]) * keys.shape[2]), None, None, []
    for start in range(0, len(queries), count):
        rows = slice(start, start + count)
        present = [bias for bias in biases[rows] if bias is not None]
        bias = torch.stack(present) if present else None
        shares, sink = attention_shares(torch.stack(list(queries[rows])), keys[rows], bias, scaling, form)
        weights = shares.new_empty(len(queries), *shares.shape[1:]) if weights is None else weights
        weights[rows] = shares
        if bias is not None:
            visible = bias.new_empty(weights.shape, dtype=torch.bool) if visible is None else visible
            visible[rows] = bias > -torch.inf
        sinks += [] if sink is None else [sink]
    assert weights is not None, "a part has layers"
    return weights, visible, torch.cat(sinks) if sinks else None
