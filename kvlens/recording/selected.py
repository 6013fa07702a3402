"""What a step's heads attended of full attention: selection recall (how many of the tokens that full attention weighs
most were chosen), and the tokens that a query head attended in some form. Shapes as in ``snapshot.py``; n positions, t
of the T steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvlens.recording.snapshot import Attended
from kvlens.tiers.slots import FREE, ROLE


def selection_recall(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share [T, L, Hq] of the k tokens with most of full attention's mass that the query head attended, where k is how
    many tokens it attended; NaN where k = 0.

    A token counts as attended in whatever form it was read, exact, rebuilt or packed; a summary entry is no token. So 1
    is what the best choice of as many tokens reaches, and k / n what a random one does on average. Of tokens with equal
    mass at the k-th place those attended count first. full: [L, H_kv, T, G, n], 0 on positions a step had not written;
    groups: of T steps each.
    """
    steps, start, shares = full.shape[2], 0, []
    for group in groups:
        attended, position = _attended(group, full.shape[-1])
        layers = len(attended) // steps
        mass = full[start : start + layers].movedim(2, 0)
        tables = (table.unflatten(0, (steps, -1)) for table in (attended, position))
        shares.append(_hits(mass, *tables).flatten(2, 3))
        start += layers
    return torch.cat(shares, 1)


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
    room = np.empty((*places.shape[-2:], n), least.dtype)
    for row in np.ndindex(places.shape[:-2]):  # of a layer's step: with few different k, and in a processor's cache
        place = places[row]
        start, last = int(place.min()), int(place.max())
        np.copyto(room, values[row].numpy())
        room.partition(start if start == last else np.unique(place), axis=-1)
        least[row] = room[..., start : start + 1] if start == last else np.take_along_axis(room, place[..., None], -1)
        equal = room[..., start:] == least[row]
        if start < last:
            equal &= np.arange(start, n) >= place[..., None]
        ties[row] = equal.sum(-1)
    return torch.from_numpy(least), torch.from_numpy(ties)


def kth_by_sorting(values: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kth_by_partition`, where the values are."""
    best = values.topk(int(k.max()), -1).values
    least = best.gather(-1, (k - 1)[..., None])
    among = torch.arange(best.shape[-1], device=values.device) < k[..., None]
    return least, ((best == least) & among).sum(-1, dtype=torch.int32)


def read_positions(groups: Sequence[Attended], steps: int, sampled: list[int], owners: torch.Tensor) -> torch.Tensor:
    """Return which positions each query head attended in some form, bool [t, L, H_kv, G, n].

    groups: of `steps` steps each; sampled: steps; owners int64 [t, n]: the span of each position."""
    return torch.cat([_read(group, steps, sampled, owners) for group in groups], 1)


def _read(group: Attended, steps: int, sampled: list[int], owners: torch.Tensor) -> torch.Tensor:
    """bool [t, l, H_kv, G, n]: the position was attended, exactly or rebuilt, or its span's summary was."""
    attended = (group.role != FREE)[:, :, None].expand_as(group.weights)
    if group.visible is not None:
        attended = attended & group.visible
    tables = (attended, group.role[:, :, None], group.position[:, :, None], group.span[:, :, None])
    attended, role, position, span = (table.unflatten(0, (steps, -1))[sampled] for table in tables)
    summary = attended & (role == ROLE["coarse"])
    read = _marked(attended & ~summary & (position >= 0), position, owners.shape[-1])
    if group.summarised is not None:
        read |= group.summarised.unflatten(0, (steps, -1))[sampled][..., : owners.shape[-1]]
    elif summary.any():
        named = _marked(summary, span, int(max(span.max(), owners.max())) + 1)
        read |= named.gather(-1, owners[:, None, None, None].expand(*named.shape[:-1], -1))
    return read


def _marked(where: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """bool [..., size]: true at index [..., 1, C] where bool [..., C] says so."""
    marks = torch.zeros(*where.shape[:-1], size + 1, dtype=torch.bool, device=where.device)
    return marks.scatter_(-1, torch.where(where, index.long(), size), True)[..., :size]
