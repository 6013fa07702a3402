"""What full attention wanted of tokens that a query head attended in no form. Shapes as in ``snapshot.py``; n
positions, t of the T steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlens.memory.hot_tier import FREE, ROLE
from kvlens.recording.snapshot import Attended


def unread(
    rows: torch.Tensor, groups: Sequence[Attended], steps: int, at: list[int], owners: torch.Tensor
) -> torch.Tensor:
    """Full attention's mass by position with what was read set to 0.

    rows: full attention [L, H_kv, t, G, n] of all layers at the sampled steps `at`; groups: of `steps` steps each;
    owners int64 [t, n]: the span of each position. -> [t, L, H_kv, G, n].
    """
    wanted, first, found = rows.movedim(2, 0), 0, []
    for group in groups:
        read = _read(group, steps, at, owners)
        found.append(wanted[:, first : first + read.shape[1]].masked_fill(read, 0.0))
        first += read.shape[1]
    return torch.cat(found, 1)


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
