"""A run in parts. Keys: the prompt's and the decoded tokens' lie side by side, and are never joined. Layers: the
attention of several steps is measured some layers at a time, so that no table has all layers. Steps: which of them are
measured together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvlens.kernels.attend import LayerForm, attention_shares
from kvlens.memory.memory import Memory
from kvlens.memory.windowed import WindowedLayers
from kvlens.recording.snapshot import Attended, LayerKeys, Snapshot
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


def joined(groups: Sequence[Attended]) -> list[Attended]:
    """Return the attention of the same layers in fewer groups: neighbours with equally many slots are one, up to as
    many layers as are measured at a time."""
    members: list[list[Attended]] = []
    for group in groups:
        count = sum(len(member.weights) for member in members[-1]) if members else 0
        most = layers_at_a_time(group.weights[0].numel())
        if members and count + len(group.weights) <= most and _shapes(members[-1][0]) == _shapes(group):
            members[-1].append(group)
        else:
            members.append([group])
    return [each[0] if len(each) == 1 else _side_by_side(each) for each in members]


def _shapes(group: Attended) -> list[torch.Size | None]:
    return [None if table is None else table.shape[1:] for table in vars(group).values()]


def _side_by_side(members: Sequence[Attended]) -> Attended:
    tables: dict[str, Any] = {
        name: None if table is None else torch.cat([getattr(member, name) for member in members])
        for name, table in vars(members[0]).items()
    }
    return Attended(**tables)


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


def split_alike(shots: Sequence[Snapshot]) -> Iterator[range]:
    """Yield runs of consecutive steps that can be measured together."""
    start = 0
    for step in range(1, len(shots) + 1):
        if step == len(shots) or not _joins(shots[start:step], shots[step]):
            yield range(start, step)
            start = step


def _joins(run: Sequence[Snapshot], shot: Snapshot) -> bool:
    """Return whether a step can be measured with the steps of a run. A step that is not sampled joins any."""
    sampled = [each.reference is None for each in (*run, shot) if each.sampled]
    return _form(run[0]) == _form(shot) and len(set(sampled)) < 2


def _form(shot: Snapshot) -> tuple[object, ...]:
    """Return what steps that are measured together have in common."""
    groups = tuple(
        (group.weights.shape[0], group.visible is None, group.share is None, group.summarised is None)
        for group in shot.groups
    )
    return (
        groups,
        shot.keys is None,
        shot.previous_q is None,
        shot.zooms is None,
        shot.shadow is None,
        shot.packed is None,
        tuple(shot.head_columns),
        tuple(shot.kv_columns),
        tuple(ranked is None for ranked in shot.ranked),
    )


@dataclass(frozen=True)
class KeyParts:
    """Stands for keys [L, H_kv, n, D] without a copy of the prompt's."""

    prompt: torch.Tensor
    """[L, H_kv, N, D]"""
    decoded: torch.Tensor
    """[L, H_kv, n - N, D], of the tokens after the prompt"""

    @property
    def shape(self) -> torch.Size:
        """Return [L, H_kv, n, D]."""
        layers, kv_heads, tokens, head_dim = self.prompt.shape
        return torch.Size((layers, kv_heads, tokens + self.decoded.shape[2], head_dim))


def layer_keys(keys: LayerKeys, layer: int) -> tuple[torch.Tensor, ...]:
    """Return the keys [H_kv, ., D] of a layer, in parts by position, without a copy. keys: a tensor or KeyParts."""
    if isinstance(keys, KeyParts):
        return keys.prompt[layer], keys.decoded[layer]
    assert isinstance(keys, torch.Tensor)
    return (keys[layer],)


class WatchedKeys:
    """The keys of a run, which grow by a token a step. It owns the decoded tokens' keys and copies no other."""

    def __init__(self, memory: Memory, windowed: WindowedLayers, prompt: torch.Tensor | None, max_new: int) -> None:
        """prompt: its keys [L, H_kv, N, D], which must not change; None: the slots keep all keys by position."""
        self._memory, self._windowed = memory, windowed
        self._keys: KeyParts | None = None
        if prompt is not None:
            self._keys = KeyParts(prompt, prompt.new_zeros(*prompt.shape[:2], max_new, prompt.shape[3]))

    def until(self, position: int) -> torch.Tensor | KeyParts:
        """Return the keys of all positions up to `position`, which is the newest and is read from the memory."""
        hot = self._memory.hot
        if self._keys is None:
            return hot.pools[0].keys[:, :, : position + 1]
        prompt, decoded = self._keys.prompt, self._keys.decoded
        step = position - prompt.shape[2]
        decoded[list(self._windowed.numbers), :, step] = hot.read_window(position, position + 1)[0][:, :, 0]
        for layer, ring in self._windowed.rings.items():
            decoded[layer, :, step] = ring[0, :, position % ring.shape[2]]
        return KeyParts(prompt, decoded[:, :, : step + 1])
