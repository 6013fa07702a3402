"""Which tokens a query head attended in some form. Shapes as in ``snapshot.py``; n
positions, t of the T steps are sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlens.memory.slots import FREE, ROLE
from kvlens.recording.snapshot import Attended


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
