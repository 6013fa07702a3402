"""Full attention of a run's own queries over the exact keys of every position, made a layer at a time.

Beside it what a step's heads attended of it: selection recall (how many of the tokens that full attention weighs most
were chosen), the tokens that a query head attended in some form, and masses added up by span. Shapes as in
``snapshot.py``; n positions, t of the T steps are sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from kvlens.kernels.attend import attention_weights
from kvlens.recording.snapshot import Attended, LayerKeys, Snapshot
from kvlens.tiers.slots import FREE, ROLE


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
    shot: Snapshot, rows: torch.Tensor, keys: LayerKeys, bias: torch.Tensor, counts: torch.Tensor, group: int
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


def selection_recall(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share [T, L, Hq] of the k tokens with most of full attention's mass that the query head attended, where k is how
    many tokens it attended; NaN where k = 0.

    A token counts as attended in whatever form it was read, exact, rebuilt or packed; a summary entry is no token. So 1
    is what the best choice of as many tokens reaches, and k / n what a random one does on average. Of tokens with equal
    mass at the k-th place those attended count first. full: [L, H_kv, T, G, n], 0 on positions a step had not written;
    groups: of T steps each.
    """
    steps, first, found = full.shape[2], 0, []
    for group in groups:
        attended, position = _attended(group, full.shape[-1])
        layers = len(attended) // steps
        mass = full[first : first + layers].movedim(2, 0).flatten(0, 1)
        found.append(_hits(mass, attended, position).unflatten(0, (steps, -1)).flatten(2, 3))
        first += layers
    return torch.cat(found, 1)


def _attended(group: Attended, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [l, H_kv, G, C]: the slot's token was attended, and int64 [l, H_kv, 1, C], its position below n. A token
    counts in one slot only."""
    slot = ((group.role != FREE) & (group.role != ROLE["coarse"]) & (group.position >= 0))[:, :, None]
    slot = slot.expand_as(group.weights)
    if group.visible is not None:
        slot = slot & group.visible
    position = group.position.clamp(0, n - 1).long()[:, :, None]
    if group.share is None:  # the memory keeps a token in one slot
        return slot, position
    marks = torch.zeros(*slot.shape[:-1], n + 1, dtype=torch.bool, device=slot.device)
    marks.scatter_(-1, torch.where(slot, position, n), True)
    return marks[..., :n], torch.arange(n, device=slot.device).expand(*slot.shape[:2], 1, n)


def _hits(mass: torch.Tensor, attended: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Share of the k largest of `mass` [..., G, n] that are attended, k the number attended: attended [..., G, C],
    position [..., 1, C] -> [..., G]."""
    k = attended.sum(-1, dtype=torch.int32).long()
    kth = kth_by_sorting if mass.is_cuda else kth_by_partition
    least, ties = kth(mass, k.clamp(min=1))
    at_slots = mass.gather(-1, position.expand_as(attended))
    above = (attended & (at_slots > least)).sum(-1, dtype=torch.int32)
    even = torch.minimum((attended & (at_slots == least)).sum(-1, dtype=torch.int32), ties)
    return torch.where(k > 0, (above + even) / k, torch.nan)


def kth_by_partition(values: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k-th largest of each row of values [..., n], k >= 1 [...] -> [..., 1], and how many of the k largest equal
    it, int32 [...]. On a CPU a fourth of the time of sorting the best ones."""
    places, n = values.shape[-1] - k.numpy(), values.shape[-1]
    least = np.empty((*places.shape, 1), values.numpy().dtype)
    ties = np.empty(places.shape, np.int32)
    for row, place in enumerate(places):  # of a layer's step: with few different k, and in a processor's cache
        parted = np.partition(values[row].numpy(), np.unique(place), axis=-1)
        least[row] = np.take_along_axis(parted, place[..., None], -1)
        start = int(place.min())
        among = np.arange(start, n) >= place[..., None]
        ties[row] = ((parted[..., start:] == least[row]) & among).sum(-1)
    return torch.from_numpy(least), torch.from_numpy(ties)


def kth_by_sorting(values: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kth_by_partition`, where the values are."""
    best = values.topk(int(k.max()), -1).values
    least = best.gather(-1, (k - 1)[..., None])
    among = torch.arange(best.shape[-1], device=values.device) < k[..., None]
    return least, ((best == least) & among).sum(-1, dtype=torch.int32)


def read_positions(groups: Sequence[Attended], steps: int, at: list[int], owners: torch.Tensor) -> torch.Tensor:
    """Return which positions each query head attended in some form, bool [t, L, H_kv, G, n].

    groups: of `steps` steps each; at: the sampled steps; owners int64 [t, n]: the span of each position."""
    return torch.cat([_read(group, steps, at, owners) for group in groups], 1)


def _read(group: Attended, steps: int, at: list[int], owners: torch.Tensor) -> torch.Tensor:
    """bool [t, l, H_kv, G, n]: the position was attended, exactly or rebuilt, or its span's summary was."""
    attended = (group.role != FREE)[:, :, None].expand_as(group.weights)
    if group.visible is not None:
        attended = attended & group.visible
    tables = (attended, group.role[:, :, None], group.position[:, :, None], group.span[:, :, None])
    attended, role, position, span = (table.unflatten(0, (steps, -1))[at] for table in tables)
    summary = attended & (role == ROLE["coarse"])
    read = _marked(attended & ~summary & (position >= 0), position, owners.shape[-1])
    if group.summarised is not None:
        read |= group.summarised.unflatten(0, (steps, -1))[at][..., : owners.shape[-1]]
    elif summary.any():
        named = _marked(summary, span, int(max(span.max(), owners.max())) + 1)
        read |= named.gather(-1, owners[:, None, None, None].expand(*named.shape[:-1], -1))
    return read


def _marked(where: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """bool [..., size]: true at index [..., 1, C] where bool [..., C] says so."""
    marks = torch.zeros(*where.shape[:-1], size + 1, dtype=torch.bool, device=where.device)
    return marks.scatter_(-1, torch.where(where, index.long(), size), True)[..., :size]


def by_span(rows: torch.Tensor, owners: Sequence[torch.Tensor], spans: int) -> torch.Tensor:
    """Masses by position [t, l, H_kv, G, n] added over spans [t, l, Hq, S]. owners: of each step the span of each
    position, int64 [>= n]; steps with the same table share one sum."""
    span_sums = []
    for _, run in groupby(range(len(owners)), key=lambda t: id(owners[t])):
        steps = list(run)
        same_table = rows[steps[0] : steps[-1] + 1]
        span_sums.append(sum_by(same_table, owners[steps[0]][: rows.shape[-1]], spans))
    return torch.cat(span_sums).flatten(2, 3)


def sum_by(rows: torch.Tensor, code: torch.Tensor, codes: int) -> torch.Tensor:
    """Add rows [..., n] up over the columns with an equal code, int64 [n] -> [..., codes]. On a CPU runs of equal codes
    are added first, without a copy."""
    out = rows.new_zeros(*rows.shape[:-1], codes)
    if rows.is_cuda:
        return out.index_add_(-1, code, rows)
    starts = np.flatnonzero(np.diff(code.numpy(), prepend=-1))
    return out.index_add_(-1, code[starts], torch.from_numpy(np.add.reduceat(rows.numpy(), starts, axis=-1)))
