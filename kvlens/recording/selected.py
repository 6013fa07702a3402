"""Which tokens a step's heads attended: selection recall, how many of the tokens that full attention weighs most were
chosen; and the tokens that a query head attended in some form. Shapes as in ``snapshot.py``; n positions, t of the T
steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvlens.memory.slots import FREE, ROLE
from kvlens.recording.snapshot import Attended


def selection_recall(full: torch.Tensor, groups: Sequence[Attended]) -> torch.Tensor:
    """Share [T, L, Hq] of the k tokens with most of full attention's mass that the query head attended, where k is how
    many tokens it attended; NaN where k = 0.

    A token counts as attended in whatever form it was read, exact, rebuilt or packed; a summary entry is no token. So 1
    is what the best choice of as many tokens reaches, and k / n what a random one does on average. Of tokens with equal
    mass at the k-th place those attended count first. full: [L, H_kv, T, G, n], 0 on positions a step had not written;
    groups: of T steps each.
    """
    steps, n, first, found = full.shape[2], full.shape[-1], 0, []
    for group in groups:
        attended = _attended(group, n).unflatten(0, (steps, -1))
        layers = attended.shape[1]
        found.append(_hits(full[first : first + layers].movedim(2, 0), attended).flatten(2, 3))
        first += layers
    return torch.cat(found, 1)


def _attended(group: Attended, n: int) -> torch.Tensor:
    """bool [l, H_kv, G, n]: the token at that position was attended."""
    slot = ((group.role != FREE) & (group.role != ROLE["coarse"]) & (group.position >= 0))[:, :, None]
    slot = slot.expand_as(group.weights)
    if group.bias is not None:
        slot = slot & (group.bias > -torch.inf)
    where = torch.where(slot, group.position[:, :, None].long(), n)
    marks = torch.zeros(*slot.shape[:-1], n + 1, dtype=torch.bool, device=slot.device)
    return marks.scatter_(-1, where, True)[..., :n]


def _hits(mass: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Share of the k largest of `mass` that are attended, k the number attended: both [..., n] -> [...]."""
    k = attended.sum(-1)
    kth = kth_by_sorting if mass.is_cuda else kth_by_partition
    least = kth(mass, k.clamp(min=1))
    above = mass > least
    even = torch.minimum((attended & (mass == least)).sum(-1), k - above.sum(-1))
    return torch.where(k > 0, ((attended & above).sum(-1) + even) / k, torch.nan)


def kth_by_partition(values: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k-th largest of each row of values [..., n], k >= 1 [...] -> [..., 1]. On a CPU a fourth of the time of
    sorting the best ones."""
    place = values.shape[-1] - k.numpy()
    parted = np.partition(values.numpy(), np.unique(place), axis=-1)
    return torch.from_numpy(np.take_along_axis(parted, place[..., None], -1))


def kth_by_sorting(values: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As `kth_by_partition`, where the values are."""
    return values.topk(int(k.max()), -1).values.gather(-1, (k - 1)[..., None])


def read_positions(groups: Sequence[Attended], steps: int, at: list[int], owners: torch.Tensor) -> torch.Tensor:
    """Return which positions each query head attended in some form, bool [t, L, H_kv, G, n].

    groups: of `steps` steps each; at: the sampled steps; owners int64 [t, n]: the span of each position."""
    return torch.cat([_read(group, steps, at, owners) for group in groups], 1)


def _read(group: Attended, steps: int, at: list[int], owners: torch.Tensor) -> torch.Tensor:
    """bool [t, l, H_kv, G, n]: the position was attended, exactly or rebuilt, or its span's summary was."""
    attended = (group.role != FREE)[:, :, None].expand_as(group.weights)
    if group.bias is not None:
        attended = attended & (group.bias > -torch.inf)
    tables = (attended, group.role[:, :, None], group.position[:, :, None], group.span[:, :, None])
    attended, role, position, span = (table.unflatten(0, (steps, -1))[at] for table in tables)
    summary = attended & (role == ROLE["coarse"])
    read = _marked(attended & ~summary & (position >= 0), position, owners.shape[-1])
    if summary.any():
        named = _marked(summary, span, int(max(span.max(), owners.max())) + 1)
        read |= named.gather(-1, owners[:, None, None, None].expand(*named.shape[:-1], -1))
    return read


def _marked(where: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """bool [..., size]: true at index [..., 1, C] where bool [..., C] says so."""
    marks = torch.zeros(*where.shape[:-1], size + 1, dtype=torch.bool, device=where.device)
    return marks.scatter_(-1, torch.where(where, index.long(), size), True)[..., :size]
